"""Drafts of tiny EAGLE-3 heads for recorded checkpoints. transformers has no EAGLE-3, so the head is built from its layers.

The head is computed as in vLLM (0.33, `llama_eagle3.py`): for the row of token i, attention reads the normalized embedding of
token i+1 and then the normalized product of `fc` and the inputs of some decoder layers. Positions are those of token i."""

import copy
import json

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoProcessor, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3VLForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from .drafts import ANSWER, DRAFTS
from .files import write_checkpoint_tensors, write_json
from .reference import ERROR_MAX, MARGIN_MIN, norms_in_f64, relative
from .weights import Weights

# The checkpoint that verifies the drafts, its class and cases, and the seed of the head's weights.
HEADS = {
    "eagle3": ("llama", LlamaForCausalLM, ("short", "long"), 5),
    "eagle3_vl": ("qwen3_vl", Qwen3VLForConditionalGeneration, ("single_image", "two_turns"), 4),
}


def settings(name):
    """`config.json` of a head, and the settings of its layer.

    `eagle3` has the layout of the EAGLE authors and a reduced vocabulary. `eagle3_vl` has the layout of speculators, an embedding,
    rows of another width than the decoder's, biases, and positions with three axes."""
    if name == "eagle3":
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 92,
            "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 384,
            "draft_vocab_size": 200, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu",
            "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": [0, 1], "eagle_config": {"use_aux_hidden_state": True}}  # fmt: skip
        return config, config
    layer = {
        "model_type": "llama", "hidden_size": 96, "intermediate_size": 60, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 384, "rms_norm_eps": 1e-06, "hidden_act": "silu",
        "attention_bias": True, "mlp_bias": False, "max_position_embeddings": 4096, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1000000.0, "mrope_interleaved": True, "mrope_section": [24, 20, 20]}}  # fmt: skip
    return {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 384,
            "target_hidden_size": 64, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            "torch_dtype": "bfloat16", "transformer_layer_config": layer}, layer  # fmt: skip


def layers_read(config):
    """The layers whose inputs the head reads. `eagle_config` lists the layers before them, as in SGLang."""
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    return inputs or [layer + 1 for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]


def tensors_of(name, config, layer, target_hidden):
    """The weights of a head by the names that its tool uses."""
    weights = Weights(HEADS[name][3], torch.bfloat16, levels=3, deviation=1.2)
    at = "midlayer" if name == "eagle3" else "layers.0"
    hidden, width, heads = layer["hidden_size"], layer["intermediate_size"], layer["num_attention_heads"]
    head_dim, kv_heads, biases = layer["head_dim"], layer["num_key_value_heads"], "qkvo" if layer.get("attention_bias") else ""
    weights.matrix("fc.weight", hidden, len(layers_read(config)) * target_hidden)
    for part, rows, columns in (("q", heads * head_dim, 2 * hidden), ("k", kv_heads * head_dim, 2 * hidden),
                                ("v", kv_heads * head_dim, 2 * hidden), ("o", hidden, heads * head_dim)):  # fmt: skip
        weights.projection(at, f"self_attn.{part}", rows, columns, biases, gain=1.4)
    for part, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        weights.projection(at, f"mlp.{part}", rows, columns, "", gain=1.5)
    for norm in (f"{at}.input_layernorm", f"{at}.hidden_norm", f"{at}.post_attention_layernorm", "norm"):
        weights.vector(f"{norm}.weight", hidden, mean=1.0)
    weights.matrix("lm_head.weight", config["draft_vocab_size"], hidden, gain=3.0)
    tensors = weights.tensors
    if name == "eagle3":
        # Tokens in ascending order, and differences to their places, as the training tools count them.
        tokens = torch.from_numpy(weights.random.permutation(layer["vocab_size"])[: config["draft_vocab_size"]]).sort().values
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(layer["vocab_size"], dtype=torch.bool).index_fill(0, tokens, True)
    else:
        weights.matrix("embed_tokens.weight", layer["vocab_size"], hidden, gain=hidden**0.5)
    return tensors


