"""GGUF files of eight checkpoints, quantized blocks, and splitters, with the package `gguf` 0.19.

Names, metadata and rows match those of llama.cpp's `convert_hf_to_gguf.py`."""

import inspect
import json
import re

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from . import archives
from .tokenizer import SPLIT_QWEN3_5, STRINGS

F32, F16, BF16 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16"))
# The types of the matrices and of the embedding. The last file mixes two types.
FILES = {"llama": (BF16, BF16), "qwen2": (F16, F16), "qwen3": (BF16, F32)}
# Hybrid models, by name and architecture. The file of the first model's vision encoder is also
# recorded.
HYBRIDS = {"qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
# Models with SentencePiece vocabularies, by name and architecture.
GEMMAS = {"gemma3_text": "gemma3", "gemma4_sharing": "gemma4", "gemma4_moe": "gemma4"}
# The tokens that llama.cpp's chat parser reads in the text of replies (`conversion/gemma.py`).
VISIBLE = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'}
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
# `tools/cpu/gguf_peers.py record` recorded this file from a real model.
PEERS = "gguf/smollm2.json"


def permuted(weight, heads):
    """Moves the rows of each head from halves to rotary pairs (llama.cpp's `LlamaModel.permute`)."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def frequency_divisors(config):
    """`rope_freqs.weight` (llama.cpp's `LlamaModel.generate_extra_tensors`)."""
    rope, pairs = config["rope_scaling"], config["head_dim"] // 2
    context, low, high = (rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    divisors = []
    for pair in range(pairs):
        turns = context * config["rope_theta"] ** (-pair / pairs) / (2 * np.pi)
        kept = min(max((turns - low) / (high - low), 0), 1)
        divisors.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.array(divisors, np.float32)


def add_settings(writer, config, architecture):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_file_type(0)
    if architecture == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])


def add_vocabulary(writer, source, size, splitter="qwen2"):
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids = {token: id for token, id in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(ids.values(), gguf.TokenType.NORMAL)
    for token in tokenizer["added_tokens"]:
        ids[token["content"]] = token["id"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    texts = {id: token for token, id in ids.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list([texts.get(id, f"[PAD{id}]") for id in range(size)])
    writer.add_token_types([kinds.get(id, gguf.TokenType.UNUSED) for id in range(size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]])
    add_special_tokens(writer, source, ids)


def add_special_tokens(writer, source, ids):
    settings, template = json.loads((source / "tokenizer_config.json").read_text()), source / "chat_template.jinja"
    for key, add in [("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id),
                     ("pad_token", writer.add_pad_token_id), ("unk_token", writer.add_unk_token_id)]:  # fmt: skip
        token = settings.get(key)
        if token is not None:
            add(ids[token["content"] if isinstance(token, dict) else token])
    writer.add_chat_template(template.read_text() if template.exists() else settings["chat_template"])


def write_file(path, source, name):
    config = json.loads((source / "config.json").read_text())
    matrices, embedding = FILES[name]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, name)
    writer.add_type("model")
    add_settings(writer, config, name)
    add_vocabulary(writer, source, config["vocab_size"])
    if name == "llama":
        writer.add_tensor("rope_freqs.weight", frequency_divisors(config))
    for hf_name, tensor in load_file(source / "model.safetensors").items():
        gguf_name, weight = names.get_name(hf_name, (".weight", ".bias")), tensor.float().numpy()
        if name == "llama" and ".attn_q." in gguf_name:
            weight = permuted(weight, config["num_attention_heads"])
        if name == "llama" and ".attn_k." in gguf_name:
            weight = permuted(weight, config["num_key_value_heads"])
        kind = F32 if weight.ndim == 1 else embedding if gguf_name.startswith("token_embd") else matrices
        writer.add_tensor(gguf_name, gguf.quantize(weight, kind), raw_dtype=kind)
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_weight(writer, name, weight):
    """Adds a matrix in BF16. Other tensors are F32, and so are the tensors that llama.cpp never quantizes."""
    is_f32 = weight.ndim == 1 or any(part in name for part in ("ssm_conv1d", "ffn_gate_inp", "patch_embd", "position_embd"))
    kind = F32 if is_f32 else BF16
    writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)


def tiled(weight, axis, key_heads, heads, width):
    """Moves value heads from (key head, value) to (value, key head) along an axis (llama.cpp's `_reorder_v_heads`)."""
    shape = weight.shape
    split = shape[:axis] + (key_heads, heads // key_heads, width) + shape[axis + 1 :]
    return weight.reshape(split).swapaxes(axis, axis + 1).reshape(shape)


def hybrid_weight(name, weight, config):
    """A tensor of a hybrid decoder as llama.cpp writes it (`Qwen3NextModel` and `_LinearAttentionVReorderBase`)."""
    keys, heads, width = (config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "value_head_dim"))
    tile = lambda weight, axis=0, width=1: tiled(weight, axis, keys, heads, width)  # noqa: E731
    if name.endswith("norm.weight"):
        return weight if ".linear_attn." in name else weight + 1
    if name.endswith("A_log"):
        return tile(-np.exp(weight))
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "dt_bias")):
        return tile(weight)
    if name.endswith("in_proj_z.weight"):
        return tile(weight, 0, width)
    if name.endswith(".out_proj.weight"):
        return tile(weight, 1, width)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        weight, before = weight.reshape(weight.shape[0], -1), 2 * keys * config["linear_key_head_dim"]
        return np.concatenate([weight[:before], tile(weight[before:], 0, width)])
    return weight


def add_hybrid_settings(writer, config, drafts):
    rope, heads = config["rope_parameters"], config["linear_num_value_heads"]
    writer.add_block_count(config["num_hidden_layers"] + drafts)
    if drafts:
        writer.add_uint32(f"{writer.arch}.nextn_predict_layers", drafts)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_file_type(0)


DRAFT_NAMES = {"fc": "nextn.eh_proj", "norm": "nextn.shared_head_norm", "pre_fc_norm_embedding": "nextn.enorm",
               "pre_fc_norm_hidden": "nextn.hnorm"}  # fmt: skip


def hybrid_names(name, weight, names, layers):
    """The names and tensors in GGUF for a tensor with llama.cpp's values."""
    if name.startswith("mtp.layers."):
        name = name.replace("mtp.layers.0", f"model.layers.{layers}")
    elif name.startswith("mtp."):
        part = name.removeprefix("mtp.").removesuffix(".weight")
        return [(f"blk.{layers}.{DRAFT_NAMES[part]}.weight", weight)]
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith(".experts.gate_up_proj") and ".layers.0." not in name:  # older files have two tensors
        gate, up = np.split(weight, 2, axis=1)
        at = names.get_name(name.replace("gate_up_proj", "gate_proj")), names.get_name(name.replace("gate_up_proj", "up_proj"))
        return [(f"{at[0]}.weight", gate), (f"{at[1]}.weight", up)]
    if ".experts." in name:
        return [(f"{names.get_name(name)}.weight", weight)]
    return [(names.get_name(name, (".weight", ".bias")), weight)]


def write_hybrid(folder, source, name):
    whole, architecture = json.loads((source / "config.json").read_text()), HYBRIDS[name]
    config, tensors = whole["text_config"], {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    drafts = int(any(key.startswith("mtp.") for key in tensors))
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], layers + drafts)
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", architecture)
    writer.add_type("model")
    add_hybrid_settings(writer, config, drafts)
    add_vocabulary(writer, source, config["vocab_size"], "qwen35")
    for key, tensor in tensors.items():
        if not key.startswith("model.visual."):
            weight = hybrid_weight(key, tensor.float().numpy(), config)
            for gguf_name, part in hybrid_names(key.replace("model.language_model.", "model."), weight, names, layers):
                add_weight(writer, gguf_name, part)
    finish(writer)
    if name == "qwen3_5":
        write_vision(folder / f"{name}.mmproj.gguf", source, whole, tensors)


