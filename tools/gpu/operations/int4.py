"""Products with weights of 4-bit integers by groups of columns, and the dequantization of such weights."""

import functools
import itertools

import torch
from torch.nn import functional

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, divide_up, processors
from table import Case

INT4 = contract("gemm_int4")
# The column of each integer of a word, from the lowest bits on.
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
SUM_LIMIT = 1e-4  # of sums in f32
FILES = {"hopper": "gemm_int4", "sm_80": "gemm_int4.sm_80.ptx"}


class Packed:
    """A weight [features, columns] and rows of activations. `zeros` are zero points other than 8."""

    def __init__(self, rows, features, columns, dtype, group=128, zeros=False):
        self.rows, self.features, self.columns, self.dtype, self.group = rows, features, columns, dtype, group
        integers = torch.randint(0, 16, (features, columns), device="cuda", dtype=torch.int32)
        words = sum(integers.view(features, -1, 8)[..., column].long() << 4 * at for at, column in enumerate(ORDER))
        words = torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
        # Blocks of 16 rows, with a unit of 16 bytes for each row and each group of 32 columns.
        units = words.view(features // 16, 16, columns // 32, 4).transpose(1, 2)
        row, strip = torch.arange(16, device="cuda"), torch.arange(columns // 32, device="cuda")
        order = (row ^ 2 * (strip % 4)[:, None]).view(1, -1, 16, 1).expand_as(units)
        self.words = units.gather(2, order).contiguous()
        groups = columns // group
        self.scales = ((torch.rand(features, groups, device="cuda") + 0.5) * columns**-0.5 / 8).to(dtype)
        self.zeros = torch.randint(0, 16, (features, groups), device="cuda", dtype=torch.uint8) if zeros else None
        zero = self.zeros.int().repeat_interleave(group, 1) if zeros else 8
        # The product is exact in f32, and rounded once.
        self.elements = ((integers - zero).float() * self.scales.float().repeat_interleave(group, 1)).to(dtype)
        self.x = torch.randn(rows, columns + 8, device="cuda").to(dtype)[:, :columns]
        self.bias = torch.randn(features, device="cuda").to(dtype)

    def bytes(self):
        zeros = self.zeros.numel() if self.zeros is not None else 0
        return self.words.numel() * 4 + self.scales.numel() * 2 + zeros + self.x.numel() * 2

    def expected(self, biased, gated):
        out = self.x.double() @ self.elements.double().T
        if biased:
            out = out + self.bias.double()
        half = self.features // 2
        return functional.silu(out[:, :half]) * out[:, half:] if gated else out


@functools.cache
def memory():
    return torch.full((16 << 20,), float("nan"), device="cuda"), torch.zeros(INT4.STREAM_COUNTERS, device="cuda", dtype=torch.int32)


def units_of(features, columns, most, gated, per_sm=None, sms=None):
    """The number of blocks and the units of each, as in `tiles.rs`."""
    tiles = divide_up(features, INT4.TILE_ROWS // 2 if gated else INT4.TILE_ROWS)
    total = tiles * divide_up(columns, INT4.STEP_COLUMNS)
    sms, blocks = sms or processors(), INT4.BLOCKS[most]
    units = divide_up(total, sms * (per_sm or min(max(total // (sms * 3), divide_up(blocks, 2)), blocks)))
    return divide_up(total, units), units


def few(packed, biased=False, added=False, gated=False, out_type=None, file="hopper", per_sm=None, sms=None, beside=False):
    """The case of a product, in launches of up to 64 rows."""
    features = packed.features // 2 if gated else packed.features
    out = Output((packed.rows, features), out_type or packed.dtype, gap=3)
    before = torch.randn(packed.rows, features, device="cuda").to(out.tensor.dtype)
    if added:
        out.tensor.copy_(before)
    parts, counters = memory()
    flags = INT4.ADD_TO_OUT * added + INT4.OUT_IS_F32 * (out.tensor.dtype == torch.float32) + INT4.GATED * gated

    def run():
        for first in range(0, packed.rows, INT4.ROWS_MAX):
            x, to = packed.x[first : first + INT4.ROWS_MAX], out.tensor[first : first + INT4.ROWS_MAX]
            rows = x.shape[0]
            most = next(most for most in INT4.BLOCKS if rows <= most)
            blocks, units = units_of(features, packed.columns, most, gated, per_sm, sms)
            assert 2 * blocks * INT4.PART_NUMBERS[most] <= parts.numel()
            kernel = Kernel(FILES[file], f"gemm_int4_{ENDINGS[packed.dtype]}_r{most}", INT4.SHARED_BYTES[most])
            kernel((blocks,), (INT4.THREADS,), packed.words, packed.scales, packed.zeros, x, packed.bias if biased else None,
                   to, parts, counters, rows, features, packed.columns, x.stride(0), to.stride(0),
                   packed.group.bit_length() - 1, units, flags, early=file == "hopper")  # fmt: skip

    def found():
        if int(counters.abs().sum()) != 0:
            return float("inf")
        return out.error(packed.expected(biased, gated) + (before.double() if added else 0))

    limit = SUM_LIMIT if out.tensor.dtype == torch.float32 else LIMITS[packed.dtype]
    limit *= 20 if packed.rows * features < 64 else 1  # the norm of few sums may be small, which raises the relative error
    others = {}
    if beside:
        theirs = torch.empty(packed.rows, packed.features, device="cuda", dtype=packed.dtype)
        others["cuBLASLt bf16"] = lambda: torch.mm(packed.x, packed.elements.T, out=theirs)
    return Case(run, found, limit, packed.bytes(), beside=others)


def dequantize(packed, half, first, second, rows, file="hopper"):
    """The case of a part of a weight: `half` rows from `first` on, and the other rows from `second` on."""
    out = Output((rows, packed.columns), packed.dtype)
    kernel = Kernel(FILES[file], f"dequantize_int4_{ENDINGS[packed.dtype]}")

    def run():
        kernel((rows // 16,), (INT4.THREADS,), packed.words, packed.scales, packed.zeros, out.tensor, packed.columns,
               packed.group.bit_length() - 1, half, first, second, early=file == "hopper")  # fmt: skip

    def found():
        wanted = torch.cat([packed.elements[first : first + half], packed.elements[second : second + rows - half]])
        same = torch.equal(wanted.view(torch.int16), out.tensor.view(torch.int16)) and out.is_guarded()
        return 0.0 if same else float("inf")

    return Case(run, found, 0.0, packed.bytes() + out.tensor.numel() * 2)


def check(table):
    dtypes = (torch.bfloat16, torch.float16)
    ways = [{}, {"biased": True}, {"added": True}, {"out_type": torch.float32}, {"gated": True},
            {"biased": True, "added": True, "out_type": torch.float32}, {"gated": True, "biased": True}]  # fmt: skip
    number = itertools.count()
    for dtype, file in itertools.product(dtypes, FILES):
        for features, columns in [(32, 32), (96, 96), (160, 128), (288, 416), (608, 1120), (4608, 3584)]:
            for rows in (1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 100):
                at = next(number)
                group = [size for size in (32, 64, 128) if columns % size == 0][at % sum(columns % size == 0 for size in (32, 64, 128))]
                packed = Packed(rows, features, columns, dtype, group, zeros=at % 3 == 0)
                way, sms = ways[at % len(ways)], [None, 3, 7][at % 3]
                work = f"{rows} x {columns} -> {features}, {ENDINGS[dtype]}, groups of {group}, {way}, {file}"
                table.check("gemm_int4", work, few(packed, **way, file=file, sms=sms))
            for group in (size for size in (32, 64, 128) if columns % size == 0):
                for zeros in (False, True):
                    packed, half = Packed(1, features, columns, dtype, group, zeros), features // 32 * 16
                    table.check("dequantize_int4", f"{features} x {columns}", dequantize(packed, features, 0, 0, features, file))
                    table.check("dequantize_int4", "halves", dequantize(packed, half, 0, features - half, 2 * half, file))
    poisoned = Packed(33, 304, 512, torch.bfloat16)
    poisoned.x[7, 5] = float("nan")
    others = [row for row in range(33) if row != 7]
    case = few(poisoned)
    table.check("gemm_int4", "a NaN stays in its row", Case(case.run, lambda: check_nan(poisoned, others), 0.0, 1))


def check_nan(packed, others):
    out, again = (torch.empty(packed.rows, packed.features, device="cuda", dtype=packed.dtype) for _ in range(2))
    parts, counters = memory()
    for to in (out, again):
        blocks, units = units_of(packed.features, packed.columns, 64, False)
        Kernel("gemm_int4", "gemm_int4_bf16_r64", INT4.SHARED_BYTES[64])((blocks,), (INT4.THREADS,), packed.words, packed.scales,
            packed.zeros, packed.x, None, to, parts, counters, packed.rows, packed.features, packed.columns, packed.x.stride(0),
            to.stride(0), packed.group.bit_length() - 1, units, 0, early=True)  # fmt: skip
    torch.cuda.synchronize()
    same = torch.equal(out[others], again[others])
    return 0.0 if same and bool(out[7].isnan().all()) and not bool(out[others].isnan().any()) else float("inf")


SHAPES = {"qkv": (4608, 3584, False), "o": (3584, 3584, False), "gate_up": (37888, 3584, True), "down": (3584, 18944, False)}


def measure(table):
    for rows, (name, (features, columns, gated)) in itertools.product((1, 16, 64, 256), SHAPES.items()):
        make = lambda: few(Packed(rows, features, columns, torch.bfloat16), gated=gated, beside=True)  # noqa: E731
        table.row("gemm_int4", f"{name}, {rows} rows, groups of 128", make)
        if rows == 16:
            make = lambda: few(Packed(rows, features, columns, torch.bfloat16, 32, True), gated=gated)  # noqa: E731
            table.row("gemm_int4", f"{name}, {rows} rows, groups of 32, zero points", make)
    make = lambda: dequantize(Packed(1, 9472, 3584, torch.bfloat16), 4736, 0, 4736, 9472)  # noqa: E731
    table.row("dequantize_int4", "9472 x 3584", make)
