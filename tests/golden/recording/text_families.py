"""Tiny text-only checkpoints: Qwen2, Qwen3 with and without experts, Llama, Mistral."""

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, MistralForCausalLM
from transformers import Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from .files import write_case, write_checkpoint_tensors, write_json
from .messages import text_chats
from .reference import Reference, rounded_checks
from .tokenizer import FIRST_ADDED, TEXT_TOKENS, write_tiny_tokenizer
from .weights import Weights

QWEN2, SEED_QWEN2 = "qwen2", 6
SEEDS = {"qwen3": 1, "qwen3_yarn": 1, "llama": 1, "llama_biased": 12, "mistral": 2, "qwen3_moe": 2, "qwen3_moe_sparse": 1}
# Seeds of the checkpoints with sliding windows, which are shorter than the chat `long`.
SEEDS_WINDOWED = {"mistral_windowed": 1, "qwen2_windowed": 1}
LLAMA_3 = (
    "{{- bos_token -}}\n"
    "{%- for message in messages -%}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}\n"
)
LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]


def record_cases(folder, kind):
    """Records the two chats of a checkpoint. `kind` is its model class."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = Reference(kind, folder)
    for name, messages in text_chats().items():
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = dict(tokenizer(prompt, return_tensors="pt"))
        tensors, checks = reference.record(name, inputs, prompt, placeholders=set())
        facts = {"messages": messages, "prompt": prompt, "checks": rounded_checks(checks)}
        facts["greedy_text"] = tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(folder / "cases", name, tensors, facts)


def write_qwen2(folder, inputs):
    folder.mkdir(parents=True, exist_ok=True)
    _, ids = write_tiny_tokenizer(folder, inputs.qwen2_5, inputs.qwen2_5["chat_template"])
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": 64,  # 14 heads as in Qwen2.5-0.5B, on a smaller hidden size
        "hidden_act": "silu",
        "hidden_size": 48,
        "initializer_range": 0.02,
        "intermediate_size": 92,
        "max_position_embeddings": 4096,
        "max_window_layers": 2,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 384,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "repetition_penalty": 1.1, "temperature": 0.7,
        "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0"})  # fmt: skip
    weights = Weights(SEED_QWEN2, torch.float16)
    weights.decoder(config, embedding_deviation=0.6)
    weights.shrink_rows("model.embed_tokens.weight", ids["<|endoftext|>"])
    write_checkpoint_tensors(folder, weights.tensors)


def family(name):
    """Model class and settings of a checkpoint, and the projections with biases."""
    small = {"hidden_size": 48, "intermediate_size": 92, "num_hidden_layers": 2, "vocab_size": 384, "rms_norm_eps": 1e-05,
             "hidden_act": "silu", "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "attention_bias": False}  # fmt: skip
    heads = lambda heads, kv_heads, head_dim: {  # noqa: E731
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}  # fmt: skip
    qwen3 = small | heads(6, 2, 128) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-06,
                                        "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None,
                                        "max_window_layers": 2, "use_sliding_window": False, "tie_word_embeddings": True}  # fmt: skip
    # Frequencies of all three kinds: kept, blended and divided.
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 128}  # fmt: skip
    llama = small | heads(8, 2, 64) | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False,
                                       "rope_theta": 500000.0, "rope_scaling": scaled, "tie_word_embeddings": True,
                                       "pretraining_tp": 1}  # fmt: skip
    mixed = qwen3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
                     "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True, "decoder_sparse_step": 1,
                     "mlp_only_layers": [], "tie_word_embeddings": False}  # fmt: skip
    # A window that is not a multiple of a block, in the second and third of four layers.
    qwen2 = small | heads(6, 2, 64) | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4, "rope_theta": 1000000.0,
        "use_sliding_window": True, "sliding_window": 23, "max_window_layers": 4, "tie_word_embeddings": True,
        "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")]}  # fmt: skip
    mistral = small | heads(4, 1, 128) | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False}  # fmt: skip
    return {
        "qwen2_windowed": (Qwen2ForCausalLM, qwen2, ("q", "k", "v")),
        "mistral_windowed": (MistralForCausalLM, mistral | {"sliding_window": 32}, ""),
        "qwen3_moe": (Qwen3MoeForCausalLM, mixed, ""),
        # Layers 1 and 5 of six have experts, and their routing weights do not sum to 1.
        "qwen3_moe_sparse": (Qwen3MoeForCausalLM, mixed | {
            "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}, ""),
        "qwen3": (Qwen3ForCausalLM, qwen3, ""),
        "qwen3_yarn": (Qwen3ForCausalLM, qwen3 | {"max_position_embeddings": 128, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, ""),
        "llama": (LlamaForCausalLM, llama, ""),
        "llama_biased": (LlamaForCausalLM, llama | heads(4, 4, 80) | {
            "attention_bias": True, "mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 4.0},
            "tie_word_embeddings": False}, ("q", "k", "v", "o", "gate", "up", "down")),
        "mistral": (MistralForCausalLM, mistral, ""),
    }[name]  # fmt: skip


def write_checkpoint(folder, name, inputs):
    folder.mkdir(parents=True, exist_ok=True)
    _, config, biases = family(name)
    is_qwen, settings = name.startswith("qwen"), inputs.qwen2_5
    if not is_qwen:
        added = settings["added_tokens_decoder"][str(FIRST_ADDED)]
        settings = settings | {
            "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>",
            "additional_special_tokens": LLAMA_TOKENS, "added_tokens_decoder": {
                str(FIRST_ADDED + place): added | {"content": token} for place, token in enumerate(LLAMA_TOKENS)}}  # fmt: skip
    tokenizer, _ = write_tiny_tokenizer(folder, settings, settings["chat_template"] if is_qwen else LLAMA_3)
    ends = ("<|im_end|>", "<|endoftext|>") if is_qwen else ("<|eot_id|>", "<|end_of_text|>")
    ends = [tokenizer.token_to_id(token) for token in ends]
    write_json(folder / "config.json", config | {"eos_token_id": ends[0]})
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": False})
    weights = Weights((SEEDS | SEEDS_WINDOWED)[name], torch.bfloat16)
    weights.decoder(config, embedding_deviation=0.6, biases=biases, head_norms=name.startswith("qwen3"))
    add_output(weights, config)
    write_checkpoint_tensors(folder, weights.tensors)


def add_output(weights, config):
    """Adds the output head unless it is tied. Shrinks the rows of added tokens in the head or the tied embedding."""
    output = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    if not config["tie_word_embeddings"]:
        weights.matrix("lm_head.weight", config["vocab_size"], config["hidden_size"], gain=3.0)
    weights.shrink_rows(output, TEXT_TOKENS)


def record_qwen2(root, inputs):
    print(QWEN2)
    write_qwen2(root / QWEN2, inputs)
    record_cases(root / QWEN2, Qwen2ForCausalLM)


def record(root, inputs):
    record_families(root, inputs, SEEDS)


def record_windowed(root, inputs):
    record_families(root, inputs, SEEDS_WINDOWED)


def record_families(root, inputs, names):
    for name in names:
        print(name)
        write_checkpoint(root / name, name, inputs)
        record_cases(root / name, family(name)[0])
