#!/usr/bin/env python3
"""Checks and times the products of gemm_large_m.cu against cuBLASLt, on a Hopper GPU.

    gated.py [--folder DIR] [--file NAME ...] [--check] [--time SHAPE ...] [--rows N ...] [--group N ...] [--milliseconds N]

DIR (default kernels/cuda/compiled) contains the archive of compiled kernels, or files that `compile.py --unpack` wrote. --file
names other builds of gemm_large_m in DIR. Without --check and --time it does both, for all shapes. The check uses
sizes that no tile size divides, poisoned outputs, and float64 as the reference. Times are medians of rounds in which all
versions run in random order, on normal random numbers, with weights that rotate beyond the cache: microseconds, TFLOP/s,
and the speedup over cuBLASLt. Needs torch.
"""

import argparse
import random
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import device
from contract import contract
from device import ENDINGS, Kernel, driver, processors, tensor_map

ROUNDS = 9
NUMBERS = contract("gemm_large_m")
TILE_ROWS, TILE_WEIGHTS, CLUSTER = NUMBERS.TILE_ROWS, NUMBERS.TILE_WEIGHTS, NUMBERS.CLUSTER
# (kind, input columns, output columns, has a bias, numbers of rows) of the products of
# Qwen2.5-VL-7B and its vision tower.
SHAPES = {
    "gate_up": ("gated", 3584, 18944, False, (512, 2048, 8192)),
    "qkv": ("plain", 3584, 4608, True, (512, 2048, 8192)),
    "o": ("add", 3584, 3584, False, (512, 2048, 8192)),
    "down": ("add", 18944, 3584, False, (512, 2048, 8192)),
    "vision.gate_up": ("gated", 1280, 3456, True, (5476, 21904)),
    "vision.qkv": ("plain", 1280, 3840, True, (5476, 21904)),
    "vision.proj": ("add", 1280, 1280, True, (5476, 21904)),
    "vision.down": ("add", 3456, 1280, True, (5476, 21904)),
}
ACTIVATIONS = {"gated": contract("gate").SILU, "gelu": contract("gate").GELU_TANH}
NAMES = {"gated": "gemm_large_m_gated", "gelu": "gemm_large_m_gated", "plain": "gemm_large_m", "add": "gemm_large_m_add"}
TYPES = (torch.bfloat16, torch.float16)


def rows_map(tensor, box):
    """A map that copies rows of 64 columns, swizzled within 128 bytes."""
    rows, columns = tensor.shape
    return tensor_map(tensor, [columns, rows], [2 * tensor.stride(0)], [NUMBERS.STEP_COLUMNS, box], 3)


