"""Kernels bound by reading and writing rows: norms, rotary positions, gates, and gathered or scattered rows."""

import functools

import torch
from torch.nn import functional

from contract import contract
from device import ENDINGS, LIMITS, Kernel, Output, Sections, divide_up, error, processors, unsigned
from table import Case

EPSILON = 1e-6
NONE, PREVIOUS = contract("common").NO_CHOICE, contract("common").PREVIOUS
BLOCK_TOKENS = contract("common").BLOCK_TOKENS
COPY_THREADS = contract("copy_rows").THREADS
NAN = float("nan")


def random_rows(rows, columns, gap, kind):
    """A view of wider rows."""
    return torch.randn(rows, columns + gap, device="cuda", dtype=kind)[:, :columns]


def norm_shape(rows, hidden):
    return (min(rows, 8 * processors()),), (min(contract("norm").THREADS_MAX, divide_up(divide_up(hidden, 16), 32) * 32),)


def normed(x, weight):
    """The last axis divided by its root mean square and multiplied by `weight`, in f64."""
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def rms_norm(rows, hidden, kind, gap=0):
    x, weight = random_rows(rows, hidden, gap, kind), torch.randn(hidden, device="cuda", dtype=kind)
    out, kernel = Output((rows, hidden), kind), Kernel("rms_norm", f"rms_norm_{ENDINGS[kind]}")
    return Case(
        run=lambda: kernel(*norm_shape(rows, hidden), x, x.stride(0), weight, rows, hidden, EPSILON, 0.0, out.tensor),
        error=lambda: out.error(normed(x, weight)),
        limit=LIMITS[kind],
        bytes=2 * kind.itemsize * rows * hidden,
        baselines={"torch": lambda: functional.rms_norm(x, (hidden,), weight, EPSILON)},
    )


def rms_norm_add(rows, hidden, kind, gap=0):
    """Each run adds the norm to a copy of the same rows."""
    x, weight = random_rows(rows, hidden, gap, kind), torch.randn(hidden, device="cuda", dtype=kind)
    total, kernel = Output((rows, hidden), kind, gap), Kernel("rms_norm", f"rms_norm_add_{ENDINGS[kind]}")
    before = torch.randn(rows, hidden, device="cuda", dtype=kind)

    def run():
        total.tensor.copy_(before)
        kernel(*norm_shape(rows, hidden), x, x.stride(0), weight, rows, hidden, EPSILON, 1.0, None, total.tensor, total.tensor.stride(0))

    return Case(
        run=run,
        error=lambda: total.error(before.double() + normed(x, weight.double() + 1)),
        limit=LIMITS[kind],
        bytes=5 * kind.itemsize * rows * hidden,
    )


def layer_normed(x, weight, bias):
    return functional.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), EPSILON)


def layer_norm(rows, hidden, kind, gap=0):
    x, (weight, bias) = random_rows(rows, hidden, gap, kind), torch.randn(2, hidden, device="cuda", dtype=kind)
    out, kernel = Output((rows, hidden), kind), Kernel("layer_norm", f"layer_norm_{ENDINGS[kind]}")
    return Case(
        run=lambda: kernel(*norm_shape(rows, hidden), x, x.stride(0), weight, bias, rows, hidden, EPSILON, out.tensor),
        error=lambda: out.error(layer_normed(x, weight, bias)),
        limit=LIMITS[kind],
        bytes=2 * kind.itemsize * rows * hidden,
        baselines={"torch": lambda: functional.layer_norm(x, (hidden,), weight, bias, EPSILON)},
    )


def gate_shape(rows, features):
    return (rows, divide_up(features, 2048 if rows < 128 else 4096)), (contract("gate").THREADS,)


def silu_mul(rows, features, kind, gap=0, operation="silu_mul"):
    gate_up = random_rows(rows, 2 * features, gap, kind)
    out, kernel = Output((rows, features), kind), Kernel("silu_mul", f"{operation}_{ENDINGS[kind]}")
    unit = functional.silu if operation == "silu_mul" else FORMS["gelu_tanh"]
    gate, up = gate_up[:, :features], gate_up[:, features:]
    return Case(
        run=lambda: kernel(*gate_shape(rows, features), gate, gate.stride(0), up, up.stride(0), features, out.tensor),
        error=lambda: out.error(unit(gate.double()) * up.double()),
        limit=LIMITS[kind],
        bytes=3 * kind.itemsize * rows * features,
        baselines={"torch": lambda: unit(gate) * up},
    )


