#!/usr/bin/env python3
"""A decode step of Qwen2.5-VL-7B's language model as one CUDA graph: our kernels around torch's products.

    python3 tools/gpu/decode.py [--compiled DIR] [--batches 1 16 64 256] [--context 576] [--layers 28]

Run on a GPU machine with torch; needs no build: `--compiled` is kernels/cuda/compiled of this checkout if not told
otherwise. Weights, cache and rows are random. For each batch it replays the whole step and the same step without one
family of kernels in turn, and prints milliseconds a step (median of replays) and what leaving the family out saves:
what a kernel costs in its place, launch and waiting included. Beside it what attention takes with nothing else in the graph.
Then it checks that the kernels give the same bits when none may start early.

Products are torch's choice of cuBLASLt, which is not the engine's: compare steps of this script with one another.
"""

import argparse
import ctypes
import pathlib
import statistics

import torch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEATURES, VOCABULARY = 3584, 28, 4, 128, 18944, 152064
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
BLOCK_TOKENS = 16
RING = 24576  # bytes of shared memory a warp of attention_decode has for heads of 128
BF16 = dict(device="cuda", dtype=torch.bfloat16)
U32, F32 = ctypes.c_uint32, ctypes.c_float
FAMILIES = ["products", "attention", "rotary", "norms", "gates", "rows", "choice"]

# What the driver's header calls them.
SHARED_MOST, EARLY_START = 8, 6


class Sections(ctypes.Structure):
    _fields_ = [("pairs", U32 * 4)]


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("gap", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", U32 * 3),
        ("block", U32 * 3),
        ("shared", U32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", U32),
    ]


class Kernels:
    """Kernels of the compiled folder by name, launched in torch's stream of the moment."""

    def __init__(self, folder):
        torch.zeros(1, device="cuda")
        self.driver, self.folder, self.known = ctypes.CDLL("libcuda.so.1"), folder, {}

    def ok(self, code):
        if code != 0:
            said = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(said))
            raise RuntimeError(f"the driver says {code}: {said.value}")

    def function(self, file, name):
        if (file, name) not in self.known:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            path = str(self.folder / f"{file}.sm_90a.cubin").encode()
            self.ok(self.driver.cuModuleLoad(ctypes.byref(module), path))
            self.ok(self.driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            self.known[file, name] = function
        return self.known[file, name]

    def launch(self, file, name, grid, block, *arguments, shared=0, early=True):
        function = self.function(file, name)
        if shared > 48 * 1024:
            self.ok(self.driver.cuFuncSetAttribute(function, SHARED_MOST, shared))
        held = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(a) for a in held])
        attribute = Attribute(EARLY_START, 0, (ctypes.c_int * 16)(1))
        grid = (U32 * 3)(*grid, *[1] * (3 - len(grid)))
        stream = torch.cuda.current_stream().cuda_stream
        config = Config(grid, (U32 * 3)(block, 1, 1), shared, stream, ctypes.pointer(attribute), int(early))
        self.ok(self.driver.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))


def decode_launch(sequences, processors):
    """Warps of a block, blocks and the shortest piece: kernels/src/cuda/decode_launch.rs."""
    runs = sequences * KV_HEADS
    if runs <= 32:
        return 8, processors, 8
    for warps, percent in ((8, 70), (2, 85), (1, 90)):
        blocks = processors * 8 // warps
        if runs <= blocks and 100 * runs >= percent * blocks:
            return warps, blocks, 20
    return 4, 2 * processors, 20


