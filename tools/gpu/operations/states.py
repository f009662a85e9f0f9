"""Layers with a recurrent state: the causal convolution, the gated delta rule, and the gates around them."""

import ctypes
import functools

import torch
from torch.nn import functional

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, divide_up, error, processors, unsigned
from operations.small import copy, random_rows
from table import Case

CONV, DELTA, GATED, GATE = (contract(family) for family in ("causal_conv", "gated_delta", "gated_rms_norm", "gate"))
NO_STATE, SNAPSHOTS = contract("states").NO_STATE, contract("states").SNAPSHOTS
EPSILON = 1e-6
# The largest relative error of chunks, whose products have f16 operands.
CHUNK_LIMIT = 3e-3


class Sequences(ctypes.Structure):
    """The sequences of a step, in the layout of `state_sequences.cuh`."""

    _fields_ = [("lists", ctypes.c_void_p * 6), ("sequences", ctypes.c_uint32), ("rows", ctypes.c_uint32)]


class Slots(ctypes.Structure):
    """The slots of one layer, in the layout of `state_sequences.cuh`."""

    _fields_ = [("start", ctypes.c_void_p), ("slot_bytes", ctypes.c_uint64), ("matrices_at", ctypes.c_uint64),
                ("slots", ctypes.c_uint32), ("padding", ctypes.c_uint32)]  # fmt: skip


class Step:
    """Sequences of (rows, tokens including these rows, rows before each snapshot), and one layer's states. A sequence
    without tokens is padding. Every second sequence writes the slot that it reads. `stored` is the type of the matrices."""

    def __init__(self, sequences, key_heads, value_heads, key_dim, value_dim, kind, taps=4, stored=torch.float32):
        self.stored = stored
        self.kind, self.taps, self.value_heads, self.key_heads = kind, taps, value_heads, key_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.rows, starts, places = sum(rows for rows, *_ in sequences), [0], []
        slots = 2 * len(sequences) + sum(len(snapshots) for *_, snapshots in sequences)
        free = iter(torch.randperm(slots).tolist())
        for at, (rows, context, snapshots) in enumerate(sequences):
            read, other = next(free), next(free)
            write = NO_STATE if context == 0 else (read, other)[at % 2]
            places.append((starts[-1], rows, context, read, write, [(after, next(free)) for after in snapshots]))
            starts.append(starts[-1] + rows)
        self.places = places
        self.singles = next((at for at, (rows, *_) in enumerate(sequences) if rows != 1), len(sequences))
        taken = [snapshots + [(0, NO_STATE)] * (SNAPSHOTS - len(snapshots)) for *_, snapshots in places]
        lists = (starts, *([place[i] for place in places] for i in (2, 3, 4)),
                 *([[snapshot[i] for snapshot in row] for row in taken] for i in (0, 1)))  # fmt: skip
        self.lists = [unsigned(numbers) for numbers in lists]
        self.sequences = Sequences((ctypes.c_void_p * 6)(*[numbers.data_ptr() for numbers in self.lists]), len(places), self.rows)
        self.conv_bytes = divide_up(kind.itemsize * (taps - 1) * self.channels, 256) * 256
        self.matrix_bytes = stored.itemsize * value_heads * value_dim * key_dim
        self.memory = torch.empty(slots, self.conv_bytes + self.matrix_bytes, dtype=torch.uint8, device="cuda")
        self.inputs[:] = torch.randn(slots, taps - 1, self.channels, device="cuda").to(kind)
        self.matrices[:] = 0.3 * torch.randn(slots, value_heads, value_dim, key_dim, device="cuda")
        self.slots = Slots(self.memory.data_ptr(), self.memory.stride(0), self.conv_bytes, slots, 0)

    @property
    def inputs(self):
        """[slots, taps - 1, channels]"""
        used = self.memory[:, : self.kind.itemsize * (self.taps - 1) * self.channels]
        return used.view(self.kind).unflatten(1, (self.taps - 1, self.channels))

    @property
    def matrices(self):
        """[slots, value_heads, value_dim, key_dim]"""
        return self.memory[:, self.conv_bytes :].view(self.stored).unflatten(1, (self.value_heads, self.value_dim, self.key_dim))

    @property
    def prepared_bytes(self):
        """Bytes of scratch for chunks, as `delta_scratch` of `target.rs` computes them."""
        halves = 2 * self.key_heads * self.key_dim + 2 * self.value_heads * DELTA.CHUNK
        return self.rows * (2 * halves + 8 * self.value_heads)

    @staticmethod
    def slots_after(place, rows):
        """The slots to which the state after `rows` rows is written."""
        return [slot for after, slot in place[5] if after == rows] + ([place[4]] if rows == place[1] else [])