def gelu_mul(rows, features, kind, gap=0):
    return silu_mul(rows, features, kind, gap, "gelu_mul")


FORMS = {
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def gelu(rows, columns, kind, gap=0, form="gelu"):
    x, kernel = Output((rows, columns), kind, gap), Kernel("gelu", f"{form}_{ENDINGS[kind]}")
    x.tensor.normal_(std=2)
    before = x.tensor.clone()
    return Case(
        run=lambda: kernel(*gate_shape(rows, columns), x.tensor, x.tensor.stride(0), columns),
        error=lambda: x.error(FORMS[form](before.double())),
        limit=LIMITS[kind],
        bytes=2 * kind.itemsize * rows * columns,
        baselines={"torch": lambda: FORMS[form](before)},
    )


def mean_rows(rows, columns, kind, gap=0, count=16):
    x = random_rows(rows * count, columns, gap, kind)
    out, kernel = Output((rows, columns), kind), Kernel("mean_rows", f"mean_rows_{ENDINGS[kind]}")
    mean = lambda x: x.unflatten(0, (rows, count)).mean(1)  # noqa: E731
    return Case(
        run=lambda: kernel(*gate_shape(rows, columns), out.tensor, x, x.stride(0), columns, count),
        error=lambda: out.error(mean(x.double())),
        limit=LIMITS[kind],
        bytes=kind.itemsize * (count + 1) * rows * columns,
        baselines={"torch": lambda: mean(x)},
    )



def gelu_tanh(rows, columns, kind, gap=0):
    return gelu(rows, columns, kind, gap, "gelu_tanh")


def gelu_quick(rows, columns, kind, gap=0):
    return gelu(rows, columns, kind, gap, "gelu_quick")


class Positions:
    """Positions of tokens, up to 2^17, on one axis per section, and the rotation angle of each pair of a head. If interleaved,
    the second and the third axis have every third pair."""

    def __init__(self, tokens, head_dim, sections, is_interleaved=False):
        self.pitch = tokens + 3
        self.numbers = torch.randint(1 << 17, (sum(pairs > 0 for pairs in sections), self.pitch), device="cuda")
        self.frequencies = (1e6 ** (-torch.arange(0, head_dim, 2, device="cuda").double() / head_dim)).float()
        axes = torch.repeat_interleave(torch.arange(4), torch.tensor(sections)).cuda()
        if is_interleaved:
            axes.zero_()
            for axis in (1, 2):
                axes[axis : 3 * sections[axis] : 3] = axis
        self.angles = (self.numbers[axes, :tokens].T.float() * self.frequencies).double()[:, None]  # [tokens, 1, pairs]
        self.arguments = (unsigned(self.numbers), self.pitch, self.frequencies,
                          Sections(*sections, is_interleaved=is_interleaved))  # fmt: skip

    def rotated(self, heads):
        """The rotated heads [tokens, heads, head_dim] in f64, where element i is paired with element i + head_dim / 2."""
        left, right = heads.double().chunk(2, -1)
        cosine, sine = self.angles.cos(), self.angles.sin()
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)


def rotary_block(elements):
    return (min(max(divide_up(divide_up(elements, 16), 32) * 32, 64), contract("rotary").THREADS_MAX),)


def rotary(tokens, heads, head_dim, sections, kind, behind=0):
    """Rotates the `heads` heads at the start of each row. `behind` more columns follow them."""
    x, columns = Output((tokens, heads * head_dim + behind), kind), heads * head_dim
    x.tensor.normal_()
    before, positions = x.tensor.clone(), Positions(tokens, head_dim, sections)
    kernel = Kernel("rotary", f"rotary_{ENDINGS[kind]}")

    def wrong():
        wanted = torch.cat((positions.rotated(before[:, :columns].unflatten(1, (heads, head_dim))).flatten(1),
                            before[:, columns:].double()), 1)  # fmt: skip
        kept = torch.equal(x.tensor[:, columns:], before[:, columns:])
        return x.error(wanted) if kept else float("inf")

    return Case(
        run=lambda: kernel((tokens,), rotary_block(columns), x.tensor, x.tensor.stride(0), heads, head_dim,
                           *positions.arguments),
        error=wrong,
        limit=LIMITS[kind],
        bytes=2 * kind.itemsize * tokens * columns,
    )  # fmt: skip


EPSILON = 1e-6


