"""Sampling: the four kernels of `sampling.cu`."""

import ctypes
import math

import numpy as np
import torch

from contract import contract
from device import Kernel, Output, divide_up, unsigned
from operations.sampler import NONE, Request, is_right
from table import Case

NUMBERS, PREVIOUS = contract("sampling"), contract("common").PREVIOUS
TOP_MAX = NUMBERS.TOP_MAX
ROW = np.dtype([("temperature", "f8"), ("top_p", "f8"), ("min_p_logarithm", "f8"), ("presence", "f8"),
                ("frequency", "f8"), ("seed", "u8"), ("position", "u8"), ("repetition", "f4"), ("top_k", "u4"),
                ("top", "u4"), ("allowed", "u4"), ("ignored", "u4"), ("given", "u4")])  # fmt: skip
ROW_WORDS = NUMBERS.ROW_WORDS
assert ROW.itemsize == 4 * ROW_WORDS


def starts_and_words(of_rows, first):
    """The lists of all rows one after the other from word `first` on: the start of each row's list
    and the end of the last list, and the concatenated lists."""
    starts = first + np.cumsum([0] + [len(row) for row in of_rows])
    return starts.astype(np.uint32), np.concatenate([np.asarray(row, np.uint32) for row in of_rows])


def pack(requests, vocabulary):
    """The options of all rows as one array of words in the layout of `SampleBatch::pack`: rows, starts of the lists, lists,
    masks. Also returns the tokens of the previous step, which are the last produced token of each
    row."""
    rows, masks = np.zeros(len(requests), ROW), []
    produced = [list(request.produced) for request in requests]
    previous = [row[-1] if row else NONE for row in produced]
    for at, request in enumerate(requests):
        for name in ("temperature", "top_p", "presence", "frequency", "seed", "position", "repetition", "top_k", "top",
                     "ignored", "given"):  # fmt: skip
            rows[at][name] = getattr(request, name)
        rows[at]["min_p_logarithm"] = math.log(request.min_p) if request.min_p > 0 else -math.inf
        if produced[at]:
            produced[at][-1] = PREVIOUS | at
    biases = [np.asarray(list(request.bias.values()), np.float32).view(np.uint32) for request in requests]
    kinds = ([request.forbidden for request in requests], [list(request.bias) for request in requests], biases,
             [request.prompt for request in requests], produced)  # fmt: skip
    starts, lists = [], []
    first = ROW_WORDS * len(requests) + len(kinds) * (len(requests) + 1)
    for of_rows in kinds:
        of_kind, words = starts_and_words(of_rows, first)
        starts.append(of_kind)
        lists.append(words)
        first += len(words)
    for at, request in enumerate(requests):
        rows[at]["allowed"] = NONE if request.mask is None else first
        if request.mask is not None:
            bits = np.zeros(divide_up(vocabulary, 32) * 32, np.uint8)
            bits[:vocabulary] = request.mask.cpu().numpy()
            masks.append(np.packbits(bits, bitorder="little").view(np.uint32))
            first += len(masks[-1])
    return np.concatenate([rows.view(np.uint32), *starts, *lists, *masks]), previous


