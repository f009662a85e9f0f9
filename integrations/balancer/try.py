"""Two `bursar serve` processes behind a load balancer: which requests finish and which fail when one server dies.

    python integrations/balancer/try.py BURSAR [haproxy|nginx|smg...]

Needs HAProxy and nginx (Debian's packages), and the Python packages openai, smg and setproctitle. Prints the rows of
docs/cluster.md, and fails if a stream's tokens are held back until they arrive together, or if a request hangs.
"""

import asyncio
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

from openai import APIError, APIStatusError, APITimeoutError, AsyncOpenAI

HERE = Path(__file__).resolve().parent
BURSAR = Path(sys.argv[1]).resolve()
AT_ONCE, PATIENCE_S = 12, 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_ready(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


class Server:
    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.start()

    def start(self):
        command = [BURSAR, "serve", "demo", "--listen", f"127.0.0.1:{self.port}", "--device", "host"]
        command += ["--capacity", "256MiB", "--profile-cache", self.folder / "profiles", "--log-level", "error"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not is_ready(self.port, "/health/ready"):
            time.sleep(0.05)


class Balancer:
    """A load balancer, with some text of its configuration in this folder replaced."""

    def __init__(self, folder, program, servers, changes=()):
        self.port, one, two = free_port(), servers[0].port, servers[1].port
        ports = {"PORT": str(self.port), "ONE": str(one), "TWO": str(two)}
        if program == "smg":
            command = [Path(sys.executable).with_name("smg"), "launch", "--host", "127.0.0.1", "--port", str(self.port)]
            command += ["--worker-urls", f"http://127.0.0.1:{one}", f"http://127.0.0.1:{two}", "--policy", "cache_aware"]
            command += ["--health-check-interval-secs", "1", "--prometheus-port", str(free_port()), "--log-level", "error"]
        else:
            configuration = folder / {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}[program]
            text = (HERE / configuration.name).read_text()
            # HAProxy reads environment variables. nginx does not, so its configuration is edited.
            changes = [*changes, *(("${" + name + "}", port) for name, port in ports.items() if program == "nginx")]
            for old, new in changes:
                assert old in text, f"{configuration.name} has no {old!r}"
                text = text.replace(old, new)
            configuration.write_text(text)
            command = {
                "haproxy": ["haproxy", "-db", "-f", configuration],
                "nginx": ["nginx", "-p", f"{folder}/", "-c", configuration],
            }[program]
        self.log = folder / f"{program}.log"
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(command, env={**os.environ, **ports}, stdout=log, stderr=log)
        while not is_ready(self.port, "/v1/models"):
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text())
            time.sleep(0.1)

    def end(self):
        self.process.terminate()
        self.process.wait()


def client(port, retries=0):
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=PATIENCE_S, max_retries=retries)


