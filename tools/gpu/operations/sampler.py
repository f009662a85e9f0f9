"""A row's sampling options, and the expected result: the rules of `sampling.cu` in f64.

The kernel computes in f32 and integers, so a random number near the border between two tokens may select the other token.
A token is right if its share of the weights, widened by `SLACK`, contains the random number.
"""

import math
from dataclasses import dataclass, field

import torch

from contract import contract

NONE = contract("common").NO_CHOICE
SLACK = 1e-5
WORD = 0xFFFFFFFF  # mask of the lowest 32 bits
LARGEST = 3.4028234663852886e38


@dataclass
class Request:
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    top_k: int = 0
    top: int = NONE  # number of the likeliest tokens to report; NONE for no report
    seed: int = 0
    position: int = 0
    ignored: bool = False
    given: int = NONE  # a known token, such as the prompt's next token, which overrides all other options; NONE to sample
    mask: torch.Tensor | None = None  # [vocabulary] bool: the tokens that may follow
    forbidden: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    produced: list[int] = field(default_factory=list)

    def is_greedy(self):
        return self.temperature == 0.0 or self.top_k == 1 or self.given != NONE


def drawn_number(seed, position):
    """A random number from 0 to 1 with 53 bits: Philox 4x32-10 (Salmon et al. 2011) of the position, with the seed as key."""
    numbers, key = [position & WORD, position >> 32, 0, 0], [seed & WORD, seed >> 32]
    for turn in range(10):
        if turn > 0:
            key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
        left, right = 0xD2511F53 * numbers[0], 0xCD9E8D57 * numbers[2]
        numbers = [(right >> 32) ^ numbers[1] ^ key[0], right & WORD, (left >> 32) ^ numbers[3] ^ key[1], left & WORD]
    return ((numbers[0] << 32 | numbers[1]) >> 11) / (1 << 53)


def changed(logits, request):
    """The logits after the mask, forbidden tokens, biases and penalties: [vocabulary] f32."""
    x, vocabulary, device = logits.clone(), len(logits), logits.device
    tokens = lambda ids: torch.tensor([i for i in ids if i < vocabulary], dtype=torch.int64, device=device)  # noqa: E731
    if request.mask is not None:
        x[~request.mask] = -float("inf")
    x[tokens(request.forbidden)] = -float("inf")
    if request.bias:
        ids = tokens(request.bias)
        biases = torch.tensor([bias for i, bias in request.bias.items() if i < vocabulary], device=device)
        x[ids] = bounded(x[ids] + biases)
    if (request.repetition, request.presence, request.frequency) != (1.0, 0.0, 0.0):
        counts = torch.bincount(tokens(request.produced), minlength=vocabulary)
        seen = counts > 0
        if request.repetition != 1.0:
            seen[tokens(request.prompt)] = True
        # The divisor is on the device, because torch multiplies by the inverse of a Python number.
        repetition = torch.tensor(request.repetition, device=device)
        repeated = torch.where(x < 0, x * repetition, x / repetition)
        penalties = (request.frequency * counts.double() + request.presence * (counts > 0)).float()
        x = torch.where(seen, bounded(repeated - penalties), x)
    return x


def bounded(x):
    return torch.where(x == -float("inf"), x, x.clamp(-LARGEST, LARGEST))


def candidates(x, request):
    """Candidate tokens in order, and their weights. Sorted by likelihood if top-k or top-p limits them,
    otherwise by id."""
    ids = x.isfinite().nonzero()[:, 0]
    values = x[ids]
    likeliest = lambda ids, values: (ids[order := values.sort(descending=True, stable=True).indices], values[order])  # noqa: E731
    if 0 < request.top_k < len(values):
        is_kept = values >= values.topk(request.top_k).values[-1]  # tokens equal to the last are kept
        ids, values = likeliest(ids[is_kept], values[is_kept])
    differences = lambda values: (values - x.max()).double() / request.temperature  # noqa: E731
    if request.min_p > 0:
        is_kept = differences(values) >= math.log(request.min_p)
        ids, values = ids[is_kept], values[is_kept]
    if request.top_p < 1.0:
        ids, values = likeliest(ids, values)
        weights = differences(values).exp()
        count = int((weights.cumsum(0) < request.top_p * weights.sum()).sum()) + 1  # the token that crosses the limit stays
        ids, values = ids[:count], values[:count]
    return ids, differences(values).exp()


def fault_of(logits, x):
    if logits.isnan().any() or (logits == float("inf")).any():
        return 1
    return 0 if (x > -float("inf")).any() else 2


def is_right(logits, request, chosen, fault, log_probability, top_ids, top_log_probabilities):
    """Returns whether the sampling result of a row is right. The last two arguments are lists."""
    x = logits if request.given != NONE else changed(logits, request)
    wanted_fault = 3 if request.ignored else fault_of(logits, x)
    if fault != wanted_fault:
        return False
    if fault != 0:
        return (chosen == NONE and math.isnan(log_probability) and set(top_ids) <= {NONE}
                and all(map(math.isnan, top_log_probabilities)))  # fmt: skip
    if request.given != NONE:
        is_fine = chosen == request.given
    elif request.is_greedy():
        is_fine = chosen == int((x == x.max()).int().argmax())
    else:
        ids, weights = candidates(x, request)
        ends = weights.cumsum(0) / weights.sum()
        place = (ids == chosen).nonzero()[:, 0]
        number = drawn_number(request.seed, request.position)
        is_fine = len(place) == 1 and ends[place] + SLACK >= number >= ends[place] - weights[place] / weights.sum() - SLACK
    reported = 0 if request.top == NONE else min(request.top, int((logits > -float("inf")).sum()))
    is_fine = bool(is_fine) and set(top_ids[reported:]) <= {NONE} and all(map(math.isnan, top_log_probabilities[reported:]))
    if request.top == NONE:
        return is_fine and math.isnan(log_probability)
    logarithms = torch.log_softmax(logits.double(), 0)
    likeliest = logits.sort(descending=True, stable=True).indices[:reported]
    is_within = lambda found, right: found == right or abs(found - right) <= 4e-6 * max(1.0, abs(right))  # noqa: E731
    is_near = lambda found, id: is_within(found, float(logarithms[id]))  # noqa: E731
    return (is_fine and is_near(log_probability, chosen) and top_ids[:reported] == likeliest.tolist()
            and all(map(is_near, top_log_probabilities, top_ids[:reported])))  # fmt: skip
