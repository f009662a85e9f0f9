"""The GGUF files of this folder, by the package `gguf` (0.19), and those of `torch.save`: `make.py --only gguf` runs it,
after the checkpoints.

Three golden checkpoints again, with names, metadata and rows as llama.cpp's `convert_hf_to_gguf.py` writes them; blocks of
every quantised type with their values; texts in the pieces that each splitter makes.
"""

import gzip
import inspect
import json
import re
import tempfile
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import convert_slow_tokenizer, tokenization_utils_tokenizers
from transformers.models.qwen2 import tokenization_qwen2

F32, F16, BF16 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16"))
# The type of matrices, and that of the embedding. One file has both, as files of mixed types have.
FILES = {"llama": (BF16, BF16), "qwen2": (F16, F16), "qwen3": (BF16, F32)}
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def permuted(weight, heads):
    """The rows of each head from halves to pairs (`LlamaModel.permute`)."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def divisors(config):
    """`LlamaModel.generate_extra_tensors`."""
    rope, pairs = config["rope_scaling"], config["head_dim"] // 2
    context, low, high = (rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    found = []
    for pair in range(pairs):
        turns = context * config["rope_theta"] ** (-pair / pairs) / (2 * np.pi)
        kept = min(max((turns - low) / (high - low), 0), 1)
        found.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.array(found, np.float32)


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


def write_file(source, name):
    config = json.loads((source / "config.json").read_text())
    matrices, embedding = FILES[name]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config["num_hidden_layers"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, name)
        writer.add_type("model")
        add_settings(writer, config, name)
        add_vocabulary(writer, source, config["vocab_size"])
        if name == "llama":
            writer.add_tensor("rope_freqs.weight", divisors(config))
        for theirs, tensor in load_file(source / "model.safetensors").items():
            ours, weight = names.get_name(theirs, (".weight", ".bias")), tensor.float().numpy()
            if name == "llama" and ".attn_q." in ours:
                weight = permuted(weight, config["num_attention_heads"])
            if name == "llama" and ".attn_k." in ours:
                weight = permuted(weight, config["num_key_value_heads"])
            kind = F32 if weight.ndim == 1 else embedding if ours.startswith("token_embd") else matrices
            writer.add_tensor(ours, gguf.quantize(weight, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def record_blocks(folder):
    """Random blocks, each bit of them drawn, but for scales, which are finite; `dequantize` says what they mean."""
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
    """What transformers splits by, by the names of llama.cpp."""
    pre = tokenizers.pre_tokenizers
    bytes_only = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    by = lambda words: pre.Sequence([pre.Split(tokenizers.Regex(words), "isolated"), bytes_only])  # noqa: E731
    llama = inspect.signature(convert_slow_tokenizer.TikTokenConverter).parameters["pattern"].default
    source = inspect.getsource(tokenization_utils_tokenizers.TokenizersBackend._patch_mistral_regex)
    gpt2 = pre.ByteLevel(add_prefix_space=False)
    return {
        "gpt-2": gpt2,
        "llama-bpe": by(llama),
        "qwen2": by(tokenization_qwen2.PRETOKENIZE_REGEX),
        # As tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct.
        "smollm": pre.Sequence([pre.Digits(individual_digits=True), gpt2]),
        "tekken": by(re.search(r'r"(\[\^.+?)"\n', source).group(1)),
    }


def zipped(path, save):
    """What `save` writes to a path, gzipped."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        save(made)
        path.write_bytes(gzip.compress(made.read_bytes(), 9, mtime=0))


def record_pytorch(here):
    """One file of Llama's, tied as a model is saved, and two of Qwen2's with their index."""
    folder = here / "pytorch"
    folder.mkdir(exist_ok=True)
    llama, qwen2 = (load_file(here / name / "model.safetensors") for name in ("llama", "qwen2"))
    llama = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in llama.items()}
    llama["lm_head.weight"] = llama["model.embed_tokens.weight"]
    zipped(folder / "pytorch_model.bin.gz", lambda path: torch.save(llama, path))
    names = sorted(qwen2)
    shards = {f"pytorch_model-{at + 1:05}-of-00002.bin": names[at::2] for at in range(2)}
    # Parts of one storage, as a model is loaded that was sharded by hand.
    for shard, own in shards.items():
        whole = torch.cat([qwen2[name].flatten() for name in own])
        parts = whole.split([qwen2[name].numel() for name in own])
        tensors = {name: part.view(qwen2[name].shape) for name, part in zip(own, parts)}
        zipped(folder / f"{shard}.gz", lambda path: torch.save(tensors, path))  # noqa: B023
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1) + "\n")


def make(here, strings):
    record_pytorch(here)
    folder = here / "gguf"
    folder.mkdir(exist_ok=True)
    for name in FILES:
        (folder / f"{name}.gguf.gz").write_bytes(gzip.compress(write_file(here / name, name), 9, mtime=0))
    record_blocks(folder)
    pieces = {name: [[piece for piece, _ in splitter.pre_tokenize_str(text)] for text in strings] for name, splitter in splitters().items()}
    record = {"texts": strings, "pieces": pieces}
    (folder / "pieces.json").write_text(json.dumps(record, ensure_ascii=False, indent=None) + "\n", encoding="utf-8")