def write_vision(path, source, config, tensors):
    """The vision encoder (llama.cpp's `Qwen3VLVisionModel`)."""
    vision, pixels = config["vision_config"], json.loads((source / "preprocessor_config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["depth"])
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_image_mean(pixels["image_mean"])
    writer.add_vision_image_std(pixels["image_std"])
    writer.add_vision_min_pixels(pixels["size"]["shortest_edge"])
    writer.add_vision_max_pixels(pixels["size"]["longest_edge"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_attention_layernorm_eps(config["text_config"]["rms_norm_eps"])
    writer.add_vision_is_deepstack_layers([False] * vision["depth"])
    writer.add_file_type(0)
    merger = {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
    for key, tensor in tensors.items():
        if not key.startswith("model.visual."):
            continue
        key, weight = key.removeprefix("model.visual."), tensor.float().numpy()
        part, suffix = key.rsplit(".", 1)
        if key == "patch_embed.proj.weight":
            add_weight(writer, "v.patch_embd.weight", weight[:, :, 0].copy())
            add_weight(writer, "v.patch_embd.weight.1", weight[:, :, 1].copy())
        elif part in merger:
            add_weight(writer, f"{merger[part]}.{suffix}", weight)
        else:
            add_weight(writer, names.get_name(f"visual.{key}", (".weight", ".bias")), weight)
    finish(writer)


def add_pieces(writer, source, size):
    """A SentencePiece vocabulary. Gemma 3's files have scores, from which the order of merges follows; Gemma 4's have merges."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids, special = tokenizer["model"]["vocab"], {token["content"] for token in tokenizer["added_tokens"]}
    kinds = {id: gguf.TokenType.BYTE if re.fullmatch("<0x[0-9A-F]{2}>", text) else gguf.TokenType.NORMAL for text, id in ids.items()}
    kinds |= {ids[text]: gguf.TokenType.USER_DEFINED if text in VISIBLE else gguf.TokenType.CONTROL for text in special}
    kinds[ids["<unk>"]] = gguf.TokenType.UNKNOWN
    texts = {id: token for token, id in ids.items()}
    has_merges = writer.arch == "gemma4"
    writer.add_tokenizer_model("gemma4" if has_merges else "llama")
    writer.add_token_list([texts.get(id, f"[PAD{id}]") for id in range(size)])
    writer.add_token_scores([-1000.0 if has_merges else -float(id) for id in range(size)])
    writer.add_token_types([kinds.get(id, gguf.TokenType.UNUSED) for id in range(size)])
    if has_merges:
        writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    add_special_tokens(writer, source, ids)


def add_gemma_settings(writer, config):
    is_new, layers = writer.arch == "gemma4", config["num_hidden_layers"]
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_file_type(0)
    width, kv_heads = config["intermediate_size"], config["num_key_value_heads"]
    if not is_new:
        writer.add_feed_forward_length(width)
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_freq_base(config["rope_theta"])
        return
    is_windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    rope, sharing, full_heads = config["rope_parameters"], config["num_kv_shared_layers"], config["num_global_key_value_heads"]
    wide = 2 * width if config["use_double_wide_mlp"] else width
    writer.add_feed_forward_length([width] * (layers - sharing) + [wide] * sharing if wide > width else width)
    writer.add_head_count_kv([kv_heads if windowed else full_heads for windowed in is_windowed] if full_heads else kv_heads)
    writer.add_shared_kv_layers(sharing)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(is_windowed)
    for length, of_windows in [(writer.add_key_length, writer.add_key_length_swa), (writer.add_value_length, writer.add_value_length_swa),
                               (writer.add_rope_dimension_count, writer.add_rope_dimension_count_swa)]:  # fmt: skip
        length(config["global_head_dim"])
        of_windows(config["head_dim"])
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    pairs = config["global_head_dim"] // 2
    rotated = int(pairs * rope["full_attention"]["partial_rotary_factor"])
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32))


def write_gemma(path, source, architecture):
    config = json.loads((source / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("model")
    add_gemma_settings(writer, config)
    add_pieces(writer, source, config["vocab_size"])
    # Gemma 3's files do not have the divisor of attention scores, which is the size of a head except in the 27B.
    # The weights of the query norm make up for the divisor of this checkpoint.
    scale = (config["head_dim"] / config.get("query_pre_attn_scalar", config["head_dim"])) ** 0.5
    for key, tensor in load_file(source / "model.safetensors").items():
        weight = tensor.float().numpy()
        if architecture == "gemma3" and key.endswith("norm.weight"):
            weight = (weight + 1) * (scale if "q_norm" in key else 1)
        if key.endswith("router.scale"):
            name = names.get_name(key.replace("scale", "proj")) + ".scale"
        elif key.endswith("per_expert_scale"):
            name = names.get_name(key.replace("router.per_expert_scale", "experts.down_proj")) + ".scale"
        elif key.endswith(("layer_scalar", "_proj")):
            name = names.get_name(key) + ".weight"
        else:
            name = names.get_name(key, (".weight",))
        assert name, key
        add_weight(writer, name, weight)
    finish(writer)


def record_blocks(folder):
    """Random blocks of each quantized type, with finite scales, and the values that `gguf.dequantize` gives."""
    random, tensors = np.random.default_rng(5), {}
    for name in BLOCKS:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (6, size), np.uint8)
        scales = {"Q6_K": [208]}.get(name, [0, 2] if name.endswith(("_1", "_K")) else [0])
        for at in scales:
            blocks[:, at : at + 2] = random.standard_normal((6, 1)).astype(np.float16).view(np.uint8)
        tensors[f"{name}.blocks"] = torch.from_numpy(blocks)
        tensors[f"{name}.values"] = torch.from_numpy(gguf.dequantize(blocks.reshape(-1), kind).reshape(6, elements).copy())
    save_file(tensors, folder / "blocks.safetensors")


def splitters():
    """The pre-tokenizers of transformers, by the names of llama.cpp."""
    pre = tokenizers.pre_tokenizers
    bytes_only = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    by = lambda words: pre.Sequence([pre.Split(tokenizers.Regex(words), "isolated"), bytes_only])  # noqa: E731
    llama = inspect.signature(TikTokenConverter).parameters["pattern"].default
    source = inspect.getsource(TokenizersBackend._patch_mistral_regex)
    gpt2 = pre.ByteLevel(add_prefix_space=False)
    return {
        "gpt-2": gpt2,
        "llama-bpe": by(llama),
        "qwen2": by(PRETOKENIZE_REGEX),
        "qwen35": by(SPLIT_QWEN3_5),
        # As in tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct.
        "smollm": pre.Sequence([pre.Digits(individual_digits=True), gpt2]),
        "tekken": by(re.search(r'r"(\[\^.+?)"\n', source).group(1)),
    }


def record(root, _):
    folder = root / "gguf"
    folder.mkdir(exist_ok=True)
    for name in FILES:
        write_file(folder / f"{name}.gguf", root / name, name)
    for name in HYBRIDS:
        write_hybrid(folder, root / name, name)
    for name, architecture in GEMMAS.items():
        write_gemma(folder / f"{name}.gguf", root / name, architecture)
    record_blocks(folder)
    cut = lambda splitter, text: [piece for piece, _ in splitter.pre_tokenize_str(text)]  # noqa: E731
    pieces = {name: [cut(splitter, text) for text in STRINGS] for name, splitter in splitters().items()}
    contents = {"texts": STRINGS, "pieces": pieces}
    (folder / "pieces.json").write_text(json.dumps(contents, ensure_ascii=False) + "\n", encoding="utf-8")
    if not (root / PEERS).exists():  # another script recorded it
        (root / PEERS).write_bytes(archives.read_file(PEERS))
