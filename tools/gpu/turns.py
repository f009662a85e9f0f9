#!/usr/bin/env python3
"""Models that share a device through `bursar serve`: the time to sleep and to wake up, and the memory that a busy model borrows.

    python3 tools/gpu/turns.py turns MODEL --knob host-bytes=60GiB --knob memory-fraction=0.2 [--requests 1000]
    python3 tools/gpu/turns.py lending MODEL
    python3 tools/gpu/turns.py chats MODEL --knob kv-tokens=293000 --knob swap-space=32 --knob host-bytes=36GiB

MODEL is a checkpoint folder, such as `released_shape.py` writes, or `demo`. It is served under
several model names. The program is `target/release/bursar`, or $BURSAR. `turns` serves three models
that sleep in turns. The script puts each model to sleep and wakes it at both levels, then sends
requests to all models in random order and counts the results. `lending` serves two models, keeps
one under full load, and prints when that model has borrowed the other model's memory and when the
other model has its memory back. `chats` serves one model, to which many users in turn send chats,
each about the user's own picture. It prints the times and computed tokens of later turns.
"""

import argparse
import base64
import collections
import io
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
PARSER.add_argument("part", choices=["turns", "lending", "chats"])
PARSER.add_argument("model")
PARSER.add_argument("--device", default="cuda:0")
PARSER.add_argument("--capacity")
PARSER.add_argument("--requests", type=int, default=1000)
PARSER.add_argument("--cycles", type=int, default=3)
PARSER.add_argument("--port", type=int, default=8123)
PARSER.add_argument("--words", type=int, default=6500, help="words of each prompt that keeps a model full")
PARSER.add_argument("--callers", type=int, default=400, help="concurrent callers that keep a model full")
PARSER.add_argument("--users", type=int, default=200, help="users who send chats")
PARSER.add_argument("--rounds", type=int, default=8, help="turns of a chat")
PARSER.add_argument("--side", type=int, default=1036, help="side of each chat's picture, in pixels")
PARSER.add_argument("--at-once", type=int, default=8, help="chats that run concurrently")
PARSER.add_argument("--knob", action="append", default=[], help="a flag of the server without its dashes: NAME=VALUE")
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
    server = served(names, "--sleep-for-memory=1")
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
            print(f"level {level}: asleep in {spread(asleep)}\n         awake in {spread(awake)}\n         first reply after waking {spread(first)}", flush=True)
        rng, ended, failed, took = random.Random(7), 0, collections.Counter(), []
        order = [rng.choice(names) for _ in range(ASKED.requests)]

        def one(name):
            started = time.time()
            try:
                tokens = chat(name, f"Tell me about {rng.random()}", 8)
            except Exception as error:  # every error is counted
                return str(error)[:120], 0
            return (None if tokens == 8 else f"{tokens} tokens"), time.time() - started

        started = time.time()
        with ThreadPoolExecutor(96) as pool:
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
                except Exception as error:  # every error is counted
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
        print(f"the idle model's first reply took {time.time() - started:.2f} s", flush=True)
        # Sequential replies keep the model from lending its memory again.
        asking = threading.Thread(target=lambda: [chat("idle", "Hello", 400) for _ in range(3)], daemon=True)
        asking.start()
        while asking.is_alive() and size()["idle"] < before["idle"] * 0.999:
            time.sleep(0.02)
        has, took = size()["idle"], time.time() - started
        is_whole = has >= before["idle"] * 0.999
        print(f"the idle model had {has:.0f} of its {before['idle']:.0f} blocks back {took:.2f} s after it was asked", flush=True)
        stop.set()
        counts = dict(errors)
        print("errors:", counts)
        return is_whole and not counts
    finally:
        server.terminate()
        print("the server ended with", server.wait(120))


class User:
    """A chat about the user's own picture."""

    def __init__(self, number):
        import numpy as np
        from PIL import Image

        coarse = np.random.default_rng(number).integers(0, 256, (ASKED.side // 28, ASKED.side // 28, 3), dtype=np.uint8)
        jpeg = io.BytesIO()
        Image.fromarray(coarse).resize((ASKED.side, ASKED.side), Image.BICUBIC).save(jpeg, "JPEG", quality=88)
        self.picture = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + base64.b64encode(jpeg.getvalue()).decode()}}
        self.rng = random.Random(number)
        self.messages = []
        self.computed = 0  # tokens of the last prompt

    def turn(self):
        """Returns seconds to the first token, prompt tokens, and the tokens of the previous prompt that were computed again."""
        text = " ".join(self.rng.choice(["red", "green", "boat", "one", "two", "under"]) for _ in range(32))
        content = text if self.messages else [self.picture, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})
        body = {"model": "chats", "messages": self.messages, "max_tokens": 32, "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(URL + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        started, first, said, usage = time.time(), None, "", None
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event)[:300])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    # An event with only the role comes before the first token.
                    if choice["delta"].get("content"):
                        first = first or time.time() - started
                        said += choice["delta"]["content"]
        self.messages.append({"role": "assistant", "content": said})
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        again = max(0, self.computed // 16 * 16 - cached)
        self.computed = usage["prompt_tokens"]
        return first or time.time() - started, usage["prompt_tokens"], again


def chats():
    server = served(["chats"])
    try:
        with ThreadPoolExecutor(16) as pool:
            users = list(pool.map(User, range(ASKED.users)))
        await_ready(server, ["chats"])
        print("blocks:", dict(metrics("bursar_kv_blocks")), flush=True)
        for number in range(ASKED.rounds):
            with ThreadPoolExecutor(ASKED.at_once) as pool:
                began = time.time()
                turns = list(pool.map(User.turn, users))
            firsts = sorted(first for first, _, _ in turns)
            prompts, again = sum(prompt for _, prompt, _ in turns), sum(again for _, _, again in turns)
            p99 = firsts[round(0.99 * (len(firsts) - 1))]
            print(f"turn {number + 1}: first token p50 {1e3 * statistics.median(firsts):.0f} p99 {1e3 * p99:.0f} ms, {prompts} tokens of prompts, {again / prompts:.2%} computed again, {time.time() - began:.1f} s", flush=True)
        for name in ["encoder_cache_queries", "encoder_cache_hits", "encoder_cache_host_hits", "pictures_found_computed", "pictures_wanted_again", "prefix_cache_host_hits", "cached_prompt_tokens", "prompt_tokens", "requests_failed"]:
            print(f"  {name}:", sum(metrics(f"bursar_{name}_total").values()))
        return True
    finally:
        server.terminate()
        print("the server ended with", server.wait(120))


sys.exit(0 if {"turns": turns, "lending": lending, "chats": chats}[ASKED.part]() else 1)
