#!/usr/bin/env python3
"""Checks and times the products of linear_gated_hopper.cu against cuBLASLt, on a Hopper GPU.

    gated.py [--folder DIR] [--file NAME ...] [--check] [--time SHAPE ...] [--group N ...] [--milliseconds N]

DIR (kernels/cuda/compiled) holds linear_gated_hopper.sm_90a.cubin, or what --file names, and silu_mul.sm_90a.cubin. With
neither --check nor --time both are done, over all shapes. Sizes divide nothing in the check, outputs are poisoned, and
float64 is the reference. Times are medians of rounds in which all versions take turns in any order, on normal random
numbers, with weights that rotate beyond the cache: microseconds, TFLOP/s, and how much faster than cuBLASLt. Needs torch.
"""

import argparse
import ctypes
import random
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROUNDS = 9
TILE_ROWS, CLUSTER, THREADS, SHARED = 128, 2, 384, 4 * 49152 + 4 * 8192
COMPILED = Path(__file__).resolve().parents[2] / "kernels/cuda/compiled"
# kind, in, columns, bias, rows: of Qwen2.5-VL-7B and its vision tower
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
NAMES = {"gated": "linear_gated_hopper", "plain": "linear_hopper", "add": "linear_add_hopper"}
SUFFIX = {torch.bfloat16: "bf16", torch.float16: "f16"}

driver = ctypes.CDLL("libcuda.so.1")


class Map(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 128)]


def said(what, code):
    if code != 0:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        raise SystemExit(f"{what}: {name.value.decode()}")


def load(path, name, shared=0):
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    said(f"load {path}", driver.cuModuleLoad(ctypes.byref(module), str(path).encode()))
    said(name, driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    if shared:
        said("shared memory", driver.cuFuncSetAttribute(function, 8, shared))
    return function


def launch(function, grid, block, shared, arguments):
    held = [
        ctypes.c_uint64(a.data_ptr()) if isinstance(a, torch.Tensor)
        else ctypes.c_uint64(0) if a is None
        else ctypes.c_uint32(a) if isinstance(a, int)
        else a
        for a in arguments
    ]  # fmt: skip
    places = (ctypes.c_void_p * len(held))(*[ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in held])
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    said("launch", driver.cuLaunchKernel(function, *grid, block, 1, 1, shared, stream, places, None))


def tensor_map(tensor, box):
    """Rows of 64 columns a copy, pieces exchanged within 128 bytes."""
    raw = ctypes.create_string_buffer(192)
    place = (ctypes.addressof(raw) + 63) // 64 * 64
    rows, columns = tensor.shape
    said("map", driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), 9 if tensor.dtype == torch.bfloat16 else 6, 2, ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(tensor.stride(0) * 2),
        (ctypes.c_uint32 * 2)(64, box), (ctypes.c_uint32 * 2)(1, 1), 0, 3, 2, 0))  # fmt: skip
    return Map.from_buffer_copy(ctypes.string_at(place, 128))


class Product:
    """One of our kernels for these operands; calling it launches it."""

    def __init__(self, path, kind, x, weight, bias, out, group):
        self.function = load(path, f"{NAMES[kind]}_{SUFFIX[x.dtype]}", SHARED)
        rows, columns = out.shape
        pairs = -(-rows // (TILE_ROWS * CLUSTER))
        tiles = pairs * -(-columns // (128 if kind == "gated" else 256))
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.grid = (CLUSTER * min(tiles, processors // CLUSTER), 1, 1)
        self.arguments = [tensor_map(x, 128), tensor_map(weight, 128), tensor_map(out, 64), bias,
                          rows, columns, x.shape[1], group]  # fmt: skip

    def __call__(self):
        launch(self.function, self.grid, THREADS, SHARED, self.arguments)


def expected(kind, x, weight, bias, held):
    value = x.double() @ weight.double().T
    if bias is not None:
        value += bias.double()
    if kind == "gated":
        gate, up = value.chunk(2, dim=1)
        return F.silu(gate) * up
    return value + held.double() if kind == "add" else value


def operands(kind, rows, depth, columns, bias, dtype, gap=0):
    """x with a gap between its rows, weight, bias, and what the output holds."""
    width = 2 * columns if kind == "gated" else columns
    x = torch.randn(rows, depth + gap, device="cuda").to(dtype)[:, :depth]
    weight = (torch.randn(width, depth, device="cuda") * depth**-0.5).to(dtype)
    bias = torch.randn(width, device="cuda").to(dtype) if bias else None
    return x, weight, bias, torch.randn(rows, columns, device="cuda").to(dtype)


def check(path, group):
    sizes = [(1, 8, 8), (2, 64, 128), (130, 72, 136), (127, 1288, 264), (257, 3584, 1000), (700, 328, 3456),
             (1153, 1280, 520), (2700, 192, 2056), (64, 18944, 72)]  # fmt: skip
    bad = 0
    for kind in NAMES:
        for dtype in SUFFIX:
            worst = 0.0
            for number, (rows, depth, columns) in enumerate(sizes):
                for bias in (False, True):
                    x, weight, bias, held = operands(kind, rows, depth, columns, bias, dtype, gap=8 * (number % 3))
                    # NaNs around the output and in it, and behind the rows of x.
                    around = torch.full((rows + 3, columns + 8), float("nan"), device="cuda", dtype=dtype)
                    out = around[:rows, :columns]
                    runs = []
                    for _ in range(2):
                        if kind == "add":
                            out.copy_(held)
                        else:
                            out.fill_(float("nan"))
                        Product(path, kind, x, weight, bias, out, group)()
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
            print(f"{NAMES[kind]}_{SUFFIX[dtype]}: worst relative error {worst:.2e}", flush=True)
    print("all right" if not bad else f"{bad} WRONG")
    return bad


def graph_of(version, calls, copies):
    """Calls one after the other without the host between them."""
    for which in range(copies):
        version(which)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            version(call % copies)
    return graph


def time(files, silu_mul, shape, groups, milliseconds):
    kind, depth, columns, has_bias, all_rows = SHAPES[shape]
    for rows in all_rows:
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
                grid = (rows, -(-columns // 4096), 1)
                launch(silu_mul, grid, 256, 0, [wide, width, columns, out])

        versions = {"cuBLASLt": library}
        for path in files:
            for group in groups:
                ours = [Product(path, kind, x, w, bias, held if kind == "add" else out, group) for w in weights]
                name = path.name.split(".")[0] + (f"/{group}" if len(groups) > 1 else "")
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
            # Who comes behind something cooler is faster where the card's power is the limit.
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
    parser.add_argument("--folder", type=Path, default=COMPILED)
    parser.add_argument("--file", nargs="+", default=["linear_gated_hopper.sm_90a.cubin"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", nargs="*")
    parser.add_argument("--group", nargs="+", type=int, default=[16])
    parser.add_argument("--milliseconds", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(4)
    torch.zeros(1, device="cuda")
    files = [options.folder / name for name in options.file]
    neither = not options.check and options.time is None
    bad = 0
    if options.check or neither:
        bad = sum(check(path, options.group[0]) for path in files)
    if options.time is not None or neither:
        silu_mul = load(options.folder / "silu_mul.sm_90a.cubin", "silu_mul_bf16")
        for shape in options.time or SHAPES:
            time(files, silu_mul, shape, options.group, options.milliseconds)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
