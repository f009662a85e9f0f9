"""A tiny Qwen3.5-MoE checkpoint with FP8 weights in the format of its releases.

Projections are FP8 with block scales, and experts are stored one by one. The projections of the gates of gated delta
nets, the router, the gate of the shared expert, and the vision encoder are bf16."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3_5MoeForConditionalGeneration

from . import fp8, qwen3_5
from .delta_nets import use_token_by_token_rule
from .files import write_json
from .fp8_formats import PROJECTION, Format, Tie
from .messages import LONG, text
from .qwen2_5_vl import with_new_names
from .qwen3_vl import vision_weights
from .reference import ERROR_MAX, greedy, relative
from .tokenizer import SPLIT_QWEN3_5, write_tiny_tokenizer
from .weights import Weights

NAME, SEED = "qwen3_5_moe_fp8", 1449
# Partial blocks in both axes. The queries, gates, keys and values of a projection start at block boundaries, as in all
# releases. Attention comes first, so that few sums follow the f32 noise of a gated delta net.
SIZES = {"hidden_size": 144, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 136,
         "head_dim": 128, "layer_types": ["full_attention", "linear_attention"], "rope_parameters": {
             "mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default", "rope_theta": 10000000,
             "partial_rotary_factor": 0.25}}  # fmt: skip


def draw_weights(config, first_added, seed):
    weights = Weights(seed, torch.bfloat16, levels=3, deviation=1.2)
    vision_weights(weights, config["vision_config"])
    qwen3_5.add_decoder(weights, config["text_config"], first_added)
    # The values of the embedding are not multiples of one step, as in `fp8.py`.
    rows = config["text_config"]["vocab_size"], config["text_config"]["hidden_size"]
    weights.vector("model.embed_tokens.weight", rows, deviation=1.0)
    for name in filter(PROJECTION.fullmatch, weights.tensors):
        fp8.vary_blocks(weights, name)
    return with_new_names(weights.tensors)


def write_checkpoint(folder, inputs, seed):
    folder.mkdir(parents=True, exist_ok=True)
    template = qwen3_5.qwen3_5_template()
    tokenizer, ids = write_tiny_tokenizer(folder, inputs.qwen3, template, SPLIT_QWEN3_5)
    qwen3_5.write_settings(folder, "qwen3_5_moe", tokenizer, ids)
    plain = json.loads((folder / "config.json").read_text())
    plain["text_config"] |= SIZES
    plain["vision_config"]["out_hidden_size"] = SIZES["hidden_size"]
    how = Format("block", [])
    tensors = how.write(draw_weights(plain, ids["<|endoftext|>"], seed))
    # The releases list every module that is not FP8.
    modules = [name.removesuffix(".weight") for name, tensor in tensors.items()
               if name.endswith(".weight") and tensor.dim() > 1 and not PROJECTION.fullmatch(name)]  # fmt: skip
    write_json(folder / "config.json", plain | {"quantization_config": how.config() | {"modules_to_not_convert": modules}})
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return how, plain, load_file(folder / "model.safetensors")


def check_rounding(model, ids, expected):
    """Raises Tie if the same model in f32 rounds an activation to another E4M3 number than in f64.

    Sums over many tokens have more noise than the margin in `fp8_formats`, and no seed would pass with a larger margin.
    `model` is converted to f32."""
    model.float().model.rope_deltas = None
    prefill, tokens, logits = greedy(model, {"input_ids": ids})
    error = max(relative(prefill, expected[0]), relative(logits, expected[2]))
    print(f"           f32 differs by {error:.1e}")
    if error > ERROR_MAX or not torch.equal(tokens, expected[1]):
        raise Tie


@torch.no_grad()
def record(root, inputs, seed=SEED):
    print(NAME)
    how, config, tensors = write_checkpoint(root / NAME, inputs, seed)
    tokenizer = AutoTokenizer.from_pretrained(root / NAME)
    for case, content in {"short": "Hi!", "long": LONG[:16]}.items():
        model = fp8.reference_model(Qwen3_5MoeForConditionalGeneration, config, how, tensors)
        use_token_by_token_rule(model)
        ids, expected = fp8.record_case(root / NAME, case, [text("user", content)], model, tokenizer)
        check_rounding(model, ids, expected)