def rotary_kv_write(tokens, heads, kv_heads, head_dim, sections, kind, gap=0, is_odd=False, is_normed=False, is_e4m3=False):
    """With `is_odd`, one token has no slot, and another token's slot is in no block. With `is_normed`, heads
    are normalized and axes interleaved, as in Qwen3-VL."""
    qkv = Output((tokens, (heads + 2 * kv_heads) * head_dim), kind, gap)
    qkv.tensor.normal_()
    in_heads = qkv.tensor.unflatten(1, (heads + 2 * kv_heads, head_dim))
    before = in_heads.clone()
    positions = Positions(tokens, head_dim, sections, is_interleaved=is_normed)
    blocks = divide_up(tokens, BLOCK_TOKENS) + 2
    weights = torch.randn(2, head_dim, device="cuda").to(kind) if is_normed else None
    norms = (weights[0], weights[1], float(EPSILON), 0.0, contract("rotary").VALUES_UNCHANGED) if is_normed else ()
    of = lambda heads, weight: normed(heads, weights[weight]) if is_normed else heads.double()  # noqa: E731
    cache = Output((blocks, 2, kv_heads, BLOCK_TOKENS, head_dim), torch.uint8 if is_e4m3 else kind)
    # Small enough that some numbers exceed the largest E4M3 number.
    scales = torch.rand(2, kv_heads, device="cuda") * 0.02 + 0.003 if is_e4m3 else None
    places = torch.randperm(blocks * BLOCK_TOKENS, device="cuda")[:tokens]
    slots, written = places.clone(), torch.ones(tokens, dtype=torch.bool, device="cuda")
    if is_odd:
        slots[1], slots[2], written[1:3] = NONE, blocks * BLOCK_TOKENS, False
    sent, name = unsigned(slots), ("normed_" if is_normed else "") + ("e4m3_" if is_e4m3 else "") + ENDINGS[kind]
    kernel = Kernel("rotary", f"rotary_kv_write_{name}")

    def wrong():
        wanted = before.double()
        wanted[:, :heads] = positions.rotated(of(before[:, :heads], 0))
        found = qkv.error(wanted.flatten(1))
        here = places[written]
        keys = cache.tensor[here // BLOCK_TOKENS, 0, :, here % BLOCK_TOKENS]
        values = cache.tensor[here // BLOCK_TOKENS, 1, :, here % BLOCK_TOKENS]
        rotated = positions.rotated(of(before[:, heads : heads + kv_heads], 1))[written]
        others = torch.ones(blocks * BLOCK_TOKENS, dtype=torch.bool, device="cuda")
        others[here] = False
        rest = cache.tensor.permute(0, 3, 1, 2, 4).flatten(0, 1)[others]
        is_kept = torch.equal(in_heads[:, heads:], before[:, heads:])
        copied, of_keys = before[written, heads + kv_heads :], 0.0
        if is_e4m3:
            divided = (copied.float() / scales[1, :, None]).clamp(-448, 448)
            is_copied = torch.equal(values, divided.to(torch.float8_e4m3fn).view(torch.uint8))
            # Half a step of E4M3 is 1/16 of a number, or 2^-10 for the smallest numbers.
            wanted_keys = (rotated / scales[0, :, None].double()).clamp(-448, 448)
            off = (keys.contiguous().view(torch.float8_e4m3fn).double() - wanted_keys).abs()
            of_keys = 0.0 if bool((off <= 1.001 * (wanted_keys.abs() / 16).clamp_min(2**-10)).all()) else float("inf")
        else:
            is_copied, of_keys = torch.equal(values, copied), error(keys, rotated)
        is_fine = is_kept and is_copied and Output.is_untouched(rest) and cache.is_guarded()
        return max(found, of_keys) if is_fine else float("inf")

    return Case(
        run=lambda: kernel((tokens,), rotary_block((heads + 2 * kv_heads) * head_dim), qkv.tensor, qkv.tensor.stride(0),
                           heads, kv_heads, head_dim, head_dim // 2, *positions.arguments, sent, cache.tensor, scales, blocks, *norms),
        error=wrong,
        limit=LIMITS[kind],
        bytes=tokens * head_dim * (2 * kind.itemsize * heads + (kind.itemsize + cache.tensor.itemsize) * 2 * kv_heads),
    )  # fmt: skip


def rotary_kv_write_normed(tokens, heads, kv_heads, head_dim, sections, kind, gap=0, is_e4m3=False):
    return rotary_kv_write(tokens, heads, kv_heads, head_dim, sections, kind, gap, tokens > 3, True, is_e4m3)


def rotary_kv_write_e4m3(tokens, heads, kv_heads, head_dim, sections, kind, gap=0):
    return rotary_kv_write(tokens, heads, kv_heads, head_dim, sections, kind, gap, tokens > 3, is_e4m3=True)


@functools.lru_cache(1)
def embedding_table(vocabulary, hidden, kind):
    return torch.randn(vocabulary, hidden, device="cuda", dtype=kind)


def embed(tokens, hidden, kind, vocabulary, is_odd=False):
    """With `is_odd`, some ids refer to a token of the previous step, and some are invalid."""
    table, previous = embedding_table(vocabulary, hidden, kind), torch.randint(vocabulary, (9,), device="cuda")
    ids = torch.randint(vocabulary, (tokens,), device="cuda")
    sent, nothing = ids.clone(), torch.zeros(tokens, dtype=torch.bool, device="cuda")
    if is_odd:
        previous[3] = NONE  # an id that refers to this entry gets zeros
        sent[2], ids[2] = PREVIOUS | 4, previous[4]
        sent[3], sent[4], sent[5], sent[6] = PREVIOUS | 3, PREVIOUS | 9, vocabulary, NONE
        nothing[4:7] = True
    sent, chosen = unsigned(sent), unsigned(previous)
    out, kernel = Output((tokens, hidden), kind), Kernel("embed", f"embed_{ENDINGS[kind]}")

    def wrong():
        wanted = table[ids]
        if is_odd:
            wanted[3] = 0  # its id refers to previous[3]
        is_fine = bool(out.tensor[nothing].isnan().all()) and torch.equal(out.tensor[~nothing], wanted[~nothing])
        return out.error(wanted[~nothing], rows=~nothing) if is_fine else float("inf")

    return Case(
        run=lambda: kernel(
            (tokens,), (COPY_THREADS,), table, 0, vocabulary, vocabulary, hidden, sent, chosen, 9, out.tensor),
        error=wrong,
        limit=0.0,
        bytes=2 * kind.itemsize * tokens * hidden,
        baselines={"torch": lambda: functional.embedding(ids, table)},
    )


def embed_scaled(tokens, hidden, kind, vocabulary):
    table, ids = embedding_table(vocabulary, hidden, kind), torch.randint(vocabulary, (tokens,), device="cuda")
    scale = torch.tensor(hidden**0.5).to(kind).item()
    out, kernel = Output((tokens, hidden), kind), Kernel("embed", f"embed_scaled_{ENDINGS[kind]}")
    sent, chosen = unsigned(ids), unsigned(torch.zeros(1, dtype=torch.long, device="cuda"))
    return Case(
        run=lambda: kernel(
            (tokens,), (COPY_THREADS,), table, 0, vocabulary, vocabulary, hidden, sent, chosen, 1, out.tensor, scale),
        error=lambda: out.error(table[ids].double() * scale),
        limit=LIMITS[kind],
        bytes=2 * kind.itemsize * tokens * hidden,
        baselines={"torch": lambda: functional.embedding(ids, table) * scale},
    )  # fmt: skip


def gather_rows(chosen, columns, kind, gap=0, is_odd=False):
    x, rows = random_rows(2 * chosen, columns, gap, kind), torch.randperm(2 * chosen, device="cuda")[:chosen]
    sent, out, kernel = rows.clone(), Output((chosen, columns), kind), Kernel("gather_rows", "gather_rows")
    nowhere = 2 if is_odd else 0  # the first two indices are invalid
    sent[:nowhere] = torch.tensor([2 * chosen, NONE][:nowhere], device="cuda")
    sent = unsigned(sent)

    def wrong():
        is_fine = bool(out.tensor[:nowhere].isnan().all())
        return out.error(x[rows[nowhere:]], rows=slice(nowhere, None)) if is_fine else float("inf")

    return Case(
        run=lambda: kernel((chosen,), (COPY_THREADS,), x, 2 * chosen, x.stride(0), sent, columns, kind.itemsize, out.tensor,
                           columns),
        error=wrong,
        limit=0.0,
        bytes=2 * kind.itemsize * chosen * columns,
        baselines={"torch": lambda: x.index_select(0, rows)},
    )  # fmt: skip


def copy_rows(count, columns, kind, gap=0, **_):
    """`gather_rows` without indices, which copies all rows."""
    x, out, kernel = random_rows(count, columns, gap, kind), Output((count, columns), kind), Kernel("gather_rows", "gather_rows")
    return Case(
        run=lambda: kernel((count,), (COPY_THREADS,), x, count, x.stride(0), None, columns, kind.itemsize, out.tensor, columns),
        error=lambda: out.error(x),
        limit=0.0,
        bytes=2 * kind.itemsize * count * columns,
    )


def scatter_rows(chosen, columns, kind, gap=0, is_odd=False):
    x, rows = random_rows(chosen, columns, gap, kind), torch.randperm(2 * chosen, device="cuda")[:chosen]
    sent, out, kernel = rows.clone(), Output((2 * chosen, columns), kind, gap), Kernel("scatter_rows", "scatter_rows")
    nowhere = 2 if is_odd else 0
    sent[:nowhere] = torch.tensor([2 * chosen, NONE][:nowhere], device="cuda")
    sent, untouched = unsigned(sent), torch.ones(2 * chosen, dtype=torch.bool, device="cuda")
    untouched[rows[nowhere:]] = False
    return Case(
        run=lambda: kernel((chosen,), (COPY_THREADS,), x, x.stride(0), sent, columns, kind.itemsize, out.tensor, 2 * chosen,
                           columns + gap),
        error=lambda: out.error(x[nowhere:], rows=rows[nowhere:], untouched=untouched),
        limit=0.0,
        bytes=2 * kind.itemsize * chosen * columns,
    )  # fmt: skip


def add_rows(chosen, columns, kind, gap=0, is_odd=False):
    """With `is_odd`, one source row is invalid, which makes a row of NaN, and two destinations are invalid."""
    x, source = random_rows(chosen + 7, columns, gap, kind), torch.randint(chosen + 7, (chosen,), device="cuda")
    places, nowhere = torch.randperm(2 * chosen, device="cuda")[:chosen], 3 if is_odd else 0
    out, kernel = Output((2 * chosen, columns), kind, gap), Kernel("add_rows", f"add_rows_{ENDINGS[kind]}")
    before = out.tensor.normal_().clone()
    from_rows, to_rows = source.clone(), places.clone()
    from_rows[:nowhere] = torch.tensor([chosen + 7, 0, 1][:nowhere], device="cuda")
    to_rows[1:nowhere] = torch.tensor([2 * chosen, NONE][: max(nowhere - 1, 0)], device="cuda")
    from_rows, to_rows = unsigned(from_rows), unsigned(to_rows)

    def wrong():
        named, kept = places[nowhere:], torch.ones(2 * chosen, dtype=torch.bool, device="cuda")
        kept[named] = kept[places[: min(nowhere, 1)]] = False
        is_fine = torch.equal(out.tensor[kept], before[kept]) and bool(out.tensor[places[: min(nowhere, 1)]].isnan().all())
        wanted = before[named].double() + x[source[nowhere:]].double()
        return out.error(wanted, rows=named) if is_fine else float("inf")

    return Case(
        run=lambda: kernel((chosen,), (COPY_THREADS,), x, chosen + 7, x.stride(0), from_rows, to_rows, columns, out.tensor,
                           2 * chosen, columns + gap),
        error=wrong,
        limit=LIMITS[kind],
        bytes=3 * kind.itemsize * chosen * columns,
    )  # fmt: skip


TEXT, VISION = (16, 24, 24, 0), (20, 20, 0, 0)  # rotary pairs of each axis


def copy(rows, columns, kind):
    """torch's copy, as a measure of the GPU's memory bandwidth."""
    x, out = random_rows(rows, columns, 0, kind), Output((rows, columns), kind)
    return Case(lambda: out.tensor.copy_(x), lambda: out.error(x), 0.0, bytes=2 * kind.itemsize * rows * columns)


def check(table):
    for kind in (torch.bfloat16, torch.float16):
        for operation in (rms_norm, rms_norm_add, layer_norm):
            for rows, hidden, gap in ((1, 3584, 0), (33, 61, 0), (33, 61, 3), (129, 1280, 8), (7, 8192, 0), (5, 9000, 0),
                                      (5, 20000, 8), (1300, 3584, 1), (3, 16, 0), (3, 5, 0)):  # fmt: skip
                table.check(operation.__name__, f"{rows} x {hidden} + {gap}", operation(rows, hidden, kind, gap))
        for operation in (silu_mul, gelu_mul, gelu, gelu_tanh, gelu_quick, mean_rows):
            for rows, columns, gap in ((3, 18944, 0), (65, 3420, 0), (200, 3420, 0), (9, 61, 3), (1, 2048, 8)):
                table.check(operation.__name__, f"{rows} x {columns} + {gap}", operation(rows, columns, kind, gap))
        for tokens, heads, kv_heads, head_dim, sections, gap in (
            (33, 28, 4, 128, TEXT, 0), (5, 28, 4, 128, (64, 0, 0, 0), 8), (17, 16, 16, 80, VISION, 0),
            (3, 4, 2, 32, (4, 4, 4, 4), 0), (9, 6, 2, 64, (32, 0, 0, 0), 3), (4, 3, 1, 6, (1, 2, 0, 0), 0),
        ):  # fmt: skip
            work = f"{tokens} of {heads}:{kv_heads} x {head_dim} + {gap}"
            table.check(
                "rotary_kv_write",
                work,
                rotary_kv_write(tokens, heads, kv_heads, head_dim, sections, kind, gap, is_odd=tokens > 3),
            )
            table.check("rotary", work, rotary(tokens, heads, head_dim, sections, kind, behind=gap))  # fmt: skip
            third = head_dim // 8
            interleaved = (head_dim // 2 - 2 * third, third, third, 0)
            table.check("rotary_kv_write", f"{work}, normed",
                        rotary_kv_write_normed(tokens, heads, kv_heads, head_dim, interleaved, kind, gap))  # fmt: skip
            table.check("rotary_kv_write", f"{work}, E4M3",
                        rotary_kv_write_e4m3(tokens, heads, kv_heads, head_dim, sections, kind, gap))  # fmt: skip
            table.check("rotary_kv_write", f"{work}, normed, E4M3",
                        rotary_kv_write_normed(tokens, heads, kv_heads, head_dim, interleaved, kind, gap, is_e4m3=True))  # fmt: skip
        for tokens, hidden, vocabulary in ((257, 3584, 1000), (33, 61, 300), (9, 40, 77)):
            table.check("embed", f"{tokens} x {hidden}", embed(tokens, hidden, kind, vocabulary, is_odd=True))
            table.check("embed_scaled", f"{tokens} x {hidden}", embed_scaled(tokens, hidden, kind, vocabulary))
        for operation in (gather_rows, copy_rows, scatter_rows, add_rows):
            for rows, columns, gap in ((70, 1280, 0), (33, 61, 0), (33, 61, 5), (9, 3584, 8), (12, 5124, 4)):
                table.check(operation.__name__, f"{rows} x {columns} + {gap}",
                            operation(rows, columns, kind, gap, is_odd=True))  # fmt: skip


def measure(table):
    kind, hidden, features = torch.bfloat16, 3584, 18_944
    table.row("torch's copy", "64 MiB", lambda: copy(8192, 4096, kind))
    timed = (
        (rms_norm, f"{hidden:,} columns", (hidden, kind)),
        (rms_norm_add, f"{hidden:,} columns, with the copy", (hidden, kind)),
        (layer_norm, f"{hidden:,} columns", (hidden, kind)),
        (rotary_kv_write, "28:4 heads of 128", (28, 4, 128, TEXT, kind)),
        (rotary_kv_write_e4m3, "28:4 heads of 128", (28, 4, 128, TEXT, kind)),
        (rotary_kv_write, "32:8 heads of 128", (32, 8, 128, TEXT, kind)),
        (rotary_kv_write_normed, "32:8 heads of 128", (32, 8, 128, (24, 20, 20, 0), kind)),
        (rotary, "32 heads of 80", (32, 80, VISION, kind, 1280)),
        (silu_mul, f"{features:,} features", (features, kind)),
        (gelu_mul, "6,912 features", (6912, kind)),
        (gelu, f"{features:,} columns", (features, kind)),
        (gelu_tanh, "4,304 columns", (4304, kind)),
        (gelu_quick, "4,096 columns", (4096, kind)),
        (mean_rows, "1,152 columns, of 16 rows", (1152, kind)),
        (embed, f"{hidden:,} columns", (hidden, kind, 152_064)),
        (embed_scaled, f"{hidden:,} columns", (hidden, kind, 152_064)),
        (gather_rows, f"{hidden:,} columns", (hidden, kind)),
        (scatter_rows, f"{hidden:,} columns", (hidden, kind)),
        (add_rows, "4,096 columns", (4096, kind, 8192)),
    )
    for operation, work, sizes in timed:
        for rows in (64, 256, 8192):
            table.row(operation.__name__, f"{rows:,} rows, {work}", functools.partial(operation, rows, *sizes))
    embedding_table.cache_clear()
