"""Drafts of tiny Gemma 4 assistants for recorded checkpoints, one token at a time, as in transformers (5.17,
`SinglePositionMultiTokenCandidateGenerator`), except that windows are as long as in vLLM.

For the row of token i, the assistant reads the embedding of token i+1 and the decoder's row i after the final norm. Each layer
attends to the decoder's keys and values of tokens 0 to i, and all drafts have the position i+1. In layers with a sliding
window, the last `sliding_window` of these keys are visible, as in vLLM (0.33). transformers shows one more."""

import copy
import json

import torch
from safetensors.torch import load_file, save_file
from transformers import (Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4ForConditionalGeneration)

from .drafts import ANSWER, DRAFTS
from .eagle3 import case_inputs
from .files import write_checkpoint_tensors, write_json
from .gemma4 import FULL, SLIDING, text_settings
from .reference import ERROR_MAX, MARGIN_MIN, norms_in_f64, relative
from .weights import Weights

# The checkpoint that verifies the drafts, its class and cases, and the seed of the assistant's weights.
ASSISTANTS = {
    "gemma4_assistant": ("gemma4_sharing", Gemma4ForCausalLM, ("short", "long"), 3),
    "gemma4_assistant_vl": ("gemma4", Gemma4ForConditionalGeneration, ("one_image", "two_turns"), 5),
}


def settings(name):
    """`config.json`. `gemma4_assistant` is like the released assistants of E2B and E4B, which choose among the tokens of the
    best clusters. `gemma4_assistant_vl` computes all logits, like the other released assistants, and is wider than
    the decoder."""
    target = text_settings(ASSISTANTS[name][0])
    hidden, is_ordered = (32, True) if name == "gemma4_assistant" else (80, False)
    text = target | {
        "hidden_size": hidden, "hidden_size_per_layer_input": 0, "intermediate_size": 56, "layer_types": [SLIDING, SLIDING, FULL],
        "num_hidden_layers": 3, "num_kv_shared_layers": 3, "use_double_wide_mlp": False, "vocab_size_per_layer_input": 0,
        "use_bidirectional_attention": None, "final_logit_softcapping": None, "num_attention_heads": 4}  # fmt: skip
    return {"architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": target["hidden_size"],
            "centroid_intermediate_top_k": 5, "dtype": "bfloat16", "model_type": "gemma4_assistant", "num_centroids": 24,
            "text_config": text, "tie_word_embeddings": True, "use_ordered_embeddings": is_ordered}  # fmt: skip


def tensors_of(name, model):
    """The weights by the names of transformers, except the tied output projection."""
    weights = Weights(ASSISTANTS[name][3], torch.bfloat16, levels=3, deviation=1.2)
    for key, tensor in model.state_dict().items():
        if key.endswith("layer_scalar"):
            weights.vector(key, 1, mean=0.9, deviation=0.05)
        elif key.endswith("token_ordering"):
            weights.tensors[key] = torch.from_numpy(weights.random.permutation(len(tensor)))
        elif key.endswith("q_norm.weight"):
            weights.vector(key, len(tensor), mean=0.3, deviation=0.1)
        elif tensor.dim() == 1:
            weights.vector(key, len(tensor), mean=1.0)
        elif key != "lm_head.weight":
            weights.matrix(key, *tensor.shape, gain=3.0 if key.endswith("embed_tokens.weight") else 1.5)
    return weights.tensors


def load(config, tensors, dtype):
    # Copied, because the configuration class changes the dictionaries that it is given.
    kind = Gemma4AssistantConfig(**copy.deepcopy(config))
    model = Gemma4AssistantForCausalLM._from_config(kind, attn_implementation="eager").to(dtype)
    kept = {key: tensor if tensor.dtype == torch.int64 else tensor.float() for key, tensor in tensors.items()}
    kept["lm_head.weight"] = kept["model.embed_tokens.weight"]
    model.load_state_dict(kept, strict=True)
    norms_in_f64(model) if dtype == torch.float64 else None
    return model.eval()


def margin_after(scores, chosen):
    """How far the last of the `chosen` largest scores is above the next score."""
    top = scores.topk(chosen + 1).values
    return (top[chosen - 1] - top[chosen]) / scores.abs().max()