async def ask(asker, content, tokens, system=None, headers=None):
    """Returns how a streamed reply ended, and its usage."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    begun = False
    try:
        answer = await asker.chat.completions.create(
            model="demo",
            messages=messages,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
            extra_headers=headers,
        )
        usage = None
        async for piece in answer:
            begun = begun or bool(piece.choices)
            usage = piece.usage or usage
        return ("ended" if usage and usage.completion_tokens == tokens else "cut short in silence"), usage
    except APITimeoutError:
        return "hung", None
    except APIStatusError as error:
        return f"refused, {error.status_code}", None
    except (APIError, OSError):
        return ("cut" if begun else "refused, no answer"), None
    except Exception as error:
        # httpx reports a broken stream with its own type of error.
        return ("cut" if begun else f"refused, {type(error).__name__}"), None


async def storm(port, servers, death, requests=200, tokens=(40, 160), retries=0):
    """Sends streams, a dozen at a time. After a quarter of the streams, the first server gets the
    signal `death` and is restarted."""
    permits, done, kinds = asyncio.Semaphore(AT_ONCE), 0, Counter()

    async def one(number):
        nonlocal done
        async with permits:
            kind, _ = await ask(asker, f"{number} Hello!", random.Random(number).randrange(*tokens))
        kinds[kind] += 1
        done += 1

    async def kill():
        while done < requests // 4:
            await asyncio.sleep(0.01)
        servers[0].process.send_signal(death)
        await asyncio.to_thread(servers[0].process.wait)
        await asyncio.sleep(1)
        await asyncio.to_thread(servers[0].start)

    async with client(port, retries) as asker:
        await asyncio.gather(kill(), *(one(number) for number in range(requests)))
    # Gives the balancer time to use the server again.
    await asyncio.sleep(3)
    return kinds


async def affinity(port):
    """Returns the fraction of prompt tokens found in the prefix cache. There are twelve chats of
    six turns each, and no two chats begin with the same text."""
    cached, prompts, mark = 0, 0, random.random()
    async with client(port) as asker:
        for turn in range(6):
            for chat in random.Random(turn).sample(range(12), 12):
                system = f"{mark} {chat} " + "You are kind and answer in few words. " * 12
                kind, usage = await ask(asker, f"Turn {turn}", 4, system, {"x-session": f"{mark} {chat}"})
                assert kind == "ended", kind
                cached += usage.prompt_tokens_details.cached_tokens
                prompts += usage.prompt_tokens
    return cached / prompts


def pace(port):
    """The median time in ms to the first token of a stream, and the median number of pieces in which a stream arrives."""
    connection, first, pieces = http.client.HTTPConnection("127.0.0.1", port), [], []
    for number in range(30):
        asked = {"model": "demo", "max_tokens": 64, "ignore_eos": True, "temperature": 0, "stream": True}
        asked["messages"] = [{"role": "user", "content": f"Tell me about {number}. {random.random()}"}]
        begun, came, last, count = time.perf_counter(), None, 0.0, 0
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"content-type": "application/json"})
        for line in connection.getresponse():
            now = time.perf_counter()
            if line.startswith(b"data: {") and b'"content":"' in line and came is None:
                came = now
            # Lines within a tenth of a millisecond arrived together.
            count += now - last > 1e-4
            last = now
        first.append((came - begun) * 1e3)
        pieces.append(count)
    return statistics.median(first), statistics.median(pieces)


LEAST = ("balance hash req.body,json_query('$.messages[0].content')", "balance leastconn")
SESSION = (LEAST[0], "balance hdr(x-session)")
NO_RETRIES = [
    LEAST,
    ("retries 3", "retries 0"),
    ("    option redispatch 1\n", ""),
    ("    retry-on conn-failure empty-response 503\n", ""),
]
STICKY = ("        least_conn;", "        hash $http_x_session consistent;")
ONCE = ("proxy_next_upstream error timeout http_503 http_429 non_idempotent;", "proxy_next_upstream off;")
KINDS = [
    ("haproxy.cfg", "haproxy", []),
    ("the same, by a header", "haproxy", [SESSION]),
    ("the same, leastconn", "haproxy", [LEAST]),
    ("the same, leastconn, no retries", "haproxy", NO_RETRIES),
    ("nginx.conf", "nginx", []),
    ("the same, by a header", "nginx", [STICKY]),
    ("the same, proxy_next_upstream off", "nginx", [ONCE]),
    ("smg --policy cache_aware", "smg", []),
]


async def row(folder, servers, name, program, changes):
    balancer = Balancer(folder, program, servers, changes)
    try:
        first, pieces = pace(balancer.port)
        found = await affinity(balancer.port)
        killed = await storm(balancer.port, servers, signal.SIGKILL)
        # The replies take some seconds, during which the server that shuts down reports that
        # it is not ready.
        ended = await storm(balancer.port, servers, signal.SIGTERM, 60, (400, 700))
        again = await storm(balancer.port, servers, signal.SIGKILL, retries=2)
    finally:
        balancer.end()
    print(f"{program}, {name}: first token {first:.1f} ms, {pieces:.0f} pieces; cached {found:.0%}")
    for what, kinds in (("SIGKILL", killed), ("SIGTERM", ended), ("SIGKILL, client retries", again)):
        print(f"    {what}: {dict(kinds)}", flush=True)
    # A buffered stream arrives in one piece.
    return pieces > 5 and not any(kinds["hung"] for kinds in (killed, ended, again))


async def main():
    good = True
    with tempfile.TemporaryDirectory(prefix="bursar-balancer-") as name:
        folder = Path(name)
        # If root starts nginx, its worker processes run as another user, and they write to this folder.
        folder.chmod(0o777)
        servers = [Server(folder), Server(folder)]
        try:
            print("no balancer: first token {:.1f} ms, {:.0f} pieces".format(*pace(servers[0].port)))
            for name, program, changes in KINDS:
                if not sys.argv[2:] or program in sys.argv[2:]:
                    good &= await row(folder, servers, name, program, changes)
        finally:
            for server in servers:
                server.process.kill()
                server.process.wait()
    sys.exit(0 if good else 1)


asyncio.run(main())