def causal_conv(sequences, kind, shape=(16, 32, 128, 128), taps=4, gap=0):
    step = Step(sequences, *shape, kind, taps)
    x, weight = random_rows(step.rows, step.channels, gap, kind), torch.randn(step.channels, taps, device="cuda").to(kind)
    out, kernel, before = Output((step.rows, step.channels), kind), Kernel("causal_conv", f"causal_conv_{ENDINGS[kind]}"), step.inputs.clone()
    left = len(sequences) - step.singles
    tiles = (step.rows - step.singles + (CONV.TILE_ROWS - 1) * left) // CONV.TILE_ROWS if left else 0
    grid = (divide_up(step.channels, CONV.CHANNELS * CONV.THREADS), step.singles + tiles)

    def wrong():
        wanted, states = torch.zeros_like(out.tensor, dtype=torch.float64), before.clone()
        for place in step.places:
            first, rows, context, read, *_ = place
            if context == 0 or rows == 0:
                continue
            old = before[read] if context > rows else torch.zeros_like(before[read])
            inputs = torch.cat([old, x[first : first + rows]])
            sums = sum(inputs[tap : tap + rows].double() * weight[:, tap].double() for tap in range(taps))
            wanted[first : first + rows] = functional.silu(sums)
            for after in range(1, rows + 1):
                for slot in step.slots_after(place, after):
                    states[slot] = inputs[after : after + taps - 1]
        return out.error(wanted) if torch.equal(states, step.inputs) else float("inf")

    moved = 2 * x.numel() + sum(2 * before[0].numel() for _, rows, context, *_ in step.places if context > rows)
    return Case(
        run=lambda: kernel(grid, (CONV.THREADS,), x, x.stride(0), weight, step.channels, taps, step.sequences, step.slots,
                           step.singles, out.tensor),
        error=wrong,
        limit=LIMITS[kind],
        bytes=kind.itemsize * moved,
    )  # fmt: skip


