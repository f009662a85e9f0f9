"""Attention of one new token per sequence over the cache: `attention_decode.cu`."""

import torch

from contract import contract
from device import LIMITS, Kernel, Output, divide_up, processors
from operations.paged import NO_WINDOW, Paged
from table import Case

NUMBERS = contract("attention_decode")
TILE_QUERIES, WARPS_MAX = NUMBERS.TILE_QUERIES, NUMBERS.WARPS_MAX
# Up to this many rows, products mark their weights in the L2 cache to be evicted first.
SMALL_M_ROWS = contract("gemm_small_m").ROWS_MAX


def shape_of(sequences, kv_heads, group, rows=1):
    """Returns the warps, the workers, and the blocks per piece for sequences of `rows` rows. The
    rules are the same as in the Launch comment of the source and in `DecodeLaunch::of`."""
    runs = sequences * kv_heads * divide_up(rows * group, TILE_QUERIES)
    if runs <= 32:
        return 8, processors(), 8
    if 3 * runs <= 2 * processors():
        return 4, 2 * processors(), 8
    for warps, percent in ((8, 70), (2, 85), (1, 90)):
        workers = processors() * WARPS_MAX // warps
        if runs <= workers and 100 * runs >= percent * workers:
            return warps, workers, 20
    return 4, processors() * WARPS_MAX // 4, 20


