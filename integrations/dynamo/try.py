"""The checks of try.sh: a frontend, three workers, and the properties that must hold when workers
sleep, shrink and die."""

import asyncio
import base64
import http.client
import json
import lzma
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

from openai import AsyncOpenAI, APIError, APITimeoutError

WORKER, DEMO = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
# The repository contains the weights compressed. An earlier decompressed copy may
# belong to another commit.
WEIGHTS = DEMO / "checkpoint/model.safetensors"
WEIGHTS.write_bytes(lzma.decompress(WEIGHTS.with_suffix(".safetensors.xz").read_bytes()))
# Names of the checks to run. `overhead` is a measurement and runs only if it is named here.
ONLY = os.environ.get("ONLY", "").split()
WORKERS = 1 if ONLY == ["overhead"] else 3
REQUESTS = int(os.environ.get("REQUESTS", "1000"))
# The longest time that a request may take. A request that takes longer counts as hung.
PATIENCE_S = 60

checks = []


def check(what, holds, detail=""):
    checks.append((what, bool(holds)))
    print(f"{'ok  ' if holds else 'FAIL'} {what}{f' ({detail})' if detail else ''}", flush=True)


def free_port():
    """A port that fits into 15 bits, because Dynamo reads a system port as a signed 16-bit number."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


async def until(what, holds, patience=PATIENCE_S):
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun > patience:
            raise SystemExit(f"never true: {what}")
        await asyncio.sleep(0.05)
    return time.monotonic() - begun


class Worker:
    """A process of bursar-dynamo."""

    def __init__(self, deployment, number):
        self.deployment, self.number, self.log = deployment, number, deployment.folder / f"worker{number}.log"
        self.start()

    def start(self):
        self.port = free_port()
        environment = {**self.deployment.environment, "DYN_SYSTEM_PORT": str(self.port)}
        command = [WORKER, "--model", DEMO / "checkpoint", "--served-model-name", "demo", "--device", "host"]
        command += ["--capacity", "256MiB", "--knob", "context_tokens=2048", "--drain", "20"]
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def is_ready(self):
        if self.process.poll() is not None:
            raise SystemExit(f"worker {self.number} has ended:\n{self.log.read_text()[-2000:]}")
        try:
            return call(f"http://127.0.0.1:{self.port}/health")["status"] == "ready"
        except (OSError, ValueError, KeyError):
            return False

    def control(self, name, **body):
        return call(f"http://127.0.0.1:{self.port}/engine/control/{name}", body)

    def metric(self, name):
        lines = call(f"http://127.0.0.1:{self.port}/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))

    def replies(self):
        """The number of requests that this worker has had, however they ended."""
        return self.metric("bursar_requests_total")

    def kill(self):
        self.process.kill()
        self.process.wait()


class Deployment:
    """The frontend, its workers, and the folder through which they discover each other."""

    def __init__(self, folder):
        self.folder = Path(folder)
        (self.folder / "discovery").mkdir()
        usual = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
        }
        # Variables that are already set take precedence, so that etcd and NATS can be tested
        # in the same way.
        self.environment = {**usual, **os.environ}
        self.log = self.folder / "frontend.log"
        self.frontends = []
        self.port = self.open([Path(__file__).with_name("frontend.py")])
        self.url = f"http://127.0.0.1:{self.port}"
        self.workers = [Worker(self, number) for number in range(WORKERS)]
        self.client = AsyncOpenAI(base_url=self.url + "/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)

    def open(self, program):
        """Starts a frontend and returns its port."""
        port = free_port()
        command = [sys.executable, *program, "--http-port", str(port), "--router-mode", "kv"]
        # Requests migrate from a worker that dies or is full. A worker with less than a fifth of
        # its blocks left gets no requests.
        command += ["--migration-limit", "5", "--active-decode-blocks-threshold", "0.8"]
        with open(self.log, "a") as log:
            self.frontends.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
        return port

    def is_listed(self, port=None):
        try:
            return [model["id"] for model in call(f"http://127.0.0.1:{port or self.port}/v1/models")["data"]] == ["demo"]
        except (OSError, ValueError, KeyError):
            return False

    async def ready(self):
        await until("all workers are ready", lambda: all(worker.is_ready() for worker in self.workers))
        await until("the model is listed", self.is_listed)
        # The frontend has found a worker once that worker has answered a request.
        for worker in self.workers:
            before = worker.replies()
            while worker.replies() == before:
                await asyncio.gather(*(self.ask(f"Who are you, {random.random()}?") for _ in range(6)))

    def metric(self, name, *labels):
        lines = call(self.url + "/metrics").splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(name) and all(label in line for label in labels)
        )

    async def ask(self, content, tokens=4, extra=(), **more):
        extra = {"nvext": {"extra_fields": ["worker_id"]}, **dict(extra)}
        messages = [{"role": "user", "content": content}]
        return await self.client.chat.completions.create(
            model="demo", messages=messages, max_tokens=tokens, temperature=0, extra_body=extra, **more
        )

    async def stream(self, content, tokens, has_begun=None, extra=(("ignore_eos", True),)):
        """Returns how a streamed reply ended, with its text or a description of the failure."""
        text = ""
        try:
            answer = await self.ask(content, tokens, extra, stream=True)
            async for piece in answer:
                if piece.choices and piece.choices[0].delta.content:
                    text += piece.choices[0].delta.content
                    if has_begun is not None:
                        has_begun.set()
            return "ended", text
        except APITimeoutError:
            return "hung", text
        except (APIError, OSError) as error:
            return "failed", f"{type(error).__name__}: {error}"

    def end(self):
        for process in [worker.process for worker in self.workers] + self.frontends:
            if process.poll() is None:
                process.terminate()
        for process in [worker.process for worker in self.workers] + self.frontends:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def all_ended(results):
    """Returns `True` if all streams have ended, and a description that includes the first stream
    that failed."""
    others = [how for kind, how in results if kind != "ended"]
    return not others, f"{len(results) - len(others)} of {len(results)}" + "".join(f"; {how}" for how in others[:1])


def worker_of(answer):
    return answer.nvext["worker_id"]["decode_worker_id"]


def unlike(number):
    """A prompt of 150 words that begins with a number. Prompts of different numbers share no prefix."""
    words = random.Random(number)
    return f"{number} " + " ".join(words.choice(["Hello", "show", "me", "a", "picture"]) for _ in range(150))


async def pictures(deployment):
    question, expected = "What number is written?", "427"
    data = base64.b64encode((DEMO / "pictures/number.png").read_bytes()).decode()
    shown = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]
    answers = [await deployment.ask(shown + [{"type": "text", "text": question}], 16) for _ in range(3)]
    said = [answer.choices[0].message.content for answer in answers]
    check("the answer about a picture is right each time", said == [expected] * 3, said)
    try:
        far = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}, {"type": "text", "text": "?"}]
        await deployment.ask(far)
        check("a picture from a host that is not allowed is refused", False)
    except APIError as error:
        check("a picture from a host that is not allowed is refused", getattr(error, "status_code", 0) == 400, error)


async def prefixes(deployment):
    first = [await deployment.ask(unlike(number)) for number in range(12)]
    await asyncio.sleep(0.3)
    again = [await deployment.ask(unlike(number)) for number in range(12)]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in again]
    whole = [(answer.usage.prompt_tokens - 1) // 16 * 16 for answer in again]
    same = sum(worker_of(one) == worker_of(other) for one, other in zip(first, again))
    check("equal prompts go to the worker that has their blocks", same == 12, f"{same} of 12")
    detail = f"{sum(cached)} of {sum(whole)} tokens"
    check("replies to equal prompts report all whole blocks as cached", cached == whole, detail)
    check("different prompts go to several workers", len({worker_of(answer) for answer in first}) > 1)


async def sleeping(deployment):
    asleep = deployment.workers[0]
    state = asleep.control("sleep", level=1)
    check("the control `sleep` suspends a worker", state.get("is_sleeping") is True, state)
    before, others = asleep.replies(), sum(worker.replies() for worker in deployment.workers[1:])
    results = await asyncio.gather(*(deployment.stream(unlike(100 + number), 4) for number in range(40)))
    check("no request fails while a worker sleeps", *all_ended(results))
    check("a worker that sleeps gets no requests", asleep.replies() == before)
    check("the other workers get all requests", sum(worker.replies() for worker in deployment.workers[1:]) == others + 40)
    state = asleep.control("wake_up")
    check("the control `wake_up` wakes the worker", state.get("is_sleeping") is False, state)
    begun = time.monotonic()
    while asleep.replies() == before and time.monotonic() - begun < PATIENCE_S:
        await asyncio.gather(*(deployment.ask(unlike(time.monotonic_ns())) for _ in range(6)))
    check("the woken worker gets requests again", asleep.replies() > before)


async def shrinking(deployment):
    small = deployment.workers[1]
    blocks = small.metric("dynamo_component_total_blocks")
    begun = time.monotonic()
    # Another process takes the free memory repeatedly, until at most a sixth of the blocks is left.
    while small.metric("dynamo_component_total_blocks") > blocks / 6 and time.monotonic() - begun < PATIENCE_S:
        held = small.control("other_process", bytes=1 << 40)["bytes"]
        await asyncio.sleep(0.1)
    left = small.metric("dynamo_component_total_blocks")
    detail = f"{blocks:.0f} to {left:.0f} blocks, {held} bytes"
    check("a cache that shrinks for another process is reported", left <= blocks / 6, detail)
    shrunk = small.metric("bursar_kv_blocks")
    check("the reported number of blocks is the worker's", left == shrunk, f"{shrunk:.0f}")
    await asyncio.sleep(1)
    before = small.replies()
    results = await asyncio.gather(*(deployment.stream(unlike(200 + number), 4) for number in range(40)))
    detail = f"{small.replies() - before:.0f} of 40"
    check("a worker with few blocks left gets no more requests", small.replies() == before, detail)
    check("no request fails while a worker has few blocks", *all_ended(results))
    small.control("other_process", bytes=0)
    await until("the blocks are back", lambda: small.metric("dynamo_component_total_blocks") == blocks)
    begun = time.monotonic()
    while small.replies() == before and time.monotonic() - begun < PATIENCE_S:
        await asyncio.gather(*(deployment.ask(unlike(time.monotonic_ns())) for _ in range(6)))
    check("the worker gets requests again when its memory is back", small.replies() > before)


async def dying(deployment):
    prompts = [f"Tell me about {number}." for number in range(18)]
    expected = [await deployment.stream(prompt, 120) for prompt in prompts]
    begun = [asyncio.Event() for _ in prompts]
    streams = [asyncio.create_task(deployment.stream(prompt, 120, event)) for prompt, event in zip(prompts, begun)]
    await until("half of the replies have begun", lambda: sum(event.is_set() for event in begun) >= 9)
    victim = deployment.workers[2]
    victim.kill()
    results = await asyncio.gather(*streams)
    kinds = Counter(kind for kind, _ in results)
    moved = deployment.metric("dynamo_frontend_model_migration_total")
    check("a worker killed during replies leaves no request hanging or failed", kinds == {"ended": 18}, dict(kinds))
    check("requests of the killed worker moved to other workers", moved > 0, f"{moved:.0f} moves")
    check("the replies are the same as without a death", results == expected)
    victim.start()
    await until("the killed worker is back", victim.is_ready)


async def forms(deployment):
    begun = [asyncio.Event() for _ in range(18)]
    form = {"guided_regex": "[a-z ]{400}"}
    prompts = [f"Tell me about {number}." for number in range(18)]
    streams = [asyncio.create_task(deployment.stream(prompt, 200, event, form)) for prompt, event in zip(prompts, begun)]
    await until("half of the replies have begun", lambda: sum(event.is_set() for event in begun) >= 9)
    victim = deployment.workers[1]
    victim.kill()
    results = await asyncio.gather(*streams)
    kinds = Counter(kind for kind, _ in results)
    # If no reply fails any more, Dynamo also migrates replies with a form, and
    # docs/cluster.md must be updated.
    detail = f"{dict(kinds)}"
    check("replies with a form fail when a worker dies, and none hangs", kinds["failed"] and not kinds["hung"], detail)
    others = [len(text) for kind, text in results if kind == "ended"]
    check("the other replies have their form", others and set(others) == {400}, f"{len(others)}")
    victim.start()
    await until("the killed worker is back", victim.is_ready)


async def ending(deployment):
    worker = deployment.workers[2]
    # The replies take longer than Dynamo's default time limit for a worker that shuts down.
    streams = [asyncio.create_task(deployment.stream(unlike(300 + number), 1000)) for number in range(24)]
    await asyncio.sleep(0.3)
    worker.process.send_signal(signal.SIGTERM)
    kinds = Counter(kind for kind, _ in await asyncio.gather(*streams))
    code = await asyncio.to_thread(worker.process.wait, PATIENCE_S)
    check("a worker that is told to end finishes its replies", kinds == {"ended": 24} and code == 0, f"{dict(kinds)}, exit {code}")
    worker.start()
    await until("the ended worker is back", worker.is_ready)


async def storm(deployment):
    """Many requests while workers are killed and restarted, one after another."""
    before = deployment.metric("dynamo_frontend_model_migration_total")
    permits, done = asyncio.Semaphore(12), 0

    async def one(number):
        nonlocal done
        async with permits:
            result = await deployment.stream(f"{number % 97} Hello! {number}", random.Random(number).randrange(4, 60))
        done += 1
        return result

    kills = 0

    async def killer():
        nonlocal kills
        while True:
            target = done + REQUESTS // 8
            while done < target:
                await asyncio.sleep(0.05)
            victim = deployment.workers[kills % WORKERS]
            victim.kill()
            kills += 1
            victim.start()
            await until("the killed worker is back", victim.is_ready)

    begun = time.monotonic()
    killing = asyncio.create_task(killer())
    results = await asyncio.gather(*(one(number) for number in range(REQUESTS)))
    kinds = Counter(kind for kind, _ in results)
    killing.cancel()
    took = time.monotonic() - begun
    moved = deployment.metric("dynamo_frontend_model_migration_total") - before
    detail = f"{all_ended(results)[1]}, {moved:.0f} moves, {kills} kills, {took:.0f} s"
    check(f"none of {REQUESTS} requests hangs over {kills} kills", kinds["hung"] == 0 and kills > 2, detail)
    check("at most one request in a hundred fails", kinds["failed"] * 100 <= REQUESTS, detail)


def paces(port, first_number, replies=100, tokens=64):
    """Medians of streamed replies in ms: to the first token, and for each later token."""
    connection, first, each = http.client.HTTPConnection("127.0.0.1", port), [], []
    for number in range(first_number, first_number + replies):
        asked = {"model": "demo", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        asked["messages"] = [{"role": "user", "content": f"Tell me about {number}."}]
        begun, came = time.perf_counter(), None
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"content-type": "application/json"})
        for line in connection.getresponse():
            if came is None and line.startswith(b"data: {"):
                came = time.perf_counter()
        first.append((came - begun) * 1e3)
        each.append((time.perf_counter() - came) * 1e3 / (tokens - 1))
    return {"first_ms": round(statistics.median(first), 3), "each_ms": round(statistics.median(each), 3)}


async def overhead(deployment):
    """The latency that each layer adds to the first token and to each later token, with one
    request at a time."""
    program = WORKER.parent / "examples/overhead"
    if not program.exists():
        raise SystemExit(f"{program} is missing: cargo build --example overhead, with the worker's profile")
    command = [program, "--model", DEMO / "checkpoint", "--device", "host", "--capacity", "256MiB"]
    done = subprocess.run([*command, "--knob", "context_tokens=2048"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    plain = deployment.open(["-m", "dynamo.frontend"])
    await until("the other frontend lists the model", lambda: deployment.is_listed(plain))
    for name, port, number in (("frontend.py", deployment.port, 2000), ("dynamo.frontend", plain, 4000)):
        # Not measured: the frontend finds its worker and warms up.
        await asyncio.to_thread(paces, port, number + 500, 10)
        metric = deployment.workers[0].metric
        engine = lambda part: metric("bursar_time_to_first_token_seconds_" + part)
        spent, count = engine("sum"), engine("count")
        found[name] = await asyncio.to_thread(paces, port, number)
        mean = (engine("sum") - spent) / (engine("count") - count)
        found[name]["engine_first_ms"] = round(mean * 1e3, 3)
    for name, figures in found.items():
        print(f"{name:15} {figures}")
    spared = found["dynamo.frontend"]["first_ms"] - found["frontend.py"]["first_ms"]
    # If this fails, Dynamo has fixed the problem, and frontend.py can be removed.
    check("with frontend.py, first tokens do not wait for an ACK", spared > 20, f"{spared:.1f} ms")


async def main():
    with tempfile.TemporaryDirectory(prefix="bursar-dynamo-") as folder:
        deployment = Deployment(folder)
        try:
            await deployment.ready()
            parts = (pictures, prefixes, sleeping, shrinking, dying, forms, ending, storm)
            chosen = [part for part in (*parts, overhead) if part.__name__ in ONLY] if ONLY else parts
            for part in chosen:
                print(f"--- {part.__name__}", flush=True)
                await part(deployment)
        except BaseException:
            print("the frontend's last lines:", deployment.log.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            deployment.end()
    failed = [what for what, holds in checks if not holds]
    print(f"{len(checks) - len(failed)} of {len(checks)} checks hold")
    sys.exit(1 if failed else 0)


asyncio.run(main())
