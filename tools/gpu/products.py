"""Checks matrix products with few rows, and gated products with some hundred rows, on a Hopper GPU, and times them
next to cuBLASLt's.

    python3 tools/gpu/products.py [check] [sanitize] [time] [--rows N ...] [--compiled FOLDER]     default: check and time

check     every kernel of gemm_small_m.cubin and gemm_medium_m.cubin at odd sizes in poisoned memory, against float64
sanitize  a small part of `check`, to be run under compute-sanitizer
time      a decode step of Qwen2.5-VL-7B (28 layers and the logits) at 1, 16, 64 and 256 rows, or at the given numbers, with
          different weights for each layer, as graphs of launches: first each product, then the whole step with norms,
          attention over 576 tokens and the gate (no rotary positions). The step is timed with cuBLASLt's products as torch
          uses them, with Bursar's products for each cut that Bursar can choose, with the fastest cut of each product,
          and with the fastest kernel of each product. With more than 64 rows, Bursar has a kernel only for gate_up. This
          kernel has no cut, and is compared with cuBLASLt's product followed by the gate

Needs only torch with CUDA. Bursar's kernels come from kernels/cuda/compiled.
"""

import argparse
import functools
import pathlib
import statistics
import sys

import torch
from torch.nn import functional

import device
from contract import contract, sizes
from device import ENDINGS, Kernel, driver, microseconds, processors, tensor_map
from operations.decode import Decode, shape_of
from operations.small import gate_shape, norm_shape

HIDDEN, QKV, INTERMEDIATE, VOCABULARY, LAYERS = 3584, 4608, 18944, 152064, 28
CONTEXT = 576  # tokens
BLOCK_TOKENS = contract("common").BLOCK_TOKENS

# Numbers of blocks that share a tile, from which Bursar's autotuning chooses (`Cut::ALL` in
# kernels/src/cuda/gemm/tiles.rs).
CUTS = [1, 2, 4, 132]
SMALL_M, MEDIUM_M, GATE = contract("gemm_small_m"), contract("gemm_medium_m"), contract("gate")
WIDTHS = sizes("FOR_EACH_GATED_WIDTH")
TEAM = SMALL_M.TEAM  # blocks per cluster
# The largest number of rows that the kernels for few rows take.
SMALL_M_ROWS = SMALL_M.ROWS_MAX


SWIZZLE = 3  # CU_TENSOR_MAP_SWIZZLE_128B
REPLAYS = 7
TURNS = 5


