"""FP8: activations rounded to E4M3, and matrix products of E4M3 numbers with scales."""

import functools
import itertools

import torch
from torch.nn import functional

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, divide_up, error, processors, tensor_map
from table import Case

FP8, SMALL_M, LARGE_M = contract("fp8"), contract("gemm_small_m"), contract("gemm_large_m")
TRANSPOSE, TILED, TILED_ROWS = contract("transpose_scales"), contract("gemm_tiled_e4m3"), [8, 16, 32]
OLDER = {"sm_75": [torch.float16], "sm_80": [torch.bfloat16, torch.float16], "sm_89": [torch.bfloat16, torch.float16]}
GROUP, LARGEST, TINY = FP8.GROUP, 448.0, torch.finfo(torch.float32).tiny
KINDS = {"groups": FP8.BY_GROUPS, "rows": FP8.BY_ROWS, "fixed": FP8.FIXED}
E4M3, SWIZZLE, FIXED = torch.float8_e4m3fn, 3, 0.0123
TILE_GROUP = 16  # tiles per group, in products of many rows
# Error limit of sums in f32. The tensor cores truncate each of 32 products at about 2^-13 of the largest product. In a
# numpy simulation, 77 sums of 144 products had an error of 1.1e-4, and of 2.0e-4 in one of a thousand runs.
SUM_LIMIT = 2.5e-4


def by_groups(numbers):
    """The numbers as [rows, groups, 128], padded with zeros after the last column."""
    rows, columns = numbers.shape
    return functional.pad(numbers, (0, -columns % GROUP)).view(rows, -1, GROUP)


def scales_of(numbers, kind):
    """The scales of `kind`, in f32: [rows, groups], one for each 128 columns. All scales of a row are equal if `kind` is
    `rows`, and all scales are equal if it is `fixed`."""
    groups = by_groups(numbers.float().nan_to_num(0.0, float("inf"), float("-inf"))).abs().amax(-1)
    if kind == "fixed":
        return torch.full_like(groups, FIXED)
    largest = groups if kind == "groups" else groups.amax(-1, keepdim=True).expand_as(groups)
    # The divisor is a tensor, because torch turns a division by a Python number into a multiplication
    # by its reciprocal.
    return (largest / torch.full_like(largest, LARGEST)).clamp_min(TINY)


def rounded(numbers, scales):
    """The numbers divided by their scales, rounded to E4M3 values [rows, columns]."""
    spread = scales.repeat_interleave(GROUP, 1)[:, : numbers.shape[1]]
    return (numbers.float() / spread).clamp(-LARGEST, LARGEST).to(E4M3)


def widened(numbers, scales):
    """The numbers times their scales, in f64."""
    return numbers.double() * scales.double().repeat_interleave(GROUP, 1)[:, : numbers.shape[1]]


class QuantizedRows:
    """Poisoned rows in E4M3, and their scales."""

    def __init__(self, rows, columns, kind, plain=None):
        self.kind, self.data = kind, Output((rows, columns), torch.uint8)
        shape = {"groups": (rows, divide_up(columns, GROUP)), "rows": (rows, 1), "fixed": (1, 1)}[kind]
        self.scales = Output(shape, torch.float32)
        self.plain = Output((rows, columns), plain) if plain else None

    def arguments(self):
        scales = None if self.kind == "fixed" else self.scales.tensor
        return (self.plain.tensor if self.plain else None, KINDS[self.kind], FIXED, self.data.tensor, scales)

    def error(self, wanted, exactly=False):
        """The error against f64. A number between two E4M3 values may be rounded to either, because its f32 value may
        differ in the last bits."""
        outputs = [self.data, self.scales] + ([self.plain] if self.plain else [])
        if not all(output.is_guarded() for output in outputs):
            return float("inf")
        rows, columns = self.data.tensor.shape
        scales = FIXED * torch.ones(rows, divide_up(columns, GROUP), device="cuda")
        if self.kind != "fixed":
            scales = self.scales.tensor.expand_as(scales)
            off = error(scales, scales_of(wanted, self.kind))
            if not off <= (0 if exactly else 1e-3):
                return float("inf")
        data = self.data.tensor.view(E4M3)
        if exactly and not torch.equal(data.view(torch.uint8), rounded(wanted, scales).view(torch.uint8)):
            return float("inf")
        # E4M3 rounds by at most 1/16 of a number, or by 2^-10 for the smallest numbers. The error of a
        # sum grows with the number of its terms.
        spread = scales.double().repeat_interleave(GROUP, 1)[:, :columns]
        ideal = (wanted.double() / spread).clamp(-LARGEST, LARGEST)
        slack = 1e-3 * wanted.double().abs().amax() / spread
        far = (data.double() - ideal).abs() > ideal.abs() / 16 + 2**-10 * (1 + 1e-4) + slack
        if bool(far.any()):
            return float("inf")
        return self.plain.error(wanted) if self.plain else 0.0


