#!/usr/bin/env python3
"""A decode step of Qwen2.5-VL-7B's language model as one CUDA graph: Bursar's kernels around torch's matrix products.

    python3 tools/gpu/decode.py [--compiled DIR] [--batches 1 16 64 256] [--context 576] [--layers 28]

Run it on a GPU machine with torch. No build is needed: by default `--compiled` is kernels/cuda/compiled of this checkout.
Weights, cache and rows are random. For each batch the script replays the whole step, and the step without one family of
kernels at a time. It prints milliseconds per step (median of replays) and the time that leaving the family out saves.
This time is the cost of the family within the step, including launch and waiting. The script also prints the time of
attention in a graph without other kernels. Then it checks that the kernels give the same bits if no kernel may start
early.

Matrix products use the cuBLASLt kernels that torch chooses, not those that the engine chooses. Compare steps of this
script only with each other.
"""

import argparse
import pathlib
import statistics

import torch

import device
from contract import contract
from device import Kernel, Sections, driver
from operations.argmax import BLOCKS as ARGMAX_BLOCKS, THREADS as ARGMAX_THREADS
from operations.decode import Decode, shape_of
from operations.small import COPY_THREADS, gate_shape, norm_shape, rotary_block

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEATURES, VOCABULARY = 3584, 28, 4, 128, 18944, 152064
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
BLOCK_TOKENS = contract("common").BLOCK_TOKENS
BF16 = dict(device="cuda", dtype=torch.bfloat16)
FAMILIES = ["products", "attention", "rotary", "norms", "gates", "rows", "choice"]


class Step:
    """Everything that a step of one batch reads and writes."""

    def __init__(self, weights, batch, context):
        self.weights, self.batch, self.layers = weights, batch, len(weights["qkv"])
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
        self.decode = Decode("bf16", HEAD_DIM, shape_of(batch, KV_HEADS, HEADS // KV_HEADS))

    def norm(self, early, x, out):
        arguments = (x, HIDDEN, self.weights["norm"], self.batch, HIDDEN, 1e-6, 0.0, out)
        Kernel("rms_norm", "rms_norm_bf16")(*norm_shape(self.batch, HIDDEN), *arguments, early=early)

    def rotary(self, early, cache):
        arguments = (self.qkv, QKV, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM // 2, self.positions, self.batch, self.frequencies,
                     Sections(16, 24, 24, 0), self.slots, cache, None, cache.shape[0])  # fmt: skip
        Kernel("rotary", "rotary_kv_write_bf16")((self.batch,), rotary_block(QKV), *arguments, early=early)

    def attention(self, early, cache):
        self.decode(self.qkv, cache, KV_HEADS, HEADS // KV_HEADS, self.starts, self.contexts, self.tables, HEAD_DIM**-0.5,
                    self.attended, past_is_there=True, early=early)  # fmt: skip

    def gate(self, early):
        arguments = (self.gate_up, 2 * FEATURES, FEATURES, self.gated)
        Kernel("silu_mul", "silu_mul_bf16")(*gate_shape(self.batch, FEATURES), *arguments, early=early)

    def run(self, without=(), early=True):
        """Launches all kernels of a step except the families `without`."""
        w, n = self.weights, self.batch
        on = lambda family: family not in without
        embedding = (w["embedding"], VOCABULARY, HIDDEN, self.ids, self.chosen, n, self.hidden)
        if on("rows"):
            Kernel("embed", "embed_bf16")((n,), (COPY_THREADS,), *embedding, early=early)
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
        rows = (self.normed, n, HIDDEN, self.every, HIDDEN, 2, self.last, HIDDEN)
        if on("rows"):
            Kernel("gather_rows", "gather_rows")((n,), (COPY_THREADS,), *rows, early=early)
        if on("products"):
            torch.mm(self.last, w["embedding"].T, out_dtype=torch.float32, out=self.logits)
        if on("choice"):
            choice = (self.logits, VOCABULARY, VOCABULARY, None, self.chosen)
            Kernel("argmax", "argmax_f32")((ARGMAX_BLOCKS * n,), (ARGMAX_THREADS,), *choice, early=early)

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
        """Median times of steps without each list of families. The steps alternate, so that all run at the same
        clocks."""
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
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--compiled", type=pathlib.Path, default=device.COMPILED)
    asked.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    asked.add_argument("--context", type=int, default=576)
    asked.add_argument("--layers", type=int, default=28)
    asked = asked.parse_args()
    device.load_from(asked.compiled)
    driver()
    drawn = lambda *shape: torch.empty(shape, **BF16).normal_(0, 0.02)
    weights = {name: [drawn(*shape) for _ in range(asked.layers)] for name, shape in {
        "qkv": (QKV, HIDDEN), "out": (HIDDEN, HEADS * HEAD_DIM), "gate_up": (2 * FEATURES, HIDDEN),
        "down": (HIDDEN, FEATURES),
    }.items()}
    weights |= {"bias": drawn(QKV), "norm": torch.ones(HIDDEN, **BF16), "embedding": drawn(VOCABULARY, HIDDEN)}
    print(f"milliseconds per step at context {asked.context}, {asked.layers} layers; then the time of each family of kernels")
    print("batch".rjust(6) + "step".rjust(9) + "".join(map("{:>11}".format, FAMILIES)) + "  attention alone")
    fine = True
    for batch in asked.batches:
        step = Step(weights, batch, asked.context)
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
