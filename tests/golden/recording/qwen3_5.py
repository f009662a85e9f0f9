"""Tiny Qwen3.5 checkpoints: one with vision, one with experts and vision, and one that has only text."""

import math

import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from transformers import Qwen3_5MoeForConditionalGeneration

from . import drafts, picture_chats, text_families, video_chats
from .chat_templates import qwen3_5_template
from .delta_nets import add_delta_net
from .files import write_checkpoint_tensors, write_json
from .messages import LONG, text, text_chats
from .mixtures import add_experts, fuse_experts
from .qwen2_5_vl import with_new_names
from .qwen3_vl import vision_weights
from .tokenizer import SPLIT_QWEN3_5, write_tiny_tokenizer
from .weights import Weights

# Model class and seed. Each seed gives every greedy step a clear margin (`reference.MARGIN_MIN`).
CHECKPOINTS = {
    "qwen3_5": (Qwen3_5ForConditionalGeneration, 148),
    "qwen3_5_moe": (Qwen3_5MoeForConditionalGeneration, 18),
    "qwen3_5_text": (Qwen3_5ForCausalLM, 5),
    "qwen3_5_yarn": (Qwen3_5ForCausalLM, 1),
}
TEXT_ONLY = ("qwen3_5_text", "qwen3_5_yarn")
# Seeds of the draft heads. They give every draft a clear margin, too.
DRAFT_SEEDS = {"qwen3_5": 148, "qwen3_5_moe": 1}
# Prompt lengths on both sides of chunk borders. A chunk has 64 tokens.
LENGTHS = (63, 64, 65, 127, 129, 200)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 36,
           "output_router_logits": False, "router_aux_loss_coef": 0.001}  # fmt: skip


def text_settings(name, ids):
    """The released settings of the decoder with small sizes.

    `qwen3_5` has `layer_types` and the interval that they follow, as released. `qwen3_5_moe` has only the interval, and
    `qwen3_5_text` has only a list, which follows no interval. These three have 2, 3 and 1 value heads per key head."""
    shared = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": ids["<|endoftext|>"], "head_dim": 64, "hidden_act": "silu", "hidden_size": 64,
        "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_num_key_heads": 2,
        "linear_value_head_dim": 32, "max_position_embeddings": 4096, "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "use_cache": True, "vocab_size": 384, "mamba_ssm_dtype": "float32", "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default", "rope_theta": 10000000,
            "partial_rotary_factor": 0.25}}  # fmt: skip
    linear, full = ["linear_attention"], ["full_attention"]
    text_only = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "intermediate_size": 92,
                 "num_hidden_layers": 4, "layer_types": linear + full + linear * 2, "linear_num_value_heads": 2,
                 "tie_word_embeddings": True}  # fmt: skip
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return shared | {
        "qwen3_5": {"model_type": "qwen3_5_text", "intermediate_size": 92, "num_hidden_layers": 8, "mlp_only_layers": [],
                    "full_attention_interval": 4, "layer_types": (linear * 3 + full) * 2, "linear_num_value_heads": 4,
                    "tie_word_embeddings": False},
        "qwen3_5_moe": EXPERTS | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "full_attention_interval": 2,
                                  "linear_num_value_heads": 6, "tie_word_embeddings": False},
        "qwen3_5_text": text_only,
        # As the releases recommend for long texts. YaRN scales only the rotated elements of a head.
        "qwen3_5_yarn": text_only | {"rope_parameters": shared["rope_parameters"] | scaling},
    }[name]  # fmt: skip


def vision_settings(name):
    """Qwen3-VL's vision encoder without DeepStack. `model_type` is the complete model's type, as released."""
    depth, heads, head_dim = (2, 1, 72) if name == "qwen3_5" else (1, 1, 64)
    return {
        "deepstack_visual_indexes": [], "depth": depth, "hidden_act": "gelu_pytorch_tanh", "hidden_size": heads * head_dim,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 80, "model_type": name, "num_heads": heads,
        "num_position_embeddings": 144, "out_hidden_size": 64, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2}  # fmt: skip


def write_settings(folder, name, tokenizer, ids):
    """Writes the JSON files and the chat template. Returns the settings of the decoder and of the vision encoder."""
    config, vision_config = text_settings(name, ids), None
    if name in TEXT_ONLY:
        write_json(folder / "config.json", config | {"transformers_version": "5.17.0"})
    else:
        vision_config, token = vision_settings(name), lambda part: tokenizer.token_to_id(f"<|{part}|>")
        write_json(folder / "config.json", {
            "architectures": [CHECKPOINTS[name][0].__name__], "image_token_id": token("image_pad"), "model_type": name,
            "text_config": config, "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0",
            "video_token_id": token("video_pad"), "vision_config": vision_config,
            "vision_end_token_id": token("vision_end"), "vision_start_token_id": token("vision_start")})  # fmt: skip
        patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3,
                   "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}  # fmt: skip
        limits = lambda fewest, most: {"size": {"shortest_edge": fewest * 32**2, "longest_edge": most * 32**2}}  # noqa: E731
        write_json(folder / "preprocessor_config.json",
                   patches | limits(6, 40) | {"image_processor_type": "Qwen2VLImageProcessorFast"})
        write_json(folder / "video_preprocessor_config.json",
                   patches | limits(12, 60) | {"video_processor_type": "Qwen3VLVideoProcessor"})
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "top_k": 20, "top_p": 0.95,
        "temperature": 1.0, "transformers_version": "4.57.0.dev0"})  # fmt: skip
    (folder / "chat_template.jinja").write_text(qwen3_5_template(), encoding="utf-8")
    return config, vision_config


