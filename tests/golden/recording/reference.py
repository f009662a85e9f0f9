"""Runs a checkpoint with transformers and checks the result three ways before it is recorded."""

import tokenizers
import torch

from .delta_nets import use_token_by_token_rule
from .tokenizer import TEXT_TOKENS

NEW_TOKENS = 32
DECODE_STEPS_STORED = [0, 1, 2, 3, 15, 16, 17, 31]
MARGIN_MIN = 1e-3  # between the two largest logits of each greedy step, relative to the largest |logit|
ERROR_MAX = 1e-5  # of f32 against f64 and of sdpa against eager attention, relative to the largest value


def kept_positions(input_ids, placeholders):
    """Prompt positions whose logits are stored: both ends, some edges of blocks of 16, the edges of pictures and videos.

    `placeholders` are the token ids that pictures and videos are embedded at."""
    n = len(input_ids)
    keep = {0, 1, n - 4, n - 3, n - 2, n - 1}
    keep |= {p for block in range(16, n, 48) for p in (block - 1, block)}
    keep |= {p for p in range(1, n) if (input_ids[p] in placeholders) != (input_ids[p - 1] in placeholders)}
    return sorted(p for p in keep if 0 <= p < n)


@torch.no_grad()
def greedy(model, inputs):
    """Logits of the prompt [tokens, vocabulary], then NEW_TOKENS greedy tokens and their logits. End tokens are ignored."""
    out = model(**inputs, use_cache=True)
    prefill, cache = out.logits[0], out.past_key_values
    tokens, logits = [], [prefill[-1]]
    while True:
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == NEW_TOKENS:
            return prefill, torch.tensor(tokens), torch.stack(logits)
        out = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=cache, use_cache=True)
        logits.append(out.logits[0, -1])


def greedy_margin(name, tokens, logits):
    """The smallest margin of the greedy steps. Asserts that it is clear, and that every token has text."""
    top = logits.topk(2).values
    margin = float(((top[:, 0] - top[:, 1]) / logits.abs().amax(1)).min())
    assert int(tokens.max()) < TEXT_TOKENS, "a greedy token has no text"
    assert margin > MARGIN_MIN, f"a greedy step of {name} is nearly a tie ({margin:.1e}): choose another seed"
    return margin


def case_tensors(input_ids, prefill, tokens, logits, placeholders):
    """The tensors that every case has. `input_ids` is [tokens]."""
    positions = kept_positions(input_ids.tolist(), placeholders)
    return {
        "input_ids": input_ids,  # [tokens]
        "logit_positions": torch.tensor(positions),  # [kept]
        "logits": prefill[positions],  # [kept, vocabulary]
        "greedy_tokens": tokens,  # [32]
        "decode_steps": torch.tensor(DECODE_STEPS_STORED),  # [kept]
        "decode_logits": logits[DECODE_STEPS_STORED],  # [kept, vocabulary]; step i chose greedy_tokens[i]
    }


def relative(a, b):
    """The largest difference, relative to the largest |b|."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def rounded_checks(checks):
    """The checks rounded to one digit, because the measured noise itself varies."""
    return {key: float(f"{value:.0e}") for key, value in checks.items()}


def norms_in_f64(model):
    """Makes RMS norms compute in f64. transformers computes them in f32 for every type of model."""
    normal = lambda x, epsilon: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)  # noqa: E731

    def plain(self, x):
        return self.weight * normal(x, self.variance_epsilon)

    def zero_centered(self, x):
        return (1.0 + self.weight) * normal(x, self.eps)

    def gated(self, x, gate):
        return plain(self, x) * torch.nn.functional.silu(gate)

    def scaled(self, x):
        return normal(x, self.eps) * (self.weight if self.with_scale else 1.0)

    for module in model.modules():
        kind = type(module).__name__
        if kind.startswith("Gemma4") and kind.endswith("RMSNorm"):
            module.forward = scaled.__get__(module)
        elif kind.endswith("RMSNormGated"):
            module.forward = gated.__get__(module)
        elif kind.endswith("RMSNorm"):
            module.forward = (zero_centered if kind.startswith(("Qwen3_5", "Gemma3")) else plain).__get__(module)


class Reference:
    """A checkpoint loaded three times: `model` (f32, sdpa) is recorded, `eager` (f32) and `exact` (f64) check it.

    `model` computes gated delta nets in chunks. The other two compute them token by token."""

    def __init__(self, kind, folder):
        load = lambda attention: kind.from_pretrained(  # noqa: E731
            folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True)  # fmt: skip
        (self.model, info), (self.eager, _), (self.exact, _) = load("sdpa"), load("eager"), load("eager")
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
        self.exact = self.exact.double()
        norms_in_f64(self.exact)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        for model in (self.eager, self.exact):
            model.set_experts_implementation("eager")  # the grouped matrix product of experts has no f64
            use_token_by_token_rule(model)
        for model in self.models():
            model.eval()

    def models(self):
        return self.model, self.eager, self.exact

    def forget_positions(self):
        """Clears the rotary offset that a vision-language model keeps from the prompt before."""
        for model in self.models():
            model.model.rope_deltas = None

    def record(self, name, inputs, prompt, placeholders):
        """Tensors and checks that every family has: logits and greedy tokens."""
        ids = inputs["input_ids"][0]
        self.check_tokens(ids.tolist(), prompt, placeholders)
        inputs = {key: value for key, value in inputs.items() if key != "attention_mask"}
        prefill, tokens, logits = greedy(self.model, inputs)
        eager_prefill, eager_tokens, eager_logits = greedy(self.eager, inputs)
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        exact_prefill, exact_tokens, exact_logits = greedy(self.exact, wide)
        checks = {
            "greedy_margin_min": greedy_margin(name, tokens, logits),
            "prefill_f32_vs_f64": relative(prefill, exact_prefill),
            "decode_f32_vs_f64": relative(logits, exact_logits),
            "prefill_sdpa_vs_eager": relative(prefill, eager_prefill),
            "decode_sdpa_vs_eager": relative(logits, eager_logits),
        }
        print(f"  {name:18} {len(ids):4} tokens, {len(set(tokens.tolist())):2} distinct of {NEW_TOKENS},",
              " ".join(f"{key} {value:.1e}" for key, value in checks.items()))  # fmt: skip
        assert torch.equal(tokens, eager_tokens) and torch.equal(tokens, exact_tokens), "greedy tokens differ"
        assert max(value for key, value in checks.items() if "_vs_" in key) < ERROR_MAX, checks
        return case_tensors(ids, prefill, tokens, logits, placeholders), checks

    def check_tokens(self, ids, prompt, placeholders):
        """Asserts that transformers and tokenizer.json give the same ids, with each run of a placeholder counted once."""
        squeezed = [t for t, before in zip(ids, [-1] + ids) if not (t == before and t in placeholders)]
        plain = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        assert plain == squeezed, "transformers and tokenizer.json tokenize the prompt differently"
