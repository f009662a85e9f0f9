"""Attention without a causal mask within segments of packed rows: `attention_prefill.cu` and its variant for Hopper."""

import torch

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, processors, tensor_map
from operations.prefill import ROWS_CHECKED, cudnn
from table import Case

NUMBERS, HOPPER = contract("attention_prefill"), contract("attention_hopper")
WINDOW = NUMBERS.WINDOW_ROWS


class Packed:
    """qkv [rows, 3 * heads * head_dim], a view of wider rows. Rows outside all segments and the memory between rows are
    NaN."""

    def __init__(self, lengths, heads, head_dim, kind, before=0, behind=0, gap=0):
        self.heads, self.head_dim, self.kind, self.lengths = heads, head_dim, kind, lengths
        self.rows = before + sum(lengths) + behind
        self.starts = torch.tensor([before, *lengths]).cumsum(0)
        self.device_starts = self.starts.int().cuda()
        wide = torch.randn(self.rows, 3 * heads * head_dim + gap, device="cuda", dtype=kind)
        self.qkv = wide[:, : 3 * heads * head_dim]
        wide[:, 3 * heads * head_dim :] = float("nan")
        self.qkv[:before] = self.qkv[self.rows - behind :] = float("nan")
        self.written = torch.arange(before, self.rows - behind)

    def reference(self, chosen):
        """The expected values of the rows `chosen`, in f64: [rows, heads * head_dim]."""
        out = torch.zeros(len(chosen), self.heads * self.head_dim, dtype=torch.float64, device="cuda")
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist()):
            places = ((chosen >= start) & (chosen < end)).nonzero()[:, 0]
            if len(places) == 0:
                continue
            parts = self.qkv.unflatten(1, (3, self.heads, self.head_dim))
            queries = parts[chosen[places].cuda(), 0].double()
            keys, values = parts[start:end, 1].double(), parts[start:end, 2].double()
            scores = torch.einsum("nhd,thd->hnt", queries, keys) * self.head_dim**-0.5
            out[places.cuda()] = torch.einsum("hnt,thd->nhd", torch.softmax(scores, -1), values).flatten(1)
        return out

    def tiles(self, size):
        return self.heads * ((self.rows + (size - 1) * len(self.lengths)) // size)


def sizes(packed, out):
    return (packed.device_starts, out.tensor.stride(0), packed.qkv.stride(0), packed.rows, len(packed.lengths),
            packed.heads, packed.head_dim**-0.5)  # fmt: skip


def general(packed, out):
    kernel = Kernel("attention_prefill", f"attention_packed_{ENDINGS[packed.kind]}_d{packed.head_dim}")
    grid = packed.tiles(NUMBERS.TILE_QUERIES)
    return lambda: kernel((grid,), (NUMBERS.THREADS,), out.tensor, packed.qkv, *sizes(packed, out))


def windows(packed, out):
    kernel = Kernel("attention_prefill", f"attention_windows_{ENDINGS[packed.kind]}_d{packed.head_dim}")
    grid = packed.heads * len(packed.lengths)
    return lambda: kernel((grid,), (NUMBERS.THREADS,), out.tensor, packed.qkv, *sizes(packed, out))


def hopper(packed, out):
    head_dim, strides = packed.head_dim, [2 * packed.qkv.stride(0), 2 * packed.head_dim]
    chunk, block = HOPPER.PACKED_CHUNK[head_dim], (HOPPER.PACKED_THREADS[head_dim],)
    name = f"attention_packed_hopper_{ENDINGS[packed.kind]}_d{head_dim}"
    kernel = Kernel("attention_prefill_hopper", name, HOPPER.PACKED_SHARED_BYTES[head_dim])
    view = tensor_map(packed.qkv, [head_dim, packed.rows, 3 * packed.heads], strides,
                      [chunk, HOPPER.PACKED_KEYS[head_dim], 1], 3 if chunk == 64 else 1)  # fmt: skip
    grid = min(processors(), packed.tiles(HOPPER.PACKED_QUERIES[head_dim]))
    return lambda: kernel((grid,), block, view, out.tensor, packed.qkv, *sizes(packed, out))


def case(launch, packed, gap=0, baselines=None, is_bound_by_memory=False):
    out = Output((packed.rows, packed.heads * packed.head_dim), packed.kind, gap)
    rows = packed.written
    if not gap and len(rows) > ROWS_CHECKED:
        rows = rows[torch.randperm(len(rows))[:ROWS_CHECKED]]
    unwritten = torch.ones(packed.rows, dtype=torch.bool)
    unwritten[packed.written] = False
    operations = 4 * sum(length * length for length in packed.lengths) * packed.heads * packed.head_dim
    return Case(
        run=launch(packed, out),
        error=lambda: out.error(packed.reference(rows), rows.cuda(), unwritten.cuda()),
        limit=LIMITS[packed.kind],
        bytes=2 * (packed.qkv.numel() + out.tensor.numel()),
        operations=None if is_bound_by_memory else operations,
        baselines={name: make() for name, make in (baselines or {}).items()},
    )


def check(table):
    short, long = [64] * 9 + [48, 36, 1, 0, 7, 64], [300, 63, 65, 128, 129, 1]
    for kind in (torch.bfloat16, torch.float16):
        for heads, lengths in ((16, short), (3, long), (2, [777, 1000, 40])):
            for head_dim in HOPPER.PACKED_CHUNK:
                packed, work = Packed(lengths, heads, head_dim, kind, before=5, behind=3, gap=8), f"{lengths} x {head_dim}"
                table.check("packed, mma", work, case(general, packed, gap=8))
                if max(lengths) <= WINDOW and head_dim <= 80:
                    table.check("windows", work, case(windows, packed, gap=8))
                table.check("packed", work, case(hopper, packed, gap=8))


def measure(table):
    make = lambda lengths, head_dim: Packed(lengths, 16, head_dim, torch.bfloat16)  # noqa: E731
    for head_dim in (80, 72, 64, 128):
        of = f"16 heads of {head_dim}"
        for rows in (5476, 10764):
            other = {"cuDNN": lambda: cudnn([rows], 16, head_dim, torch.bfloat16, causal=False)}
            table.row("packed", f"{rows:,} rows, {of}", lambda: case(hopper, make([rows], head_dim), baselines=other))
        table.row("packed, mma", f"5,476 rows, {of}", lambda: case(general, make([5476], head_dim)))
    for head_dim in (80, 72):
        for count in (86, 344):
            other = {"cuDNN": lambda: cudnn([WINDOW] * count, 16, head_dim, torch.bfloat16, causal=False)}
            table.row("windows", f"{count} of 64 rows, 16 heads of {head_dim}",
                      lambda: case(windows, make([WINDOW] * count, head_dim), baselines=other, is_bound_by_memory=True))  # fmt: skip