class Product:
    """One of Bursar's kernels for these operands. Calling it launches the kernel."""

    def __init__(self, file, kind, x, weight, bias, out, group):
        self.kernel = Kernel(file, f"{NAMES[kind]}_{ENDINGS[x.dtype]}", NUMBERS.SHARED_BYTES)
        rows, columns = out.shape
        pairs = -(-rows // (TILE_ROWS * CLUSTER))
        tiles = pairs * -(-columns // (TILE_WEIGHTS // 2 if kind in ACTIVATIONS else TILE_WEIGHTS))
        self.grid = (CLUSTER * min(tiles, processors() // CLUSTER),)
        self.arguments = [rows_map(x, TILE_ROWS), rows_map(weight, TILE_WEIGHTS // 2), rows_map(out, NUMBERS.BOX), bias,
                          rows, columns, x.shape[1], group, ACTIVATIONS.get(kind, 0)]  # fmt: skip

    def __call__(self):
        self.kernel(self.grid, (NUMBERS.THREADS,), *self.arguments)


def expected(kind, x, weight, bias, held):
    value = x.double() @ weight.double().T
    if bias is not None:
        value += bias.double()
    if kind in ACTIVATIONS:
        gate, up = value.chunk(2, dim=1)
        return (F.silu(gate) if kind == "gated" else F.gelu(gate, approximate="tanh")) * up
    return value + held.double() if kind == "add" else value


def operands(kind, rows, depth, columns, bias, dtype, gap=0):
    """x with a gap between its rows, the weight, the bias, and the initial contents of the output."""
    width = 2 * columns if kind in ACTIVATIONS else columns
    x = torch.randn(rows, depth + gap, device="cuda").to(dtype)[:, :depth]
    weight = (torch.randn(width, depth, device="cuda") * depth**-0.5).to(dtype)
    bias = torch.randn(width, device="cuda").to(dtype) if bias else None
    return x, weight, bias, torch.randn(rows, columns, device="cuda").to(dtype)


def check(file, group):
    sizes = [(1, 8, 8), (2, 64, 128), (130, 72, 136), (127, 1288, 264), (257, 3584, 1000), (700, 328, 3456),
             (1153, 1280, 520), (2700, 192, 2056), (64, 18944, 72)]  # fmt: skip
    bad = 0
    for kind in NAMES:
        for dtype in TYPES:
            worst = 0.0
            for number, (rows, depth, columns) in enumerate(sizes):
                for bias in (False, True):
                    x, weight, bias, held = operands(kind, rows, depth, columns, bias, dtype, gap=8 * (number % 3))
                    # The output, the memory around it, and the gaps between the rows of x are NaN.
                    around = torch.full((rows + 3, columns + 8), float("nan"), device="cuda", dtype=dtype)
                    out = around[:rows, :columns]
                    runs = []
                    for _ in range(2):
                        if kind == "add":
                            out.copy_(held)
                        else:
                            out.fill_(float("nan"))
                        Product(file, kind, x, weight, bias, out, group)()
                        torch.cuda.synchronize()
                        runs.append(out.clone())
                    reference = expected(kind, x, weight, bias, held)
                    error = ((out.double() - reference).norm() / reference.norm()).item()
                    untouched = around[rows:].isnan().all() and around[:, columns:].isnan().all()
                    good = error < (4e-3 if dtype == torch.bfloat16 else 6e-4) and untouched
                    if not good or not torch.equal(*runs):
                        bad += 1
                        print(f"WRONG {kind} {dtype} {rows} x {depth} -> {columns}: {error:.2e}, "
                              f"untouched {bool(untouched)}, twice the same {torch.equal(*runs)}")  # fmt: skip
                    worst = max(worst, error)
            print(f"{kind}, {NAMES[kind]}_{ENDINGS[dtype]}: worst relative error {worst:.2e}", flush=True)
    print("all right" if not bad else f"{bad} WRONG")
    return bad


def graph_of(version, calls, copies):
    """A graph that launches all calls one after the other, so that no time of the host is
    measured."""
    for which in range(copies):
        version(which)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            version(call % copies)
    return graph


def time(files, shape, all_rows, groups, milliseconds):
    silu_mul = Kernel("silu_mul", "silu_mul_bf16")
    kind, depth, columns, has_bias, usual_rows = SHAPES[shape]
    for rows in all_rows or usual_rows:
        x, weight, bias, held = operands(kind, rows, depth, columns, has_bias, torch.bfloat16)
        width = weight.shape[0]
        copies = max(2, min(8, 300_000_000 // (width * depth * 2)))
        weights = [weight] + [torch.randn_like(weight) * depth**-0.5 for _ in range(copies - 1)]
        out, wide = torch.empty_like(held), torch.empty(rows, width, device="cuda", dtype=x.dtype)

        def library(which):
            if kind == "add":
                torch.addmm(held, x, weights[which].T, out=held)
            elif bias is None:
                torch.mm(x, weights[which].T, out=wide)
            else:
                torch.addmm(bias, x, weights[which].T, out=wide)
            if kind == "gated":
                silu_mul((rows, -(-columns // 4096)), (256,), wide, width, columns, out)

        versions = {"cuBLASLt": library}
        for file in files:
            for group in groups:
                ours = [Product(file, kind, x, w, bias, held if kind == "add" else out, group) for w in weights]
                name = Path(file).name.split(".")[0] + (f"/{group}" if len(groups) > 1 else "")
                versions[name] = lambda which, ours=ours: ours[which]()
        if kind == "gated":
            versions["product alone"] = lambda which: torch.mm(x, weights[which].T, out=wide)
        operations = 2 * rows * depth * width
        calls = copies * -(-8 // copies)
        graphs = {name: graph_of(version, calls, copies) for name, version in versions.items()}
        replays = max(2, int(milliseconds * 1e-3 / calls / (operations / 650e12 + 5e-6)))
        taken = {name: [] for name in versions}
        turns = random.Random(4)
        for _ in range(ROUNDS):
            # When the GPU's power is the limit, a kernel measured after a low-power kernel looks
            # faster, so the order is random.
            for name in turns.sample(list(graphs), len(graphs)):
                graph = graphs[name]
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                for _ in range(-(-replays // 2)):
                    graph.replay()
                begin.record()
                for _ in range(replays):
                    graph.replay()
                end.record()
                torch.cuda.synchronize()
                taken[name].append(begin.elapsed_time(end) * 1e3 / calls / replays)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        words = [
            f"{name} {us:.1f} us {operations / us / 1e6:.0f} ({medians['cuBLASLt'] / us:.3f})"
            for name, us in medians.items()
        ]
        print(f"{shape:>14} {rows:>5} rows | " + " | ".join(words), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=device.COMPILED)
    parser.add_argument("--file", nargs="+", default=["gemm_large_m.sm_90a.cubin"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", nargs="*")
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--group", nargs="+", type=int, default=[16])
    parser.add_argument("--milliseconds", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(4)
    device.load_from(options.folder)
    driver()
    neither = not options.check and options.time is None
    bad = 0
    if options.check or neither:
        bad = sum(check(file, options.group[0]) for file in options.file)
    if options.time is not None or neither:
        for shape in options.time or SHAPES:
            time(options.file, shape, options.rows, options.group, options.milliseconds)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