class Head(nn.Module):
    def __init__(self, model, config, layer, tensors):
        """`model` is the checkpoint's model, whose embedding is used unless the head has one."""
        super().__init__()
        self.config, self.model, made = LlamaConfig(**layer), [model], {}
        hidden, epsilon = layer["hidden_size"], layer["rms_norm_eps"]
        for name, tensor in tensors.items():
            part, kind = name.rsplit(".", 1) if "." in name else (name, "")
            if kind == "weight" and tensor.dim() == 2:
                made[part] = nn.Linear(tensor.shape[1], tensor.shape[0], bias=f"{part}.bias" in tensors)
            elif kind == "weight":
                made[part] = LlamaRMSNorm(hidden, eps=epsilon)
        self.parts = nn.ModuleDict({part.replace(".", "/"): module for part, module in made.items()})
        for part, module in made.items():
            own = {kind: tensors[f"{part}.{kind}"].float() for kind in ("weight", "bias") if f"{part}.{kind}" in tensors}
            module.load_state_dict(own, strict=True)
        self.at = "midlayer" if "midlayer/hidden_norm" in self.parts else "layers/0"
        self.adds_normed = config.get("norm_before_residual", "speculators_model_type" in config)
        places = tensors.get("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
        self.tokens = places + torch.arange(len(places))
        scaling = layer.get("rope_parameters")
        self.rotary = (Qwen3VLTextRotaryEmbedding if scaling else LlamaRotaryEmbedding)(self.config)
        self.to(next(model.parameters()).dtype).eval()

    def part(self, name):
        return self.parts[f"{self.at}/{name}"]

    def embed(self, tokens):
        table = self.parts["embed_tokens"].weight if "embed_tokens" in self.parts else self.model[0].get_input_embeddings().weight
        return nn.functional.embedding(tokens, table)

    def forward(self, embedded, hidden, positions):
        """The rows [1, rows, hidden] before the final norm. `positions` is [axes, 1, rows]."""
        normed = self.part("hidden_norm")(hidden)
        x = torch.cat([self.part("input_layernorm")(embedded), normed], -1)
        rows, config = x.shape[1], self.config
        heads = lambda name: self.part(f"self_attn/{name}_proj")(x).view(1, rows, -1, config.head_dim).transpose(1, 2)  # noqa: E731
        query, key, value = heads("q"), heads("k"), heads("v")
        angles = self.rotary(x, positions if len(positions) == 3 else positions[0])
        query, key = apply_rotary_pos_emb(query, key, *(angle.to(x.dtype) for angle in angles))
        key, value = (repeat_kv(each, config.num_attention_heads // config.num_key_value_heads) for each in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(1, rows, -1)
        out = (normed if self.adds_normed else hidden) + self.part("self_attn/o_proj")(mixed)
        normed = self.part("post_attention_layernorm")(out)
        gate, up, down = (self.part(f"mlp/{name}_proj") for name in ("gate", "up", "down"))
        return out + down(nn.functional.silu(gate(normed)) * up(normed))

    def logits(self, rows):
        return self.parts["lm_head"](self.parts["norm"](rows))


def layer_inputs(model, inputs, layers):
    """The inputs of decoder layers next to each other [1, tokens, layers * hidden], and positions [axes, 1, tokens]."""
    text, seen, rows = getattr(model.model, "language_model", model.model), {}, {}
    keep = lambda layer: lambda module, args, named: rows.update({layer: args[0] if args else named["hidden_states"]})  # noqa: E731
    hooks = [text.layers[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in layers]
    hooks.append(text.register_forward_pre_hook(lambda module, args, named: seen.update(named), with_kwargs=True))
    model.model.rope_deltas = None
    model.model(**inputs)
    for hook in hooks:
        hook.remove()
    tokens, positions = inputs["input_ids"].shape[1], seen.get("position_ids")
    if hasattr(model.model, "language_model"):
        positions = torch.arange(tokens).expand(3, 1, -1) if positions is None else positions[-3:]
    else:
        positions = torch.arange(tokens).expand(1, 1, -1)
    return torch.cat([rows[layer] for layer in layers], -1), positions


@torch.no_grad()
def drafts(model, name, tensors, inputs, prompt):
    """Logits of the head for each row but the last, and the logits and tokens of the drafts after the prompt."""
    config, layer = settings(name)
    head = Head(model, config, layer, tensors)
    norms_in_f64(head) if next(model.parameters()).dtype == torch.float64 else None
    rows, positions = layer_inputs(model, inputs, layers_read(config))
    embedded = head.embed(inputs["input_ids"])[:, 1:]
    hidden, positions = head.parts["fc"](rows)[:, :-1], positions[..., :-1]
    rows = head(embedded, hidden, positions)
    logits = head.logits(rows)[0]
    embedded, hidden, positions = embedded[:, :prompt], hidden[:, :prompt], positions[..., :prompt]
    last, of_drafts, tokens = rows[:, prompt - 1 : prompt], [logits[prompt - 1]], []
    while True:
        top = of_drafts[-1].topk(2).values
        assert (top[0] - top[1]) / of_drafts[-1].abs().max() > MARGIN_MIN, "a draft is nearly a tie: choose another seed"
        tokens.append(int(head.tokens[of_drafts[-1].argmax()]))
        if len(tokens) == DRAFTS:
            return logits, torch.stack(of_drafts), torch.tensor(tokens)
        embedded = torch.cat([embedded, head.embed(torch.tensor([[tokens[-1]]]))], 1)
        hidden, positions = torch.cat([hidden, last], 1), torch.cat([positions, positions[..., -1:] + 1], -1)
        last = head(embedded, hidden, positions)[:, -1:]
        of_drafts.append(head.logits(last)[0, 0])


def case_inputs(root, folder, facts, answer):
    """The prompt of a recorded case and the tokens that follow it."""
    if not facts.get("images"):
        inputs = dict(AutoTokenizer.from_pretrained(folder)(facts["prompt"], return_tensors="pt", add_special_tokens=False))
    else:
        images = [Image.open(root / "pictures" / file).convert("RGB") for file in facts["images"]]
        inputs = dict(AutoProcessor.from_pretrained(folder)(text=[facts["prompt"]], images=images, return_tensors="pt", add_special_tokens=False))
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer[None]], 1)
    types = inputs.pop("mm_token_type_ids", None)
    if types is not None:
        inputs["mm_token_type_ids"] = torch.cat([types, types.new_zeros(1, ANSWER)], 1)
    del inputs["attention_mask"]
    return inputs


def record(root, _):
    for name, (target, kind, cases, _) in HEADS.items():
        print(name)
        config, layer = settings(name)
        folder = root / target
        load = lambda: kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()  # noqa: E731, B023
        model, exact = load(), load().double()
        norms_in_f64(exact)
        text = getattr(model.config, "text_config", model.config)
        tensors = tensors_of(name, config, layer, text.hidden_size)
        (root / name / "cases").mkdir(parents=True, exist_ok=True)
        write_json(root / name / "config.json", config)
        write_checkpoint_tensors(root / name, copy.copy(tensors))
        for case_name in cases:
            path = folder / "cases" / f"{case_name}.safetensors"
            case, facts = load_file(path), json.loads(path.with_suffix(".json").read_text())
            prompt = len(case["input_ids"])
            inputs = case_inputs(root, folder, facts, case["greedy_tokens"][:ANSWER])
            wide = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
            logits, of_drafts, tokens = drafts(model, name, tensors, inputs, prompt)
            exact_logits, exact_of_drafts, exact_tokens = drafts(exact, name, tensors, wide, prompt)
            error = max(relative(logits, exact_logits), relative(of_drafts, exact_of_drafts))
            print(f"  {case_name:18} drafts differ by {error:.1e} from f64")
            assert error < ERROR_MAX and torch.equal(tokens, exact_tokens), error
            rows = sorted(set(case["logit_positions"].tolist()) | set(range(prompt, prompt + ANSWER - 1)))
            case |= {
                "draft_positions": torch.tensor(rows),  # [kept], rows of the prompt and of `greedy_tokens`
                "draft_logits": logits[rows],  # [kept, draft vocabulary]
                "drafted_tokens": tokens,  # [3], after the last token of the prompt
                "drafted_logits": of_drafts,  # [3, draft vocabulary]; draft i chose drafted_tokens[i]
            }
            to = root / name / "cases" / f"{case_name}.safetensors"
            save_file({key: value.contiguous().clone() for key, value in case.items()}, to)
            write_json(to.with_suffix(".json"), facts)
