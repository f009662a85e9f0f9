"""Writes a random Qwen2.5-VL checkpoint of 1,156,817,664 parameters in bf16: the released vision tower (32 layers of 1280)
with the decoder of Qwen2.5-0.5B (24 layers of 896, tied embeddings) and the real tokenizer of the family.

    python3 checkpoint.py FOLDER        # 2.3 GB; torch and transformers 5.17
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests/golden"))
from recording.archives import read_file  # noqa: E402

CONFIG = dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", torch_dtype="bfloat16",
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, hidden_act="silu", max_position_embeddings=32_768, rms_norm_eps=1e-6, rope_theta=1e6,
    rope_scaling=dict(type="mrope", mrope_section=[8, 12, 12]), tie_word_embeddings=True, bos_token_id=151_643,
    eos_token_id=151_645, vision_start_token_id=151_652, vision_end_token_id=151_653, vision_token_id=151_654,
    image_token_id=151_655, video_token_id=151_656,
    vision_config=dict(
        depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, in_chans=3, out_hidden_size=896,
        patch_size=14, spatial_merge_size=2, spatial_patch_size=14, temporal_patch_size=2, tokens_per_second=2,
        window_size=112, fullatt_block_indexes=[7, 15, 23, 31], hidden_act="silu"),
)
PROCESSOR = dict(min_pixels=3136, max_pixels=12_845_056)


def weight(name, shape):
    if "norm" in name or name.endswith("ln_q.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    return (torch.randn(shape) * 0.02).to(torch.bfloat16)


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**CONFIG))
    weights = {}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            # The names of the released checkpoints.
            name = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
            weights[name] = weight(name, tensor.shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(read_file("qwen2_5_tokenizer/tokenizer.json"))
    (folder / "chat_template.json").write_bytes(read_file("qwen2_5_vl/chat_template.json"))
    settings = json.loads(read_file("qwen2_5_vl/tokenizer_config.json"))
    del settings["added_tokens_decoder"]  # its ids belong to the tiny vocabulary
    processor = json.loads(read_file("qwen2_5_vl/preprocessor_config.json")) | PROCESSOR
    generation = dict(bos_token_id=151_643, eos_token_id=[151_645, 151_643], do_sample=False)
    for name, value in dict(config=CONFIG, tokenizer_config=settings, preprocessor_config=processor,
                            generation_config=generation).items():
        (folder / f"{name}.json").write_text(json.dumps(value, indent=1))
    print(sum(tensor.numel() for tensor in weights.values()), "parameters")


main(pathlib.Path(sys.argv[1]))
