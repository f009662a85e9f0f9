#!/usr/bin/env python3
"""Products of FP8 prompts when the GPU is at its power limit: Bursar's kernels next to cuBLASLt's.

    python3 tools/gpu/sustained.py [ROWS]

The burst figure is the shortest of three graphs of eight rounds after a pause, as in autotuning.
The sustained figure is the mean after the clocks have settled. "fast" marks products whose sums
stay in the tensor cores, as in vLLM's products with scales by tensor and by row. All other products
accumulate in f32. Results are not checked here: `kernels.py e4m3` does that. Needs a Hopper GPU and
torch.
"""

import subprocess
import sys
import time

import torch

from operations.e4m3 import SHAPES_7B, Product, large_m, rounding, scaled_mm_by_blocks, scaled_mm_by_rows

ROWS = int(sys.argv[1]) if len(sys.argv) > 1 else 8448
# The shapes of 72B are the shapes of one rank, if two ranks share the model.
SHAPES = SHAPES_7B | {"72B's half, gate and up": (29568, 8192), "72B's half, down": (8192, 14784)}
ROUNDS = 8  # rounds per graph
SETTLING, MEASURED = 0.4, 0.6  # seconds


def seconds_of(graph, calls):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    count = calls(graph.replay)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count / ROUNDS * 1e-3


def once(replay):
    replay()
    return 1


def for_seconds(seconds):
    def calls(replay):
        count, until, before = 0, time.time() + seconds, None
        while time.time() < until:
            replay()
            count += 1
            if before:  # one more graph is always queued
                before.synchronize()
            before = torch.cuda.Event()
            before.record()
        return count

    return calls


def tell(name, cases):
    for run in cases:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for run in cases:
                run()
    graph.replay()
    burst = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        time.sleep(0.15)
        burst = min(burst, seconds_of(graph, once))
    seconds_of(graph, for_seconds(SETTLING))
    clock = subprocess.Popen(["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm", "--format=csv,noheader"], stdout=subprocess.PIPE, text=True)
    sustained = seconds_of(graph, for_seconds(MEASURED))
    print(f"| {name} | {burst * 1e6:.0f} | {sustained * 1e6:.0f} | {clock.communicate()[0].strip()} |", flush=True)


def fast(product):
    scales, of_x = product.scales.view(1, -1), product.x_scales[:, :1].contiguous()
    return lambda: torch._scaled_mm(product.x, product.weight.T, of_x, scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def of_shape(name, features, columns):
    held = []  # outputs must live as long as their cases

    def case(made):
        held.append(made)
        return made.run

    rows, blocks = (Product(ROWS, features, columns, torch.bfloat16, height) for height in (None, 128))
    library, of_blocks = scaled_mm_by_rows(rows)["torch"], scaled_mm_by_blocks(blocks).get("torch")
    tell(f"{name}, rows, cuBLASLt, fast", [fast(rows)])
    tell(f"{name}, rows, cuBLASLt", [library])
    tell(f"{name}, rows, ours", [case(large_m(rows))])
    if of_blocks:
        tell(f"{name}, blocks, cuBLASLt", [of_blocks])
    tell(f"{name}, blocks, ours", [case(large_m(blocks))])
    if "gate" not in name:
        return
    gate = lambda kind: case(rounding("silu_mul_rounded", kind, ROWS, features // 2, torch.bfloat16))  # noqa: E731
    gated = case(large_m(rows, "linear_gated"))
    tell(f"{name}, rows, cuBLASLt, then the gate, rounded", [library, gate("rows")])
    tell(f"{name}, rows, ours gated", [gated])
    tell(f"{name}, rows, ours gated, then rounded", [gated, case(rounding("quantize", "rows", ROWS, features // 2, torch.bfloat16))])
    if of_blocks:
        tell(f"{name}, blocks, cuBLASLt, then the gate, rounded", [of_blocks, gate("groups")])
    tell(f"{name}, blocks, ours gated and rounded", [case(large_m(blocks, "groups"))])


def main():
    print(f"{torch.cuda.get_device_name()}, {ROWS} rows\n\n| product | burst, us | sustained, us | clock |\n|---|---|---|---|")
    for name, (features, columns) in SHAPES.items():
        of_shape(name, features, columns)
        torch.cuda.empty_cache()


main()