class Drafter:
    def __init__(self, model, assistant, inputs):
        """Runs the decoder `model` once over all tokens of `inputs`."""
        self.embedding, self.assistant, self.window = model.get_input_embeddings(), assistant, assistant.config.text_config.sliding_window
        outputs = model.model(**inputs, return_shared_kv_states=True, use_cache=False)
        self.hidden, self.kv, self.logits = outputs.last_hidden_state, outputs.shared_kv_states, None
        read = assistant.masked_embedding.centroids if assistant.masked_embedding else assistant.lm_head
        read.register_forward_hook(lambda module, args, logits: setattr(self, "logits", logits[0, 0]))

    def draft(self, row, token, hidden):
        """Returns the scores of the clusters (or all logits), the draft, and the input row of the next draft, [1, 1, hidden].
        `token` follows the token of `row` or the previous draft."""
        kept = {kind: [states[:, :, : row + 1] for states in kv] for kind, kv in self.kv.items()}
        kept[SLIDING] = [states[:, :, -self.window :] for states in kept[SLIDING]]
        inputs = torch.cat([self.embedding(torch.tensor([[token]])), hidden], -1)
        outputs = self.assistant(inputs_embeds=inputs, position_ids=torch.tensor([[row + 1]]),
                                 shared_kv_states={kind: tuple(kv) for kind, kv in kept.items()}, use_cache=False)  # fmt: skip
        # Neither the choice of the clusters nor that of the token may be nearly a tie.
        choices = [(outputs.logits[0, 0], 1)]
        if self.assistant.masked_embedding:
            choices.append((self.logits, self.assistant.config.centroid_intermediate_top_k))
        self.margin = min((margin_after(scores, chosen) for scores, chosen in choices))
        return self.logits, int(outputs.logits[0, 0].argmax()), outputs.last_hidden_state


@torch.no_grad()
def drafts(model, assistant, inputs, rows, prompt):
    """Logits after each row of `rows`, and the logits and tokens of the drafts after the prompt."""
    drafter, tokens = Drafter(model, assistant, inputs), inputs["input_ids"][0]
    logits = [drafter.draft(row, int(tokens[row + 1]), drafter.hidden[:, row : row + 1])[0] for row in rows]
    of_drafts, drafted, token, hidden = [], [], int(tokens[prompt]), drafter.hidden[:, prompt - 1 : prompt]
    for _ in range(DRAFTS):
        of_draft, token, hidden = drafter.draft(prompt - 1, token, hidden)
        assert drafter.margin > MARGIN_MIN, "a draft is nearly a tie: choose another seed"
        of_drafts.append(of_draft)
        drafted.append(token)
    return torch.stack(logits), torch.stack(of_drafts), torch.tensor(drafted)


def record(root, _):
    for name, (target, kind, cases, _) in ASSISTANTS.items():
        print(name)
        config, folder = settings(name), root / target
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        exact = copy.deepcopy(model).double()
        norms_in_f64(exact)
        made = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**copy.deepcopy(config)))
        tensors = tensors_of(name, made)
        assistant, exact_assistant = (load(config, tensors, dtype) for dtype in (torch.float32, torch.float64))
        (root / name / "cases").mkdir(parents=True, exist_ok=True)
        write_json(root / name / "config.json", config)
        write_checkpoint_tensors(root / name, copy.copy(tensors))
        for case_name in cases:
            path = folder / "cases" / f"{case_name}.safetensors"
            case, facts = load_file(path), json.loads(path.with_suffix(".json").read_text())
            prompt = len(case["input_ids"])
            inputs = case_inputs(root, folder, facts, case["greedy_tokens"][:ANSWER])
            assert torch.equal(inputs["input_ids"][0, :prompt], case["input_ids"].long())
            pictures = inputs.get("mm_token_type_ids", torch.zeros_like(inputs["input_ids"]))[0]
            # A row before a picture's token has no draft, because picture tokens are never sampled.
            kept = [row for row in case["logit_positions"].tolist() if row < prompt and not pictures[row + 1]]
            rows = sorted(set(kept) | set(range(prompt - 1, prompt + ANSWER - 1)))
            wide = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
            logits, of_drafts, tokens = drafts(model, assistant, inputs, rows, prompt)
            exact_logits, exact_of_drafts, exact_tokens = drafts(exact, exact_assistant, wide, rows, prompt)
            error = max(relative(logits, exact_logits), relative(of_drafts, exact_of_drafts))
            print(f"  {case_name:18} drafts differ by {error:.1e} from f64")
            assert error < ERROR_MAX and torch.equal(tokens, exact_tokens), error
            case |= {
                "draft_positions": torch.tensor(rows),  # [kept], rows of the prompt and of `greedy_tokens`
                "draft_logits": logits,  # [kept, clusters or vocabulary]
                "drafted_tokens": tokens,  # [3], after the last token of the prompt
                "drafted_logits": of_drafts,  # [3, clusters or vocabulary]; draft i chose drafted_tokens[i]
            }
            to = root / name / "cases" / f"{case_name}.safetensors"
            save_file({key: value.contiguous().clone() for key, value in case.items()}, to)
            write_json(to.with_suffix(".json"), facts)
