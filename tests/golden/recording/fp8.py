"""Tiny checkpoints with FP8 weights, and the logits of an f64 model that rounds activations as the format prescribes.

transformers 5.17 does not run FP8 on a CPU. The reference is its f64 model, in which each FP8 projection rounds its
activations to E4M3 (scales and quotients in f32, torch's conversion) and multiplies them by the dequantized weight.

Two other implementations check this reference. transformers' `Fp8Dequantize` must give the same weights for the format
`block`. compressed-tensors 0.20 with accelerate 1.15 must give the same logits for `channel`, if they can be imported."""

import importlib.util
import math
import types

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from .files import write_case, write_json
from .fp8_formats import BLOCK, PROJECTION, Format, over_blocks
from .messages import LONG, text
from .reference import case_tensors, greedy, greedy_margin, norms_in_f64, relative
from .text_families import add_output, family
from .tokenizer import write_tiny_tokenizer
from .weights import Weights

CHECKPOINTS = {
    "qwen3_fp8": ("qwen3", Format("block", ["model.layers.1.mlp.down_proj", "model.layers.1.self_attn"])),
    "qwen3_fp8_dynamic": ("qwen3", Format("channel", ["layers.0.self_attn"])),
    "qwen3_fp8_modelopt": ("qwen3", Format("tensor", ["model.layers.1.self_attn"])),
    "qwen3_moe_fp8": ("qwen3_moe", Format("block", [])),
    "qwen3_moe_fp8_dynamic": ("qwen3_moe", Format("channel", [])),
}
SEEDS = {"qwen3_fp8": 709, "qwen3_fp8_dynamic": 47, "qwen3_fp8_modelopt": 30, "qwen3_moe_fp8": 203, "qwen3_moe_fp8_dynamic": 34}


