"""The cost of a Dynamo frontend per request, token and block, and the resulting cost for 64 workers.

    python integrations/dynamo/simulate.py [WORKERS...]        default: 4, 16 and 64

The workers are Dynamo's mocker with Bursar's step times for Qwen2.5-VL-7B on an H200 (benches/h200.md). One frontend
gets the requests. A second frontend gets only the events of all workers, so its CPU time is the cost of events for a
router. Needs the packages of try.sh.
"""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy

DEMO = Path(__file__).resolve().parents[2] / "model/demo/checkpoint"
# Bursar with a 7B model in bf16 on an H200: ms per step by batch size, and prompt
# tokens per second.
STEP_MS = {1: 3.64, 16: 3.86, 64: 4.71, 256: 9.17}
PREFILL_TOKENS_PER_S = 50_409
BLOCK_TOKENS = 16
# A worker near its capacity: 16 requests per second with prompts of 600 tokens and
# replies of 200 tokens.
LOAD = {"requests": 16, "prompt": 600, "reply": 200}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def step_times(path):
    """Writes the mocker's tables: prefill by prompt tokens, and decode by tokens in the KV cache
    and by tokens per sequence."""
    held, context = numpy.linspace(0, 256 * 4096, 129), numpy.linspace(1, 4096, 33)
    batch = numpy.maximum(1, held[:, None] / context[None, :])
    step = numpy.interp(batch, list(STEP_MS), list(STEP_MS.values()))
    prompts = numpy.array([1.0, 8192.0])
    took = numpy.maximum(STEP_MS[1], prompts / PREFILL_TOKENS_PER_S * 1e3)
    decode = {"decode_active_kv_tokens": held, "decode_context_length": context, "decode_itl": step}
    numpy.savez(path, prefill_isl=prompts, prefill_ttft_ms=took, **decode)


def cpu_s(process):
    """Returns the CPU seconds that all threads of a process have used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def is_listed(port):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/v1/models")
        return b'"demo"' in connection.getresponse().read()
    except OSError:
        return False


class Fleet:
    def __init__(self, folder, workers):
        (folder / "discovery").mkdir(parents=True)
        step_times(folder / "steps.npz")
        usual = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder / "discovery"), "DYN_LOG": "warn"}
        usual |= {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
        self.environment, self.log = {**usual, **os.environ}, open(folder / "log", "w")
        mocker = ["dynamo.mocker", "--model-path", DEMO, "--model-name", "demo", "--num-workers", str(workers)]
        mocker += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "16384", "--max-num-seqs", "256"]
        mocker += ["--max-num-batched-tokens", "8192", "--planner-profile-data", folder / "steps.npz"]
        self.processes = [self.run(mocker)]
        self.ports = [free_port(), free_port()]
        for port in self.ports:
            self.processes.append(self.run(["dynamo.frontend", "--http-port", str(port), "--router-mode", "kv"]))
        self.asked, self.receives = self.processes[1:]
        begun = time.monotonic()
        while not all(is_listed(port) for port in self.ports):
            if time.monotonic() - begun > 120 or any(process.poll() is not None for process in self.processes):
                raise SystemExit((folder / "log").read_text()[-3000:])
            time.sleep(0.2)
        # The frontends need a few seconds to discover all workers.
        time.sleep(5)

    def run(self, module):
        return subprocess.Popen([sys.executable, "-m", *module], env=self.environment, stdout=self.log, stderr=self.log)

    def ask(self, count, prompt, reply, at_once=16):
        """Streams `count` requests. Prompts have different words and about `prompt` tokens."""
        numbers, answered = iter(range(count)), []
        usual = {"model": "demo", "max_tokens": reply, "ignore_eos": True}
        usual |= {"stream": True, "stream_options": {"include_usage": True}}

        def client():
            connection = http.client.HTTPConnection("127.0.0.1", self.ports[0])
            for _ in numbers:
                words = random.choices(["Hello", "show", "me", "a", "picture", "number"], k=prompt)
                asked = usual | {"messages": [{"role": "user", "content": " ".join(words)}]}
                connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"content-type": "application/json"})
                text = connection.getresponse().read()
                usage = json.loads(text.split(b"data: ")[-2])["usage"]
                answered.append((usage["prompt_tokens"], usage["completion_tokens"]))

        clients = [threading.Thread(target=client) for _ in range(at_once)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        assert len(answered) == count, f"{len(answered)} of {count} were answered"
        return [sum(tokens) / count for tokens in zip(*answered)]

    def cost(self, work):
        """Runs `work`. Returns four values: the CPU seconds of the frontend that gets requests, the
        CPU seconds of the frontend that gets only events, the elapsed seconds, and the result of
        `work`."""
        before, begun = (cpu_s(self.asked), cpu_s(self.receives)), time.monotonic()
        result = work()
        time.sleep(1)
        took = time.monotonic() - begun
        return cpu_s(self.asked) - before[0], cpu_s(self.receives) - before[1], took, result

    def end(self):
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.log.close()


def measured(folder, workers, count=600):
    fleet = Fleet(folder, workers)
    try:
        fleet.ask(64, 300, 4)
        idle = fleet.cost(lambda: time.sleep(10))
        rates = [used / idle[2] for used in idle[:2]]

        def net(*asked):
            asks, receives, took, tokens = fleet.cost(lambda: fleet.ask(*asked))
            return asks - rates[0] * took, receives - rates[1] * took, tokens

        short = net(count, 500, 1)
        long = net(count, 500, 129)
        wide = net(count // 4, 2500, 1)
    finally:
        fleet.end()
    prompt, replied = short[2][0], long[2][1] - short[2][1]
    blocks = prompt // BLOCK_TOKENS
    # The prompt's share of the cost grows with its tokens. The rest of a request's cost does not.
    of_prompt = (wide[0] / (count // 4) - short[0] / count) / (wide[2][0] - prompt)
    found = {
        "workers": workers,
        "idle_percent": round(100 * rates[1], 2),
        "request_us": (short[0] / count - of_prompt * prompt) * 1e6,
        "prompt_token_us": of_prompt * 1e6,
        "reply_token_us": (long[0] - short[0]) / count / replied * 1e6,
        "prompt_block_received_us": short[1] / count / blocks * 1e6,
        "reply_block_received_us": (long[1] - short[1]) / count / (replied / BLOCK_TOKENS) * 1e6,
    }
    return {name: round(value, 2) for name, value in found.items()}


def of_64(found):
    """CPU cores that all frontends together use for the requests and reply tokens of 64 workers under LOAD, and CPU
    cores that each frontend uses for the events of these workers."""
    requests = 64 * LOAD["requests"]
    of_requests = requests * (found["request_us"] + found["prompt_token_us"] * LOAD["prompt"])
    of_tokens = requests * LOAD["reply"] * found["reply_token_us"]
    received = sum(LOAD[part] / BLOCK_TOKENS * found[f"{part}_block_received_us"] for part in ("prompt", "reply"))
    cores = {"requests": of_requests, "reply_tokens": of_tokens, "events_in_each_frontend": requests * received}
    return {f"cores_of_{name}": round(us / 1e6, 2) for name, us in cores.items()}


def main():
    for workers in [int(number) for number in sys.argv[1:]] or [4, 16, 64]:
        with tempfile.TemporaryDirectory(prefix="bursar-simulate-") as folder:
            found = measured(Path(folder), workers)
            print(json.dumps(found), json.dumps(of_64(found)), flush=True)


main()
