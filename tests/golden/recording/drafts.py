"""Drafts of Qwen3.5's draft head (MTP), computed with the layers of transformers, which does not load `mtp.*` itself.

The head is computed as in vLLM (0.33, `qwen3_5_mtp.py`): for the row of token i, `fc` reads the normalized embedding of
token i+1 and then the normalized row of the decoder after its final norm. The layer has the positions of token i."""

import copy
import json
import sys

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoProcessor

from .delta_nets import use_token_by_token_rule
from .reference import ERROR_MAX, MARGIN_MIN, norms_in_f64, relative

# Greedy tokens of a case that follow its prompt, and drafts after the prompt.
ANSWER, DRAFTS = 8, 3


class DraftHead(nn.Module):
    def __init__(self, model, tensors):
        """`tensors` are the checkpoint's tensors. The embedding and the output projection are taken from `model`."""
        super().__init__()
        text = model.model.language_model
        kinds, config = sys.modules[type(text).__module__], copy.copy(text.config)
        config.layer_types = ["full_attention"]
        prefix = type(text).__name__.removesuffix("TextModel")
        norm = getattr(kinds, f"{prefix}RMSNorm")
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(hidden, eps=epsilon) for _ in range(3))
        self.layers = nn.ModuleList([getattr(kinds, f"{prefix}DecoderLayer")(config, 0)])
        own = {name.removeprefix("mtp."): tensor.float() for name, tensor in tensors.items() if name.startswith("mtp.")}
        self.load_state_dict(own, strict=True)
        self.to(text.norm.weight.dtype).eval()
        self.rotary = text.rotary_emb

    def combine(self, embedded, hidden):
        """The input of the layer [1, rows, hidden] for the embeddings of the next tokens and rows of the same shape."""
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))

    def forward(self, inputs, positions):
        """The rows after the final norm. `positions` is [3, 1, rows]."""
        rows = inputs.shape[1]
        mask = torch.full((rows, rows), torch.finfo(inputs.dtype).min, dtype=inputs.dtype).triu(1)[None, None]
        angles = self.rotary(inputs, positions)
        return self.norm(self.layers[0](inputs, position_embeddings=angles, attention_mask=mask))


def decoder_rows(model, inputs):
    """Embeddings of all tokens and pictures, rows after the final norm, and positions [3, 1, tokens]."""
    seen = {}
    hook = lambda module, args, named: seen.update(named)  # noqa: E731
    handle = model.model.language_model.register_forward_pre_hook(hook, with_kwargs=True)
    model.model.rope_deltas = None
    hidden = model.model(**inputs).last_hidden_state
    handle.remove()
    positions = seen["position_ids"]
    if positions is None:
        positions = torch.arange(hidden.shape[1]).expand(3, 1, -1)
    return seen["inputs_embeds"], hidden, positions[-3:]


@torch.no_grad()
def drafts(model, tensors, inputs, prompt):
    """Logits of the head for each row but the last, and the logits and tokens of the drafts after the prompt."""
    head = DraftHead(model, tensors)
    embedded, hidden, positions = decoder_rows(model, inputs)
    layer_inputs = head.combine(embedded[:, 1:], hidden[:, :-1])
    normed = head(layer_inputs, positions[..., :-1])
    logits = model.lm_head(normed)[0]
    layer_inputs, positions = layer_inputs[:, :prompt], positions[..., :prompt]
    last, of_drafts, tokens = normed[:, prompt - 1 : prompt], [logits[prompt - 1]], []
    while True:
        top = of_drafts[-1].topk(2).values
        assert (top[0] - top[1]) / of_drafts[-1].abs().max() > MARGIN_MIN, "a draft is nearly a tie: choose another case"
        tokens.append(int(of_drafts[-1].argmax()))
        if len(tokens) == DRAFTS:
            return logits, torch.stack(of_drafts), torch.tensor(tokens)
        token = model.get_input_embeddings()(torch.tensor([[tokens[-1]]]))
        layer_inputs = torch.cat([layer_inputs, head.combine(token, last)], 1)
        positions = torch.cat([positions, positions[..., -1:] + 1], -1)
        last = head(layer_inputs, positions)[:, -1:]
        of_drafts.append(model.lm_head(last)[0, 0])


def record(root, folder, kind, names):
    """Adds the drafts to the recorded cases `names` of the checkpoint in `folder`."""
    processor = AutoProcessor.from_pretrained(folder)
    load = lambda: kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()  # noqa: E731
    model, exact = load(), load().double()
    norms_in_f64(exact)
    for each in (model, exact):
        each.set_experts_implementation("eager")
    use_token_by_token_rule(exact)
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    for name in names:
        path = folder / "cases" / f"{name}.safetensors"
        case, facts = load_file(path), json.loads(path.with_suffix(".json").read_text())
        images = [Image.open(root / "pictures" / file).convert("RGB") for file in facts["images"]]
        inputs = dict(processor(text=[facts["prompt"]], images=images or None, return_tensors="pt"))
        answer, prompt = case["greedy_tokens"][:ANSWER], len(case["input_ids"])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answer[None]], 1)
        types = inputs.pop("mm_token_type_ids", None)
        if types is not None:
            inputs["mm_token_type_ids"] = torch.cat([types, types.new_zeros(1, ANSWER)], 1)
        del inputs["attention_mask"]
        wide = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        logits, of_drafts, tokens = drafts(model, tensors, inputs, prompt)
        exact_logits, exact_of_drafts, exact_tokens = drafts(exact, tensors, wide, prompt)
        error = max(relative(logits, exact_logits), relative(of_drafts, exact_of_drafts))
        print(f"  {name:18} drafts differ by {error:.1e} from f64")
        assert error < ERROR_MAX and torch.equal(tokens, exact_tokens), error
        rows = sorted(set(case["logit_positions"].tolist()) | set(range(prompt, prompt + ANSWER - 1)))
        case |= {
            "draft_positions": torch.tensor(rows),  # [kept], rows of the prompt and of `greedy_tokens`
            "draft_logits": logits[rows],  # [kept, vocabulary]
            "drafted_tokens": tokens,  # [3], after the last token of the prompt
            "drafted_logits": of_drafts,  # [3, vocabulary]; draft i chose drafted_tokens[i]
        }
        save_file({key: value.contiguous().clone() for key, value in case.items()}, path)