def sizes(name):
    """Settings with partial blocks, and projections that do not start at a block boundary."""
    family_name, _ = CHECKPOINTS[name]
    kind, config, _ = family(family_name)
    config = config | {"hidden_size": 144, "intermediate_size": 136, "num_attention_heads": 4, "num_key_value_heads": 2,
                       "head_dim": 32, "moe_intermediate_size": 136, "num_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    if name == "qwen3_fp8":  # some matrices of whole blocks, which transformers can dequantize too
        config |= {"hidden_size": 256}
    if family_name == "qwen3_moe":
        config |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "qwen3_moe_fp8":  # whole blocks, so that all experts fit in one tensor
        config |= {"moe_intermediate_size": 128}
    if family_name == "qwen3":
        config = {key: value for key, value in config.items() if "expert" not in key and "moe" not in key}
    return kind, config


def draw_weights(name, config):
    weights = Weights(SEEDS[name], torch.bfloat16)
    weights.decoder(config, embedding_deviation=0.6, biases="", head_norms=True)
    # If embeddings were multiples of one step, they would be simple fractions of a row's largest
    # element. Such fractions are midpoints between E4M3 numbers.
    weights.vector("model.embed_tokens.weight", (config["vocab_size"], config["hidden_size"]), deviation=0.6)
    if name in ("qwen3_fp8", "qwen3_moe_fp8_dynamic"):
        for key in [key for key in weights.tensors if key.endswith("layernorm.weight")]:
            norm = weights.tensors[key]
            weights.tensors[key] = norm.float() * (1 + torch.from_numpy(weights.random.random(norm.shape)).float() / 256)
    if CHECKPOINTS[name][1].name == "block":
        for key in filter(PROJECTION.fullmatch, weights.tensors):
            vary_blocks(weights, key)
    add_output(weights, config)
    return weights.tensors


def vary_blocks(weights, name):
    """Gives each block of a matrix a different scale, so that a misplaced scale changes the logits."""
    shape = weights.tensors[name].shape
    blocks = [math.ceil(extent / BLOCK) for extent in shape]
    factors = weights.random.permutation(np.linspace(0.5, 1, math.prod(blocks))).reshape(blocks)
    weights.tensors[name] = (weights.tensors[name].float() * over_blocks(torch.from_numpy(factors), shape)).to(weights.dtype)


def write_checkpoint(folder, name, inputs):
    """Writes the files, and returns the model class, the unquantized settings and the tensors."""
    how, (kind, config) = CHECKPOINTS[name][1], sizes(name)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, _ = write_tiny_tokenizer(folder, inputs.qwen2_5, inputs.qwen2_5["chat_template"])
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    plain = config | {"eos_token_id": ends[0]}
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": False})
    tensors = how.write(draw_weights(name, config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if how.name == "tensor":
        write_json(folder / "config.json", plain)
        write_json(folder / "hf_quant_config.json", {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {
            "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", *(f"{part}*" for part in how.skipped)]}})
    else:
        write_json(folder / "config.json", plain | {"quantization_config": how.config()})
    return kind, plain, load_file(folder / "model.safetensors")


def dequantized(how, tensors):
    """The f64 weights by name."""
    wide = {}
    for name, tensor in tensors.items():
        if how.is_unquantized(name) or not name.endswith("weight"):
            if "scale" not in name:
                wide[name] = tensor.double()
            continue
        wide[name] = how.widened(tensors, name)
        if how.name == "block" and all(extent % BLOCK == 0 or extent < BLOCK for extent in tensor.shape):
            check_dequantized(tensors, name, wide[name])
    return wide


def check_dequantized(tensors, name, expected):
    """Asserts that transformers dequantizes weights of whole blocks to the same numbers."""
    scales = tensors[name.removesuffix("weight") + "weight_scale_inv"]
    config = types.SimpleNamespace(weight_block_size=(BLOCK, BLOCK))
    quantizer = types.SimpleNamespace(quantization_config=config)
    theirs = Fp8Dequantize(quantizer)._dequantize_one(tensors[name], scales.float(), output_dtype=torch.float32)
    assert torch.equal(theirs.double(), expected.float().double()), name


def reference_model(kind, config, how, tensors):
    """The f64 model whose FP8 projections round their activations."""
    model = kind._from_config(kind.config_class(**config), dtype=torch.float64).eval()
    wide = dequantized(how, tensors)
    modules, text = dict(model.named_modules()), config.get("text_config", config)
    for at, module in modules.items():
        if type(module).__name__.endswith("Experts"):
            of = lambda part: torch.stack([  # noqa: E731
                wide.pop(f"{at}.{expert}.{part}_proj.weight") for expert in range(text["num_experts"])])  # noqa: B023
            gate, up, down = of("gate"), of("up"), of("down")
            wide[f"{at}.gate_up_proj"], wide[f"{at}.down_proj"] = torch.cat([gate, up], 1), down
            rounding = how.rounding(tensors, f"{at}.0.gate_proj.weight")
            module.forward = types.MethodType(experts_forward(rounding), module)
    found = model.load_state_dict(wide, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}, found
    model.tie_weights()
    for name, module in modules.items():
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" in tensors and not how.is_unquantized(f"{name}.weight"):
            module.forward = types.MethodType(linear_forward(how.rounding(tensors, f"{name}.weight")), module)
    norms_in_f64(model)
    return model


def linear_forward(rounding):
    return lambda self, x: F.linear(rounding(x).to(x.dtype), self.weight, self.bias)


def experts_forward(rounding):
    def forward(self, hidden, indices, weights):
        out = torch.zeros_like(hidden)
        for row in range(hidden.shape[0]):
            for rank in range(indices.shape[1]):
                expert = int(indices[row, rank])
                gate, up = F.linear(rounding(hidden[row]).to(hidden.dtype), self.gate_up_proj[expert]).chunk(2, -1)
                down = F.linear(rounding(F.silu(gate) * up).to(hidden.dtype), self.down_proj[expert])
                out[row] += weights[row, rank] * down
        return out

    return forward


def check_by_compressed_tensors(folder, ids, expected):
    """Compares with the layers of compressed-tensors, in f32."""
    if any(importlib.util.find_spec(name) is None for name in ("accelerate", "compressed_tensors")):
        return print("           (not compared with compressed-tensors, which is not installed)")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits[0]
    error = relative(theirs, expected)
    print(f"           compressed-tensors differs by {error:.1e}")
    assert error < 1e-4, error


def record_case(folder, name, messages, model, tokenizer):
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    prefill, tokens, logits = greedy(model, {"input_ids": ids})
    if folder.name == "qwen3_fp8_dynamic":
        check_by_compressed_tensors(folder, ids, prefill)
    margin = greedy_margin(name, tokens, logits)
    print(f"  {name:8} {ids.shape[1]} tokens, {len(set(tokens.tolist()))} distinct, margin {margin:.1e}")
    tensors = case_tensors(ids[0], prefill.float(), tokens, logits.float(), set())
    facts = {"messages": messages, "prompt": prompt, "checks": {"greedy_margin_min": float(f"{margin:.1e}")}}
    facts["greedy_text"] = tokenizer.decode(tokens, skip_special_tokens=False)
    write_case(folder / "cases", name, tensors, facts)
    return ids, (prefill, tokens, logits)


@torch.no_grad()
def record(root, inputs):
    for name, (_, how) in CHECKPOINTS.items():
        print(name)
        kind, config, tensors = write_checkpoint(root / name, name, inputs)
        model = reference_model(kind, config, how, tensors)
        tokenizer = AutoTokenizer.from_pretrained(root / name)
        for case, content in {"short": "Hi!", "long": LONG[:60]}.items():
            record_case(root / name, case, [text("user", content)], model, tokenizer)
