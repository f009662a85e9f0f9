"""Tiny Gemma 3 checkpoints: one without pictures, and one with a vision tower."""

import json
import math

import tokenizers
import torch
from transformers import Gemma3ForCausalLM, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast

from . import crop_chats
from .files import write_case, write_checkpoint_tensors, write_json
from .messages import text_chats
from .picture_chats import PATCH
from .reference import Reference, rounded_checks
from .tokenizer import CORPUS, TEXT_TOKENS
from .weights import Weights

# Model class and seed. Each seed gives every greedy step a clear margin (`reference.MARGIN_MIN`).
CHECKPOINTS = {"gemma3_text": (Gemma3ForCausalLM, 3), "gemma3": (Gemma3ForConditionalGeneration, 8)}
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
# Tokens of `gemma3` after the text tokens, by their names in transformers.
PICTURE_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
SIDE, PICTURE_SIDE = 168, 6  # of a processed picture: 168 x 168 pixels, 12 x 12 patches, 6 x 6 tokens
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
# The same for contents that are lists of parts. A picture is one token, which the processor expands.
PICTURE_TEMPLATE = TEMPLATE.replace(
    "{{ messages[0]['content'] }}", "{% set system = messages[0]['content'] %}{{ system if system is string else system[0]['text'] }}"
).replace(
    "{{ turn['content'] | trim }}",
    "{% if turn['content'] is string %}{{ turn['content'] | trim }}{% elif turn['content'] is iterable %}"
    "{% for part in turn['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% else %}{{ raise_exception('content must be a text or a list of parts') }}{% endif %}")  # fmt: skip


def write_tokenizer(folder, more=None, template=TEMPLATE, processor=None):
    """Trains a BPE over characters, with a token for each byte that stands in for characters without a token, as Gemma's.

    `more` are tokens of pictures and sound, by their names in transformers, and `processor` is the class that reads them.
    Returns their ids."""
    more = more or {}
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    as_gemma = lambda tokenizer: (  # noqa: E731
        setattr(tokenizer, "normalizer", tokenizers.normalizers.Replace(" ", "▁")),
        setattr(tokenizer, "pre_tokenizer", tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")))  # fmt: skip
    as_gemma(trained)
    own = len(CONTROL) + 256
    trained.train_from_iterator([CORPUS], tokenizers.trainers.BpeTrainer(vocab_size=TEXT_TOKENS - own, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    texts = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocab={text: place for place, text in enumerate(texts)}, merges=merges, unk_token="<unk>", fuse_unk=True,
        byte_fallback=True))  # fmt: skip
    as_gemma(tokenizer)
    tokenizer.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])  # fmt: skip
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", CONTROL.index("<bos>"))])  # fmt: skip
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in CONTROL])
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in more.values()])
    ids = {key: tokenizer.token_to_id(token) for key, token in more.items()}
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "chat_template": template,
        "added_tokens_decoder": {str(place): added | {"content": token} for place, token in enumerate(CONTROL)},
        "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    if more:
        settings["added_tokens_decoder"] |= {str(ids[key]): added | {"content": token} for key, token in more.items()}
        settings |= more | {"extra_special_tokens": more, "processor_class": processor}
        write_json(folder / "chat_template.json", {"chat_template": template})  # as released, in both files
    write_json(folder / "tokenizer_config.json", settings)
    return ids


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
    # The window is shorter than a picture.
    return shared | {
        "layer_types": kinds, "num_attention_heads": 2, "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 23,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}  # fmt: skip


def vision_settings():
    """`vision_config` with the keys of the released checkpoints. Vision heads have 32 elements."""
    return {"hidden_size": 64, "image_size": SIDE, "intermediate_size": 96, "model_type": "siglip_vision_model",
            "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": PATCH, "vision_use_head": False}  # fmt: skip


def write_settings(folder, name, ids):
    """Writes the JSON files. `ids` are the tokens of pictures. Returns the settings of the decoder."""
    text = text_settings(name)
    config = text if name == "gemma3_text" else {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": ids["boi_token"], "eoi_token_index": ids["eoi_token"],
        "dtype": "bfloat16", "eos_token_id": [1, 5], "image_token_index": ids["image_token"], "mm_tokens_per_image": PICTURE_SIDE**2,
        "model_type": "gemma3", "text_config": text, "vision_config": vision_settings()}  # fmt: skip
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True, "eos_token_id": [1, 5], "pad_token_id": 0,
        "top_k": 64, "top_p": 0.95})  # fmt: skip
    if name == "gemma3":
        write_processor(folder)
    return text


