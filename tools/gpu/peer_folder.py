#!/usr/bin/env python3
"""Writes the configuration of a released shape, for vLLM with random weights. `peer.py` takes the folder.

    python3 tools/gpu/peer_folder.py TOKENIZER FOLDER SHAPE [fp8_per_block|fp8_per_channel]      (FP8: only Qwen's shapes)

TOKENIZER is a folder with Qwen2.5's `tokenizer.json` and `tokenizer_config.json`, which all shapes use, because the figures do
not depend on the text of tokens. The sizes are the same as in the families' `shape.rs`. FP8 has the formats of
released checkpoints: blocks of 128 x 128 as in Qwen's checkpoints, channels as in compressed-tensors. Vision towers,
routers and output heads are not quantized.
"""

import json
import os
import sys

TOKENIZER, FOLDER, SHAPE = sys.argv[1:4]
FORMAT = sys.argv[4] if len(sys.argv) > 4 else None
if FORMAT not in (None, "fp8_per_block", "fp8_per_channel") or (FORMAT and not SHAPE.startswith("qwen")):
    sys.exit(f"{FORMAT} is not supported for {SHAPE}; see the usage in this file")

# Hidden size, MLP size, layers, query heads, KV heads.
TEXT = {
    "qwen2.5-vl-3b": (2048, 11008, 36, 16, 2),
    "qwen2.5-vl-7b": (3584, 18944, 28, 28, 4),
    "qwen2.5-vl-32b": (5120, 27648, 64, 40, 8),
    "qwen2.5-vl-72b": (8192, 29568, 80, 64, 8),
    "qwen3-vl-2b": (2048, 6144, 28, 16, 8),
    "qwen3-vl-8b": (4096, 12288, 36, 32, 8),
    "qwen3-vl-32b": (5120, 25600, 64, 64, 8),
    "qwen3-vl-30b-a3b": (2048, 6144, 48, 32, 4),
    "qwen3-8b": (4096, 12288, 36, 32, 8),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8),
    "internvl3-8b": (3584, 18944, 28, 28, 4),
    "gemma-4-e4b": (2560, 10240, 42, 8, 2),
    "gemma-4-26b-a4b": (2816, 2112, 30, 16, 8),
    "gemma-4-31b": (5376, 21504, 60, 32, 16),
}
GEMMA_TOKENS = {
    "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>",
    "eoa_token": "<audio|>", "audio_token": "<|audio|>", "video_token": "<|video|>"}  # fmt: skip
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PICTURE_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def read(name):
    with open(f"{TOKENIZER}/{name}", encoding="utf-8") as file:
        return json.load(file)


def save(name, value):
    with open(f"{FOLDER}/{name}", "w", encoding="utf-8") as file:
        json.dump(value, file)


