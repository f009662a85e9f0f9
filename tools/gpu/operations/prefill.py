"""Attention of many rows over the cache: `attention_prefill.cu`, and `attention_prefill_hopper.cu` with its combine kernel."""

import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, processors, tensor_map
from operations.paged import BLOCK_TOKENS, NO_WINDOW, Paged
from table import Case

NUMBERS, HOPPER = contract("attention_prefill"), contract("attention_paged_hopper")
# Rows checked in a timed case. All of its rows would be too many for the reference in f64.
ROWS_CHECKED = 64


def tiles(paged, size):
    return paged.kv_heads * ((paged.rows * paged.group + (size - 1) * len(paged.sequences)) // size)


def sizes(paged, out):
    return (out.tensor.stride(0), paged.queries.stride(0), paged.rows, len(paged.sequences), 0, paged.heads,
            paged.kv_heads, paged.blocks, paged.tables.shape[1])  # fmt: skip


def general(paged, out):
    kernel = Kernel("attention_prefill", f"attention_paged_{paged.ending}_d{paged.head_dim}")
    grid = tiles(paged, NUMBERS.TILE_QUERIES)
    return lambda: kernel((grid,), (NUMBERS.THREADS,), out.tensor, paged.queries, paged.cache, paged.starts,
                          paged.contexts, paged.tables, *sizes(paged, out), paged.window, paged.key_ends, paged.scales,
                          paged.scale)  # fmt: skip


def cache_map(paged):
    pieces, columns = paged.blocks * 2 * paged.kv_heads, paged.head_dim
    if paged.scales is not None:
        return tensor_map(paged.cache, [columns, 16, pieces], [columns, 16 * columns], [columns, 16, 1], 0)
    chunks, strides = columns // 64, [2 * columns, 128, 16 * columns, 32 * columns]
    return tensor_map(paged.cache, [64, 8, chunks, 2, pieces], strides, [64, 8, chunks, 2, 1], 3)


def block_of(paged):
    """Threads and shared bytes per block of the kernels for Hopper."""
    if paged.scales is not None:
        return HOPPER.E4M3_THREADS, HOPPER.E4M3_SHARED_BYTES
    return HOPPER.THREADS, HOPPER.SHARED_BYTES[paged.head_dim]


def hopper(paged, out):
    threads, shared_bytes = block_of(paged)
    kernel = Kernel("attention_prefill_hopper", f"attention_paged_hopper_{paged.ending}_d{paged.head_dim}", shared_bytes)
    grid, view = min(processors(), tiles(paged, HOPPER.QUERIES)), cache_map(paged)
    return lambda: kernel((grid,), (threads,), view, out.tensor, paged.queries, paged.starts, paged.contexts,
                          paged.tables, *sizes(paged, out), paged.window, paged.key_ends, paged.scales, paged.scale)  # fmt: skip


def split(paged, out, splits=None):
    jobs, view, (threads, shared_bytes) = tiles(paged, HOPPER.QUERIES), cache_map(paged), block_of(paged)
    size = f"d{paged.head_dim}"
    keys = min(paged.tables.shape[1] * BLOCK_TOKENS, paged.window)
    splits = splits or max(1, min(processors() // jobs, keys // HOPPER.SPLIT_KEYS))
    gather = Kernel("attention_prefill_hopper", f"attention_paged_hopper_split_{paged.ending}_{size}", shared_bytes)
    combine = Kernel("attention_paged_combine", f"attention_paged_combine_{ENDINGS[paged.kind]}_{size}")
    parts = torch.full((jobs * splits, HOPPER.PART_NUMBERS[paged.head_dim]), float("nan"), device="cuda")
    grid, (out_pitch, _, *counts, _, table_blocks) = min(processors(), jobs * splits), sizes(paged, out)

    def run():
        gather((grid,), (threads,), view, out.tensor, paged.queries, paged.starts, paged.contexts, paged.tables, parts,
               *sizes(paged, out), paged.window, splits, paged.key_ends, paged.scales, paged.scale)  # fmt: skip
        blocks = HOPPER.QUERIES // HOPPER.COMBINE_WARPS * jobs
        combine((blocks,), (32 * HOPPER.COMBINE_WARPS,), out.tensor, parts, paged.starts, paged.contexts, out_pitch,
                *counts, table_blocks, paged.window, splits, paged.key_ends, paged.scales, paged.scale)  # fmt: skip

    return run


def cudnn(lengths, heads, head_dim, kind, causal):
    """cuDNN's attention for sequences of one length, contiguous, with separate keys and values for each head."""
    count, rows = len(lengths), lengths[0]
    q, k, v = (torch.randn(count, heads, rows, head_dim, device="cuda", dtype=kind) for _ in range(3))

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def case(launch, paged, gap=0, baselines=None):
    """`launch(paged, out)` returns the function to run."""
    out = Output((paged.rows, paged.heads * paged.head_dim), paged.kind, gap)
    rows = paged.some_rows(1 << 30 if gap else ROWS_CHECKED)
    return Case(
        run=launch(paged, out),
        error=lambda: out.error(paged.reference(rows), rows.cuda(), paged.unwritten().cuda()),
        limit=LIMITS[paged.kind],
        bytes=sum(tensor.numel() * tensor.itemsize for tensor in (paged.cache, paged.queries, out.tensor)),
        operations=4 * paged.pairs() * paged.heads * paged.head_dim,
        baselines={name: make(paged, out) for name, make in (baselines or {}).items()},
    )


ODD = [  # heads, KV heads, sequences of (rows, context)
    (28, 4, [(1, 1), (0, 0), (17, 17), (300, 300), (65, 257), (0, 33), (129, 1129), (1, 700), (2, 64)]),
    (33, 1, [(5, 9), (31, 131), (200, 200)]),
    (3, 3, [(16, 16), (64, 128), (63, 130), (190, 1391)]),
    (7, 1, [(20, 15), (3, 40)]),  # the first rows attend to no key
]

# Sequences with a window: contexts around the windows' lengths, block boundaries, and step boundaries (32, 64, 80 and 128
# keys).
WINDOWED = [
    (28, 4, [(1, 1), (17, 17), (300, 300), (65, 257), (0, 33), (129, 1129), (1, 700), (2, 64), (9, 5000)]),
    (33, 1, [(5, 9), (31, 131), (33, 545), (200, 4300)]),
    (3, 3, [(16, 16), (64, 128), (63, 130), (190, 1391), (128, 640), (129, 4225)]),
    (7, 1, [(20, 15), (3, 40), (600, 900)]),
]
WINDOWS = (1, 17, 64, 128, 512, 4096)


def check_odd(table, odd, window=NO_WINDOW, picture=0):
    ending = ("" if window == NO_WINDOW else ", windowed") + (", pictures" if picture else "")
    for kind in (torch.bfloat16, torch.float16):
        for heads, kv_heads, sequences in odd:
            for is_e4m3 in (False, True):
                ending = ending.removesuffix(", E4M3") + (", E4M3" if is_e4m3 else "")
                for head_dim in (32, 64, 80, 128, 256):
                    paged = Paged(sequences, heads, kv_heads, head_dim, kind, 3, 5, 8, is_e4m3, window, picture)
                    work = f"{sequences}, heads of {head_dim}, window {window}, picture {picture}"
                    table.check(f"prefill, mma{ending}", work, case(general, paged, gap=8))
                    if head_dim not in ((HOPPER.E4M3_HEAD_DIM,) if is_e4m3 else HOPPER.SHARED_BYTES):
                        continue
                    table.check(f"prefill{ending}", work, case(hopper, paged, gap=8))
                    for splits in (1, 2, 5, 33):
                        launch = functools.partial(split, splits=splits)
                        table.check(f"prefill, split{ending}", f"{work}, by {splits}", case(launch, paged, gap=8))


def check(table):
    check_odd(table, ODD)
    for window in WINDOWS:
        check_odd(table, WINDOWED, window)
    for picture, window in ((1, NO_WINDOW), (61, NO_WINDOW), (256, NO_WINDOW), (9, 1), (61, 128), (256, 64), (256, 512)):
        check_odd(table, WINDOWED, window, picture)


def measure(table):
    make = lambda sequences, **others: Paged(sequences, 28, 4, 128, torch.bfloat16, gap=1024, **others)  # noqa: E731
    for count, rows in ((8, 8000), (32, 2048), (64, 512)):
        other = {"cuDNN": lambda *_: cudnn([rows] * count, 28, 128, torch.bfloat16, causal=True)}
        table.row("prefill", f"{count} x {rows}", lambda: case(hopper, make([(rows, rows)] * count), baselines=other))
        table.row("prefill, E4M3", f"{count} x {rows}",
                  lambda: case(hopper, make([(rows, rows)] * count, is_e4m3=True)))  # fmt: skip
    table.row("prefill, mma", "8 x 8000", lambda: case(general, make([(8000, 8000)] * 8)))
    table.row("prefill, mma, E4M3", "8 x 8000", lambda: case(general, make([(8000, 8000)] * 8, is_e4m3=True)))
    for rows, context in ((100, 30_000), (16, 100_000)):
        other = {"unsplit": hopper}
        table.row("prefill, split", f"{rows} rows of {context:,}",
                  lambda: case(split, make([(rows, context)]), baselines=other))  # fmt: skip
        table.row("prefill, split, E4M3", f"{rows} rows of {context:,}",
                  lambda: case(split, make([(rows, context)], is_e4m3=True), baselines=other))  # fmt: skip
    wide = lambda sequences: Paged(sequences, 16, 4, 256, torch.bfloat16, gap=1024)  # noqa: E731
    for count, rows in ((1, 8000), (1, 2048), (32, 2048)):
        other = {"cuDNN": lambda *_: cudnn([rows] * count, 16, 256, torch.bfloat16, causal=True), "mma": general}
        table.row("prefill, heads of 256", f"{count} x {rows}",
                  lambda: case(hopper, wide([(rows, rows)] * count), baselines=other))  # fmt: skip
    table.row("prefill, split, heads of 256", "100 rows of 30,000",
              lambda: case(split, wide([(100, 30_000)]), baselines={"unsplit": hopper, "mma": general}))  # fmt: skip
    for rows, context in ((8000, 8000), (2048, 32_768)):
        for window in (512, 4096, NO_WINDOW):
            seen = "" if window == NO_WINDOW else f", window {window:,}"
            for head_dim in (128, 256):
                windowed = lambda **others: Paged([(rows, context)], 16, 4, head_dim, torch.bfloat16, gap=1024,
                                                  window=window, **others)  # noqa: E731  # fmt: skip
                work = f"{rows} of {context:,}{seen}, 16:4 heads of {head_dim}"
                table.row("prefill", work, lambda: case(hopper, windowed(), baselines={"mma": general}))
                table.row("prefill, mma, E4M3", work, lambda: case(general, windowed(is_e4m3=True)))
                if head_dim == HOPPER.E4M3_HEAD_DIM:
                    table.row("prefill, E4M3", work, lambda: case(hopper, windowed(is_e4m3=True)))
