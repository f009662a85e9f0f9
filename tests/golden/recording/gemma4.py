"""Tiny Gemma 4 checkpoints: three without pictures, two with a vision tower, and one that projects pixels."""

import math

import torch
from transformers import Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration

from . import enlarged_chats, gemma3
from .files import write_checkpoint_tensors, write_json
from .reference import Reference
from .tokenizer import TEXT_TOKENS
from .weights import Weights

# Model class and seed. Each seed gives every greedy step a clear margin (`reference.MARGIN_MIN`).
CHECKPOINTS = {
    "gemma4_text": (Gemma4ForCausalLM, 9), "gemma4_sharing": (Gemma4ForCausalLM, 1), "gemma4_moe": (Gemma4ForCausalLM, 1),
    "gemma4": (Gemma4ForConditionalGeneration, 1), "gemma4_clipped": (Gemma4ForConditionalGeneration, 1),
    "gemma4_unified": (Gemma4UnifiedForConditionalGeneration, 10)}  # fmt: skip
PICTURES = ["gemma4", "gemma4_clipped", "gemma4_unified"]
# Tokens after the text tokens, by their names in transformers.
MORE_TOKENS = {
    "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
    "audio_token": "<|audio|>", "video_token": "<|video|>"}  # fmt: skip
TEMPLATE = gemma3.PICTURE_TEMPLATE.replace(
    "<start_of_image>", "<|image|>{% elif part['type'] == 'video' %}<|video|>")  # fmt: skip
PATCH, POOL, TOKENS = 4, 3, 70  # 70 tokens are the smallest value that transformers' processor accepts
SLIDING, FULL = "sliding_attention", "full_attention"


def text_settings(name):
    """The decoder's settings. `gemma4_moe` is like the released 26B-A4B: each layer has experts and a dense MLP. `gemma4_text` and `gemma4` are like the released 31B: keys of full attention are its values, and
    picture tokens attend to the whole picture in sliding-window layers. `gemma4_unified` has the same decoder as `gemma4`.

    `gemma4_sharing` and `gemma4_clipped` are like the released E2B: layers that read keys and values of earlier layers, with
    a wide MLP, and per-layer embeddings."""
    shared = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "dtype": "bfloat16", "enable_moe_block": False,
        "eos_token_id": 1, "final_logit_softcapping": 6.0, "global_head_dim": 64, "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 48, "initializer_range": 0.02, "intermediate_size": 60,
        "max_position_embeddings": 4096, "model_type": "gemma4_text", "moe_intermediate_size": None, "num_attention_heads": 4,
        "num_experts": None, "pad_token_id": 0, "rms_norm_eps": 1e-06, "sliding_window": 23, "tie_word_embeddings": True,
        "top_k_experts": None, "use_cache": True, "vocab_size": 384, "vocab_size_per_layer_input": 384,
        "rope_parameters": {
            FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"}}}  # fmt: skip
    if name in ("gemma4", "gemma4_unified"):
        return shared | ({"model_type": "gemma4_unified_text"} if name == "gemma4_unified" else {}) | {
            "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_global_key_value_heads": 1, "num_hidden_layers": 5, "num_key_value_heads": 2, "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision", "use_double_wide_mlp": False}  # fmt: skip
    if name == "gemma4_clipped":
        return shared | {
            "attention_k_eq_v": False, "hidden_size_per_layer_input": 16, "num_global_key_value_heads": None,
            "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4, "num_key_value_heads": 1,
            "num_kv_shared_layers": 2, "use_bidirectional_attention": None, "use_double_wide_mlp": True}  # fmt: skip
    if name == "gemma4_text":
        return shared | {
            "architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL], "num_attention_heads": 8,
            "num_global_key_value_heads": 2, "num_hidden_layers": 7, "num_key_value_heads": 8,
            "num_kv_shared_layers": 0, "use_bidirectional_attention": None, "use_double_wide_mlp": False}  # fmt: skip
    if name == "gemma4_moe":
        return shared | {
            "architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": True, "enable_moe_block": True,
            "hidden_size_per_layer_input": 0, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
            "moe_intermediate_size": 36, "num_attention_heads": 4, "num_experts": 8, "num_global_key_value_heads": 2,
            "num_hidden_layers": 5, "num_key_value_heads": 4, "num_kv_shared_layers": 0, "top_k_experts": 3,
            "use_bidirectional_attention": None, "use_double_wide_mlp": False}  # fmt: skip
    return shared | {
        "attention_k_eq_v": False, "hidden_size_per_layer_input": 16, "num_global_key_value_heads": None,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL], "num_hidden_layers": 8,
        "num_key_value_heads": 2, "num_kv_shared_layers": 3, "use_bidirectional_attention": None,
        "use_double_wide_mlp": True}  # fmt: skip