def add_attention(weights, at, config):
    """The full attention of the layer named `at`. Rows of `q_proj` are the query and then the gate of each head."""
    hidden, heads, kv_heads, head_dim = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))  # fmt: skip
    at = f"{at}.self_attn"
    weights.matrix(f"{at}.q_proj.weight", heads * 2 * head_dim, hidden, gain=1.4)
    weights.matrix(f"{at}.k_proj.weight", kv_heads * head_dim, hidden, gain=1.4)
    weights.matrix(f"{at}.v_proj.weight", kv_heads * head_dim, hidden)
    weights.matrix(f"{at}.o_proj.weight", hidden, heads * head_dim, gain=3.0)  # the gates halve its input
    for part in ("q_norm", "k_norm"):
        weights.vector(f"{at}.{part}.weight", head_dim, mean=0.4, deviation=0.3)


def add_mlp(weights, at, config):
    if "num_experts" not in config:
        return weights.mlp(at, config, biases="")
    hidden, width = config["hidden_size"], config["shared_expert_intermediate_size"]
    add_experts(weights, at, config)
    for part, *shape in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        weights.matrix(f"{at}.mlp.shared_expert.{part}_proj.weight", *shape, gain=1.5)
    weights.matrix(f"{at}.mlp.shared_expert_gate.weight", 1, hidden, gain=1.5)


def add_norm(weights, name, size):
    """A norm that multiplies by 1 + weight."""
    weights.vector(f"{name}.weight", size, deviation=0.3)


def add_layer(weights, at, config, is_linear):
    add_norm(weights, f"{at}.input_layernorm", config["hidden_size"])
    (add_delta_net if is_linear else add_attention)(weights, at, config)
    add_norm(weights, f"{at}.post_attention_layernorm", config["hidden_size"])
    add_mlp(weights, at, config)


def add_decoder(weights, config, first_added):
    """The decoder and its output head. The rows from `first_added` on belong to added tokens and padding."""
    hidden, rows, is_tied = (config[key] for key in ("hidden_size", "vocab_size", "tie_word_embeddings"))
    weights.matrix("model.embed_tokens.weight", rows, hidden, gain=(0.6 if is_tied else 1.0) * math.sqrt(hidden))
    for layer in range(config["num_hidden_layers"]):
        if "layer_types" in config:
            is_linear = config["layer_types"][layer] == "linear_attention"
        else:
            is_linear = (layer + 1) % config["full_attention_interval"] != 0
        add_layer(weights, f"model.layers.{layer}", config, is_linear)
    add_norm(weights, "model.norm", hidden)
    if not is_tied:
        weights.matrix("lm_head.weight", rows, hidden, gain=3.0)
    weights.shrink_rows("model.embed_tokens.weight" if is_tied else "lm_head.weight", first_added)


def draft_tensors(seed, config):
    """The layer that predicts the token after the next, which transformers does not load."""
    weights, hidden = Weights(seed, torch.bfloat16, levels=3, deviation=1.2), config["hidden_size"]
    weights.matrix("mtp.fc.weight", hidden, 2 * hidden)
    add_layer(weights, "mtp.layers.0", config, is_linear=False)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        add_norm(weights, f"mtp.{name}", hidden)
    fuse_experts(weights.tensors, is_swapped=False)
    return weights.tensors


def write_checkpoint(folder, name, inputs):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, ids = write_tiny_tokenizer(folder, inputs.qwen3, qwen3_5_template(), SPLIT_QWEN3_5)
    config, vision_config = write_settings(folder, name, tokenizer, ids)
    weights = Weights(CHECKPOINTS[name][1], torch.bfloat16, levels=3, deviation=1.2)
    if vision_config:
        vision_weights(weights, vision_config)
    add_decoder(weights, config, ids["<|endoftext|>"])
    if name == "qwen3_5_moe":
        fuse_experts(weights.tensors, is_swapped=False)
    tensors = with_new_names(weights.tensors) if vision_config else weights.tensors
    if name in DRAFT_SEEDS:
        tensors |= draft_tensors(DRAFT_SEEDS[name], config)
    write_checkpoint_tensors(folder, tensors, shards=2 if name == "qwen3_5" else 1)


def chats_of_length(folder):
    """A chat for each of `LENGTHS`, which is the number of its prompt's tokens."""
    tokenizer, chats = AutoTokenizer.from_pretrained(folder), {}
    for characters in range(1, len(LONG)):
        messages = [text("user", LONG[:characters])]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = len(tokenizer(prompt).input_ids)
        if tokens in LENGTHS:
            chats.setdefault(f"tokens_{tokens}", messages)
    assert len(chats) == len(LENGTHS), f"only {list(chats)}"
    return chats


def record(root, inputs):
    for name, (kind, _) in CHECKPOINTS.items():
        print(name)
        write_checkpoint(root / name, name, inputs)
        if name == "qwen3_5":
            picture_chats.record(root, name, kind, ["single_image", "two_turns"], chats_of_length(root / name))
            video_chats.record(root, name, kind, ["video_fraction"])
            drafts.record(root, root / name, kind, ["single_image", "two_turns", "tokens_65"])
        elif name == "qwen3_5_moe":
            picture_chats.record(root, name, kind, ["single_image"], text_chats())
            drafts.record(root, root / name, kind, ["single_image", "short"])
        else:
            text_families.record_cases(root / name, kind)
