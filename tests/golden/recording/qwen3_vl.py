"""Tiny Qwen3-VL checkpoints in the released layout: two dense ones, and one with experts."""

import math
from typing import NamedTuple

import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration

from . import picture_chats, video_chats
from .chat_templates import qwen3_vl_template
from .files import write_checkpoint_tensors, write_json
from .mixtures import fuse_experts
from .qwen2_5_vl import with_new_names
from .tokenizer import write_tiny_tokenizer
from .weights import Weights


class Sizes(NamedTuple):
    seed: int
    vision_heads: int
    vision_head_dim: int
    vision_depth: int
    deepstack: list  # the vision layers whose output goes to the first decoder layers
    decoder_layers: int
    is_tied: bool


CHECKPOINTS = {
    "qwen3_vl": Sizes(9, 2, 64, 4, [0, 2, 3], 4, True),  # vision heads as in 2B and 4B
    "qwen3_vl_72": Sizes(1, 2, 72, 3, [0, 1, 2], 3, False),  # as in 8B and 32B; the last decoder layer has a deepstack input
    "qwen3_vl_moe": Sizes(1, 1, 72, 2, [0, 1], 3, False),  # as in 30B-A3B
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
           "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen3_vl_moe_text"}  # fmt: skip
# `qwen3_vl` records every case. The other checkpoints record these cases.
PICTURE_CASES, VIDEO_CASES = ["several_images", "two_turns"], ["video_even"]


def vision_weights(weights, config):
    """Qwen3-VL's vision encoder."""
    hidden, merged = config["hidden_size"], config["hidden_size"] * config["spatial_merge_size"] ** 2
    patch = (3, config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    weights.linear("visual.patch_embed.proj", hidden, *patch, gain=1.5)
    # The position embeddings are as large as the patch embeddings, so that a wrong position changes
    # the result.
    weights.matrix("visual.pos_embed.weight", config["num_position_embeddings"], hidden, gain=math.sqrt(hidden))
    for block in range(config["depth"]):
        at = f"visual.blocks.{block}"
        weights.layer_norm(f"{at}.norm1", hidden)
        weights.linear(f"{at}.attn.qkv", 3 * hidden, hidden, gain=1.4)
        weights.linear(f"{at}.attn.proj", hidden, hidden, gain=1.5)
        weights.layer_norm(f"{at}.norm2", hidden)
        weights.linear(f"{at}.mlp.linear_fc1", config["intermediate_size"], hidden, gain=1.5)
        weights.linear(f"{at}.mlp.linear_fc2", hidden, config["intermediate_size"], gain=1.5)
    deep = [f"visual.deepstack_merger_list.{part}" for part in range(len(config["deepstack_visual_indexes"]))]
    for at in ["visual.merger", *deep]:
        weights.layer_norm(f"{at}.norm", merged if at in deep else hidden)
        weights.linear(f"{at}.linear_fc1", merged, merged)
        weights.linear(f"{at}.linear_fc2", config["out_hidden_size"], merged, gain=1.5)


def text_settings(sizes, ids):
    return {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": ids["<|endoftext|>"], "dtype": "bfloat16",
        "eos_token_id": ids["<|im_end|>"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 64,
        "initializer_range": 0.02, "intermediate_size": 92, "max_position_embeddings": 4096, "model_type": "qwen3_vl_text",
        "num_attention_heads": 4, "num_hidden_layers": sizes.decoder_layers, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": True, "vocab_size": 384}  # fmt: skip


def vision_settings(sizes, model_type):
    return {
        "deepstack_visual_indexes": sizes.deepstack, "depth": sizes.vision_depth, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": sizes.vision_heads * sizes.vision_head_dim, "in_channels": 3, "initializer_range": 0.02,
        "intermediate_size": 80, "model_type": model_type, "num_heads": sizes.vision_heads, "num_position_embeddings": 144,
        "out_hidden_size": 64, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip


def write_settings(folder, name, sizes, tokenizer, ids):
    """Writes the JSON files and the chat template. Returns the settings of the decoder and of the vision encoder.

    As in the released files, `size` gives the pixel limits. The limits of a video apply to all its frames together."""
    text_config, kind, architecture = text_settings(sizes, ids), "qwen3_vl", "Qwen3VLForConditionalGeneration"
    if name == "qwen3_vl_moe":
        text_config |= EXPERTS
        kind, architecture = "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"
    vision_config = vision_settings(sizes, kind)
    write_json(folder / "config.json", {
        "architectures": [architecture], "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "model_type": kind, "text_config": text_config, "tie_word_embeddings": sizes.is_tied,
        "transformers_version": "4.57.0.dev0", "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_config": vision_config, "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>")})  # fmt: skip
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "top_k": 20, "top_p": 0.8,
        "repetition_penalty": 1.0, "temperature": 0.7, "transformers_version": "4.56.0"})  # fmt: skip
    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
               "processor_class": "Qwen3VLProcessor"}  # fmt: skip
    write_json(folder / "preprocessor_config.json", patches | {
        "size": {"shortest_edge": 6 * 32**2, "longest_edge": 40 * 32**2}, "image_processor_type": "Qwen2VLImageProcessorFast"})
    write_json(folder / "video_preprocessor_config.json", patches | {
        "size": {"shortest_edge": 12 * 32**2, "longest_edge": 60 * 32**2}, "video_processor_type": "Qwen3VLVideoProcessor"})
    (folder / "chat_template.jinja").write_text(qwen3_vl_template(), encoding="utf-8")
    return text_config, vision_config


def write_checkpoint(folder, name, inputs):
    sizes = CHECKPOINTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, ids = write_tiny_tokenizer(folder, inputs.qwen2_5, qwen3_vl_template())
    text_config, vision_config = write_settings(folder, name, sizes, tokenizer, ids)
    weights = Weights(sizes.seed, torch.bfloat16, levels=3, deviation=1.2)
    vision_weights(weights, vision_config)
    weights.decoder(text_config, embedding_deviation=0.4 if sizes.is_tied else 1.0, biases="", head_norms=True)
    output = "model.embed_tokens.weight" if sizes.is_tied else "lm_head.weight"
    if not sizes.is_tied:
        weights.matrix("lm_head.weight", 384, 64, gain=3.0)
    weights.shrink_rows(output, ids["<|endoftext|>"])
    if name == "qwen3_vl_moe":
        fuse_experts(weights.tensors, is_swapped=True)
    write_checkpoint_tensors(folder, with_new_names(weights.tensors))


def record(root, inputs):
    for name in CHECKPOINTS:
        print(name)
        write_checkpoint(root / name, name, inputs)
        pictures, videos = (None, None) if name == "qwen3_vl" else (PICTURE_CASES, VIDEO_CASES)
        kind = Qwen3VLMoeForConditionalGeneration if name == "qwen3_vl_moe" else Qwen3VLForConditionalGeneration
        picture_chats.record(root, name, kind, pictures)
        video_chats.record(root, name, kind, videos)