def launches(step, by_tokens):
    """The launches of the gated delta rule as (kernel, grid, block, first sequence, further arguments), as in `states.rs`.
    With `by_tokens`, sequences with many rows also use the kernel for single tokens."""
    count, ending = len(step.places), ENDINGS[step.kind]
    stored = "_stored_bf16" if step.stored == torch.bfloat16 else ""
    blocks = lambda held: step.value_heads * divide_up(step.value_dim, DELTA.GROUPS * held)  # noqa: E731
    is_128 = step.key_dim == DELTA.KEY_DIM
    by_token = "gated_delta_128" if is_128 else "gated_delta"
    found = []
    if step.singles:
        is_held = is_128 and step.singles * blocks(DELTA.HELD) >= processors()
        kernel = Kernel("gated_delta", f"{'gated_delta_128_held' if is_held else by_token}{stored}_{ending}")
        found.append((kernel, (blocks(DELTA.HELD if is_held else 1), step.singles), DELTA.ROW_THREADS, 0, ()))
    if step.singles < count:
        left, has_chunks = count - step.singles, is_128 and step.value_dim % DELTA.CHUNK_VALUES == 0
        if has_chunks and not by_tokens:
            # All bits are set, so that a number that the first kernel does not write is a NaN.
            prepared = torch.full((step.prepared_bytes,), 255, dtype=torch.uint8, device="cuda")
            tiles = (step.rows - step.singles + (DELTA.CHUNK - 1) * left) // DELTA.CHUNK
            for source, grid, shared in (
                ("gated_delta_prepare", (step.value_heads, tiles), DELTA.PREPARE_SHARED_BYTES),
                ("gated_delta_chunked", (step.value_heads * step.value_dim // DELTA.CHUNK_VALUES, left), DELTA.CHUNK_SHARED_BYTES),
            ):
                name = f"{source}{stored if source == 'gated_delta_chunked' else ''}_{ending}"
                found.append((Kernel(source, name, shared), grid, DELTA.CHUNK_THREADS, step.singles, (prepared,)))
        else:
            kernel = Kernel("gated_delta", f"{by_token}{stored}_{ending}")
            found.append((kernel, (blocks(1), left), DELTA.ROW_THREADS, step.singles, ()))
    return found


def delta_rule(step, place, q, k, v, decay, strength, before):
    """The output [rows, value_heads, value_dim] and the states after each row that is written, by slot."""
    first, rows, context, read, *_ = place
    state = before[read].double() if context > rows else torch.zeros_like(before[read], dtype=torch.float64)
    out, states = [], {}
    for row in range(first, first + rows):
        state = state * decay[row, :, None, None]
        change = strength[row, :, None] * (v[row] - (state @ k[row, :, :, None]).squeeze(-1))
        state = state + change[:, :, None] * k[row, :, None]
        out.append((state @ q[row, :, :, None]).squeeze(-1))
        for slot in step.slots_after(place, row - first + 1):
            states[slot] = state
    return torch.stack(out), states


def gated_delta(sequences, kind, shape=(16, 32, 128, 128), rate=-2.0, gap=0, name="chunks", stored=torch.float32):
    """The gated delta rule. If `name` is `chunks` or `tokens`, sequences of many rows are computed in chunks or token by token.
    If `name` is a kernel for chunks, only this kernel is measured. No sequence may then have a state before the step,
    because the check runs all kernels again."""
    step = Step(sequences, *shape, kind, stored=stored)
    qkv = random_rows(step.rows, step.channels, gap, kind)
    update, decay = (random_rows(step.rows, step.value_heads, gap, kind) for _ in range(2))
    log_decay, bias = torch.randn(2, step.value_heads, device="cuda") + torch.tensor([[rate], [0.0]], device="cuda")
    out, before = Output((step.rows, step.value_heads * step.value_dim), kind), step.matrices.clone()
    all_launches, is_part = launches(step, name == "tokens"), name not in ("chunks", "tokens")
    assert not is_part or all(context == rows for rows, context, _ in sequences)

    def run(is_all=not is_part):
        for kernel, grid, threads, first, further in all_launches:
            if not is_all and kernel.file != name:
                continue
            kernel(grid, (threads,), qkv, qkv.stride(0), update, update.stride(0), decay, decay.stride(0), log_decay, bias,
                   step.key_heads, step.value_heads, step.key_dim, step.value_dim, step.sequences, step.slots, first,
                   out.tensor, *further)  # fmt: skip

    def wrong():
        if is_part:
            run(is_all=True)
        keys = step.key_heads * step.key_dim
        unit = lambda x: x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()  # noqa: E731
        heads = qkv[:, : 2 * keys].double().unflatten(1, (2, step.key_heads, step.key_dim))
        q, k = unit(heads).repeat_interleave(step.value_heads // step.key_heads, 2).unbind(1)
        q, v = q * step.key_dim**-0.5, qkv[:, 2 * keys :].double().unflatten(1, (step.value_heads, step.value_dim))
        kept = (-log_decay.double().exp() * functional.softplus(decay.double() + bias.double())).exp()
        wanted, states = torch.zeros_like(out.tensor, dtype=torch.float64), before.double()
        for place in step.places:
            if place[1] > 0 and place[2] > 0:
                found, written = delta_rule(step, place, q, k, v, kept, update.double().sigmoid(), before)
                wanted[place[0] : place[0] + place[1]] = found.flatten(1)
                for slot, state in written.items():
                    states[slot] = state
        return max(out.error(wanted), error(step.matrices, states))

    states = sum((1 + (context > rows)) for _, rows, context, *_ in step.places if context) * step.matrix_bytes
    tokens = sum(rows for rows, *_ in sequences)
    return Case(
        run=run,
        error=wrong,
        limit=max(LIMITS[kind], CHUNK_LIMIT),
        bytes=states + kind.itemsize * (qkv.shape[0] * qkv.shape[1] + out.tensor.numel()),
        # Four multiply-adds for each token and element of the state. Chunks need about as many.
        operations=8 * tokens * step.value_heads * step.value_dim * step.key_dim if tokens > 16 * len(sequences) else None,
    )


def gated_rms_norm(rows, heads, head_dim, kind, gap=0):
    x, gate = random_rows(rows, heads * head_dim, 0, kind), random_rows(rows, heads * head_dim, gap, kind)
    weight, out = torch.randn(head_dim, device="cuda"), Output((rows, heads * head_dim), kind)
    kernel, lanes = Kernel("gated_rms_norm", f"gated_rms_norm_{ENDINGS[kind]}"), 1
    while lanes < min(32, divide_up(head_dim, GATED.VECTOR)):
        lanes *= 2

    def wrong():
        of_heads = x.double().unflatten(1, (heads, head_dim))
        normed = of_heads / (of_heads.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()
        return out.error(normed.flatten(1) * functional.silu(gate.double()))

    return Case(
        run=lambda: kernel((divide_up(rows * heads * lanes, GATED.THREADS),), (GATED.THREADS,), x, x.stride(0), gate,
                           gate.stride(0), weight, rows, heads, head_dim, EPSILON, lanes, out.tensor),
        error=wrong,
        limit=LIMITS[kind],
        bytes=3 * kind.itemsize * rows * heads * head_dim,
    )  # fmt: skip


def sigmoid_mul(rows, columns, kind, gap=0, by_row=False):
    out, gate = Output((rows, columns), kind, gap), random_rows(rows, 1 if by_row else columns, gap, kind)
    before = out.tensor.normal_().clone()
    kernel = Kernel("sigmoid_mul", f"sigmoid_mul_{'rows_' if by_row else ''}{ENDINGS[kind]}")
    return Case(
        run=lambda: kernel((rows, divide_up(columns, 2048 if rows < 128 else 4096)), (GATE.THREADS,), out.tensor,
                           columns + gap, gate, gate.stride(0), columns),
        error=lambda: out.error(before.double() * gate.double().sigmoid()),
        limit=LIMITS[kind],
        bytes=(2 if by_row else 3) * kind.itemsize * rows * columns,
    )  # fmt: skip


ONE = (1, 40, [])
MIXED = [(1, 7, []), (1, 1, []), (1, 0, []), (1, 9, [1]), (3, 3, []), (0, 8, []), (65, 90, [2, 64]), (2, 0, []), (20, 21, [5, 20]),
         (129, 200, [64, 65]), (64, 64, [64]), (127, 128, [])]  # fmt: skip
# Lengths around whole chunks, and snapshots that divide a chunk's rows.
AROUND = [(rows, rows + 9 * (at % 2), snapshots) for at, (rows, snapshots) in enumerate(
    [(2, [1]), (63, []), (64, [63]), (65, [64]), (66, [1, 2]), (127, [64, 126]), (128, [100]), (129, [128]), (191, [3, 67]),
     (192, [192]), (193, [])])]  # fmt: skip


def check(table):
    for kind in (torch.bfloat16, torch.float16):
        for sequences in (MIXED, [ONE] * 9, [(1, 1, [])], [(300, 300, [])]):
            for shape, taps, gap in (((2, 4, 128, 128), 4, 0), ((1, 2, 16, 5), 3, 3), ((2, 2, 32, 16), 2, 8)):
                table.check("causal_conv", f"{sequences[:3]}, {shape}", causal_conv(sequences, kind, shape, taps, gap))
            for shape, gap in (((2, 4, 128, 128), 8), ((1, 3, 128, 24), 0), ((2, 6, 16, 12), 3), ((1, 2, 256, 40), 0)):
                for rate, name in ((2.0, "chunks"), (-2.0, "chunks"), (-12.0, "chunks"), (-2.0, "tokens")):
                    table.check("gated_delta", f"{sequences[:3]}, {shape}, rate {rate}, {name}",
                                gated_delta(sequences, kind, shape, rate, gap, name))  # fmt: skip
                    table.check("gated_delta", f"{sequences[:3]}, {shape}, rate {rate}, {name}, states in bf16",
                                gated_delta(sequences, kind, shape, rate, gap, name, torch.bfloat16))  # fmt: skip
        for stored in (torch.float32, torch.bfloat16):
            table.check("gated_delta", f"decoding, rows held, states in {stored}", gated_delta([ONE] * 40, kind, stored=stored))
        for shape in ((2, 6, 128, 32), (3, 3, 128, 96)):
            # Decays far below 1, near 1, and so near 1 that nothing is forgotten.
            for rate in (4.0, -6.0, -20.0):
                table.check("gated_delta", f"around chunks, {shape}, rate {rate}", gated_delta(AROUND, kind, shape, rate))
        sequences = [ONE] * 3 + [(2 + at % 5, 9, []) for at in range(150)]
        table.check("gated_delta", "many sequences", gated_delta(sequences, kind, (1, 2, 128, 32)))
        table.check("gated_delta", "prompt of 3,000", gated_delta([(3000, 3000, [1000, 2048])], kind, (1, 2, 128, 64), -6.0))
        for rows, heads, head_dim, gap in ((5, 3, 20, 1), (7, 4, 128, 8), (3, 2, 300, 0), (2, 3, 1, 0), (70, 5, 24, 8)):
            table.check("gated_rms_norm", f"{rows} x {heads} x {head_dim} + {gap}", gated_rms_norm(rows, heads, head_dim, kind, gap))
        for rows, columns, gap in ((13, 41, 0), (301, 523, 3), (3, 4096, 8)):
            for by_row in (False, True):
                table.check("sigmoid_mul", f"{rows} x {columns} + {gap}", sigmoid_mul(rows, columns, kind, gap, by_row))


def measure(table):
    kind = torch.bfloat16
    table.row("torch's copy", "64 MiB", lambda: copy(8192, 4096, kind))
    for value_heads in (16, 32, 48):
        shape = (16, value_heads, 128, 128)
        for count in (1, 16, 64, 256):
            for operation in (causal_conv, gated_delta):
                make = functools.partial(operation, [ONE] * count, kind, shape)
                table.row(operation.__name__, f"{count} decoding, {value_heads} value heads", make)
            make = functools.partial(gated_delta, [ONE] * count, kind, shape, stored=torch.bfloat16)
            table.row("gated_delta", f"{count} decoding, {value_heads} value heads, states in bf16", make)
        for tokens in (512, 2048, 8192):
            prompt = [(tokens, tokens, [])]
            work = f"prompt of {tokens:,}, {value_heads} value heads"
            table.row("causal_conv", work, functools.partial(causal_conv, prompt, kind, shape))
            for name in ("chunks", "gated_delta_prepare", "gated_delta_chunked", "tokens"):
                table.row("gated_delta", f"{work}, by {name}", functools.partial(gated_delta, prompt, kind, shape, name=name))
        for count, tokens in ((64, 2), (16, 64), (16, 512)):
            make = functools.partial(gated_delta, [(tokens, tokens, [])] * count, kind, shape)
            table.row("gated_delta", f"{count} prompts of {tokens:,}, {value_heads} value heads, by chunks", make)
    for rows in (64, 256, 8192):
        table.row("gated_rms_norm", f"{rows:,} rows, 32 heads of 128", functools.partial(gated_rms_norm, rows, 32, 128, kind))
        table.row("sigmoid_mul", f"{rows:,} rows, 4,096 columns", functools.partial(sigmoid_mul, rows, 4096, kind))
