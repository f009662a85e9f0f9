"""Tiny Qwen2.5-VL checkpoints: one in the released layout, and one whose files leave out every default."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from . import picture_chats, video_chats
from .chat_templates import qwen2_5_vl_template
from .files import write_checkpoint_tensors, write_json
from .picture_chats import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH
from .tokenizer import write_tiny_tokenizer
from .weights import Weights

NAME, BARE = "qwen2_5_vl", "qwen2_5_vl_bare"
# Each seed gives every greedy step a clear margin (`reference.MARGIN_MIN`).
SEED, SEED_BARE = 9, 6


def vision_weights(weights, config):
    """Qwen2.5-VL's vision encoder."""
    hidden, merged = config["hidden_size"], config["hidden_size"] * config["spatial_merge_size"] ** 2
    patch = (3, config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    weights.matrix("visual.patch_embed.proj.weight", hidden, *patch, gain=1.5)
    for block in range(config["depth"]):
        at = f"visual.blocks.{block}"
        weights.vector(f"{at}.norm1.weight", hidden, mean=1.0)
        weights.linear(f"{at}.attn.qkv", 3 * hidden, hidden, gain=1.4)
        weights.linear(f"{at}.attn.proj", hidden, hidden, gain=1.5)
        weights.vector(f"{at}.norm2.weight", hidden, mean=1.0)
        weights.linear(f"{at}.mlp.gate_proj", config["intermediate_size"], hidden, gain=1.5)
        weights.linear(f"{at}.mlp.up_proj", config["intermediate_size"], hidden, gain=1.5)
        weights.linear(f"{at}.mlp.down_proj", hidden, config["intermediate_size"], gain=1.5)
    weights.vector("visual.merger.ln_q.weight", hidden, mean=1.0)
    weights.linear("visual.merger.mlp.0", merged, merged)
    weights.linear("visual.merger.mlp.2", config["out_hidden_size"], merged, gain=1.5)


def settings(tokenizer, ids):
    """The released config.json with small sizes: text fields on top, `vision_config` nested."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "vision_token_id": tokenizer.token_to_id("<|vision_pad|>"),
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 68,
        "max_position_embeddings": 4096,
        "max_window_layers": 2,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 3,
            "hidden_act": "silu",
            "hidden_size": 160,
            "intermediate_size": 44,
            "num_heads": 2,
            "in_chans": 3,
            "out_hidden_size": 256,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 384,
    }


def write_checkpoint(folder, inputs):
    folder.mkdir(parents=True, exist_ok=True)
    template = qwen2_5_vl_template()
    tokenizer, ids = write_tiny_tokenizer(folder, inputs.qwen2_5, template)
    config = settings(tokenizer, ids)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "repetition_penalty": 1.05,
        "temperature": 0.000001, "transformers_version": "4.49.0"})  # fmt: skip
    write_json(folder / "preprocessor_config.json", {
        "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"})  # fmt: skip
    write_json(folder / "chat_template.json", {"chat_template": template})
    weights = Weights(SEED, torch.bfloat16)
    vision_weights(weights, config["vision_config"])
    weights.decoder(config, embedding_deviation=1.0)
    weights.matrix("lm_head.weight", config["vocab_size"], config["hidden_size"], gain=3.0)
    weights.shrink_rows("lm_head.weight", ids["<|endoftext|>"])
    write_checkpoint_tensors(folder, weights.tensors, shards=2)


def write_bare_checkpoint(folder, inputs):
    """A checkpoint that leaves out everything that may be missing.

    It omits every setting that equals its class's default (32 vision layers with 16 heads, theta, sections and epsilon of
    the decoder), `architectures` and `preprocessor_config.json`. Only `text_config` says that the embeddings are tied.
    `use_sliding_window` is true, but no layer uses a window. Tensors have the names of transformers 4.52 and later."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, ids = write_tiny_tokenizer(folder, inputs.qwen2_5, qwen2_5_vl_template())
    text_config = {"model_type": "qwen2_5_vl_text", "hidden_size": 128, "intermediate_size": 12, "num_hidden_layers": 2,
                   "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 384, "use_sliding_window": True,
                   "tie_word_embeddings": True}  # fmt: skip
    vision_config = {"model_type": "qwen2_5_vl", "hidden_size": 64, "in_chans": 3, "intermediate_size": 4,
                     "out_hidden_size": 128, "spatial_patch_size": 14}  # fmt: skip
    write_json(folder / "config.json", {
        "model_type": "qwen2_5_vl", "eos_token_id": ids["<|im_end|>"],
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"), "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"), "text_config": text_config,
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"), "vision_config": vision_config})  # fmt: skip
    processor = {"min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS}
    write_json(folder / "processor_config.json", {
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **processor},
        "processor_class": "Qwen2_5_VLProcessor",
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", **processor}})  # fmt: skip
    (folder / "chat_template.jinja").write_text(qwen2_5_vl_template(), encoding="utf-8")
    weights = Weights(SEED_BARE, torch.bfloat16, levels=1, deviation=0.7)
    vision_weights(weights, Qwen2_5_VLConfig(vision_config=vision_config).vision_config.to_dict())
    weights.decoder(text_config, embedding_deviation=0.6)
    weights.shrink_rows("model.embed_tokens.weight", ids["<|endoftext|>"])
    write_checkpoint_tensors(folder, with_new_names(weights.tensors))


def with_new_names(tensors):
    """The tensors with the names of transformers 4.52 and later: `model.language_model.…` and `model.visual.…`."""
    new = lambda name: re.sub(r"^(model\.)?", lambda old: "model.language_model." if old[0] else "model.", name)  # noqa: E731
    return {name if name == "lm_head.weight" else new(name): tensor for name, tensor in tensors.items()}


def without(*keys):
    """An edit of a config.json that removes `keys`, each a field or `vision_config.<field>`."""

    def edit(config):
        for key in keys:
            outer, _, inner = key.rpartition(".")
            (config[outer] if outer else config).pop(inner)

    return edit


# `model/tests/it/variants.rs` derives these from `qwen2_5_vl` and expects its recorded numbers.
VARIANTS = {
    "the decoder's defaults": without("rope_theta", "tie_word_embeddings", "hidden_act", "use_sliding_window", "architectures"),
    "the sections' default": without("rope_scaling"),
    "the tower's defaults": without(*(f"vision_config.{key}" for key in (
        "patch_size", "spatial_merge_size", "temporal_patch_size", "window_size", "hidden_act", "in_chans"))),
    "no layer slides": lambda config: config.update(use_sliding_window=True, sliding_window=16, max_window_layers=2),
}  # fmt: skip


@torch.no_grad()
def check_variants(root):
    """Asserts that each variant computes the same bits as the checkpoint. Records nothing."""
    source = root / NAME
    case = load_file(source / "cases/single_image.safetensors")
    ids, grid = case["input_ids"][None], case["image_grid_thw"]
    pixels = torch.from_numpy(np.random.default_rng(1).standard_normal((int(grid.prod()), 1176)).astype(np.float32))

    def logits(folder):
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        kinds = (ids == model.config.image_token_id).int()
        return model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds).logits

    expected = logits(source)
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(source, copy, dirs_exist_ok=True)
        for name, edit in VARIANTS.items():
            config = json.loads((source / "config.json").read_text())
            edit(config)
            (Path(copy) / "config.json").write_text(json.dumps(config))
            assert torch.equal(logits(copy), expected), name
        without("rms_norm_eps")(config)
        (Path(copy) / "config.json").write_text(json.dumps(config))
        assert not torch.equal(logits(copy), expected), "the default epsilon differs, so the logits must differ"


def record(root, inputs):
    print(NAME)
    write_checkpoint(root / NAME, inputs)
    picture_chats.record(root, NAME, Qwen2_5_VLForConditionalGeneration)


def record_videos(root, _):
    video_chats.record(root, NAME, Qwen2_5_VLForConditionalGeneration)


def record_bare(root, inputs):
    check_variants(root)
    print(BARE)
    write_bare_checkpoint(root / BARE, inputs)
    picture_chats.record(root, BARE, Qwen2_5_VLForConditionalGeneration, ["single_image"])
