"""Writes the folder of a model's settings (no weights) from a Qwen2.5-VL-7B folder that qwen25vl7b.py has written.

    shapes.py FROM DIR NAME      NAME: qwen2.5-vl-3b, -32b, -72b, qwen3-vl-8b, qwen3-vl-30b-a3b, qwen3-8b, qwen3-30b-a3b

vLLM draws weights with load_format="dummy". The numbers are from the released configurations."""
import json, os, shutil, sys

SOURCE, DIR, NAME = sys.argv[1:4]
os.makedirs(DIR, exist_ok=True)
for file in os.listdir(SOURCE):
    if file.endswith(".json") and "index" not in file: shutil.copy(f"{SOURCE}/{file}", DIR)
config = json.load(open(f"{DIR}/config.json"))


def save(name, value): json.dump(value, open(f"{DIR}/{name}", "w"), indent=1)


QWEN25 = {  # hidden, intermediate, layers, heads, kv heads, vocabulary, tied, vision intermediate
    "qwen2.5-vl-3b": (2048, 11008, 36, 16, 2, 151936, True, 3420),
    "qwen2.5-vl-32b": (5120, 27648, 64, 40, 8, 152064, False, 3456),
    "qwen2.5-vl-72b": (8192, 29568, 80, 64, 8, 152064, False, 3456),
}
QWEN3 = {  # hidden, intermediate, layers, heads, kv heads, experts (count, each, top)
    "8b": (4096, 12288, 36, 32, 8, None),
    "30b-a3b": (2048, 6144, 48, 32, 4, (128, 768, 8)),
}
if NAME in QWEN25:
    hidden, inner, layers, heads, kv, vocabulary, tied, vision = QWEN25[NAME]
    config.update(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, max_window_layers=layers,
                  num_attention_heads=heads, num_key_value_heads=kv, vocab_size=vocabulary, tie_word_embeddings=tied)
    config["vision_config"].update(out_hidden_size=hidden, intermediate_size=vision)
    save("config.json", config)
    sys.exit()
pictures = NAME.startswith("qwen3-vl-")
hidden, inner, layers, heads, kv, experts = QWEN3[NAME.removeprefix("qwen3-vl-").removeprefix("qwen3-")]
text = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "dtype": "bfloat16",
        "head_dim": 128, "hidden_act": "silu", "hidden_size": hidden, "initializer_range": 0.02, "intermediate_size": inner,
        "max_position_embeddings": 262144 if pictures else 40960, "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": kv, "rms_norm_eps": 1e-6, "rope_theta": 5e6 if pictures else 1e6, "use_cache": True,
        "vocab_size": 151936, "tie_word_embeddings": False}
if experts:
    text.update(num_experts=experts[0], moe_intermediate_size=experts[1], num_experts_per_tok=experts[2],
                decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)
kind = "_moe" if experts else ""
if not pictures:
    text.update(architectures=[f"Qwen3{'Moe' if experts else ''}ForCausalLM"], model_type=f"qwen3{kind}")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        if os.path.exists(f"{DIR}/{name}"): os.remove(f"{DIR}/{name}")
    save("config.json", text)
    sys.exit()
text.update(model_type=f"qwen3_vl{kind}_text",
            rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"})
vision = {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
          "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": f"qwen3_vl{kind}", "num_heads": 16,
          "num_position_embeddings": 2304, "out_hidden_size": hidden, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
save("config.json", {"architectures": [f"Qwen3VL{'Moe' if experts else ''}ForConditionalGeneration"], "model_type": f"qwen3_vl{kind}",
                     "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
                     "tie_word_embeddings": False, "text_config": text, "vision_config": vision})
common = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
          "processor_class": "Qwen3VLProcessor"}
save("preprocessor_config.json", {**common, "size": {"longest_edge": 16777216, "shortest_edge": 65536},
                                  "image_processor_type": "Qwen2VLImageProcessorFast"})
save("video_preprocessor_config.json", {**common, "size": {"longest_edge": 25165824, "shortest_edge": 4096},
                                        "video_processor_type": "Qwen3VLVideoProcessor"})
tokenizer = json.load(open(f"{DIR}/tokenizer_config.json"))
tokenizer["processor_class"] = "Qwen3VLProcessor"
save("tokenizer_config.json", tokenizer)