class Step:
    """All that a step of one batch reads and writes."""

    def __init__(self, kernels, weights, batch, context):
        self.kernels, self.weights, self.batch, self.layers = kernels, weights, batch, len(weights["qkv"])
        blocks = -(-context // BLOCK_TOKENS)
        self.tables = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
        shape = (batch * blocks, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
        self.caches = [torch.empty(shape, **BF16).normal_() for _ in range(self.layers)]
        self.starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        self.contexts = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        self.positions = torch.full((3, batch), context - 1, device="cuda", dtype=torch.int32)
        last = (context - 1) // BLOCK_TOKENS
        self.slots = self.tables[:, last] * BLOCK_TOKENS + (context - 1) % BLOCK_TOKENS
        self.frequencies = 1e6 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
        self.ids = torch.randint(0, VOCABULARY, (batch,), device="cuda", dtype=torch.int32)
        self.every = torch.arange(batch, device="cuda", dtype=torch.int32)
        rows = lambda columns: torch.zeros(batch, columns, **BF16)
        self.hidden, self.normed, self.last = rows(HIDDEN), rows(HIDDEN), rows(HIDDEN)
        self.qkv, self.attended = rows(QKV), rows(HEADS * HEAD_DIM)
        self.gate_up, self.gated = rows(2 * FEATURES), rows(FEATURES)
        self.logits = torch.zeros(batch, VOCABULARY, device="cuda")
        self.chosen = torch.zeros(batch, device="cuda", dtype=torch.int32)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.decode = decode_launch(batch, processors)
        self.partials = torch.zeros(self.decode[1] * 2 * 8 * (HEAD_DIM + 2), device="cuda")
        self.counters = torch.zeros(self.decode[1], device="cuda", dtype=torch.int32)

    def norm(self, early, x, out):
        n, w = self.batch, self.weights["norm"]
        arguments = (x, U32(HIDDEN), w, U32(n), U32(HIDDEN), F32(1e-6), out)
        self.kernels.launch("rms_norm", "rms_norm_bf16", (n,), 224, *arguments, early=early)

    def rotary(self, early, cache):
        arguments = (self.qkv, U32(QKV), U32(HEADS), U32(KV_HEADS), U32(HEAD_DIM), self.positions, U32(self.batch))
        arguments += (self.frequencies, Sections((U32 * 4)(16, 24, 24)), self.slots, cache, U32(cache.shape[0]))
        self.kernels.launch("rotary", "rotary_kv_write_bf16", (self.batch,), 288, *arguments, early=early)

    def attention(self, early, cache):
        n, (warps, workers, piece) = self.batch, self.decode
        arguments = (self.qkv, U32(QKV), U32(n), cache, U32(cache.shape[0]), U32(KV_HEADS), U32(HEADS // KV_HEADS))
        arguments += (self.starts, self.contexts, self.tables, U32(n), U32(self.tables.shape[1]))
        arguments += (F32(HEAD_DIM**-0.5), U32(piece), U32(1), self.partials, self.counters, self.attended)
        extent = ((workers,), 32 * warps)
        self.kernels.launch(
            "attention_decode", "attention_decode_bf16_d128", *extent, *arguments, shared=warps * RING, early=early
        )

    def gate(self, early):
        n = self.batch
        grid = (n, -(-FEATURES // (2048 if n < 128 else 4096)))
        arguments = (self.gate_up, U32(2 * FEATURES), U32(FEATURES), self.gated)
        self.kernels.launch("silu_mul", "silu_mul_bf16", grid, 256, *arguments, early=early)

    def run(self, without=(), early=True):
        """All kernels of a step but for the families `without`."""
        k, w, n = self.kernels, self.weights, self.batch
        on = lambda family: family not in without
        embedding = (w["embedding"], U32(VOCABULARY), U32(HIDDEN), self.ids, self.chosen, U32(n), self.hidden)
        if on("rows"):
            k.launch("embed", "embed_bf16", (n,), 128, *embedding, early=early)
        for layer, cache in enumerate(self.caches):
            if on("norms"):
                self.norm(early, self.hidden, self.normed)
            if on("products"):
                torch.addmm(w["bias"], self.normed, w["qkv"][layer].T, out=self.qkv)
            if on("rotary"):
                self.rotary(early, cache)
            if on("attention"):
                self.attention(early, cache)
            if on("products"):
                torch.addmm(self.hidden, self.attended, w["out"][layer].T, out=self.hidden)
            if on("norms"):
                self.norm(early, self.hidden, self.normed)
            if on("products"):
                torch.mm(self.normed, w["gate_up"][layer].T, out=self.gate_up)
            if on("gates"):
                self.gate(early)
            if on("products"):
                torch.addmm(self.hidden, self.gated, w["down"][layer].T, out=self.hidden)
        if on("norms"):
            self.norm(early, self.hidden, self.normed)
        rows = (self.normed, U32(n), U32(HIDDEN), self.every, U32(HIDDEN), U32(2), self.last, U32(HIDDEN))
        if on("rows"):
            k.launch("gather_rows", "gather_rows", (n,), 128, *rows, early=early)
        if on("products"):
            torch.mm(self.last, w["embedding"].T, out_dtype=torch.float32, out=self.logits)
        if on("choice"):
            choice = (self.logits, U32(VOCABULARY), U32(VOCABULARY), self.chosen)
            k.launch("argmax", "argmax_f32", (8 * n,), 512, *choice, early=early)

    def captured(self, **options):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.run(**options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(**options)
        return graph

    def milliseconds(self, left_out, rounds=25):
        """Of a step without each of the lists of families: they take turns, so that all meet the same clocks."""
        graphs = [self.captured(without=without) for without in left_out]
        times = [[] for _ in graphs]
        for turn in range(rounds + 3):
            for graph, of_graph in zip(graphs, times):
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before.record()
                graph.replay()
                after.record()
                torch.cuda.synchronize()
                of_graph.append(before.elapsed_time(after))
        return [statistics.median(of_graph[3:]) for of_graph in times]

    def same_bits_without_early_start(self):
        found = []
        for early in (True, False):
            graph = self.captured(early=early)
            graph.replay()
            torch.cuda.synchronize()
            found.append((self.hidden.clone(), self.logits.clone(), self.chosen.clone()))
        return all(map(torch.equal, *found)) and bool(found[0][1].isfinite().all())


def main():
    here = pathlib.Path(__file__).resolve().parents[2]
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--compiled", type=pathlib.Path, default=here / "kernels/cuda/compiled")
    asked.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    asked.add_argument("--context", type=int, default=576)
    asked.add_argument("--layers", type=int, default=28)
    asked = asked.parse_args()
    kernels = Kernels(asked.compiled)
    drawn = lambda *shape: torch.empty(shape, **BF16).normal_(0, 0.02)
    weights = {name: [drawn(*shape) for _ in range(asked.layers)] for name, shape in {
        "qkv": (QKV, HIDDEN), "out": (HIDDEN, HEADS * HEAD_DIM), "gate_up": (2 * FEATURES, HIDDEN),
        "down": (HIDDEN, FEATURES),
    }.items()}
    weights |= {"bias": drawn(QKV), "norm": torch.ones(HIDDEN, **BF16), "embedding": drawn(VOCABULARY, HIDDEN)}
    print(f"milliseconds a step at context {asked.context}, {asked.layers} layers; behind it what each family costs")
    print("batch".rjust(6) + "step".rjust(9) + "".join(map("{:>11}".format, FAMILIES)) + "  attention alone")
    fine = True
    for batch in asked.batches:
        step = Step(kernels, weights, batch, asked.context)
        alone = [family for family in FAMILIES if family != "attention"]
        whole, attention, *without = step.milliseconds([[], alone] + [[family] for family in FAMILIES])
        costs = [whole - milliseconds for milliseconds in without]
        same = step.same_bits_without_early_start()
        fine &= same
        layer = 1000 * attention / asked.layers
        line = f"{batch:6d}{whole:9.3f}" + "".join(f"{cost:11.3f}" for cost in costs) + f"{layer:11.2f} us a layer"
        print(line + ("" if same else "   OTHER BITS without the early start"))
        del step
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
