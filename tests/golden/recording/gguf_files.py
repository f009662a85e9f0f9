"""GGUF files of three checkpoints, quantized blocks, and splitters, with the package `gguf` 0.19.

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
from .tokenizer import STRINGS

F32, F16, BF16 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16"))
# The types of the matrices and of the embedding. The last file mixes two types.
FILES = {"llama": (BF16, BF16), "qwen2": (F16, F16), "qwen3": (BF16, F32)}
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


def add_vocabulary(writer, source, size):
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    ids = {token: id for token, id in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(ids.values(), gguf.TokenType.NORMAL)
    for token in tokenizer["added_tokens"]:
        ids[token["content"]] = token["id"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    texts = {id: token for token, id in ids.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([texts.get(id, f"[PAD{id}]") for id in range(size)])
    writer.add_token_types([kinds.get(id, gguf.TokenType.UNUSED) for id in range(size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]])
    for key, add in [("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id), ("pad_token", writer.add_pad_token_id)]:
        token = settings.get(key)
        if token is not None:
            add(ids[token["content"] if isinstance(token, dict) else token])
    writer.add_chat_template(settings["chat_template"])


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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
        # As in tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct.
        "smollm": pre.Sequence([pre.Digits(individual_digits=True), gpt2]),
        "tekken": by(re.search(r'r"(\[\^.+?)"\n', source).group(1)),
    }


def record(root, _):
    folder = root / "gguf"
    folder.mkdir(exist_ok=True)
    for name in FILES:
        write_file(folder / f"{name}.gguf", root / name, name)
    record_blocks(folder)
    cut = lambda splitter, text: [piece for piece, _ in splitter.pre_tokenize_str(text)]  # noqa: E731
    pieces = {name: [cut(splitter, text) for text in STRINGS] for name, splitter in splitters().items()}
    contents = {"texts": STRINGS, "pieces": pieces}
    (folder / "pieces.json").write_text(json.dumps(contents, ensure_ascii=False) + "\n", encoding="utf-8")
    if not (root / PEERS).exists():  # another script recorded it
        (root / PEERS).write_bytes(archives.read_file(PEERS))