def case(logits, requests):
    """Makes the case of `logits` [rows, vocabulary] f32 and one request per row."""
    (rows, vocabulary), u64 = logits.shape, ctypes.c_uint64
    slices, before = divide_up(vocabulary, NUMBERS.SLICE), logits.clone()
    asked, previous = pack(requests, vocabulary)
    asked, previous = torch.from_numpy(asked.view(np.int32)).cuda(), unsigned(previous)
    changed = torch.full((rows, divide_up(vocabulary, 4) * 4), float("nan"), device="cuda")
    row_bytes = NUMBERS.ROW_BYTES + NUMBERS.SLICE_BYTES * slices
    row_bytes = divide_up(row_bytes, NUMBERS.ROW_ALIGNMENT) * NUMBERS.ROW_ALIGNMENT
    scratch = torch.full((rows * row_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    chosen, faults, log_probabilities, top_ids, top_log_probabilities = outputs = [
        Output(shape, kind) for shape, kind in (((rows,), torch.int32), ((rows,), torch.int32), ((rows,), torch.float32),
                                                ((rows, TOP_MAX), torch.int32), ((rows, TOP_MAX), torch.float32))
    ]  # fmt: skip
    slicing, planning, gathering, choosing = (Kernel("sampling", f"sample_{name}_f32")
                                              for name in ("slices", "plan", "gather", "choose"))  # fmt: skip

    def run():
        read = (logits, u64(logits.stride(0)))
        both = (*read, changed, u64(changed.stride(0)), vocabulary, asked, scratch)
        # One launch covers all rows. Its first row is row 0, whose options are the first words of
        # `asked`.
        slicing((slices, rows), (NUMBERS.SLICE_THREADS,), *read, vocabulary, asked, rows, 0, previous, len(previous),
                changed, u64(changed.stride(0)), scratch)  # fmt: skip
        planning((rows,), (NUMBERS.PLAN_THREADS,), vocabulary, asked, scratch)
        gathering((slices, rows), (NUMBERS.SLICE_THREADS,), *both)
        choosing((rows,), (NUMBERS.CHOICE_THREADS,), *both, chosen.tensor, faults.tensor, log_probabilities.tensor,
                 top_ids.tensor, top_log_probabilities.tensor, TOP_MAX)  # fmt: skip

    def wrong():
        """Infinite if inputs or guards were overwritten, otherwise the number of wrong rows."""
        is_kept = torch.equal(before.view(torch.int32), logits.view(torch.int32))
        if not is_kept or not all(output.is_guarded() for output in outputs):
            return float("inf")
        wholes = [(output.tensor.long() & NONE).tolist() for output in (chosen, faults, top_ids)]
        floats = [output.tensor.tolist() for output in (log_probabilities, top_log_probabilities)]
        rows_of = zip(before, requests, wholes[0], wholes[1], floats[0], wholes[2], floats[1])
        return float(sum(not is_right(*row) for row in rows_of))

    read = 1 if all(request.is_greedy() and request.top == NONE for request in requests) else 2
    return Case(run, wrong, 0.0, bytes=read * logits.numel() * 4)


def draw_logits(shape, kind):
    """Random logits. `peaked` resembles a language model's logits: most are low, and up to sixty are
    much higher. `flat` has normal random numbers. All other kinds are special cases."""
    vocabulary = shape[1]
    x = torch.randn(shape, device="cuda")
    if kind == "peaked":
        x *= 2.5
        places = torch.rand(shape, device="cuda").topk(min(vocabulary, 60)).indices
        x.scatter_(1, places, 22 - 3 * torch.empty(places.shape, device="cuda").exponential_())
    elif kind == "wide":
        x = torch.rand(shape, device="cuda") * 200 - 100
    elif kind == "equal":
        x.fill_(1.5)
    elif kind == "masked":
        x[torch.rand(shape, device="cuda") > 40 / vocabulary] = -float("inf")
        x[:, 3] = 0.3
    elif kind == "bf16":
        x = (x * 3).bfloat16().float()
    return x


def everything(vocabulary):
    """Every option except top-k and top-p."""
    some = lambda count: torch.randint(vocabulary, (count,)).tolist()  # noqa: E731
    return {"temperature": 0.8, "min_p": 0.01, "repetition": 1.1, "presence": 0.3, "frequency": 0.1, "top": TOP_MAX,
            "bias": {token: 1.0 for token in range(0, min(vocabulary, 50_000), 1000)}, "forbidden": [5, 6, vocabulary + 3],
            "mask": torch.rand(vocabulary, device="cuda") < 0.9, "prompt": some(2000) + [vocabulary, NONE],
            "produced": some(500)}  # fmt: skip


def seeded(rows, **asked):
    return [Request(seed=int(torch.randint(1 << 62, (1,))), position=row, **asked) for row in range(rows)]


def check(table):
    for vocabulary in (5, 1009, 152_063, 262_208):
        every = everything(vocabulary)
        asked = [{}, {"top": 5}, {"temperature": 1.0}, {"temperature": 0.7, "min_p": 0.05}, {"temperature": 1.7, "top_k": 50},
                 {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.3, "top_k": 3000, "top_p": 0.95, "top": 0}, every,
                 every | {"top_k": 50, "top_p": 0.9}, every | {"top_p": 0.5}, {"temperature": 1.5, "top_p": 0.7, "min_p": 0.2},
                 {"temperature": 0.9, "top_k": 3000, "top_p": 0.6, "min_p": 0.1}, {"temperature": 1e-6}, {"ignored": True},
                 {"forbidden": [3], "top_k": 1, "temperature": 1.0, "top": 1}, {"given": 4, "top": 0},
                 {"given": vocabulary - 1, "top": 20}, every | {"given": 2}]  # fmt: skip
        requests = [seeded(1, **one)[0] for one in asked]
        for kind in ("peaked", "flat", "bf16", "wide", "equal", "masked"):
            logits = draw_logits((len(requests), vocabulary), kind)
            table.check("sampling", f"{kind} of {vocabulary}", case(logits, requests))
        broken = draw_logits((4, vocabulary), "flat")
        broken[0, 3], broken[1, 2], broken[2] = float("nan"), float("inf"), -float("inf")
        nothing = Request(temperature=1.0, mask=torch.zeros(vocabulary, dtype=torch.bool, device="cuda"))
        requests = [*seeded(3, temperature=1.0, top=5), nothing]
        table.check("sampling", f"NaN, infinity or no allowed token, of {vocabulary}", case(broken, requests))
        table.check("sampling", f"scores of NaN or infinity, of {vocabulary}", case(broken, seeded(4, given=3, top=5)))


def measure(table):
    vocabulary = 152_064
    every = everything(vocabulary)
    some = {"temperature": 0.8, "top_p": 0.9}
    for work, kind, rows, asked in (
        ("greedy", "peaked", 64, {}),
        ("temperature 0.8", "peaked", 64, {"temperature": 0.8}),
        ("top-p 0.9", "peaked", 64, some),
        ("top-k 50, top-p 0.9", "peaked", 64, some | {"top_k": 50}),
        ("top-p 0.9, flat logits", "flat", 64, some),
        ("all features", "peaked", 64, every | some | {"top_k": 50}),
        ("all but top-k, flat logits", "flat", 64, every | some),
        ("a token's score", "peaked", 64, {"given": 7, "top": 0}),
        ("a token's score and the likeliest 20", "peaked", 64, {"given": 7, "top": 20}),
        ("greedy", "peaked", 1, {}),
        ("top-p 0.9", "peaked", 1, some),
        ("greedy", "peaked", 256, {}),
        ("top-p 0.9", "peaked", 256, some),
        ("all features", "peaked", 256, every | some | {"top_k": 50}),
    ):
        requests = seeded(rows, **asked)
        table.row(
            "sampling", f"{rows} x {vocabulary:,}, {work}", lambda: case(draw_logits((rows, vocabulary), kind), requests)
        )