def row_shape(operation, rows, columns):
    blocks = FP8.GATE_BLOCKS if operation == "silu_mul_rounded_small_m" else 1
    threads = min(max(divide_up(divide_up(columns // FP8.VECTOR, blocks), 32) * 32, 32), FP8.THREADS_MAX)
    return (rows * blocks,), (threads,)


def large_m_rows(operation, kind, rows, columns, gap):
    """The name and launch of `quantize_large_m.cu` for these rows, as in `quantize.rs`. Returns None if
    `quantize_large_m.cu` does not support them."""
    vectors, most = columns // FP8.VECTOR, FP8.THREADS_MAX
    if rows <= processors() or gap % FP8.VECTOR or operation == "gelu_mul_rounded":
        return None
    if operation != "rms_norm_rounded" and 2 * most < vectors <= FP8.LONG_HELD * FP8.LONGER_THREADS_MAX:
        threads = divide_up(divide_up(vectors, FP8.LONG_HELD), 32) * 32
        bound = next(bound for bound in (FP8.LONG_THREADS_MAX, FP8.LONGER_THREADS_MAX) if threads <= bound)
        return (f"{operation}_long_{bound}", ((rows,), (threads,))) if kind == "rows" and rows > 4 * processors() else None
    if operation == "silu_mul_rounded":
        return None
    held, (_, (threads,)) = divide_up(vectors, most), row_shape(operation, rows, columns)
    blocks = min(most * (4 - held) // threads, 16) * processors()
    return (f"{operation}_large_m_{held}", ((min(rows, blocks),), (threads,))) if held <= 2 else None


def rounding(operation, kind, rows, columns, dtype, gap=0, plain=False, file="quantize", odd=False):
    """`quantize`, `rms_norm_rounded`, `silu_mul_rounded` or `gelu_mul_rounded`. `gap` elements lie between rows."""
    if file == "quantize" and operation == "silu_mul_rounded" and rows * FP8.GATE_BLOCKS <= 4 * processors():
        operation = "silu_mul_rounded_small_m"
    is_gate, is_gelu = "_mul_" in operation, operation.startswith("gelu")
    width = 2 * columns if is_gate else columns
    x = (torch.randn(rows, width + gap, device="cuda") * torch.rand(rows, 1, device="cuda") * 4).to(dtype)[:, :width]
    x[rows // 2, : columns // 2] = 0
    x[-1, -1] = -0.0
    if odd:  # a scale too small for an inverse, zeros, and NaNs
        x[0], x[1], x[2, : columns // 2], x[3, 0], x[4] = 1e-6 if dtype == torch.float16 else 1e-37, 0, 0, float("nan"), float("nan")
    weight = torch.randn(columns, device="cuda").to(dtype)
    out, pitch = QuantizedRows(rows, columns, kind, dtype if plain else None), x.stride(0)
    before = (x, pitch, weight, 1e-6, 0.0) if operation == "rms_norm_rounded" else (x, pitch)

    large = large_m_rows(operation, kind, rows, columns, gap) if file == "quantize" else None

    def run():
        if large:
            name, shape = large
            of_rows = () if "_long_" in name else (rows,)
            return Kernel("quantize_large_m", f"{name}_{ENDINGS[dtype]}")(*shape, *before, *of_rows, columns, *out.arguments(), early=True)
        Kernel(file, f"{operation}_{ENDINGS[dtype]}")(*row_shape(operation, rows, columns), *before, columns, *out.arguments(), early=file == "quantize")

    def wanted():
        numbers = x.double()
        if operation == "rms_norm_rounded":
            return numbers * (numbers.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        if is_gate:
            unit = functools.partial(functional.gelu, approximate="tanh") if is_gelu else functional.silu
            return unit(numbers[:, :columns]) * numbers[:, columns:]
        return numbers

    size = 2 * rows * width + rows * columns * (3 if plain else 1)
    # With few numbers, the rounding error of a single number may dominate the relative error.
    limit = LIMITS[dtype] * (2 if rows * columns < 64 else 1) if plain else 0.0
    return Case(run, lambda: out.error(wanted(), operation == "quantize"), limit, size)


class Product:
    """x and a weight in E4M3. `height` rows of the weight share a scale for each 128 columns. If `height` is None,
    each row of the weight has one scale, and each row of x has one scale or, with `fixed`, all rows of x share one."""

    def __init__(self, rows, features, columns, dtype, height=128, fixed=False):
        self.rows, self.features, self.columns, self.dtype = rows, features, columns, dtype
        self.height, self.fixed, self.groups = height, fixed, divide_up(columns, GROUP)
        x = torch.randn(rows, columns, device="cuda") * torch.rand(rows, 1, device="cuda").exp()
        kind = "groups" if height else "fixed" if fixed else "rows"
        self.x_scales = scales_of(x, kind)
        self.x = rounded(x * (50 * FIXED if fixed else 1), self.x_scales)
        self.weight = (torch.randn(features, columns, device="cuda") * 100).clamp(-LARGEST, LARGEST).to(E4M3)
        shape = (divide_up(features, height), self.groups) if height else (features, 1)
        self.scales = (torch.rand(shape, device="cuda") + 0.5) * columns**-0.5 / 100
        self.bias = torch.randn(features, device="cuda").to(dtype)

    def expected(self, biased):
        spread = self.scales.repeat_interleave(self.height or 1, 0)[: self.features].expand(self.features, self.groups)
        out = widened(self.x, self.x_scales) @ widened(self.weight, spread).T
        return out + self.bias.double() if biased else out

    def scale_arguments(self):
        """The last arguments: scales of the weight, scales of x, the scale for all of x, groups and height."""
        of_x = None if self.fixed else self.x_scales.contiguous() if self.height else self.x_scales[:, 0].contiguous()
        self.held = of_x
        return self.scales, of_x, FIXED, self.groups, self.height or 1

    @property
    def ending(self):
        return f"{'blocks' if self.height else 'rows'}_{ENDINGS[self.dtype]}"

    def bytes(self):
        return self.features * self.columns + self.rows * self.columns


@functools.cache
def small_m_memory():
    return torch.full((8 << 20,), float("nan"), device="cuda"), torch.zeros(SMALL_M.STREAM_COUNTERS, device="cuda", dtype=torch.int32)


def small_m(product, cut=2, biased=False, added=False, out_type=None, grid=None):
    """The case of a product of few rows, with the work split among blocks as in `SmallMTiles`
    (kernels/src/cuda/gemm/tiles.rs)."""
    rows, features, columns = product.rows, product.features, product.columns
    parts, counters = small_m_memory()
    most = next(most for most in SMALL_M.SHARED_BYTES if rows <= most)
    steps = divide_up(columns, 2 * SMALL_M.STEP_COLUMNS)
    blocks = min((grid or processors()) // SMALL_M.TEAM * SMALL_M.TEAM, features * cut)
    at_once = max(blocks // cut, 1)
    tiles = at_once * divide_up(features, at_once * SMALL_M.TILE_ROWS)
    tile_rows, blocks = divide_up(features, tiles), divide_up(min(blocks, tiles * steps), SMALL_M.TEAM) * SMALL_M.TEAM
    out = Output((rows, features), out_type or product.dtype, gap=3)
    before = torch.randn(rows, features, device="cuda").to(out.tensor.dtype)
    maps = (tensor_map(product.weight, [columns, features], [columns], [GROUP, tile_rows], SWIZZLE),
            tensor_map(product.x, [columns, rows], [columns], [GROUP, most], SWIZZLE))  # fmt: skip
    flags = SMALL_M.ADD_TO_OUT * added + SMALL_M.OUT_IS_F32 * (out.tensor.dtype == torch.float32)
    if added:
        out.tensor.copy_(before)
    kernel = Kernel("gemm_small_m_e4m3", f"gemm_small_m_e4m3_{product.ending}_r{most}", SMALL_M.SHARED_BYTES[most])
    arguments = (*maps, out.tensor, product.bias if biased else None, parts, counters, out.tensor.stride(0), rows, features,
                 steps, tiles, tile_rows, flags, *product.scale_arguments())  # fmt: skip
    limit = SUM_LIMIT if out.tensor.dtype == torch.float32 else LIMITS[product.dtype]
    limit *= 20 if rows * features < 64 else 1  # the norm of few sums may be small, which raises the relative error
    return Case(lambda: kernel((blocks,), (SMALL_M.THREADS,), *arguments, early=True),
                lambda: out.error(product.expected(biased) + (before.double() if added else 0)), limit,
                product.bytes())  # fmt: skip


def large_m(product, kind="linear", biased=False, grid=None):
    """A product of many rows: `linear`, `linear_add`, `linear_gated`, or gated and rounded with `groups` or `fixed` scales."""
    is_gated, is_rounded = kind not in ("linear", "linear_add"), kind in ("groups", "fixed")
    rows, columns = product.rows, product.columns
    features = product.features // 2 if is_gated else product.features
    tiles = divide_up(rows, LARGE_M.CLUSTER * LARGE_M.TILE_ROWS) * divide_up(features, LARGE_M.TILE_WEIGHTS // (2 if is_gated else 1))
    blocks = LARGE_M.CLUSTER * min((grid or processors()) // LARGE_M.CLUSTER, tiles)
    name = "linear_gated_rounded" if is_rounded else kind
    name = name.replace("linear", "gemm_large_m")
    out = QuantizedRows(rows, features, kind) if is_rounded else Output((rows, features), product.dtype, gap=8)
    to = out.data.tensor.view(E4M3) if is_rounded else out.tensor
    before = torch.randn(rows, features, device="cuda").to(product.dtype)
    if kind == "linear_add":
        out.tensor.copy_(before)
    maps = (tensor_map(product.x, [columns, rows], [columns], [GROUP, LARGE_M.TILE_ROWS], SWIZZLE),
            tensor_map(product.weight, [columns, product.features], [columns], [GROUP, LARGE_M.TILE_WEIGHTS // 2], SWIZZLE),
            tensor_map(to, [features, rows], [to.stride(0) * to.itemsize], [128 if is_rounded else LARGE_M.BOX, LARGE_M.BOX], SWIZZLE))  # fmt: skip
    arguments = (*maps, product.bias if biased else None, rows, features, columns, TILE_GROUP, *product.scale_arguments(),
                 out.scales.tensor if kind == "groups" else None, FIXED)  # fmt: skip
    kernel = Kernel("gemm_large_m_e4m3", f"{name}_e4m3_{product.ending}", LARGE_M.SHARED_BYTES)

    def found():
        wanted = product.expected(biased)
        if is_gated:
            wanted = functional.silu(wanted[:, :features]) * wanted[:, features:]
        return out.error(wanted + (before.double() if kind == "linear_add" else 0))

    limit = 0.0 if is_rounded else LIMITS[product.dtype]
    return Case(lambda: kernel((blocks,), (LARGE_M.THREADS,), *arguments, early=True), found, limit, product.bytes(),
                2 * rows * product.features * columns)  # fmt: skip


def tiled(product, target, biased=False, added=False, out_type=None):
    """A product as GPUs other than Hopper compute it, with the PTX of `target`."""
    rows, features, columns = product.rows, product.features, product.columns
    out = Output((rows, features), out_type or product.dtype, gap=3)
    before = torch.randn(rows, features, device="cuda").to(out.tensor.dtype)
    if added:
        out.tensor.copy_(before)
    flags = (TILED.BY_BLOCKS * bool(product.height) + TILED.ADD_TO_OUT * added
             + TILED.OUT_IS_F32 * (out.tensor.dtype == torch.float32) + TILED.IS_BF16 * (product.dtype == torch.bfloat16))  # fmt: skip
    scales, of_x, fixed, _, height = product.scale_arguments()
    arguments = (product.weight, product.x, scales, of_x, fixed, product.bias if biased else None, out.tensor, rows,
                 features, columns, product.x.stride(0), out.tensor.stride(0), height, flags)  # fmt: skip
    most = next((most for most in TILED_ROWS if rows <= most), None)
    file = f"gemm_tiled_e4m3.{target}.ptx"
    if most:
        kernel, grid, threads = Kernel(file, f"gemm_tiled_e4m3_small_m_r{most}"), (divide_up(features, TILED.SMALL_M_FEATURES),), TILED.SMALL_M_THREADS
    else:
        kernel, threads = Kernel(file, "gemm_tiled_e4m3_large_m", TILED.LARGE_M_SHARED_BYTES), TILED.LARGE_M_THREADS
        grid = (divide_up(rows, TILED.LARGE_M_ROWS), divide_up(features, TILED.LARGE_M_FEATURES))
    limit = 1.5e-4 if out.tensor.dtype == torch.float32 else LIMITS[product.dtype]
    limit *= 20 if rows * features < 64 else 1  # the norm of few sums may be small, which raises the relative error
    return Case(lambda: kernel(grid, (threads,), *arguments),
                lambda: out.error(product.expected(biased) + (before.double() if added else 0)), limit,
                product.bytes(), None if most else 2 * rows * features * columns)  # fmt: skip


def transposition(rows, groups, blocks):
    """The case of a kernel that transposes scales to the layout that cuBLASLt reads."""
    x_scales, scales = torch.rand(rows, groups, device="cuda"), torch.rand(blocks, groups, device="cuda")
    wide = divide_up(groups, TRANSPOSE.PADDED) * TRANSPOSE.PADDED
    transposed = Output((groups, rows), torch.float32)
    padded = Output((blocks, wide), torch.float32) if wide != groups else None
    grid = divide_up(rows, TRANSPOSE.TILE) * divide_up(groups, TRANSPOSE.TILE) + (divide_up(blocks * wide, TRANSPOSE.THREADS) if padded else 0)
    arguments = (x_scales, transposed.tensor, rows, groups, scales, padded.tensor if padded else None, blocks, wide)

    def found():
        off = transposed.error(x_scales.T)
        return max(off, padded.error(functional.pad(scales, (0, wide - groups)))) if padded else off

    return Case(lambda: Kernel("transpose_scales", "transpose_scales")((grid,), (TRANSPOSE.THREADS,), *arguments, early=True), found, 0.0, 8 * rows * groups)


def scaled_mm_by_blocks(product):
    """cuBLASLt's product with scales per block, if torch supports it. The transposition of x's scales is not
    included."""
    of_x, scales = product.x_scales.T.contiguous().T, product.scales.T
    call = lambda: torch._scaled_mm(product.x, product.weight.T, of_x, scales, out_dtype=torch.bfloat16)  # noqa: E731
    try:
        call()
    except (RuntimeError, ValueError, NotImplementedError):
        return {}
    return {"torch": call}


def scaled_mm_by_rows(product):
    """cuBLASLt's product with one scale per row, as torch supports it. The output can only be bf16."""
    weight, out_scales = product.weight.T, product.scales.view(1, -1)
    of_x = product.x_scales[:, :1].contiguous()
    return {"torch": lambda: torch._scaled_mm(product.x, weight, of_x, out_scales, out_dtype=torch.bfloat16)}


SHAPES = [(3584, 3584), (77, 144), (4608, 2048), (1, 16), (264, 1296), (136, 400), (192, 272)]
SHAPES_7B = {"qkv": (4608, 3584), "o": (3584, 3584), "gate and up": (37888, 3584), "down": (3584, 18944)}


def check(table):
    for dtype, kind, (rows, columns) in itertools.product(LIMITS, KINDS, [(3, 3584), (1, 16), (5, 144), (2, 18944), (4, 40000), (99, 1040)]):
        for operation, plain in itertools.product(["quantize", "rms_norm_rounded", "silu_mul_rounded", "gelu_mul_rounded"], [False, True]):
            for gap in (0, 1):
                if operation == "quantize" and plain:
                    continue
                table.check(operation, f"{kind}, {rows} x {columns}, gap {gap}", rounding(operation, kind, rows, columns, dtype, gap, plain))
    for dtype, kind, (rows, columns) in itertools.product(LIMITS, KINDS, [(133, 16), (700, 768), (1500, 3584), (300, 5128), (201, 14784), (600, 18944), (530, 27648), (529, 32768)]):
        for operation, plain in itertools.product(["quantize", "rms_norm_rounded", "silu_mul_rounded", "gelu_mul_rounded"], [False, True]):
            if operation != "quantize" or not plain:
                table.check(operation, f"large_m, {kind}, {rows} x {columns}", rounding(operation, kind, rows, columns, dtype, 8, plain))
    for dtype, kind, rows in itertools.product(LIMITS, KINDS, [8, 700]):
        table.check("quantize", f"odd numbers, {kind}, {rows} x 3584", rounding("quantize", kind, rows, 3584, dtype, odd=True))
    for rows, groups, blocks in [(4, 4, 3), (100, 5, 3), (8448, 28, 296), (4, 148, 28), (36, 33, 1), (1, 1, 1)]:
        table.check("transpose_scales", f"{rows} x {groups}, {blocks} blocks", transposition(rows, groups, blocks))
    for target in ("sm_75", "sm_80"):
        for dtype, kind, (rows, columns) in itertools.product(OLDER[target], KINDS, [(3, 3584), (1, 16), (2, 18944), (99, 1040)]):
            for operation, gap in itertools.product(["quantize", "rms_norm_rounded", "silu_mul_rounded", "gelu_mul_rounded"], [0, 1]):
                case = rounding(operation, kind, rows, columns, dtype, gap, operation != "quantize", f"quantize.{target}.ptx")
                table.check(operation, f"{target}, {kind}, {rows} x {columns}, gap {gap}", case)
    ways = [(False, False, None), (True, False, None), (True, True, None), (False, True, torch.float32), (True, False, torch.float32)]
    turn = 0
    for target, (features, columns) in itertools.product(OLDER, SHAPES):
        for dtype, rows, height in itertools.product(OLDER[target], [1, 8, 9, 27, 33, 64, 130, 300], [128, 16, 48, None]):
            product, turn = Product(rows, features, columns, dtype, height, fixed=height is None and turn % 2 == 0), turn + 1
            way = ways[turn % 5]
            table.check("gemm_tiled_e4m3", f"{target}, {rows} x {features} x {columns}, height {height}, {way}", tiled(product, target, *way))
    turn = 0
    for dtype, (features, columns) in itertools.product(LIMITS, SHAPES):
        for rows, height in itertools.product([1, 7, 16, 33, 64], [128, 16, 48, 8, None]):
            product = Product(rows, features, columns, dtype, height, fixed=height is None and turn % 2 == 0)
            # The inner loop visits five heights, and `turn * 2 // 5` gives every height each entry of `ways` in turn.
            way = ways[turn * 2 // 5 % 5]
            cut, turn = [1, 2, 4, 132][turn % 4], turn + 1
            table.check("gemm_small_m_e4m3", f"{rows} x {features} x {columns}, height {height}, {way}, cut {cut}", small_m(product, cut, *way))
        # Tiles of 127 rows that begin within a block need the scales of 17 blocks.
        table.check("gemm_small_m_e4m3", f"64 x 1016 x {columns}, height 8", small_m(Product(64, 1016, columns, dtype, 8), 132))
        for rows, height in itertools.product([65, 128, 300, 515], [128, 64, 16, None]):
            fixed, turn = height is None and turn % 2 == 0, turn + 1
            for kind, biased in itertools.product(["linear", "linear_add", "linear_gated", "groups", "fixed"], [False, True]):
                wide = divide_up(features, 16) * (32 if "linear" not in kind or kind == "linear_gated" else 16)
                product = Product(rows, wide, columns, dtype, height, fixed)
                table.check("gemm_large_m_e4m3", f"{kind}, {rows} x {wide} x {columns}, height {height}, bias {biased}", large_m(product, kind, biased))


def measure(table):
    bf16 = torch.bfloat16
    for rows in (1, 64, 256, 8192):
        for operation, columns, kind in itertools.product(["rms_norm_rounded", "silu_mul_rounded", "quantize"], [3584, 18944], ["rows", "groups"]):
            if operation == "rms_norm_rounded" and columns == 18944:
                continue
            table.row(operation, f"{kind}, {rows} x {columns}", lambda: rounding(operation, kind, rows, columns, bf16))
    for (name, (features, columns)), rows in itertools.product(SHAPES_7B.items(), [1, 16, 64]):
        for height in (None, 128):
            for cut in (1, 2, 4):
                table.row("gemm_small_m_e4m3", f"{name}, {rows} rows, {'blocks' if height else 'rows'}, cut {cut}",
                          lambda: small_m(Product(rows, features, columns, bf16, height), cut, added=name in ("o", "down")))  # fmt: skip
    for (name, (features, columns)), rows in itertools.product(SHAPES_7B.items(), [128, 256, 1024, 8192]):
        for height in (None, 128):
            kinds = ["linear_gated", "groups"] if name == "gate and up" else ["linear_add" if name in ("o", "down") else "linear"]
            for kind in kinds:
                def make():
                    product = Product(rows, features, columns, bf16, height)
                    case = large_m(product, kind)
                    case.baselines = scaled_mm_by_rows(product) if height is None else scaled_mm_by_blocks(product)
                    return case
                table.row("gemm_large_m_e4m3", f"{name}, {rows} rows, {'blocks' if height else 'rows'}, {kind}", make)
    for rows, groups in [(64, 28), (256, 28), (256, 148), (8192, 28), (8192, 148)]:
        table.row("transpose_scales", f"{rows} x {groups}", lambda: transposition(rows, groups, 28))
    for (name, (features, columns)), rows in itertools.product(SHAPES_7B.items(), [1, 16, 32, 64, 1024]):
        for target in OLDER:
            table.row("gemm_tiled_e4m3", f"{name}, {rows} rows, blocks, {target}'s PTX on this GPU",
                      lambda: tiled(Product(rows, features, columns, torch.float16, 128), target))  # fmt: skip
