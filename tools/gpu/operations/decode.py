"""Attention of a new token a sequence over the cache: `attention_decode.cu`."""

import torch

from device import ENDINGS, LIMITS, Kernel, Output, divide_up, processors
from operations.paged import Paged
from table import Case

TILE_QUERIES, WARPS_MAX = 8, 8
RING_BYTES = {128: 24_576, 64: 24_576, 80: 20_480, 32: 12_288}


def shape_of(paged):
    """Warps, workers and blocks a piece, as the Launch comment has them."""
    rows = max(rows for rows, _ in paged.sequences)
    runs = len(paged.sequences) * paged.kv_heads * divide_up(rows * paged.group, TILE_QUERIES)
    return (8, processors(), 8) if runs <= 32 else (4, 2 * processors(), 20)


def case(paged, shape=None):
    warps, workers, piece = shape or shape_of(paged)
    ring_bytes = RING_BYTES[paged.head_dim]
    kernel = Kernel("attention_decode", f"attention_decode_{ENDINGS[paged.kind]}_d{paged.head_dim}", WARPS_MAX * ring_bytes)
    out = Output((paged.rows, paged.heads * paged.head_dim), paged.kind)
    partials = torch.full((workers, 2, TILE_QUERIES, paged.head_dim + 2), float("nan"), device="cuda")
    counters = torch.zeros(workers, dtype=torch.int32, device="cuda")
    rows = paged.some_rows(256)

    def run():
        kernel((workers,), (32 * warps,), paged.queries, paged.queries.stride(0), paged.rows, paged.cache, paged.blocks,
               paged.kv_heads, paged.group, paged.starts, paged.contexts, paged.tables, len(paged.sequences),
               paged.tables.shape[1], paged.scale, piece, partials, counters, out.tensor,
               shared_bytes=warps * ring_bytes)  # fmt: skip

    def error():
        found = out.error(paged.reference(rows), rows.cuda(), paged.unwritten().cuda())
        return found if int(counters.abs().sum()) == 0 else float("inf")

    read = sum(context for _, context in paged.sequences) * 2 * paged.kv_heads * paged.head_dim
    return Case(run, error, LIMITS[paged.kind], bytes=2 * (read + paged.queries.numel() + out.tensor.numel()))


ODD = [  # head_dim, heads, heads of keys, sequences of (rows, context)
    (128, 28, 4, [(1, context) for context in (1, 17, 576, 100, 0, 16, 33)]),
    (128, 28, 4, [(1, context) for context in (3000, 1, 5, 40) * 5]),
    (64, 2, 2, [(1, context) for context in (100, 3, 77, 1000)]),
    (80, 15, 3, [(1, context) for context in (5, 60, 999)]),
    (32, 64, 1, [(1, 130), (1, 1)]),
    (128, 28, 4, [(3, 100), (5, 5), (2, 0), (8, 64)]),
    (64, 8, 2, [(1, 50), (0, 9), (4, 17)]),
    (128, 8, 1, [(1, 2)] * 300),
    (128, 28, 4, [(1, 100_001)] + [(1, 3)] * 70),
]


def check(table):
    for kind in (torch.bfloat16, torch.float16):
        for head_dim, heads, kv_heads, sequences in ODD:
            paged = Paged(sequences, heads, kv_heads, head_dim, kind, behind=3, gap=8)
            for shape in (None, (8, 132, 8), (4, 264, 16), (1, 9, 1), (3, 50, 7), (4, 264, 40)):
                work = f"{sequences[:7]} by {shape}"
                table.check("decode", work, case(paged, shape))


def measure(table):
    for count, context in ((1, 576), (16, 576), (64, 576), (256, 576), (64, 1450), (1, 100_000), (64, 2048)):
        make = lambda: case(Paged([(1, context)] * count, 28, 4, 128, torch.bfloat16, gap=1024))  # noqa: E731
        table.row("decode", f"{count} of {context:,}, 28:4 heads of 128", make)