def vision_settings(name):
    """`vision_config`. Vision heads have 32 elements."""
    if name == "gemma4_unified":
        return {"model_type": "gemma4_unified_vision", "mm_embed_dim": 64, "mm_posemb_size": 70, "output_proj_dims": 64, "patch_size": PATCH,
                "pooling_kernel_size": POOL, "rms_norm_eps": 1e-06}  # fmt: skip
    return {"model_type": "gemma4_vision", "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64,
            "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "patch_size": PATCH,
            "pooling_kernel_size": POOL, "position_embedding_size": 256, "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"}, "standardize": name == "gemma4",
            "use_clipped_linears": name == "gemma4_clipped"}  # fmt: skip


def write_settings(folder, name, ids):
    """Writes the JSON files. `ids` are the tokens of pictures. Returns the settings of the decoder."""
    text = text_settings(name)
    prefix = "Gemma4Unified" if name == "gemma4_unified" else "Gemma4"
    config = text | {"architectures": ["Gemma4ForCausalLM"]} if name not in PICTURES else {
        "architectures": [f"{prefix}ForConditionalGeneration"], "audio_config": None, "audio_token_id": ids["audio_token"],
        "boi_token_id": ids["boi_token"], "dtype": "bfloat16", "eoi_token_id": ids["eoi_token"], "eos_token_id": [1, 5],
        "image_token_id": ids["image_token"], "video_token_id": ids["video_token"], "model_type": text["model_type"].removesuffix("_text"), "text_config": text, "tie_word_embeddings": True,
        "vision_config": vision_settings(name)}  # fmt: skip
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": 2, "do_sample": True, "eos_token_id": [1, 5], "pad_token_id": 0, "temperature": 1.0, "top_k": 64,
        "top_p": 0.95})  # fmt: skip
    if name in PICTURES:
        write_json(folder / "preprocessor_config.json", {
            "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "image_mean": [0.0, 0.0, 0.0],
            "image_processor_type": f"{prefix}ImageProcessor", "image_seq_length": TOKENS, "image_std": [1.0, 1.0, 1.0],
            "max_soft_tokens": TOKENS, "patch_size": PATCH, "pooling_kernel_size": POOL, "processor_class": f"{prefix}Processor",
            "resample": 3, "rescale_factor": 0.00392156862745098})  # fmt: skip
        write_json(folder / "video_preprocessor_config.json", {
            "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0], "max_soft_tokens": TOKENS, "patch_size": PATCH, "pooling_kernel_size": POOL,
            "resample": 3, "rescale_factor": 0.00392156862745098, "video_processor_type": f"{prefix}VideoProcessor"})  # fmt: skip
    return text


def add_attention(weights, at, config, is_full, has_kv):
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config["global_head_dim" if is_full else "head_dim"]
    keys_are_values = is_full and config["attention_k_eq_v"]
    kv_heads = config["num_global_key_value_heads"] if keys_are_values else config["num_key_value_heads"]
    weights.matrix(f"{at}.q_proj.weight", heads * head_dim, hidden)
    weights.vector(f"{at}.q_norm.weight", head_dim, mean=0.3, deviation=0.1)
    if has_kv:
        weights.matrix(f"{at}.k_proj.weight", kv_heads * head_dim, hidden)
        weights.vector(f"{at}.k_norm.weight", head_dim, mean=1.0)
        if not keys_are_values:
            weights.matrix(f"{at}.v_proj.weight", kv_heads * head_dim, hidden)
    weights.matrix(f"{at}.o_proj.weight", hidden, heads * head_dim, gain=1.5)


def add_experts(weights, at, config):
    """The router, the experts and their norms of the layer named `at`."""
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    for norm in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
        weights.vector(f"{at}.{norm}.weight", hidden, mean=1.0)
    # The gain and the scale keep the router's scores apart. Near a tie, f32 would choose different experts than f64.
    weights.matrix(f"{at}.router.proj.weight", experts, hidden, gain=math.sqrt(hidden))
    weights.vector(f"{at}.router.scale", hidden, mean=2.0)
    weights.vector(f"{at}.router.per_expert_scale", experts, mean=1.0, deviation=0.3)
    weights.matrix(f"{at}.experts.gate_up_proj", experts, 2 * width, hidden, gain=1.5 * math.sqrt(2 * width))
    weights.matrix(f"{at}.experts.down_proj", experts, hidden, width, gain=1.5 * math.sqrt(hidden))


