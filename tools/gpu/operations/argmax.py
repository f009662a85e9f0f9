"""The index of the largest element of each row: `argmax.cu`."""

import torch

from contract import contract
from device import ENDINGS, Kernel, Output
from table import Case

BLOCKS, THREADS = contract("argmax").CLUSTER, contract("argmax").THREADS  # blocks per row (on sm_90 a cluster), threads per block
NONE = -1  # as an i32 in torch


def case(rows, columns, kind, gap=0, is_odd=False, has_ids=False):
    """Makes a case. With `is_odd`, rows contain NaNs, infinities, equal values and zeros of both
    signs. The gap after each row contains larger numbers, which the kernel must not read. With `has_ids`,
    the results are random ids in place of the columns."""
    wide = torch.randn(rows, columns + gap, device="cuda").to(kind)
    wide[:, columns:] = 1e4
    x = wide[:, :columns]
    if is_odd:
        nan, infinity = float("nan"), float("inf")
        x[0, columns // 2] = nan
        x[1] = nan
        x[2], x[2, :3] = -infinity, nan
        x[3], x[3, 5] = -0.0, 0.0
        x[4, 50], x[4, 60] = infinity, infinity
    ids = torch.randperm(columns, device="cuda", dtype=torch.int32) if has_ids else None
    out, kernel = Output((rows,), torch.int32), Kernel("argmax", f"argmax_{ENDINGS[kind]}")

    def wrong():
        """The number of rows with a wrong index."""
        numbers = x.nan_to_num(nan=-float("inf"), posinf=float("inf"), neginf=-float("inf"))
        is_greatest = (x == numbers.max(1, keepdim=True).values) & ~x.isnan()
        first = is_greatest.int().argmax(1)
        first = torch.where(is_greatest.any(1), first if ids is None else ids[first], NONE)
        return float((out.tensor != first).sum()) if out.is_guarded() else float("inf")

    return Case(
        run=lambda: kernel((rows * BLOCKS,), (THREADS,), x, columns, x.stride(0), ids, out.tensor),
        error=wrong,
        limit=0.0,
        bytes=rows * columns * kind.itemsize,
        baselines={"torch": lambda: x.argmax(1)},
    )


def check(table):
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        for rows, columns, gap in ((5, 152_064, 8), (9, 61, 0), (7, 4097, 2), (64, 33_000, 0)):
            for has_ids in (False, True):
                name = f"{rows} x {columns} + {gap}{' with ids' if has_ids else ''}"
                table.check("argmax", name, case(rows, columns, kind, gap, is_odd=True, has_ids=has_ids))


def measure(table):
    for rows in (1, 16, 64, 256):
        table.row("argmax", f"{rows} x 152,064 f32", lambda: case(rows, 152_064, torch.float32))
