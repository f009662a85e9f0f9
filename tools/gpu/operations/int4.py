"""Products with weights of 4-bit integers by groups of columns, and the dequantization of such weights."""

import functools
import itertools

import torch
from torch.nn import functional

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, divide_up, processors, tensor_map
from table import Case

INT4, SMALL_M = contract("gemm_int4"), contract("gemm_small_m")
HOPPER_ROWS = (8, 16, 32, 64, 128)
SUM_LIMIT = 1e-4  # of sums in f32
# The kernel for Hopper only, and the other kernel in Hopper's machine code and as PTX.
FILES = {"hopper": "gemm_small_m_int4", "streaming": "gemm_int4", "sm_80": "gemm_int4.sm_80.ptx"}
DEQUANTIZE_FILES = {"hopper": "dequantize_int4", "sm_80": "dequantize_int4.sm_80.ptx"}
BLOCK_ROWS, STRIP, SPAN = 8, 128, 32


def in_blocks(values):
    """Values [features, groups] in the order [features / 8, groups, 8]."""
    return values.view(-1, BLOCK_ROWS, values.shape[1]).transpose(1, 2).contiguous()


def packed_words(integers):
    """The words of `int4.cuh` for integers [features, columns]."""
    features, columns = integers.shape
    # [blocks, rows, spans, pairs, units, 2]: column 8 * pair + 2 * unit + i of a span.
    columns_of = integers.long().view(features // BLOCK_ROWS, BLOCK_ROWS, columns // SPAN, 4, 4, 2)
    shifts = torch.tensor([[4 * pair + 16 * i for i in range(2)] for pair in range(4)], device="cuda")
    words = (columns_of << shifts[:, None, :]).sum((3, 5))  # [blocks, rows, spans, units]
    words = torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
    strips = [words[:, :, at : at + STRIP // SPAN] for at in range(0, columns // SPAN, STRIP // SPAN)]
    strips = [strip.transpose(2, 3).reshape(features // BLOCK_ROWS, -1) for strip in strips]
    return torch.cat(strips, 1).contiguous()


class Packed:
    """A weight [features, columns] and rows of activations. `zeros` are zero points other than 8."""

    def __init__(self, rows, features, columns, dtype, group=128, zeros=False):
        self.rows, self.features, self.columns, self.dtype, self.group = rows, features, columns, dtype, group
        integers = torch.randint(0, 16, (features, columns), device="cuda", dtype=torch.int32)
        self.words = packed_words(integers)
        groups = columns // group
        scales = ((torch.rand(features, groups, device="cuda") + 0.5) * columns**-0.5 / 8).to(dtype)
        zero_points = torch.randint(0, 16, (features, groups), device="cuda", dtype=torch.uint8) if zeros else None
        self.scales, self.zeros = in_blocks(scales), in_blocks(zero_points) if zeros else None
        zero = zero_points.int().repeat_interleave(group, 1) if zeros else 8
        # The product is exact in f32, and rounded once.
        self.elements = ((integers - zero).float() * scales.float().repeat_interleave(group, 1)).to(dtype)
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


def units_of(features, columns, most, gated, sms):
    """The number of blocks and the units of each, as in `Int4Tiles`."""
    tiles = divide_up(features, INT4.TILE_ROWS // 2 if gated else INT4.TILE_ROWS)
    total = tiles * divide_up(columns, INT4.STEP_COLUMNS)
    blocks = INT4.BLOCKS[most]
    units = divide_up(total, sms * min(max(total // (sms * 3), divide_up(blocks, 2)), blocks))
    return divide_up(total, units), units


def tiles_of(features, columns, gated, cut, sms):
    """The number of blocks, the number of tiles, and the rows of the tallest tile, as in `SmallMTiles`."""
    groups, most, rows = (features // 8, 8, 16) if gated else (features // 8, 16, 8)
    steps, at_most = divide_up(columns, SMALL_M.STEP_COLUMNS), min(sms // 2 * 2, groups * cut)
    at_once = max(at_most // cut, 1)
    tiles = at_once * divide_up(groups, at_once * most)
    return divide_up(min(at_most, tiles * steps), 2) * 2, tiles, divide_up(groups, tiles) * rows


def on_hopper(packed, x, to, biased, flags, gated, cut, sms):
    """Launches `gemm_small_m_int4` once."""
    features = packed.features // 2 if gated else packed.features
    rows, steps = x.shape[0], divide_up(packed.columns, SMALL_M.STEP_COLUMNS)
    most = next(most for most in HOPPER_ROWS if rows <= most)
    blocks, tiles, tile_rows = tiles_of(features, packed.columns, gated, cut, sms)
    parts, counters = memory()
    assert 2 * blocks * SMALL_M.PART_NUMBERS[most] <= parts.numel()
    words, of_features = packed.columns, features // BLOCK_ROWS
    if gated:
        weight = tensor_map(packed.words, [words, of_features, 2], [4 * words, 4 * words * of_features],
                            [STRIP, tile_rows // 16, 2], 0)  # fmt: skip
    else:
        weight = tensor_map(packed.words, [words, of_features], [4 * words], [STRIP, tile_rows // 8], 0)
    map_of_x = tensor_map(x, [packed.columns, rows], [2 * x.stride(0)], [64, most], 3)
    way = "_gated" if gated else ""
    kernel = Kernel(FILES["hopper"], f"gemm_small_m_int4{way}_{ENDINGS[packed.dtype]}_r{most}", SMALL_M.SHARED_BYTES[most])
    sizes = [to.stride(0), rows, features, steps, tiles, tile_rows]
    begin = [to] if gated else [to, packed.bias if biased else None]
    kernel((blocks,), (SMALL_M.THREADS,), weight, map_of_x, *begin, parts, counters, *sizes, *([] if gated else [flags]),
           packed.scales, packed.zeros, packed.columns, packed.group.bit_length() - 1, early=True)  # fmt: skip


def streaming(packed, x, to, biased, flags, gated, sms, file):
    """Launches `gemm_int4` once."""
    features, rows = packed.features // 2 if gated else packed.features, x.shape[0]
    parts, counters = memory()
    most = next(most for most in INT4.BLOCKS if rows <= most)
    blocks, units = units_of(features, packed.columns, most, gated, sms)
    assert 2 * blocks * INT4.PART_NUMBERS[most] <= parts.numel()
    kernel = Kernel(FILES[file], f"gemm_int4_{ENDINGS[packed.dtype]}_r{most}", INT4.SHARED_BYTES[most])
    kernel((blocks,), (INT4.THREADS,), packed.words, packed.scales, packed.zeros, x, packed.bias if biased else None, to, parts,
           counters, rows, features, packed.columns, x.stride(0), to.stride(0), packed.group.bit_length() - 1, units,
           flags + INT4.GATED * gated, early=file == "streaming")  # fmt: skip


def small_m(packed, biased=False, added=False, gated=False, out_type=None, file="hopper", cut=2, sms=None, with_library=False):
    """The case of a product, in launches of as many rows as the kernel supports."""
    features = packed.features // 2 if gated else packed.features
    out = Output((packed.rows, features), out_type or packed.dtype, gap=3)
    before = torch.randn(packed.rows, features, device="cuda").to(out.tensor.dtype)
    if added:
        out.tensor.copy_(before)
    flags = INT4.ADD_TO_OUT * added + INT4.OUT_IS_F32 * (out.tensor.dtype == torch.float32)
    at_once = HOPPER_ROWS[-1] if file == "hopper" else INT4.ROWS_MAX

    def run():
        for first in range(0, packed.rows, at_once):
            x, to = packed.x[first : first + at_once], out.tensor[first : first + at_once]
            if file == "hopper":
                on_hopper(packed, x, to, biased, flags, gated, cut, sms or processors())
            else:
                streaming(packed, x, to, biased, flags, gated, sms or processors(), file)

    def found():
        if int(memory()[1].abs().sum()) != 0:
            return float("inf")
        return out.error(packed.expected(biased, gated) + (before.double() if added else 0))

    limit = SUM_LIMIT if out.tensor.dtype == torch.float32 else LIMITS[packed.dtype]
    limit *= 20 if packed.rows * features < 64 else 1  # the norm of few sums may be small, which raises the relative error
    baselines = {}
    if with_library:
        theirs = torch.empty(packed.rows, packed.features, device="cuda", dtype=packed.dtype)
        baselines["cuBLASLt bf16"] = lambda: torch.mm(packed.x, packed.elements.T, out=theirs)
    return Case(run, found, limit, packed.bytes(), baselines=baselines)


def dequantize(packed, half, first, second, rows, file="hopper"):
    """The case of a part of a weight: `half` rows from `first` on, and the other rows from `second` on."""
    out = Output((rows, packed.columns), packed.dtype)
    kernel = Kernel(DEQUANTIZE_FILES[file], f"dequantize_int4_{ENDINGS[packed.dtype]}")

    def run():
        kernel((rows // BLOCK_ROWS,), (INT4.THREADS,), packed.words, packed.scales, packed.zeros, out.tensor, packed.columns,
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
        for features, columns in [(16, 32), (32, 32), (48, 96), (112, 96), (160, 128), (288, 416), (608, 1120), (4608, 3584)]:
            for rows in (1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128, 200):
                at = next(number)
                group = [size for size in (32, 64, 128) if columns % size == 0][at % sum(columns % size == 0 for size in (32, 64, 128))]
                packed = Packed(rows, features, columns, dtype, group, zeros=at % 3 == 0)
                # The kernel for Hopper has no gated product with a bias.
                way = ways[at % (len(ways) - (file == "hopper"))]
                sms, cut = [None, 4, 7][at % 3], [2, 1, 4, 132][at % 4]
                work = f"{rows} x {columns} -> {features}, {ENDINGS[dtype]}, groups of {group}, {way}, {file}, cut {cut}, {sms}"
                table.check(FILES[file].split(".")[0], work, small_m(packed, **way, file=file, sms=sms, cut=cut))
            for group in (size for size in (32, 64, 128) if columns % size == 0 and file in DEQUANTIZE_FILES):
                for zeros in (False, True):
                    packed, half = Packed(1, features, columns, dtype, group, zeros), features // 16 * 8
                    table.check("dequantize_int4", f"{features} x {columns}", dequantize(packed, features, 0, 0, features, file))
                    table.check("dequantize_int4", "halves", dequantize(packed, half, 0, features - half, 2 * half, file))
    # The output projection of a draft head, with the largest vocabulary of the families.
    for rows, file in itertools.product((1, 8, 64), FILES):
        logits = small_m(Packed(rows, 248_320, 4096, torch.bfloat16), out_type=torch.float32, file=file)
        table.check(FILES[file].split(".")[0], f"{rows} rows of logits, {file}", logits)
    for rows in (33, 100):
        poisoned = Packed(rows, 304, 512, torch.bfloat16)
        poisoned.x[7, 5] = float("nan")
        case = small_m(poisoned)
        table.check("gemm_small_m_int4", "a NaN stays in its row", Case(case.run, lambda: check_nan(poisoned), 0.0, 1))  # noqa: B023


def check_nan(packed):
    others = [row for row in range(packed.rows) if row != 7]
    out, again = (torch.empty(packed.rows, packed.features, device="cuda", dtype=packed.dtype) for _ in range(2))
    for to in (out, again):
        on_hopper(packed, packed.x, to, False, 0, False, 2, processors())
    torch.cuda.synchronize()
    same = torch.equal(out[others], again[others])
    return 0.0 if same and bool(out[7].isnan().all()) and not bool(out[others].isnan().any()) else float("inf")


SHAPES = {
    "qkv": (4608, 3584, False),
    "o": (3584, 3584, False),
    "gate_up": (37888, 3584, True),
    "down": (3584, 18944, False),
    "logits": (248_320, 4096, False),
}


def measure(table):
    for rows, (name, (features, columns, gated)) in itertools.product((1, 16, 64, 128, 256), SHAPES.items()):
        for cut in (2, 1, 4, 132):
            make = lambda: small_m(Packed(rows, features, columns, torch.bfloat16), gated=gated, with_library=cut == 2, cut=cut)  # noqa: E731, B023
            table.row("gemm_small_m_int4", f"{name}, {rows} rows, groups of 128, cut {cut}", make)
        if rows <= INT4.ROWS_MAX:
            make = lambda: small_m(Packed(rows, features, columns, torch.bfloat16), gated=gated, file="streaming")  # noqa: E731, B023
            table.row("gemm_int4", f"{name}, {rows} rows, groups of 128", make)
        if rows == 16:
            make = lambda: small_m(Packed(rows, features, columns, torch.bfloat16, 32, True), gated=gated)  # noqa: E731, B023
            table.row("gemm_small_m_int4", f"{name}, {rows} rows, groups of 32, zero points", make)
    make = lambda: dequantize(Packed(1, 9472, 3584, torch.bfloat16), 4736, 0, 4736, 9472)  # noqa: E731
    table.row("dequantize_int4", "9472 x 3584", make)
