#!/usr/bin/env python3
"""Models that share a device through `bursar serve`: how long they take to sleep and to wake, what a busy one borrows.

    python3 tools/gpu/turns.py turns MODEL --knob host-bytes=60GiB --knob memory-fraction=0.2 [--requests 1000]
    python3 tools/gpu/turns.py lending MODEL

MODEL is a checkpoint folder, such as `seven_billion.py` writes, or `demo`; it is served under several names. The program is
`target/release/bursar`, or $BURSAR. `turns` serves three models that take turns, sleeps and wakes each at both levels, then asks all of them in random
order and counts what ended. `lending` serves two, keeps one full, and tells when it has what the other lent and when that has
it back.
"""

import argparse
import collections
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

PARSER = argparse.ArgumentParser()
PARSER.add_argument("part", choices=["turns", "lending"])
PARSER.add_argument("model")
PARSER.add_argument("--device", default="cuda:0")
PARSER.add_argument("--capacity")
PARSER.add_argument("--requests", type=int, default=1000)
PARSER.add_argument("--cycles", type=int, default=3)
PARSER.add_argument("--port", type=int, default=8123)
PARSER.add_argument("--words", type=int, default=6500, help="of a prompt that keeps a model full")
PARSER.add_argument("--callers", type=int, default=400, help="that keep a model full")
PARSER.add_argument("--knob", action="append", default=[], help="of the server, as --NAME=VALUE without the dashes")
ASKED = PARSER.parse_args()
URL = f"http://127.0.0.1:{ASKED.port}"


def call(path, body=None, method=None, timeout=300):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{path}: {error.code} {error.read().decode()[:300]}") from None


def chat(model, text, tokens):
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return json.loads(call("/v1/chat/completions", body))["usage"]["completion_tokens"]


def served(names, *flags):
    models = [flag for name in names for flag in ("--model", ASKED.model)]
    device = ["--device", ASKED.device] + (["--capacity", ASKED.capacity] if ASKED.capacity else [])
    command = [os.environ.get("BURSAR", "target/release/bursar"), *device, "serve", *models]
    command += ["--name", *names, "--port", str(ASKED.port), *flags, *(f"--{knob}" for knob in ASKED.knob)]
    print("$", " ".join(command), flush=True)
    return subprocess.Popen(command)


def await_ready(server, names):
    started = time.time()
    while time.time() - started < 240:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}")
        try:
            models = json.loads(call("/health", timeout=5))
            print(f"all models loaded after {time.time() - started:.1f} s: {json.dumps(models)[:300]}", flush=True)
            return
        except (RuntimeError, urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    sys.exit("the models were not ready within 240 s")


def spread(values):
    values = sorted(values)
    return f"{values[0]:.2f} to {values[-1]:.2f} s, median {statistics.median(values):.2f}, of {len(values)}"


def timed(path):
    started = time.time()
    call(path, {}, "POST")
    return time.time() - started


def metrics(name):
    """The values of a metric, by model."""
    found = re.findall(rf'^{name}\{{(.*?)\}} (\S+)$', call("/metrics"), re.M)
    values = collections.Counter()
    for labels, value in found:
        model = re.search(r'model="([^"]*)"', labels)
        values[model and model[1]] += float(value)
    return values


def turns():
    names = ["a", "b", "c"]
    server = served(names, "--sleep-for-room=1")
    try:
        await_ready(server, names)
        for level in (1, 2):
            asleep, awake, first = [], [], []
            for _ in range(ASKED.cycles):
                for name in names:
                    for other in names:
                        if other != name:
                            call(f"/sleep?level=1&model={other}", {}, "POST")
                    call(f"/wake_up?model={name}", {}, "POST")
                    asleep.append(timed(f"/sleep?level={level}&model={name}"))
                    awake.append(timed(f"/wake_up?model={name}"))
                    started = time.time()
                    chat(name, "Hello", 1)
                    first.append(time.time() - started)
            print(f"level {level}: asleep in {spread(asleep)}\n         awake in {spread(awake)}\n         first reply after it {spread(first)}", flush=True)
        rng, ended, failed, took = random.Random(7), 0, collections.Counter(), []
        order = [rng.choice(names) for _ in range(ASKED.requests)]

        def one(name):
            started = time.time()
            try:
                tokens = chat(name, f"Tell me about {rng.random()}", 8)
            except Exception as error:  # whatever it is, it is counted
                return str(error)[:120], 0
            return (None if tokens == 8 else f"{tokens} tokens"), time.time() - started

        started = time.time()
        with ThreadPoolExecutor(48) as pool:
            for wrong, seconds in pool.map(one, order):
                if wrong:
                    failed[wrong] += 1
                else:
                    ended += 1
                    took.append(seconds)
        print(f"{ASKED.requests} requests over {len(names)} models: {ended} ended, failed {dict(failed)}, in {time.time() - started:.1f} s; each {spread(took)}")
        print("sleeps by model:", dict(metrics("bursar_sleeps_total")))
        return not failed
    finally:
        server.terminate()
        print("the server ended with", server.wait(120))


def lending():
    names = ["idle", "busy"]
    server = served(names, f"--requests={2 * ASKED.callers}")
    try:
        await_ready(server, names)
        size = lambda: metrics("bursar_kv_blocks")
        before = size()
        print("blocks at first:", dict(before), flush=True)
        stop, errors = threading.Event(), collections.Counter()

        def keep_full(seed):
            rng = random.Random(seed)
            while not stop.is_set():
                try:
                    chat("busy", " ".join(rng.choice(["red", "green", "blue", "one", "two"]) for _ in range(ASKED.words)), 64)
                except Exception as error:  # whatever it is, it is counted
                    errors[str(error)[:120]] += 1
                    time.sleep(0.1)

        threads = [threading.Thread(target=keep_full, args=(seed,), daemon=True) for seed in range(ASKED.callers)]
        started = time.time()
        for thread in threads:
            thread.start()
        all_blocks, seen, last = sum(before.values()), None, None
        while time.time() - started < 60:
            now = size()
            if now != last:
                print(f"  {time.time() - started:6.2f} s: {dict(now)}", flush=True)
                last = now
            if now["busy"] >= 0.95 * all_blocks and seen is None:
                seen = time.time() - started
                break
            time.sleep(0.05)
        print(f"the busy model has {last['busy'] / all_blocks:.1%} of all blocks, 95 % after {seen} s of load", flush=True)
        started = time.time()
        chat("idle", "Hello", 1)
        print(f"the idle one's first reply took {time.time() - started:.2f} s", flush=True)
        # A reply at a time keeps it from lending again.
        asking = threading.Thread(target=lambda: [chat("idle", "Hello", 400) for _ in range(3)], daemon=True)
        asking.start()
        while asking.is_alive() and size()["idle"] < before["idle"] * 0.999:
            time.sleep(0.02)
        has, took = size()["idle"], time.time() - started
        is_whole = has >= before["idle"] * 0.999
        print(f"it had {has:.0f} of its {before['idle']:.0f} blocks back {took:.2f} s after it was asked", flush=True)
        stop.set()
        told = dict(errors)
        print("errors:", told)
        return is_whole and not told
    finally:
        server.terminate()
        print("the server ended with", server.wait(120))


sys.exit(0 if {"turns": turns, "lending": lending}[ASKED.part]() else 1)
