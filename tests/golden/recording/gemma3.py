"""Tiny Gemma 3 checkpoints, text only: one as released, and the text part of one with a vision tower."""

import json
import math

import tokenizers
import torch
from transformers import Gemma3ForCausalLM, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast

from .files import write_case, write_checkpoint_tensors, write_json
from .messages import text_chats
from .reference import Reference, rounded_checks
from .tokenizer import CORPUS, TEXT_TOKENS
from .weights import Weights

# Model class and seed. Each seed gives every greedy step a clear margin (`reference.MARGIN_MIN`).
CHECKPOINTS = {"gemma3_text": (Gemma3ForCausalLM, 3), "gemma3": (Gemma3ForConditionalGeneration, 1)}
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
# Our wording. It renders the same text as the published template for texts: the system text comes before the first turn of
# the user, and roles must alternate.
TEMPLATE = (
    "{{ bos_token }}{% set has_system = messages[0]['role'] == 'system' %}{% set turns = messages[1:] if has_system else messages %}"
    "{% for turn in turns %}"
    "{% if (turn['role'] == 'user') == (loop.index % 2 == 0) %}{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "<start_of_turn>{{ 'model' if turn['role'] == 'assistant' else turn['role'] }}\n"
    "{% if loop.first and has_system %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "{{ turn['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def write_tokenizer(folder):
    """Trains a BPE over characters, with a token for each byte that stands in for characters without a token, as Gemma's."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    as_gemma = lambda tokenizer: (  # noqa: E731
        setattr(tokenizer, "normalizer", tokenizers.normalizers.Replace(" ", "▁")),
        setattr(tokenizer, "pre_tokenizer", tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")))  # fmt: skip
    as_gemma(trained)
    own = len(CONTROL) + 256
    trained.train_from_iterator([CORPUS], tokenizers.trainers.BpeTrainer(vocab_size=TEXT_TOKENS - own, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    names = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocab={name: place for place, name in enumerate(names)}, merges=merges, unk_token="<unk>", fuse_unk=True,
        byte_fallback=True))  # fmt: skip
    as_gemma(tokenizer)
    tokenizer.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])  # fmt: skip
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", CONTROL.index("<bos>"))])  # fmt: skip
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    write_json(folder / "tokenizer_config.json", {
        "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
        "added_tokens_decoder": {str(place): added | {"content": name} for place, name in enumerate(CONTROL)},
        "tokenizer_class": "PreTrainedTokenizerFast"})  # fmt: skip


def text_settings(name):
    """The decoder's settings. `gemma3_text` has the keys of the released 1B: a pattern of windows, a base of each kind of
    layer, no `tie_word_embeddings`. `gemma3` has them as transformers saves them: a list of layers and nested rotary
    settings, with the linear factor of the larger releases."""
    shared = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": [1, 5], "final_logit_softcapping": None, "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 48, "initializer_range": 0.02, "intermediate_size": 60,
        "max_position_embeddings": 4096, "model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 48, "rms_norm_eps": 1e-06, "use_cache": True, "vocab_size": 384}  # fmt: skip
    if name == "gemma3_text":
        return shared | {
            "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "rope_local_base_freq": 10000,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 23, "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0"}  # fmt: skip
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding")]
    return shared | {
        "layer_types": kinds, "num_attention_heads": 2, "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 37, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}  # fmt: skip


def write_settings(folder, name):
    """Writes the JSON files. Returns the settings of the decoder."""
    text = text_settings(name)
    config = text if name == "gemma3_text" else {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 6, "eoi_token_index": 7, "dtype": "bfloat16",
        "eos_token_id": [1, 5], "image_token_index": 8, "mm_tokens_per_image": 1, "model_type": "gemma3",
        "text_config": text, "vision_config": {
            "hidden_size": 16, "image_size": 28, "intermediate_size": 24, "model_type": "siglip_vision_model",
            "num_attention_heads": 1, "num_hidden_layers": 1, "patch_size": 14, "vision_use_head": False}}  # fmt: skip
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True, "eos_token_id": [1, 5], "pad_token_id": 0,
        "top_k": 64, "top_p": 0.95})  # fmt: skip
    return text


def add_decoder(weights, config):
    """The decoder's tensors. Norms multiply by 1 + weight."""
    hidden = config["hidden_size"]
    weights.matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=0.06 * math.sqrt(hidden))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights.vector(f"{at}.{norm}_layernorm.weight", hidden)
        weights.attention(at, config, biases="", head_norms=False)
        for part in ("q", "k"):
            weights.vector(f"{at}.self_attn.{part}_norm.weight", config["head_dim"], mean=0.4)
        weights.mlp(at, config, biases="")
    weights.vector("model.norm.weight", hidden)
    # Greedy decoding then never chooses a control token or padding.
    weights.tensors["model.embed_tokens.weight"][:len(CONTROL)] *= 0.25
    weights.shrink_rows("model.embed_tokens.weight", TEXT_TOKENS)


def add_tower(weights, config):
    """A SigLIP tower and the projector, which no text uses."""
    hidden, width, at = 16, 24, "vision_tower.vision_model"
    weights.linear(f"{at}.embeddings.patch_embedding", hidden, 3, 14, 14)
    weights.matrix(f"{at}.embeddings.position_embedding.weight", 4, hidden)
    layer = f"{at}.encoder.layers.0"
    for norm in ("layer_norm1", "layer_norm2"):
        weights.layer_norm(f"{layer}.{norm}", hidden)
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        weights.linear(f"{layer}.self_attn.{part}", hidden, hidden)
    weights.linear(f"{layer}.mlp.fc1", width, hidden)
    weights.linear(f"{layer}.mlp.fc2", hidden, width)
    weights.layer_norm(f"{at}.post_layernorm", hidden)
    weights.vector("multi_modal_projector.mm_soft_emb_norm.weight", hidden)
    weights.matrix("multi_modal_projector.mm_input_projection_weight", hidden, config["hidden_size"])


def write_checkpoint(folder, name, seed):
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    config = write_settings(folder, name)
    weights = Weights(seed, torch.bfloat16, levels=3, deviation=1.2)
    add_decoder(weights, config)
    tensors = weights.tensors
    if name == "gemma3":
        # Names of the released checkpoints.
        weights.tensors = {f"language_model.{key}": value for key, value in tensors.items()}
        add_tower(weights, config)
    write_checkpoint_tensors(folder, weights.tensors)


def record(root, _):
    for name, (kind, seed) in CHECKPOINTS.items():
        print(name)
        folder = root / name
        write_checkpoint(folder, name, seed)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        reference = Reference(kind, folder)
        for case, messages in text_chats().items():
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            # The template has written `<bos>`.
            inputs = dict(tokenizer(prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False))
            tensors, checks = reference.record(case, inputs, prompt, placeholders=set())
            facts = {"messages": messages, "prompt": prompt, "checks": rounded_checks(checks)}
            facts["greedy_text"] = tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
            write_case(folder / "cases", case, tensors, facts)
