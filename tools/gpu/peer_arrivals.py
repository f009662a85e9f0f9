#!/usr/bin/env python3
"""Measures vLLM in the same way as `bursar bench --trace TRACE --pictures-in FOLDER`, for comparison when both run on one GPU in one session.

    python3 tools/gpu/peer_arrivals.py MODEL TRACE FOLDER

TRACE is one object with several runs (`docs/commands.md`), and FOLDER contains its pictures. MODEL
is a folder as for `peer.py`, with weights drawn at random. Requests are sent through AsyncLLM from
this process's event loop, and the engine runs in a separate process, which is the default of both.
The prefix cache is on and replies are greedy. The goodput counts the requests with a first token
within 2 s and 99 of 100 intervals of at most 50 ms. Needs vLLM (0.26.0 was measured).
"""

import asyncio
import io
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

# Modules of this folder have the same names as modules of the standard library, so the folder is removed
# from the path.
sys.path.pop(0)

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe.<|im_end|>\n<|im_start|>assistant\n"
FIRST, INTERVAL = 2.0, 0.05


def quantile(values, share):
    """The quantile by nearest rank, as in `bursar bench`."""
    values = sorted(values)
    return values[int((len(values) - 1) * share + 0.5)] if values else float("nan")


def both(seconds):
    return f"{1e3 * quantile(seconds, 0.5):.1f} {1e3 * quantile(seconds, 0.99):.1f} ms"


class Engine:
    def __init__(self, model, pictures):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = AsyncEngineArgs(
            model=model,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=8192,
            limit_mm_per_prompt={"image": 1, "video": 0},
            max_num_seqs=256,
            disable_log_stats=True,
        )
        self.engine = AsyncLLM.from_engine_args(settings)
        self.pictures = pictures
        self.decoders = ThreadPoolExecutor(16)

    async def prompt(self, request):
        from PIL import Image

        if not request["file"]:
            draw = random.Random(request["seed"])
            return {"prompt_token_ids": [draw.randrange(1000, 100_000) for _ in range(request["prompt"])]}
        decode = lambda: Image.open(io.BytesIO(self.pictures[request["file"]])).convert("RGB")
        image = await asyncio.get_running_loop().run_in_executor(self.decoders, decode)
        return {"prompt": PROMPT, "multi_modal_data": {"image": image}}

    async def ask(self, name, request, start):
        """Returns the time at which the request was sent, and the time of each token."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        await asyncio.sleep(max(0.0, start + request["t"] - time.time()))
        asked, times = time.time(), []
        params = SamplingParams(max_tokens=request["out"], ignore_eos=True, temperature=0, output_kind=RequestOutputKind.DELTA)
        async for part in self.engine.generate(await self.prompt(request), params, request_id=name):
            times += [time.time()] * len(part.outputs[0].token_ids)
        return request, asked, times


async def play(engine, run):
    start = time.time() + 0.2
    asked = [engine.ask(f"{run['name']}-{number}", request, start) for number, request in enumerate(run["requests"])]
    ended = await asyncio.gather(*asked, return_exceptions=True)
    answered = [one for one in ended if not isinstance(one, BaseException) and one[2]]
    gaps = [[later - earlier for earlier, later in zip(times, times[1:])] for _, _, times in answered]
    wall = max(times[-1] for _, _, times in answered) - start
    met = sum(times[0] - asked <= FIRST and (not own or quantile(own, 0.99) <= INTERVAL) for (_, asked, times), own in zip(answered, gaps))
    print(f"{run['name']}: {len(run['requests'])} requests, {len(run['requests']) - len(answered)} failed, {wall:.1f} s")
    for kind, wanted in ("text", False), ("picture", True):
        print(f"  first token, {kind}, p50 p99", both([times[0] - asked for request, asked, times in answered if bool(request["file"]) == wanted]))
    print("  between tokens, p50 p99", both([gap for own in gaps for gap in own]))
    print("  a request's longest, p50 p99", both([max(own, default=0.0) for own in gaps]))
    print(f"  throughput {sum(len(times) for _, _, times in answered) / wall:.1f} tokens/s")
    print(f"  goodput {met / wall:.2f} requests/s, {100 * met / len(run['requests']):.1f} % of them", flush=True)
    for error in [one for one in ended if isinstance(one, BaseException)][:3]:
        print("  error:", repr(error)[:300])


async def main():
    model, trace, folder = sys.argv[1:4]
    pictures = {name: open(f"{folder}/{name}", "rb").read() for name in os.listdir(folder)}
    began = time.time()
    engine = Engine(model, pictures)
    warm = [{"t": 0, "prompt": 300, "out": 16, "seed": seed, "file": ""} for seed in range(8)]
    warm += [{"t": 0, "prompt": 0, "out": 8, "seed": 9, "file": max(pictures)}] if pictures else []
    await asyncio.gather(*(engine.ask(f"warm-{number}", request, time.time()) for number, request in enumerate(warm)))
    print(f"ready and warm after {time.time() - began:.1f} s", flush=True)
    for run in json.load(open(trace))["runs"]:
        await play(engine, run)
    engine.engine.shutdown()


# The engine's process imports this file again.
if __name__ == "__main__":
    asyncio.run(main())
