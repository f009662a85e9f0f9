"""Tiny InternVL checkpoints: one in transformers' layout, one in the layout of the model's authors."""

import json
import math
import re
import tempfile
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import load_file

from . import tile_chats
from .chat_templates import internvl_chat_template, internvl_template
from .files import write_checkpoint_tensors, write_json
from .picture_chats import PATCH
from .tokenizer import FIRST_ADDED, write_tiny_tokenizer
from .weights import Weights

SEEDS = {"internvl": 53, "internvl_chat": 3}
AUTHORS_CASES = ["several_images", "two_turns", "text_only", "video_even"]  # the cases of `internvl_chat`
# Tokens in addition to Qwen's, by their names in transformers, and tokens that only
# the authors' tokenizer lists.
PICTURE_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                  "video_token": "<video>"}  # fmt: skip
BOX_TOKENS = ["<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"]
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
TILE = 56  # pixels a side: 16 patches, 4 tokens


def vision_weights(weights, config, text_hidden):
    """InternVL's vision encoder and projector, with the authors' names."""
    hidden, places = config["hidden_size"], (config["image_size"] // config["patch_size"]) ** 2 + 1
    rms = lambda name, size, mean=1.0: weights.vector(f"{name}.weight", size, mean=mean)  # noqa: E731
    norm = rms if config["norm_type"] == "rms_norm" else weights.layer_norm
    at = "vision_model.embeddings"
    weights.linear(f"{at}.patch_embedding", hidden, 3, config["patch_size"], config["patch_size"], gain=1.5)
    # The class and position embeddings are as large as the patch embeddings, so that a wrong
    # position changes the result.
    weights.matrix(f"{at}.class_embedding", 1, 1, hidden, gain=math.sqrt(hidden))
    weights.matrix(f"{at}.position_embedding", 1, places, hidden, gain=math.sqrt(places * hidden))
    for layer in range(config["num_hidden_layers"]):
        at = f"vision_model.encoder.layers.{layer}"
        norm(f"{at}.norm1", hidden)
        weights.matrix(f"{at}.attn.qkv.weight", 3 * hidden, hidden, gain=1.4)
        if config["qkv_bias"]:
            weights.vector(f"{at}.attn.qkv.bias", 3 * hidden)
        if config["qk_normalization"]:
            for part in ("q", "k"):
                rms(f"{at}.attn.{part}_norm", hidden, mean=1.4)
        weights.linear(f"{at}.attn.proj", hidden, hidden, gain=1.5)
        norm(f"{at}.norm2", hidden)
        weights.linear(f"{at}.mlp.fc1", config["intermediate_size"], hidden, gain=1.5)
        weights.linear(f"{at}.mlp.fc2", hidden, config["intermediate_size"], gain=1.5)
        for scale in ("ls1", "ls2"):
            weights.vector(f"{at}.{scale}", hidden, mean=0.75, deviation=0.25)
    weights.layer_norm("mlp1.0", 4 * hidden)
    weights.linear("mlp1.1", text_hidden, 4 * hidden)
    weights.linear("mlp1.3", text_hidden, text_hidden, gain=1.5)


def with_added_tokens(settings, contents):
    """A tokenizer_config.json with more special tokens after its own."""
    added, first = settings["added_tokens_decoder"], FIRST_ADDED + len(settings["added_tokens_decoder"])
    more = {str(first + place): added[str(FIRST_ADDED)] | {"content": token} for place, token in enumerate(contents)}
    return settings | {"added_tokens_decoder": added | more,
                       "additional_special_tokens": settings["additional_special_tokens"] + contents}  # fmt: skip


def decoder_settings(name, ids):
    """`llm_config`: a Qwen2 decoder as in InternVL3-8B, or a Qwen3 decoder as in InternVL3.5-38B.

    The first has `dynamic` frequencies, as released. They change after `max_position_embeddings`, which no case reaches."""
    shared = {"attention_dropout": 0.0, "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
              "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096, "max_window_layers": 2,
              "num_hidden_layers": 2, "rms_norm_eps": 1e-06, "sliding_window": None, "tie_word_embeddings": False,
              "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 400}  # fmt: skip
    if name == "internvl":
        return shared | {
            "architectures": ["Qwen2ForCausalLM"], "hidden_size": 128, "intermediate_size": 92, "model_type": "qwen2",
            "num_attention_heads": 2, "num_key_value_heads": 1, "rope_scaling": {
                "factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "rope_theta": 1000000.0}  # fmt: skip
    return shared | {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 64,
        "intermediate_size": 92, "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_scaling": None, "rope_theta": 1000000}  # fmt: skip


def vision_settings(name):
    """`vision_config` as the authors write it: as in InternVL3-8B, or as in InternVL3.5-38B."""
    shared = {"architectures": ["InternVisionModel"], "attention_dropout": 0.0, "auto_map": {
                 "AutoConfig": "configuration_intern_vit.InternVisionConfig", "AutoModel": "modeling_intern_vit.InternVisionModel"},
             "drop_path_rate": 0.0, "dropout": 0.0, "hidden_act": "gelu", "image_size": TILE, "initializer_factor": 0.1,
             "initializer_range": 1e-10, "layer_norm_eps": 1e-06, "model_type": "intern_vit_6b", "num_attention_heads": 2,
             "num_channels": 3, "num_hidden_layers": 2, "patch_size": PATCH, "torch_dtype": "bfloat16",
             "use_flash_attn": True}  # fmt: skip
    if name == "internvl":
        return shared | {"hidden_size": 128, "intermediate_size": 176, "norm_type": "layer_norm", "qk_normalization": False,
                         "qkv_bias": True}  # fmt: skip
    return shared | {"hidden_size": 256, "intermediate_size": 352, "norm_type": "rms_norm", "qk_normalization": True,
                     "qkv_bias": False}  # fmt: skip


def write_authors_checkpoint(folder, name, settings):
    """The authors' layout (`internvl_chat`), in which all InternVL checkpoints are released. `settings` is the tokenizer's."""
    folder.mkdir(parents=True, exist_ok=True)
    is_hf = name == "internvl"
    added = [token for token in PICTURE_TOKENS.values() if is_hf or token != "<video>"] + BOX_TOKENS
    _, ids = write_tiny_tokenizer(folder, with_added_tokens(settings, added), internvl_chat_template())
    text_config, vision_config = decoder_settings(name, ids), vision_settings(name)
    write_json(folder / "config.json", {
        "architectures": ["InternVLChatModel"], "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig", "AutoModel": "modeling_internvl_chat.InternVLChatModel",
            "AutoModelForCausalLM": "modeling_internvl_chat.InternVLChatModel"},
        "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": TILE, "hidden_size": text_config["hidden_size"],
        "llm_config": text_config, "max_dynamic_patch": 12 if is_hf else 6, "min_dynamic_patch": 1,
        "model_type": "internvl_chat", "output_attentions": False, "pad2square": False, "ps_version": "v2", "select_layer": -1,
        "system_message": None, "template": "internvl2_5", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": None, "use_backbone_lora": 0, "use_llm_lora": 0, "use_thumbnail": True,
        "vision_config": vision_config})  # fmt: skip
    write_json(folder / "generation_config.json", {
        "_from_model_config": True, "eos_token_id": ids["<|im_end|>"], "transformers_version": "4.52.1"})
    write_json(folder / "preprocessor_config.json", IMAGENET | {
        "crop_size": TILE, "do_center_crop": True, "do_normalize": True, "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor", "resample": 3, "size": TILE})  # fmt: skip
    levels, deviation = (3, 1.2) if is_hf else (1, 0.7)  # fewer levels for the larger checkpoint
    weights = Weights(SEEDS[name], torch.bfloat16, levels=levels, deviation=deviation)
    weights.decoder(text_config, embedding_deviation=1.0, biases="qkv" if is_hf else "", head_norms=not is_hf)
    weights.matrix("lm_head.weight", text_config["vocab_size"], text_config["hidden_size"], gain=3.0)
    weights.shrink_rows("lm_head.weight", ids["<|endoftext|>"])
    weights.tensors = {f"language_model.{name}": tensor for name, tensor in weights.tensors.items()}
    vision_weights(weights, vision_config, text_config["hidden_size"])
    write_checkpoint_tensors(folder, weights.tensors)


# From the authors' tensor names to transformers'.
HF_NAMES = [
    (r"^vision_model\.", "vision_tower."), (r"\.class_embedding$", ".cls_token"), (r"\.position_embedding$", ".position_embeddings"),
    (r"\.patch_embedding\.", ".patch_embeddings.projection."), (r"\.encoder\.layers\.", ".encoder.layer."),
    (r"\.ls([12])$", r".lambda_\1"), (r"\.attn\.proj\.", ".attention.projection_layer."), (r"\.attn\.", ".attention."),
    (r"\.norm1\.", ".layernorm_before."), (r"\.norm2\.", ".layernorm_after."),
    (r"^mlp1\.0\.", "multi_modal_projector.layer_norm."), (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
    (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
]  # fmt: skip


def hf_tensors(source):
    """The tensors with transformers' names, and with separate queries, keys and values."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for old, new in HF_NAMES if not name.startswith("language_model.") else []:
            name = re.sub(old, new, name)
        if ".attention.qkv." in name:
            tensors |= {name.replace("qkv", f"{part}_proj"): rows for part, rows in zip("qkv", tensor.chunk(3))}
        else:
            tensors[name] = tensor
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def hf_vision_settings(vision):
    tower = {key: vision[key] for key in (
        "architectures", "attention_dropout", "dropout", "hidden_act", "hidden_size", "initializer_factor", "initializer_range",
        "intermediate_size", "layer_norm_eps", "norm_type", "num_attention_heads", "num_channels", "num_hidden_layers",
        "torch_dtype")}  # fmt: skip
    tower |= {"attention_bias": vision["qkv_bias"], "hidden_dropout_prob": 0.0, "image_size": [vision["image_size"]] * 2,
              "layer_scale_init_value": 0.1, "model_type": "internvl_vision", "patch_size": [vision["patch_size"]] * 2,
              "projection_dropout": 0.0, "use_absolute_position_embeddings": True, "use_mask_token": False,
              "use_mean_pooling": True, "use_qk_norm": vision["qk_normalization"]}  # fmt: skip
    return tower


def write_hf_checkpoint(source, folder):
    """Writes the checkpoint of `source` in the layout of transformers (`*-hf`), as `convert_internvl_weights_to_hf.py` of
    transformers 4.57 writes it. Only names, files and the split of queries, keys and values change."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    write_checkpoint_tensors(folder, hf_tensors(source))
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken("<video>", normalized=False, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {"extra_special_tokens": PICTURE_TOKENS, "processor_class": "InternVLProcessor"}
    del settings["chat_template"]
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(internvl_template(), encoding="utf-8")
    vision = config["vision_config"]
    tokens = int((vision["image_size"] // vision["patch_size"] * config["downsample_ratio"]) ** 2)
    write_json(folder / "config.json", {
        "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": config["downsample_ratio"],
        "image_seq_length": tokens, "image_token_id": tokenizer.token_to_id("<IMG_CONTEXT>"), "model_type": "internvl",
        "projector_hidden_act": "gelu", "text_config": config["llm_config"],
        "tie_word_embeddings": config["llm_config"]["tie_word_embeddings"], "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0", "vision_config": hf_vision_settings(vision), "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default"})  # fmt: skip
    write_json(folder / "generation_config.json", json.loads((source / "generation_config.json").read_text()))
    write_json(folder / "processor_config.json", {"image_seq_length": tokens, "processor_class": "InternVLProcessor"})
    size = {"height": vision["image_size"], "width": vision["image_size"]}
    pictures = IMAGENET | {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
                           "processor_class": "InternVLProcessor", "resample": 3, "rescale_factor": 1 / 255, "size": size}  # fmt: skip
    # `crop_to_patches` is false as released. The processor asks for tiles regardless.
    write_json(folder / "preprocessor_config.json", pictures | {
        "crop_to_patches": False, "image_processor_type": "GotOcr2ImageProcessorFast",
        "max_patches": config["max_dynamic_patch"], "min_patches": config["min_dynamic_patch"]})
    write_json(folder / "video_preprocessor_config.json", pictures | {"video_processor_type": "InternVLVideoProcessor"})


def record(root, inputs):
    """Records both layouts. transformers 5.17 loads its own layout only, so `internvl_chat` is converted to it first."""
    with tempfile.TemporaryDirectory() as scratch:
        print("internvl")
        write_authors_checkpoint(Path(scratch) / "authors", "internvl", inputs.qwen2_5)
        write_hf_checkpoint(Path(scratch) / "authors", root / "internvl")
        tile_chats.record(root, "internvl", root / "internvl")
        print("internvl_chat")
        write_authors_checkpoint(root / "internvl_chat", "internvl_chat", inputs.qwen3)
        write_hf_checkpoint(root / "internvl_chat", Path(scratch) / "hf")
        tile_chats.record(root, "internvl_chat", Path(scratch) / "hf", AUTHORS_CASES)