def warps_most(ring_bytes):
    """The most warps whose rings of `ring_bytes` bytes fit into the shared memory of a block."""
    return min(WARPS_MAX, torch.cuda.get_device_properties(0).shared_memory_per_block_optin // ring_bytes)


def within(shape, most):
    """Limits a shape to `most` warps per block, as `DecodeLaunch::within` does."""
    warps, workers, piece = shape
    return shape if most == WARPS_MAX else (min(max(warps, 4), most), min(workers, processors()), piece)


class Decode:
    """Launches for batches of one shape, with separate scratch memory."""

    def __init__(self, ending, head_dim, shape):
        self.ring_bytes = NUMBERS.RING_BYTES[head_dim]
        most = warps_most(self.ring_bytes)
        self.warps, self.workers, self.piece = within(shape, most)
        file = "attention_decode_e4m3" if ending.startswith("e4m3") else "attention_decode"
        self.kernel = Kernel(file, f"attention_decode_{ending}_d{head_dim}", most * self.ring_bytes)
        self.partials = torch.full((self.workers, NUMBERS.PARTS, TILE_QUERIES, head_dim + 2), float("nan"), device="cuda")
        self.counters = torch.zeros(self.workers, dtype=torch.int32, device="cuda")

    def __call__(self, queries, cache, kv_heads, group, starts, contexts, tables, scale, out, past_is_there, early=False,
                 scales=None, window=NO_WINDOW):  # fmt: skip
        """Launches the kernel. `queries` may be the first columns of wider rows. `past_is_there` is
        true if the preceding kernel writes no key of a position before a sequence's rows, as in a
        step that has only single rows."""
        flags = NUMBERS.PAST_IS_THERE * past_is_there | NUMBERS.OTHERS_READ_ONCE * (queries.shape[0] <= SMALL_M_ROWS)
        self.kernel((self.workers,), (32 * self.warps,), queries, queries.stride(0), queries.shape[0], cache,
                    cache.shape[0], kv_heads, group, starts, contexts, tables, tables.shape[0], tables.shape[1], scales,
                    scale, window, self.piece, flags, self.partials, self.counters, out,
                    shared_bytes=self.warps * self.ring_bytes, early=early)  # fmt: skip


def case(paged, shape=None, past_is_there=True):
    """Makes the case of one batch. `past_is_there` may always be true here, because no preceding
    kernel writes keys."""
    most_rows = max(rows for rows, _ in paged.sequences)
    shape = shape or shape_of(len(paged.sequences), paged.kv_heads, paged.group, most_rows)
    decode = Decode(paged.ending, paged.head_dim, shape)
    out = Output((paged.rows, paged.heads * paged.head_dim), paged.kind)
    rows = paged.some_rows(256)

    def run():
        decode(paged.queries, paged.cache, paged.kv_heads, paged.group, paged.starts, paged.contexts, paged.tables,
               paged.scale, out.tensor, past_is_there, scales=paged.scales, window=paged.window)  # fmt: skip

    def error():
        found = out.error(paged.reference(rows), rows.cuda(), paged.unwritten().cuda())
        return found if int(decode.counters.abs().sum()) == 0 else float("inf")

    read = paged.tokens_read() * 2 * paged.kv_heads * paged.head_dim
    moved = read * paged.cache.itemsize + 2 * (paged.queries.numel() + out.tensor.numel())
    return Case(run, error, LIMITS[paged.kind], bytes=moved)


SHAPES = [None, (8, 132, 8), (4, 264, 8), (4, 264, 16), (2, 528, 20), (1, 1056, 20), (1, 9, 1), (3, 50, 7), (4, 264, 40)]
ODD = [  # head_dim, heads, KV heads, sequences of (rows, context)
    (128, 28, 4, [(1, context) for context in (1, 17, 576, 100, 0, 16, 33)]),
    (128, 28, 4, [(1, context) for context in (3000, 1, 5, 40) * 5]),
    (64, 2, 2, [(1, context) for context in (100, 3, 77, 1000)]),
    (80, 15, 3, [(1, context) for context in (5, 60, 999)]),
    (32, 64, 1, [(1, 130), (1, 1)]),
    (128, 28, 4, [(3, 100), (5, 5), (2, 0), (8, 64)]),
    (64, 8, 2, [(1, 50), (0, 9), (4, 17)]),
    (128, 8, 1, [(1, 2)] * 300),
    # Similar contexts, so all runs have the same number of pieces.
    (128, 28, 4, [(1, 500 + 7 * sequence) for sequence in range(12)]),
    (64, 12, 1, [(1, 150 + sequence % 20) for sequence in range(250)]),
    (128, 28, 4, [(1, 100_001)] + [(1, 3)] * 70),
    (256, 16, 4, [(1, context) for context in (1, 17, 576, 100, 0, 16, 33, 3000)]),
    (256, 9, 3, [(3, 100), (1, 999), (2, 0), (8, 64)]),
]
# Sequences with a window: contexts around the windows' lengths and around block boundaries.
WINDOWED = [
    (128, 28, 4, [(1, context) for context in (1, 16, 17, 18, 0, 33, 511, 512, 513, 527, 528, 529, 576)]),
    (128, 28, 4, [(1, 4096 + more) for more in (-1, 0, 1, 15, 16, 17, 900, 28_000)]),
    (128, 28, 4, [(1, 700)] * 40),
    (64, 4, 4, [(1, context) for context in (100, 3, 1777, 1000)]),
    (80, 15, 3, [(1, context) for context in (5, 60, 999)] * 9),
    (32, 64, 1, [(1, 130 + 5 * sequence) for sequence in range(250)]),
    (128, 28, 4, [(3, 100), (5, 5), (2, 0), (8, 64), (4, 5000)]),
    (256, 16, 4, [(1, context) for context in (1, 17, 576, 100, 0, 16, 33, 3000, 5001)]),
    (256, 9, 3, [(3, 100), (1, 999), (2, 0), (8, 64), (3, 1041)]),
]
WINDOWS = (1, 17, 512, 4096)


def check_odd(table, odd, window=NO_WINDOW):
    name = "decode" if window == NO_WINDOW else "decode, windowed"
    for kind in (torch.bfloat16, torch.float16):
        for head_dim, heads, kv_heads, sequences in odd:
            for is_e4m3 in (False, True):
                paged = Paged(sequences, heads, kv_heads, head_dim, kind, behind=3, gap=8, is_e4m3=is_e4m3, window=window)
                for shape in SHAPES:
                    for past_is_there in (True, False):
                        work = f"{sequences[:7]} by {shape}, window {window}" + (", past first" if past_is_there else "")
                        table.check(f"{name}, E4M3" if is_e4m3 else name, work, case(paged, shape, past_is_there))


def check(table):
    check_odd(table, ODD)
    for window in WINDOWS:
        check_odd(table, WINDOWED, window)


def measure(table):
    for count, context in ((1, 576), (16, 576), (33, 576), (64, 576), (128, 576), (256, 576), (64, 1450), (1, 100_000),
                           (64, 2048), (64, 16_000)):  # fmt: skip
        for is_e4m3 in (False, True):
            make = lambda: case(Paged([(1, context)] * count, 28, 4, 128, torch.bfloat16, gap=1024, is_e4m3=is_e4m3))  # noqa: E731
            table.row("decode, E4M3" if is_e4m3 else "decode", f"{count} of {context:,}, 28:4 heads of 128", make)
    for count in (1, 16, 64, 256):
        wide = lambda: case(Paged([(1, 576)] * count, 16, 4, 256, torch.bfloat16, gap=1024))  # noqa: E731
        table.row("decode", f"{count} of 576, 16:4 heads of 256", wide)
    # A window of 4,096 tokens should take as long as a context of 4,096 tokens.
    for count in (1, 16, 64):
        for context, window in ((4096, NO_WINDOW), (32_768, 4096), (32_768, NO_WINDOW)):
            for is_e4m3 in (False, True):
                make = lambda: case(Paged([(1, context)] * count, 28, 4, 128, torch.bfloat16, gap=1024, is_e4m3=is_e4m3,
                                          window=window))  # noqa: E731  # fmt: skip
                seen = "" if window == NO_WINDOW else f", window {window:,}"
                table.row("decode, E4M3" if is_e4m3 else "decode", f"{count} of {context:,}{seen}, 28:4 heads of 128", make)