def write_processor(folder):
    """The processor's settings as released. The code of transformers fills in the nulls."""
    write_json(folder / "preprocessor_config.json", {
        "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": PICTURE_SIDE**2,
        "image_std": [0.5, 0.5, 0.5], "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None, "processor_class": "Gemma3Processor", "resample": 2,
        "rescale_factor": 0.00392156862745098, "size": {"height": SIDE, "width": SIDE}})  # fmt: skip
    write_json(folder / "processor_config.json", {"image_seq_length": PICTURE_SIDE**2, "processor_class": "Gemma3Processor"})


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
    # Greedy decoding then never chooses a control token, a token of a picture or padding.
    weights.tensors["model.embed_tokens.weight"][:len(CONTROL)] *= 0.25
    weights.shrink_rows("model.embed_tokens.weight", TEXT_TOKENS)


def add_tower(weights, vision, text_hidden):
    """The SigLIP tower and the projector, with the names of the released checkpoints."""
    hidden, places, at = vision["hidden_size"], (SIDE // PATCH) ** 2, "vision_tower.vision_model"
    weights.linear(f"{at}.embeddings.patch_embedding", hidden, 3, PATCH, PATCH, gain=1.5)
    # Position embeddings are as large as patch embeddings, so that a wrong position changes the result.
    weights.matrix(f"{at}.embeddings.position_embedding.weight", places, hidden, gain=0.7 * math.sqrt(hidden))
    for layer in (f"{at}.encoder.layers.{index}" for index in range(vision["num_hidden_layers"])):
        for norm in ("layer_norm1", "layer_norm2"):
            weights.layer_norm(f"{layer}.{norm}", hidden)
        for part, gain in {"q_proj": 1.4, "k_proj": 1.4, "v_proj": 1.0, "out_proj": 1.5}.items():
            weights.linear(f"{layer}.self_attn.{part}", hidden, hidden, gain=gain)
        weights.linear(f"{layer}.mlp.fc1", vision["intermediate_size"], hidden, gain=1.5)
        weights.linear(f"{layer}.mlp.fc2", hidden, vision["intermediate_size"], gain=1.5)
    weights.layer_norm(f"{at}.post_layernorm", hidden)
    weights.vector("multi_modal_projector.mm_soft_emb_norm.weight", hidden)
    # Rows of pictures are as large as embeddings of tokens, which the decoder multiplies by the root of its width.
    weights.matrix("multi_modal_projector.mm_input_projection_weight", hidden, text_hidden, gain=0.06 * text_hidden / math.sqrt(hidden))


def write_checkpoint(folder, name, seed):
    folder.mkdir(parents=True, exist_ok=True)
    pictures = (PICTURE_TOKENS, PICTURE_TEMPLATE, "Gemma3Processor") if name == "gemma3" else ()
    config = write_settings(folder, name, write_tokenizer(folder, *pictures))
    weights = Weights(seed, torch.bfloat16, levels=3, deviation=1.2)
    add_decoder(weights, config)
    if name == "gemma3":
        weights.tensors = {f"language_model.{key}": value for key, value in weights.tensors.items()}
        add_tower(weights, vision_settings(), config["hidden_size"])
    write_checkpoint_tensors(folder, weights.tensors)


def record_texts(folder, reference):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for case, messages in text_chats().items():
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template has written `<bos>`.
        inputs = dict(tokenizer(prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False))
        tensors, checks = reference.record(case, inputs, prompt, placeholders=set())
        facts = {"messages": messages, "prompt": prompt, "checks": rounded_checks(checks)}
        facts["greedy_text"] = tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(folder / "cases", case, tensors, facts)


def record(root, _):
    for name, (kind, seed) in CHECKPOINTS.items():
        print(name)
        folder = root / name
        write_checkpoint(folder, name, seed)
        reference = Reference(kind, folder)
        record_texts(folder, reference)
        if name == "gemma3":
            crop_chats.record(root, folder, reference)