def add_decoder(weights, config):
    hidden, layers, width = (config[key] for key in ("hidden_size", "num_hidden_layers", "hidden_size_per_layer_input"))
    weights.matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=0.06 * math.sqrt(hidden))
    if width:
        name = "model.embed_tokens_per_layer.weight"
        weights.matrix(name, config["vocab_size_per_layer_input"], layers * width, gain=0.25 * math.sqrt(layers * width))
        weights.matrix("model.per_layer_model_projection.weight", layers * width, hidden, gain=math.sqrt(hidden))
        weights.vector("model.per_layer_projection_norm.weight", width, mean=1.0)
    own = layers - config["num_kv_shared_layers"]
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}"
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            # Results are smaller than the residual stream, so that rounding errors do not grow from layer to layer.
            weights.vector(f"{at}.{norm}_layernorm.weight", hidden, mean=0.4 if norm.startswith("post") else 1.0)
        add_attention(weights, f"{at}.self_attn", config, kind == FULL, layer < own)
        is_wide = config["use_double_wide_mlp"] and layer >= own
        weights.mlp(at, config | {"intermediate_size": config["intermediate_size"] * (2 if is_wide else 1)}, biases="")
        if config["enable_moe_block"]:
            add_experts(weights, at, config)
        # A factor far from 1, so that a missing one changes the result.
        weights.vector(f"{at}.layer_scalar", 1, mean=0.9)
        if width:
            weights.matrix(f"{at}.per_layer_input_gate.weight", width, hidden)
            weights.matrix(f"{at}.per_layer_projection.weight", hidden, width, gain=1.5)
            weights.vector(f"{at}.post_per_layer_input_norm.weight", hidden, mean=0.4)
    weights.vector("model.norm.weight", hidden, mean=1.0)
    # Greedy decoding then never chooses a control token or padding.
    weights.tensors["model.embed_tokens.weight"][:len(gemma3.CONTROL)] *= 0.25
    weights.shrink_rows("model.embed_tokens.weight", TEXT_TOKENS)


def add_tower(weights, vision, text_hidden):
    """The vision tower and the projection. Some limits of clipped projections are exceeded."""
    hidden, at = vision["hidden_size"], "model.vision_tower"
    weights.matrix(f"{at}.patch_embedder.input_proj.weight", hidden, 3 * PATCH**2, gain=1.5)
    # Position embeddings are as large as patch embeddings, so that a wrong position changes the result.
    weights.matrix(f"{at}.patch_embedder.position_embedding_table", 2, vision["position_embedding_size"], hidden,
                   gain=0.5 * math.sqrt(vision["position_embedding_size"] * hidden))  # fmt: skip
    for layer in (f"{at}.encoder.layers.{index}" for index in range(vision["num_hidden_layers"])):
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights.vector(f"{layer}.{norm}_layernorm.weight", hidden, mean=0.6 if norm.startswith("post") else 1.0)
        for part, mean in {"q": 0.4, "k": 1.0}.items():
            weights.vector(f"{layer}.self_attn.{part}_norm.weight", vision["head_dim"], mean=mean)
        wide = vision["intermediate_size"]
        sizes = {f"self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"} | {
            "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}  # fmt: skip
        for part, (rows, columns) in sizes.items():
            weights.matrix(f"{layer}.{part}.linear.weight", rows, columns, gain=1.5)
            if vision["use_clipped_linears"]:
                for end in ("input", "output"):
                    low, high = sorted(1.5 * weights.random.standard_normal(2))
                    weights.tensors[f"{layer}.{part}.{end}_min"] = torch.tensor(low - 1.0).to(torch.bfloat16)
                    weights.tensors[f"{layer}.{part}.{end}_max"] = torch.tensor(high + 1.0).to(torch.bfloat16)
    if vision["standardize"]:
        weights.vector(f"{at}.std_bias", hidden)
        weights.vector(f"{at}.std_scale", hidden, mean=0.5)
    # Rows of pictures are as large as embeddings of tokens, which the decoder multiplies by the root of its width.
    weights.matrix("model.embed_vision.embedding_projection.weight", text_hidden, hidden, gain=0.06 * math.sqrt(text_hidden))


def add_embedder(weights, vision, text_hidden):
    """The norms and the projections of patches."""
    hidden, at, values = vision["mm_embed_dim"], "model.vision_embedder", 3 * (PATCH * POOL) ** 2
    weights.layer_norm(f"{at}.patch_ln1", values)
    weights.linear(f"{at}.patch_dense", hidden, values, gain=1.5)
    weights.layer_norm(f"{at}.patch_ln2", hidden)
    # Position embeddings are as large as projected patches, so that a wrong position changes the result.
    weights.matrix(f"{at}.pos_embedding", vision["mm_posemb_size"], 2, hidden, gain=0.7 * math.sqrt(2 * hidden))
    weights.layer_norm(f"{at}.pos_norm", hidden)
    weights.matrix("model.embed_vision.embedding_projection.weight", text_hidden, hidden, gain=0.06 * math.sqrt(text_hidden))


def record(root, _):
    for name, (kind, seed) in CHECKPOINTS.items():
        print(name)
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        processor = "Gemma4UnifiedProcessor" if name == "gemma4_unified" else "Gemma4Processor"
        pictures = (MORE_TOKENS, TEMPLATE, processor) if name in PICTURES else ()
        config = write_settings(folder, name, gemma3.write_tokenizer(folder, *pictures))
        weights = Weights(seed, torch.bfloat16, levels=3, deviation=1.2)
        add_decoder(weights, config)
        if name in PICTURES:
            weights.tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in weights.tensors.items()}
            add_encoder = add_embedder if name == "gemma4_unified" else add_tower
            add_encoder(weights, vision_settings(name), config["hidden_size"])
        write_checkpoint_tensors(folder, weights.tensors)
        reference = Reference(kind, folder)
        if name in PICTURES:
            enlarged_chats.record(root, folder, reference)
        else:
            gemma3.record_texts(folder, reference)