def text(**more):
    hidden, intermediate, layers, heads, kv_heads = TEXT[SHAPE]
    config = {
        "bos_token_id": 151643, "eos_token_id": 151645, "dtype": "bfloat16", "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": intermediate, "max_position_embeddings": 32768, "num_attention_heads": heads,
        "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False, "vocab_size": 151936}  # fmt: skip
    return config | more


def qwen2_5_vl(_):
    tied = SHAPE.endswith("-3b")
    vision = {
        "model_type": "qwen2_5_vl", "depth": 32, "hidden_act": "silu", "hidden_size": 1280,
        "intermediate_size": 3456 if SHAPE.endswith(("32b", "72b")) else 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": TEXT[SHAPE][0], "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2}  # fmt: skip
    save("config.json", text(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", tie_word_embeddings=tied,
        vocab_size=151936 if tied else 152064, image_token_id=151655, video_token_id=151656, vision_start_token_id=151652,
        vision_end_token_id=151653, vision_token_id=151654, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        vision_config=vision))  # fmt: skip
    save("preprocessor_config.json", CLIP | {
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"})  # fmt: skip
    return {"processor_class": "Qwen2_5_VLProcessor"}


def qwen3_vl(_):
    small, mixed = SHAPE.endswith("-2b"), SHAPE.endswith("-a3b")
    kind = "qwen3_vl_moe" if mixed else "qwen3_vl"
    experts = {"num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
               "mlp_only_layers": [], "norm_topk_prob": True}  # fmt: skip
    decoder = text(
        **(experts if mixed else {}),
        model_type=f"{kind}_text", attention_bias=False, head_dim=128, max_position_embeddings=262144, rope_theta=5e6,
        tie_word_embeddings=small,
        rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"})  # fmt: skip
    vision = {
        "model_type": kind, "deepstack_visual_indexes": [5, 11, 17] if small else [8, 16, 24],
        "depth": 24 if small else 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024 if small else 1152,
        "in_channels": 3, "intermediate_size": 4096 if small else 4304, "num_heads": 16, "num_position_embeddings": 2304,
        "out_hidden_size": TEXT[SHAPE][0], "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
    save("config.json", {
        "architectures": [f"Qwen3VL{'Moe' if mixed else ''}ForConditionalGeneration"], "model_type": kind, "image_token_id": 151655,
        "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "tie_word_embeddings": small, "text_config": decoder, "vision_config": vision})  # fmt: skip
    patches = {
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor"}  # fmt: skip
    save("preprocessor_config.json", patches | {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_processor_type": "Qwen2VLImageProcessorFast"})
    save("video_preprocessor_config.json", patches | {
        "size": {"shortest_edge": 4096, "longest_edge": 25165824}, "video_processor_type": "Qwen3VLVideoProcessor"})
    return {"processor_class": "Qwen3VLProcessor"}


def qwen3(_):
    save("config.json", text(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, head_dim=128,
        max_position_embeddings=40960))  # fmt: skip
    return {}


def llama(_):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    save("config.json", text(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, max_position_embeddings=131072,
        rope_theta=5e5, rope_scaling=scaling, rms_norm_eps=1e-5, bos_token_id=128000, eos_token_id=128001))  # fmt: skip
    return {}


def add_tokens(tokenizer, texts):
    """Adds special tokens to `tokenizer`. Returns their ids by text, and their entries for the tokenizer's settings."""
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    ids = {content: first + index for index, content in enumerate(texts)}
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": token, "content": content} | common for content, token in ids.items()]
    return ids, {str(token): {"content": content} | common for content, token in ids.items()}


def gemma_4(tokenizer):
    ids, added = add_tokens(tokenizer, GEMMA_TOKENS.values())
    small, mixed, layers = SHAPE.endswith("e4b"), SHAPE.endswith("-a4b"), TEXT[SHAPE][2]
    experts = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    rope = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    decoder = text(
        **(experts if mixed else {}), model_type="gemma4_text", hidden_activation="gelu_pytorch_tanh", vocab_size=262144,
        vocab_size_per_layer_input=262144, head_dim=256, global_head_dim=512, tie_word_embeddings=True,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)],
        sliding_window=512 if small else 1024, attention_k_eq_v=not small, hidden_size_per_layer_input=256 if small else 0,
        num_global_key_value_heads={"gemma-4-31b": 4, "gemma-4-26b-a4b": 2}.get(SHAPE), num_kv_shared_layers=18 if small else 0,
        use_double_wide_mlp=False, use_bidirectional_attention=None if small else "vision", final_logit_softcapping=30.0,
        rope_parameters=rope, pad_token_id=0)  # fmt: skip
    del decoder["hidden_act"], decoder["rope_theta"]
    hidden, intermediate, blocks, heads = (768, 3072, 16, 12) if small else (1152, 4304, 27, 16)
    vision = {
        "model_type": "gemma4_vision", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": blocks,
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden // heads, "patch_size": 16,
        "pooling_kernel_size": 3, "position_embedding_size": 10240, "use_clipped_linears": small, "standardize": not small,
        "default_output_length": 280}  # fmt: skip
    save("config.json", {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True,
        "image_token_id": ids["<|image|>"], "boi_token_id": ids["<|image>"], "eoi_token_id": ids["<image|>"],
        "audio_token_id": ids["<|audio|>"], "video_token_id": ids["<|video|>"], "audio_config": None,
        "text_config": decoder, "vision_config": vision})  # fmt: skip
    patches = {"patch_size": 16, "pooling_kernel_size": 3, "do_normalize": False, "processor_class": "Gemma4Processor"}
    save("preprocessor_config.json", patches | {
        "image_processor_type": "Gemma4ImageProcessor", "feature_extractor_type": "Gemma4AudioFeatureExtractor", "max_soft_tokens": 280})
    save("video_preprocessor_config.json", patches | {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70})
    return {"processor_class": "Gemma4Processor", "extra_special_tokens": GEMMA_TOKENS, "added_tokens_decoder": added}


def internvl(tokenizer):
    ids, added = add_tokens(tokenizer, PICTURE_TOKENS.values())
    vision = {
        "model_type": "internvl_vision", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "attention_bias": True, "use_qk_norm": False, "intermediate_size": 4096, "hidden_act": "gelu",
        "norm_type": "layer_norm", "image_size": [448, 448], "patch_size": [14, 14]}  # fmt: skip
    save("config.json", {
        "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl",
        "image_token_id": ids["<IMG_CONTEXT>"], "downsample_ratio": 0.5, "image_seq_length": 256, "tie_word_embeddings": False,
        "text_config": text(architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=151674),
        "vision_config": vision})  # fmt: skip
    tiles = IMAGENET | {"size": {"height": 448, "width": 448}, "processor_class": "InternVLProcessor"}
    save("preprocessor_config.json", tiles | {
        "image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": True, "min_patches": 1, "max_patches": 12})
    save("video_preprocessor_config.json", tiles | {"video_processor_type": "InternVLVideoProcessor"})
    save("processor_config.json", {"image_seq_length": 256, "processor_class": "InternVLProcessor"})
    return {"processor_class": "InternVLProcessor", "extra_special_tokens": PICTURE_TOKENS, "added_tokens_decoder": added}


def quantization(config):
    """The `quantization_config` of an FP8 checkpoint, with vLLM's names for the modules that are not quantized."""
    decoder, vision = config.get("text_config", config), config.get("vision_config", {})
    if FORMAT == "fp8_per_channel":
        weights = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {"targets": ["Linear"], "weights": weights | {"strategy": "channel", "dynamic": False},
                 "input_activations": weights | {"strategy": "token", "dynamic": True}}  # fmt: skip
        return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
                "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*visual.*", "re:.*mlp.gate$"]}  # fmt: skip
    of_block = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    of_merger = ("mlp.0", "mlp.2", "linear_fc1", "linear_fc2")
    mergers = ["merger", *(f"deepstack_merger_list.{at}" for at in range(len(vision.get("deepstack_visual_indexes", []))))]
    plain = [f"visual.blocks.{block}.{module}" for block in range(vision.get("depth", 0)) for module in of_block]
    plain += [f"visual.{merger}.{module}" for merger in mergers for module in of_merger]
    plain += [f"language_model.model.layers.{layer}.mlp.gate" for layer in range(decoder["num_hidden_layers"])]
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *plain]}  # fmt: skip


FAMILIES = {"qwen2.5-vl": qwen2_5_vl, "qwen3-vl": qwen3_vl, "qwen3": qwen3, "llama-3.1": llama, "internvl3": internvl,
            "gemma-4": gemma_4}  # fmt: skip


def main():
    os.makedirs(FOLDER, exist_ok=True)
    tokenizer, settings = read("tokenizer.json"), read("tokenizer_config.json")
    more = next(family for name, family in FAMILIES.items() if SHAPE.startswith(f"{name}-"))(tokenizer)
    added = settings.get("added_tokens_decoder", {}) | more.pop("added_tokens_decoder", {})
    save("tokenizer_config.json", settings | more | {"added_tokens_decoder": added})
    save("tokenizer.json", tokenizer)
    if FORMAT:
        with open(f"{FOLDER}/config.json", encoding="utf-8") as file:
            config = json.load(file)
        save("config.json", config | {"quantization_config": quantization(config)})
    save("generation_config.json", {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "do_sample": False})


main()