class Kernels:
    """Bursar's products for Hopper, launched as in kernels/src/cuda/: each kernel may start early."""

    def __init__(self):
        driver()
        self.processors = processors()
        self.parts = torch.full((8 << 20,), float("nan"), device="cuda")
        self.counters = torch.zeros(SMALL_M.STREAM_COUNTERS, device="cuda", dtype=torch.int32)
        self.maps = {}

    def cut(self, features, steps, cut, gated, grid=None):
        """The number of blocks (whole teams), the number of tiles, and the rows of the tallest tile."""
        group, tile = SMALL_M.GATE_ROWS, SMALL_M.TILE_ROWS
        groups, most = (features // group, tile // 2 // group) if gated else (features, tile)
        blocks = min((grid or self.processors) // TEAM * TEAM, groups * cut)
        columns = max(blocks // cut, 1)
        tiles = columns * -(-groups // (columns * most))
        return -(-min(blocks, tiles * steps) // TEAM) * TEAM, tiles, -(-groups // tiles) * (2 * group if gated else 1)

    def weight_map(self, weight, gated, tile_rows):
        key = weight.data_ptr(), weight.shape, gated, tile_rows
        if key not in self.maps:
            rows, columns = weight.shape
            pitch = 2 * weight.stride(0)
            if gated:
                group, chunk = SMALL_M.GATE_ROWS, SMALL_M.CHUNK_COLUMNS
                shape = ([columns, group, 2, rows // (2 * group)], [pitch, pitch * (rows // 2), group * pitch],
                         [chunk, group, 2, tile_rows // (2 * group)])  # fmt: skip
            else:
                shape = [columns, rows], [pitch], [SMALL_M.CHUNK_COLUMNS, tile_rows]
            self.maps[key] = tensor_map(weight, *shape, SWIZZLE)
        return self.maps[key]

    def small_m(self, x, weight, out, bias=None, add=False, gated=False, cut=4, grid=None, is_gelu=False):
        """Launches a product of few rows."""
        rows, columns = x.shape
        most = next(most for most in SMALL_M.SHARED_BYTES if rows <= most)
        features, steps = out.shape[1], -(-columns // SMALL_M.STEP_COLUMNS)
        blocks, tiles, tile_rows = self.cut(features, steps, cut, gated, grid)
        arguments = [
            self.weight_map(weight, gated, tile_rows),
            tensor_map(x, [columns, rows], [2 * x.stride(0)], [SMALL_M.CHUNK_COLUMNS, most], SWIZZLE),
            out,
        ]
        if not gated:
            arguments.append(bias)
        arguments += [self.parts, self.counters, out.stride(0), rows, features, steps, tiles, tile_rows]
        arguments.append(SMALL_M.ADD_TO_OUT * add | SMALL_M.OUT_IS_F32 * (out.dtype == torch.float32) | SMALL_M.IS_GELU * is_gelu)
        name = f"{'gemm_small_m_gated' if gated else 'gemm_small_m'}_{ENDINGS[x.dtype]}_r{most}"
        Kernel("gemm_small_m", name, SMALL_M.SHARED_BYTES[most])((blocks,), (SMALL_M.THREADS,), *arguments, early=True)

    def medium_m(self, x, weight, out, bias=None, grid=None, width=None, activation=GATE.SILU):
        """Launches a gated product of some hundred rows, in tiles of `width` features. The default
        is the width that Bursar chooses."""
        (rows, columns), features = x.shape, out.shape[1]
        clusters = (grid or self.processors) // MEDIUM_M.CLUSTER
        tiles = lambda width: -(-rows // (MEDIUM_M.CLUSTER * MEDIUM_M.BLOCK_ROWS)) * -(-features // width)  # noqa: E731
        width = width or min(reversed(WIDTHS), key=lambda width: -(-tiles(width) // clusters) * width)
        blocks = MEDIUM_M.CLUSTER * min(clusters, tiles(width))
        key = weight.data_ptr(), weight.shape, "medium_m", width
        if key not in self.maps:
            box = [MEDIUM_M.STEP_COLUMNS, width]
            self.maps[key] = tensor_map(weight, [columns, 2 * features], [2 * weight.stride(0)], box, SWIZZLE)
        arguments = [
            tensor_map(x, [columns, rows], [2 * x.stride(0)], [MEDIUM_M.STEP_COLUMNS, MEDIUM_M.PART_ROWS], SWIZZLE),
            self.maps[key],
            *(out, bias, out.stride(0), rows, features, columns, activation),
        ]
        kernel = Kernel("gemm_medium_m", f"gemm_medium_m_{ENDINGS[x.dtype]}_f{width}", MEDIUM_M.SHARED_BYTES)
        kernel((blocks,), (MEDIUM_M.THREADS,), *arguments, early=True)


# The variants of a product: output type, and whether the product has a bias, is added to the output, and is gated.
WAYS = {
    "plain": (None, False, False, False),
    "bias": (None, True, False, False),
    "added": (None, False, True, False),
    "f32": (torch.float32, False, False, False),
    "f32, bias, added": (torch.float32, True, True, False),
    "gated": (None, False, False, True),
    "gated, bias": (None, True, False, True),
    "gelu": (None, False, False, True),
    "gelu, bias": (None, True, False, True),
}
MARGIN = 776.0  # fills the memory next to an output


def check(kernels, shapes, rows, grid=None, medium_m=None):
    """Checks every variant of every shape [features, in], with the kernels for few rows, or, for gated products, for
    some hundred rows. Prints the largest errors, and returns whether all were right."""
    worst, cases, wrong = {}, 0, 0
    for dtype in (torch.bfloat16, torch.float16):
        for features, columns in shapes:
            kernels.maps.clear()
            weights = torch.randn(2 * features, columns, device="cuda", dtype=dtype) * columns**-0.5
            biases = torch.randn(2 * features, device="cuda", dtype=dtype)
            for count in rows:
                x = torch.randn(count, columns + 8, device="cuda", dtype=dtype)[:, :columns]
                both = x.double() @ weights.double().T
                for way, (out_type, biased, added, gated) in WAYS.items():
                    if (not gated if medium_m else gated and (biased or features % 8)):
                        continue
                    cut = CUTS[(cases + cases // 6) % len(CUTS)]
                    pitch = -(-features // 4) * 4 + 4 if medium_m else features + 3
                    around = torch.full((count * pitch + 64,), MARGIN, device="cuda", dtype=out_type or dtype)
                    out = around[: count * pitch].view(count, pitch)[:, :features]
                    out.copy_(torch.randn_like(out)) if added else out.fill_(float("nan"))
                    gate, up = both[:, :features], both[:, features:]
                    bias = biases if gated else biases[:features]
                    if gated and biased:
                        gate, up = gate + bias[:features].double(), up + bias[features:].double()
                    is_gelu = way.startswith("gelu")
                    activated = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
                    expected = activated * up if gated else gate.clone()
                    expected += (bias.double() if biased and not gated else 0) + (out.double() if added else 0)
                    weight = weights if gated else weights[:features]
                    if medium_m:
                        kernels.medium_m(x, weight, out, bias if biased else None, grid, medium_m,
                                         GATE.GELU_TANH if is_gelu else GATE.SILU)  # fmt: skip
                    else:
                        kernels.small_m(x, weight, out, bias if biased else None, added, gated, cut, grid, is_gelu)
                    torch.cuda.synchronize()
                    error = float((out.double() - expected).norm() / expected.norm())
                    limit = 3e-5 if out_type else 4e-3 if dtype == torch.bfloat16 else 6e-4
                    margin = around[: count * pitch].view(count, pitch)[:, features:]
                    untouched = bool((margin == MARGIN).all()) and bool((around[count * pitch :] == MARGIN).all())
                    settled = int(kernels.counters.abs().sum()) == 0
                    cases += 1
                    if not (error <= limit and untouched and settled):
                        wrong += 1
                        print(f"WRONG {way} {dtype} {count} x {columns} -> {features}, cut {cut}: {error:.1e}, {untouched}, {settled}")
                    key = f"{way} {str(dtype)[6:]}"
                    worst[key] = max(worst.get(key, 0), error)
    print(f"{cases} cases, {wrong} wrong; errors of the norm at worst:", {key: f"{error:.1e}" for key, error in worst.items()})
    return wrong == 0


def repeats(multiply, rows, features, **ways):
    """Checks that the bits are the same every time and that a NaN stays in its row, with `features` rows of the weight."""
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(features, HIDDEN, device="cuda", dtype=torch.bfloat16)
    outs = [torch.empty_like(x) for _ in range(20)]
    for out in outs:
        multiply(x, weight, out, **ways)
    poisoned = torch.empty_like(x)
    x[1, 5] = float("nan")
    multiply(x, weight, poisoned, **ways)
    torch.cuda.synchronize()
    same = all(torch.equal(outs[0], out) for out in outs)
    others = [row for row in range(rows) if row != 1]
    alone = torch.equal(poisoned[others], outs[0][others]) and bool(poisoned[1].isnan().all())
    print(f"the same bits 20 times: {same}; a NaN stays in its row: {alone}")
    return same and alone


class Step:
    """A model's weights, and the operations between its products in a step of this many rows."""

    def __init__(self, kernels):
        def drawn(*shape):
            return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)

        shapes = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
        self.kernels = kernels
        self.layers = {name: [drawn(*shape) for _ in range(LAYERS)] for name, shape in shapes.items()}
        self.head, self.bias, self.norm_weight = drawn(VOCABULARY, HIDDEN), drawn(QKV), drawn(HIDDEN)

    def resize(self, rows):
        def drawn(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        def indices(*numbers):
            return torch.tensor(numbers, device="cuda", dtype=torch.int32)

        self.rows, blocks = rows, CONTEXT // BLOCK_TOKENS
        self.hidden, self.normed, self.attended = drawn(rows, HIDDEN), drawn(rows, HIDDEN), drawn(rows, HIDDEN)
        self.qkv, self.gate_up, self.gated = drawn(rows, QKV), drawn(rows, 2 * INTERMEDIATE), drawn(rows, INTERMEDIATE)
        self.logits = drawn(rows, VOCABULARY)
        self.logits_f32 = self.logits.float()
        self.caches = [drawn(rows * blocks, 2, 4, BLOCK_TOKENS, 128) for _ in range(LAYERS)]
        self.starts, self.contexts = indices(*range(rows + 1)), indices(*[CONTEXT] * rows)
        self.tables = indices(*range(rows * blocks)).view(rows, blocks)
        self.decode = Decode("bf16", 128, shape_of(rows, 4, 7))

    def norm(self):
        arguments = (self.hidden, HIDDEN, self.norm_weight, self.rows, HIDDEN, 1e-6, 0.0, self.normed)
        Kernel("rms_norm", "rms_norm_bf16")(*norm_shape(self.rows, HIDDEN), *arguments, early=True)

    def attend(self, layer):
        self.decode(self.qkv, self.caches[layer], 4, 7, self.starts, self.contexts, self.tables, 128**-0.5, self.attended,
                    past_is_there=True, early=True)  # fmt: skip

    def gate(self):
        arguments = (self.gate_up, 2 * INTERMEDIATE, INTERMEDIATE, self.gated)
        Kernel("silu_mul", "silu_mul_bf16")(*gate_shape(self.rows, INTERMEDIATE), *arguments, early=True)

    def multiply(self, name, layer, cut):
        """Computes a product with Bursar's kernel and this cut, gate included, or with cuBLASLt if `cut` is None."""
        weight = self.head if name == "logits" else self.layers[name][layer]
        x, out, theirs = {
            "qkv": (self.normed, self.qkv, self.qkv),
            "o": (self.attended, self.hidden, self.hidden),
            "gate_up": (self.normed, self.gated, self.gate_up),
            "down": (self.gated, self.hidden, self.hidden),
            "logits": (self.normed, self.logits_f32, self.logits),
        }[name]
        added, bias = name in ("o", "down"), self.bias if name == "qkv" else None
        if cut and self.rows > SMALL_M_ROWS:
            return self.kernels.medium_m(x, weight, out)
        if cut:
            return self.kernels.small_m(x, weight, out, bias, added, name == "gate_up", cut)
        if name == "qkv" or added:
            torch.addmm(out if added else bias, x, weight.T, out=theirs)
        else:
            torch.mm(x, weight.T, out=theirs)

    def run(self, cuts):
        """Runs the whole step, with the cut of each product from `cuts`."""
        for layer in range(LAYERS):
            self.norm()
            self.multiply("qkv", layer, cuts["qkv"])
            self.attend(layer)
            self.multiply("o", layer, cuts["o"])
            self.norm()
            self.multiply("gate_up", layer, cuts["gate_up"])
            if not cuts["gate_up"]:
                self.gate()
            self.multiply("down", layer, cuts["down"])
        self.norm()
        self.multiply("logits", 0, cuts["logits"])

    def bytes(self, name):
        weight = self.head if name == "logits" else self.layers[name][0]
        return weight.numel() * 2


def in_turns(ways):
    """Microseconds of one call of each variant: medians of alternating rounds, because a GPU at its power limit
    slows down as it gets hot, which would favor the first variant measured."""
    taken = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, calls in ways.items():
            taken[way].append(microseconds(calls, REPLAYS, least=1))
    return {way: statistics.median(times) for way, times in taken.items()}


def time(kernels, all_rows):
    step = Step(kernels)
    names = [*step.layers, "logits"]
    for rows in all_rows:
        step.resize(rows)
        best, ours = {}, {}
        is_small_m = rows <= SMALL_M_ROWS
        print(f"{rows} rows, microseconds of a product: cuBLASLt's; ours{' by blocks that share a tile' if is_small_m else ''}")
        for name in names:
            count = 4 if name == "logits" else LAYERS
            calls = lambda cut: [functools.partial(step.multiply, name, layer, cut) for layer in range(count)]  # noqa: E731
            cuts = CUTS if is_small_m else [1] if name == "gate_up" else []
            called = {cut: calls(cut) for cut in [None, *cuts]}
            if name == "gate_up" and not is_small_m:
                apart = lambda layer: (step.multiply("gate_up", layer, None), step.gate())  # noqa: E731
                called[None] = [functools.partial(apart, layer) for layer in range(count)]
            taken = in_turns(called)
            best[name], ours[name] = min(taken, key=taken.get), min(cuts or [None], key=taken.get)
            shortest = taken[ours[name]]
            rate, work = step.bytes(name) / shortest / 1e6, step.bytes(name) * rows / shortest / 1e6
            listed = "  ".join(f"{cut}: {taken[cut]:6.1f}" for cut in cuts)
            print(f"  {name:8} {taken[None]:6.1f};  {listed}  ({rate:.2f} TB/s, {work:.0f} TFLOP/s)", flush=True)
        ways = {"cuBLASLt": None, **{f"ours, {cut}": cut for cut in CUTS if is_small_m}}
        whole = lambda chosen: [lambda: step.run(chosen)]  # noqa: E731
        ways = {way: whole(dict.fromkeys(names, cut)) for way, cut in ways.items()}
        ways |= {"ours, the fastest of each": whole(ours)} if is_small_m else {}
        steps = in_turns({**ways, "the fastest of each": whole(best)})
        listed = "; ".join(f"{way} {taken / 1000:.3f}" for way, taken in steps.items())
        print(f"  28 layers and logits with the operations between products, milliseconds: {listed}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], "check", "sanitize", "time"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--compiled", type=pathlib.Path, default=device.COMPILED)
    options = parser.parse_args()
    parts = options.parts or ["check", "time"]
    device.load_from(options.compiled)
    kernels, right = Kernels(), True
    if "sanitize" in parts:
        right &= check(kernels, [(200, 136), (128, 1000)], (1, 9, 33), grid=5)
        right &= all([check(kernels, [(228, 264), (450, 520)], (1, 200, 300), 8, width) for width in WIDTHS])
    if "check" in parts:
        rows = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33, 64)
        right &= check(kernels, [(4608, 3584), (3584, 3584), (1000, 18944)], rows)
        right &= check(kernels, [(1, 8), (77, 72), (136, 64), (130, 64), (129, 1000), (3000, 200)], (1, 5, 17, 64))
        right &= check(kernels, [(333, 520), (336, 520)], rows, grid=7)
        right &= check(kernels, [(20000, 72), (70000, 136)], (3, 16, 32, 64))
        right &= all([repeats(kernels.small_m, rows, HIDDEN, cut=cut) for rows, cut in [(3, 2), (3, 4), (20, 2), (64, 2), (64, 4)]])
        rows = (1, 63, 65, 100, 128, 129, 160, 192, 193, 255, 256, 257, 600)
        for width in WIDTHS:
            right &= check(kernels, [(INTERMEDIATE, HIDDEN), (1000, 18944)], (72, 129, 256), None, width)
            right &= check(kernels, [(2, 8), (78, 72), (134, 264), (3000, 520)], rows, None, width)
            right &= check(kernels, [(666, 520)], rows, 14, width)
            right &= all([repeats(kernels.medium_m, rows, 2 * HIDDEN, width=width) for rows in (96, 256)])
    if "time" in parts:
        time(kernels, options.rows)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
