"""A tiny Qwen2-VL checkpoint in the released layout."""

import torch
from transformers import Qwen2VLForConditionalGeneration

from . import picture_chats, video_chats
from .chat_templates import qwen2_5_vl_template
from .files import write_checkpoint_tensors, write_json
from .picture_chats import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH
from .tokenizer import write_tiny_tokenizer
from .weights import Weights

NAME, SEED = "qwen2_vl", 3
PICTURE_CASES = ["several_images", "two_turns", "text_only"]
VIDEO_CASES = ["video_odd_slow", "video_fraction", "two_videos"]


def vision_weights(weights, config):
    """Qwen2-VL's vision encoder."""
    hidden, merged = config["embed_dim"], config["embed_dim"] * config["spatial_merge_size"] ** 2
    patch = (3, config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    weights.matrix("visual.patch_embed.proj.weight", hidden, *patch, gain=1.5)
    for block in range(config["depth"]):
        at = f"visual.blocks.{block}"
        weights.layer_norm(f"{at}.norm1", hidden)
        weights.linear(f"{at}.attn.qkv", 3 * hidden, hidden, gain=1.4)
        weights.linear(f"{at}.attn.proj", hidden, hidden, gain=1.5)
        weights.layer_norm(f"{at}.norm2", hidden)
        weights.linear(f"{at}.mlp.fc1", config["mlp_ratio"] * hidden, hidden, gain=1.5)
        weights.linear(f"{at}.mlp.fc2", hidden, config["mlp_ratio"] * hidden, gain=1.5)
    weights.layer_norm("visual.merger.ln_q", hidden)
    weights.linear("visual.merger.mlp.0", merged, merged)
    weights.linear("visual.merger.mlp.2", config["hidden_size"], merged, gain=1.5)


def settings(tokenizer, ids):
    """The released config.json with small sizes.

    Text fields are on top, `in_chans` is the number of channels, `mlp_ratio` gives the width of the MLP, and no field
    names the activation of the vision encoder."""
    vision_config = {"depth": 2, "embed_dim": 160, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3, "hidden_size": 128,
                     "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}  # fmt: skip
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"], "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"), "vision_token_id": tokenizer.token_to_id("<|vision_pad|>"),
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"), "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "hidden_act": "silu", "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 92,
        "max_position_embeddings": 4096, "max_window_layers": 2, "model_type": "qwen2_vl", "num_attention_heads": 1,
        "num_hidden_layers": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2",
        "use_cache": True, "use_sliding_window": False, "vision_config": vision_config,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 384}  # fmt: skip


def write_checkpoint(folder, inputs):
    folder.mkdir(parents=True, exist_ok=True)
    template = qwen2_5_vl_template()  # Qwen2-VL's template renders the same text
    tokenizer, ids = write_tiny_tokenizer(folder, inputs.qwen2_5, template)
    config = settings(tokenizer, ids)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "temperature": 0.01, "top_p": 0.001, "top_k": 1,
        "transformers_version": "4.37.0"})  # fmt: skip
    write_json(folder / "preprocessor_config.json", {
        "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"})  # fmt: skip
    write_json(folder / "chat_template.json", {"chat_template": template})
    weights = Weights(SEED, torch.bfloat16, levels=3, deviation=1.2)
    vision_weights(weights, config["vision_config"])
    weights.decoder(config, embedding_deviation=1.0)
    weights.matrix("lm_head.weight", config["vocab_size"], config["hidden_size"], gain=3.0)
    weights.shrink_rows("lm_head.weight", ids["<|endoftext|>"])
    write_checkpoint_tensors(folder, weights.tensors)


def record(root, inputs):
    print(NAME)
    write_checkpoint(root / NAME, inputs)
    picture_chats.record(root, NAME, Qwen2VLForConditionalGeneration, PICTURE_CASES)
    video_chats.record(root, NAME, Qwen2VLForConditionalGeneration, VIDEO_CASES)
