"""Products of few rows on a Hopper GPU: whether they are right, and what they take beside cuBLASLt's.

    python3 tools/gpu/products.py [check] [sanitize] [time] [--cubin FILE]          check and time, if not told otherwise

check     every kernel of linear_few.cubin at odd sizes in poisoned memory, against float64
sanitize  a small part of that, to be run under compute-sanitizer
time      the products of a decode step of Qwen2.5-VL-7B (28 layers and the logits) at 1, 16 and 64 rows, weights drawn
          anew for each layer, as graphs of launches, beside those that torch takes from cuBLASLt; each way of cutting
          the work into tiles that Bursar chooses from

Wants torch with CUDA and nothing else. KERNELS.md has the figures that this gave.
"""

import argparse
import ctypes
import pathlib
import statistics
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DRIVER = ctypes.CDLL("libcuda.so.1")
HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 3584, 18944, 152064, 28

# Blocks that share a tile: what Bursar's rehearsal chooses from (`CUTS` of kernels/src/cuda/linear_few.rs).
CUTS = [2, 4, 8, 132]


def said(status, call):
    if status != 0:
        text = ctypes.c_char_p()
        DRIVER.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{call}: {text.value} ({status})")


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class TensorMap(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 128)]


def tensor_map(tensor, dimensions, strides, box):
    """A map with swizzles of 128 bytes; strides in bytes, all innermost first."""

    def numbers(kind, values):
        return (kind * len(values))(*values)

    room = ctypes.create_string_buffer(192)
    at = (ctypes.addressof(room) + 63) // 64 * 64
    kind = 9 if tensor.dtype == torch.bfloat16 else 6
    status = DRIVER.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), kind, len(dimensions), ctypes.c_void_p(tensor.data_ptr()),
        numbers(ctypes.c_uint64, dimensions), numbers(ctypes.c_uint64, strides), numbers(ctypes.c_uint32, box),
        numbers(ctypes.c_uint32, [1] * len(dimensions)), 0, 3, 2, 0,
    )  # fmt: skip
    said(status, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(ctypes.string_at(at, 128))


class Few:
    """The kernels of linear_few.cubin, launched as kernels/src/cuda/linear_few.rs launches them."""

    def __init__(self, cubin):
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.module = ctypes.c_void_p()
        said(DRIVER.cuModuleLoad(ctypes.byref(self.module), str(cubin).encode()), "cuModuleLoad")
        self.functions = {}
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.parts = torch.full((2 * self.processors * 64 * 128,), float("nan"), device="cuda")
        self.counters = torch.zeros(4096, device="cuda", dtype=torch.int32)
        self.maps = {}

    def function(self, name, shared):
        if name not in self.functions:
            function = ctypes.c_void_p()
            said(DRIVER.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()), name)
            said(DRIVER.cuFuncSetAttribute(function, 8, shared), "cuFuncSetAttribute")
            self.functions[name] = function
        return self.functions[name]

    def cut(self, features, steps, cut, gated, grid=None):
        """Blocks, tiles, and rows of the tallest of them."""
        groups, most = (features // 8, 8) if gated else (features, 128)
        blocks = min(grid or self.processors, groups * cut)
        columns = max(blocks // cut, 1)
        tiles = columns * -(-groups // (columns * most))
        return min(blocks, tiles * steps), tiles, -(-groups // tiles) * (16 if gated else 1)

    def weight_map(self, weight, gated, tile_rows):
        key = weight.data_ptr(), weight.shape, gated, tile_rows
        if key not in self.maps:
            rows, columns = weight.shape
            pitch = 2 * weight.stride(0)
            if gated:
                shape = [columns, 8, 2, rows // 16], [pitch, pitch * (rows // 2), 8 * pitch], [64, 8, 2, tile_rows // 16]
            else:
                shape = [columns, rows], [pitch], [64, tile_rows]
            self.maps[key] = tensor_map(weight, *shape)
        return self.maps[key]

    def launch(self, x, weight, out, bias=None, add=False, gated=False, cut=CUTS[0], early=True, grid=None):
        rows, columns = x.shape
        most = next(most for most in (8, 16, 32, 64) if rows <= most)
        features, steps = out.shape[1], -(-columns // 64)
        blocks, tiles, tile_rows = self.cut(features, steps, cut, gated, grid)
        shared = (160 * 1024 - 704 - 256 * most) // 1024 * 1024 + 256 * most + 704
        number = ctypes.c_uint32
        arguments = [
            self.weight_map(weight, gated, tile_rows),
            tensor_map(x, [columns, rows], [2 * x.stride(0)], [64, most]),
            ctypes.c_void_p(out.data_ptr()),
        ]
        if not gated:
            arguments.append(ctypes.c_void_p(0 if bias is None else bias.data_ptr()))
        arguments += [ctypes.c_void_p(self.parts.data_ptr()), ctypes.c_void_p(self.counters.data_ptr())]
        arguments += [number(value) for value in (out.stride(0), rows, features, steps, tiles, tile_rows)]
        if not gated:
            arguments.append(number((1 if add else 0) | (2 if out.dtype == torch.float32 else 0)))
        kind = "bf16" if x.dtype == torch.bfloat16 else "f16"
        function = self.function(f"{'gate_up' if gated else 'linear'}_few_{kind}_r{most}", shared)
        attribute = Attribute(id=6)
        attribute.value[0] = 1
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        launch = Launch((number * 3)(blocks, 1, 1), (number * 3)(288, 1, 1), shared, stream, ctypes.pointer(attribute), early)
        pointers = [ctypes.cast(ctypes.pointer(argument), ctypes.c_void_p) for argument in arguments]
        pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        said(DRIVER.cuLaunchKernelEx(ctypes.byref(launch), function, pointers, None), "cuLaunchKernelEx")


# How a product reaches its output: its type, whether it has a bias, is added, is gated.
WAYS = {
    "plain": (None, False, False, False),
    "bias": (None, True, False, False),
    "added": (None, False, True, False),
    "f32": (torch.float32, False, False, False),
    "f32, bias, added": (torch.float32, True, True, False),
    "gated": (None, False, False, True),
}
MARGIN = 776.0  # what lies beside an output


def check(few, shapes, rows, cuts=CUTS, grid=None):
    """Every way of every shape [features, in]; prints the worst errors, and says whether all was right."""
    worst, cases, wrong = {}, 0, 0
    for dtype in (torch.bfloat16, torch.float16):
        for features, columns in shapes:
            few.maps.clear()
            weights = torch.randn(2 * features, columns, device="cuda", dtype=dtype) * columns**-0.5
            bias = torch.randn(features, device="cuda", dtype=dtype)
            for count in rows:
                x = torch.randn(count, columns + 8, device="cuda", dtype=dtype)[:, :columns]
                both = x.double() @ weights.double().T
                for way, (out_type, biased, added, gated) in WAYS.items():
                    if gated and features % 8:
                        continue
                    cut = cuts[cases % len(cuts)]
                    pitch = features + 3
                    around = torch.full((count * pitch + 64,), MARGIN, device="cuda", dtype=out_type or dtype)
                    out = around[: count * pitch].view(count, pitch)[:, :features]
                    out.copy_(torch.randn_like(out)) if added else out.fill_(float("nan"))
                    gate, up = both[:, :features], both[:, features:]
                    expected = torch.nn.functional.silu(gate) * up if gated else gate.clone()
                    expected += (bias.double() if biased else 0) + (out.double() if added else 0)
                    weight = weights if gated else weights[:features]
                    few.launch(x, weight, out, bias if biased else None, added, gated, cut, grid=grid)
                    torch.cuda.synchronize()
                    error = float((out.double() - expected).norm() / expected.norm())
                    limit = 3e-5 if out_type else 4e-3 if dtype == torch.bfloat16 else 6e-4
                    beside = around[: count * pitch].view(count, pitch)[:, features:]
                    untouched = bool((beside == MARGIN).all()) and bool((around[count * pitch :] == MARGIN).all())
                    settled = int(few.counters.abs().sum()) == 0
                    cases += 1
                    if not (error <= limit and untouched and settled):
                        wrong += 1
                        print(f"WRONG {way} {dtype} {count} x {columns} -> {features}, cut {cut}: {error:.1e}, {untouched}, {settled}")
                    key = f"{way} {str(dtype)[6:]}"
                    worst[key] = max(worst.get(key, 0), error)
    print(f"{cases} cases, {wrong} wrong; errors of the norm at worst:", {key: f"{error:.1e}" for key, error in worst.items()})
    return wrong == 0


def repeats(few):
    """The same bits every time, and a NaN stays in its row."""
    x = torch.randn(3, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
    outs = [torch.empty_like(x) for _ in range(20)]
    for out in outs:
        few.launch(x, weight, out)
    poisoned = torch.empty_like(x)
    x[1, 5] = float("nan")
    few.launch(x, weight, poisoned)
    torch.cuda.synchronize()
    same = all(torch.equal(outs[0], out) for out in outs)
    alone = torch.equal(poisoned[[0, 2]], outs[0][[0, 2]]) and bool(poisoned[1].isnan().all())
    print(f"the same bits 20 times: {same}; a NaN stays in its row: {alone}")
    return same and alone


def microseconds(work, count, replays=7):
    """A call of work(0) to work(count - 1) in one graph; the median of some replays."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for turn in range(min(count, 3)):
            work(turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(count):
            work(turn)
    graph.replay()
    times = []
    for _ in range(replays):
        before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        graph.replay()
        behind.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(behind) * 1000 / count)
    return statistics.median(times)


class Step:
    """A model's weights, and what a step of so many rows multiplies them with."""

    def __init__(self):
        def drawn(*shape):
            return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)

        shapes = {"qkv": (4608, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
        self.layers = {name: [drawn(*shape) for _ in range(LAYERS)] for name, shape in shapes.items()}
        self.head = drawn(VOCABULARY, HIDDEN)
        self.bias = drawn(4608)
        self.resize(1)

    def resize(self, rows):
        def drawn(columns):
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

        self.hidden, self.sum, self.qkv, self.gated = drawn(HIDDEN), drawn(HIDDEN), drawn(4608), drawn(INTERMEDIATE)
        self.gate_up, self.logits = drawn(2 * INTERMEDIATE), drawn(VOCABULARY)
        self.logits_f32 = self.logits.float()

    def ours(self, few, name, layer, **how):
        if name == "logits":
            return few.launch(self.hidden, self.head, self.logits_f32, **how)
        weight = self.layers[name][layer]
        if name == "qkv":
            few.launch(self.hidden, weight, self.qkv, self.bias, **how)
        elif name == "gate_up":
            few.launch(self.hidden, weight, self.gated, gated=True, **how)
        else:
            few.launch(self.hidden if name == "o" else self.gated, weight, self.sum, add=True, **how)

    def theirs(self, name, layer):
        if name == "logits":
            return torch.mm(self.hidden, self.head.T, out=self.logits)
        weight = self.layers[name][layer].T
        if name == "qkv":
            torch.addmm(self.bias, self.hidden, weight, out=self.qkv)
        elif name == "gate_up":
            torch.mm(self.hidden, weight, out=self.gate_up)
        else:
            torch.addmm(self.sum, self.hidden if name == "o" else self.gated, weight, out=self.sum)

    def bytes(self, name):
        weight = self.head if name == "logits" else self.layers[name][0]
        return weight.numel() * 2


def time(few):
    step = Step()
    names = [*step.layers, "logits"]
    for rows in (1, 16, 64):
        step.resize(rows)
        best = {}
        print(f"{rows} rows, microseconds: cuBLASLt; ours by blocks that share a tile")
        for name in names:
            count = 4 if name == "logits" else LAYERS
            theirs = microseconds(lambda layer: step.theirs(name, layer), count)
            ours = {cut: microseconds(lambda layer: step.ours(few, name, layer, cut=cut), count) for cut in CUTS}
            cut = min(ours, key=ours.get)
            best[name] = (cut, ours[cut] < theirs)
            rate = step.bytes(name) / ours[cut] / 1e6
            listed = "  ".join(f"{cut}: {taken:6.1f}" for cut, taken in ours.items())
            print(f"  {name:8} {theirs:6.1f};  {listed}  ({rate:.2f} TB/s)", flush=True)

        def whole(ours, chosen=False):
            def run(_):
                for layer in range(LAYERS):
                    for name in step.layers:
                        one(name, layer, ours, chosen)
                one("logits", 0, ours, chosen)

            def one(name, layer, ours, chosen):
                cut, wins = best[name]
                if ours and (wins or not chosen):
                    step.ours(few, name, layer, cut=cut)
                else:
                    step.theirs(name, layer)

            return microseconds(run, 1) / 1000

        print(f"  28 layers and logits, milliseconds: cuBLASLt {whole(False):.3f}, ours {whole(True):.3f}, the faster of each {whole(True, True):.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], "check", "sanitize", "time"])
    parser.add_argument("--cubin", default=ROOT / "kernels/cuda/compiled/linear_few.sm_90a.cubin")
    options = parser.parse_args()
    parts = options.parts or ["check", "time"]
    few, right = Few(options.cubin), True
    if "sanitize" in parts:
        right &= check(few, [(200, 136), (128, 1000)], (1, 9, 33), grid=5)
    if "check" in parts:
        rows = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33, 64)
        right &= check(few, [(4608, 3584), (3584, 3584), (1000, 18944)], rows)
        right &= check(few, [(1, 8), (77, 72), (136, 64), (130, 64), (129, 1000), (3000, 200)], (1, 5, 17, 64))
        right &= check(few, [(333, 520), (336, 520)], rows, grid=7)
        right &= repeats(few)
    if "time" in parts:
        time(few)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
