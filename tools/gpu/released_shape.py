#!/usr/bin/env python3
"""Writes a checkpoint with a released model's shape and random weights, and the results of transformers for it.

    released_shape.py FOLDER [--shape qwen2.5-vl-7b|qwen3-vl-8b|qwen3-vl-30b-a3b|qwen3.5-9b] [--layers N] [--tiny] [--device cpu]
                     [--weights-only] [--rounded]

FOLDER gets 16.6, 17.5, 62 or 18.8 GB of bf16 safetensors in the released layout, and prompts/<name>.{json,safetensors}: token ids
with a placeholder per picture, the pictures as PNG, and the logits of the last 32 tokens in bf16 and in f32, both with
sdpa. `model/tests/released_shape.rs` reads all of it. --tiny writes the same for few and narrow layers, to try the
script on a CPU.
--weights-only writes the checkpoint and computes nothing: for `bursar bench --model FOLDER --only start`. On a GPU the
script also prints the rate of the bus, which is the upper limit for loading. --layers keeps this many decoder layers.
--rounded also writes FOLDER-block, FOLDER-channel and FOLDER-tensor: the decoder's projections in the released FP8
formats, with the same prompts and results. The format of FOLDER-tensor has activation scales, from the largest
activations of the prompts.

Needs torch, transformers 5.17, numpy and Pillow. The full shapes need a GPU with 60 GB free.
"""

import argparse
import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/golden"))
from recording.archives import read_file  # noqa: E402

SHARDS, INDEX = 4, "model.safetensors.index.json"
ROWS = 32
VISION_START, VISION_END, IMAGE = 151652, 151653, 151655
PLAIN = 151643  # ids below are text
# Sizes in merged patches, so that nothing is resized. Most pictures have incomplete windows at
# their right and lower edges.
PICTURES = {"large": (37, 37), "wide": (39, 22), "middle": (23, 16), "small": (9, 12)}
# Numbers of text tokens between pictures.
PROMPTS = {
    "text": [512],
    "one_picture": [17, "large", 45],
    "four_pictures": [5, "large", 33, "small", 0, "wide", 120, "middle", 61],
    "long_text": [8192],
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1))


TOKENS = {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END, "image_token_id": IMAGE,
          "video_token_id": 151656}  # fmt: skip


def settings_of_qwen2_5_vl(tiny):
    """`config.json` and `preprocessor_config.json`, as released."""
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "max_window_layers": 28}  # fmt: skip
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    if tiny:
        text |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2,
                 "num_key_value_heads": 1, "max_window_layers": 2}  # fmt: skip
        vision |= {"depth": 8, "hidden_size": 160, "intermediate_size": 212, "num_heads": 2, "out_hidden_size": 256}
    vision |= {"model_type": "qwen2_5_vl", "hidden_act": "silu", "in_chans": 3, "patch_size": 14, "window_size": 112,
               "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 2,
               "fullatt_block_indexes": list(range(7, vision["depth"], 8))}  # fmt: skip
    config = text | TOKENS | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vocab_size": 152064,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 128000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": False,
        "sliding_window": 32768, "use_sliding_window": False, "torch_dtype": "bfloat16", "bos_token_id": 151643,
        "eos_token_id": 151645, "vision_token_id": 151654, "vision_config": vision,
    }  # fmt: skip
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    return config, processor


def settings_of_qwen3_vl(tiny):
    """`config.json` and `preprocessor_config.json`, as released. The released files nest the text settings."""
    text = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
              "deepstack_visual_indexes": [8, 16, 24]}  # fmt: skip
    if tiny:
        text |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2,
                 "num_key_value_heads": 1}  # fmt: skip
        vision |= {"depth": 6, "hidden_size": 144, "intermediate_size": 212, "num_heads": 2, "out_hidden_size": 256,
                   "deepstack_visual_indexes": [1, 2, 4]}  # fmt: skip
    config = TOKENS | {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False,
        "text_config": text | {
            "model_type": "qwen3_vl_text", "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_theta": 5e6, "max_position_embeddings": 262144, "attention_bias": False, "dtype": "bfloat16",
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
            "bos_token_id": 151643, "eos_token_id": 151645,
        },
        "vision_config": vision | {
            "model_type": "qwen3_vl", "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": 16,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
        },
    }  # fmt: skip
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    return config, processor


def settings_of_qwen3_vl_moe(tiny):
    """Like Qwen3-VL, with 128 experts, of which each token uses eight."""
    config, processor = settings_of_qwen3_vl(tiny)
    text, vision = config["text_config"], config["vision_config"]
    text |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 32 if tiny else 768,
             "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}  # fmt: skip
    if not tiny:
        text |= {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4}
        vision["out_hidden_size"] = 2048
    config |= {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
    text["model_type"], vision["model_type"] = "qwen3_vl_moe_text", "qwen3_vl_moe"
    return config, processor


def settings_of_qwen3_5(tiny):
    """Qwen3.5-9B: Qwen3-VL's vision encoder without DeepStack, and gated delta nets in three of four layers."""
    config, processor = settings_of_qwen3_vl(tiny)
    text, vision = config["text_config"], config["vision_config"]
    text |= {"head_dim": 256, "vocab_size": 248320, "attn_output_gate": True, "full_attention_interval": 4,
             "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
             "linear_num_key_heads": 2 if tiny else 16, "linear_num_value_heads": 4 if tiny else 32,
             "mamba_ssm_dtype": "float32", "model_type": "qwen3_5_text", "rope_parameters": {
                 "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                 "mrope_section": [11, 11, 10], "mrope_interleaved": True}}  # fmt: skip
    del text["rope_scaling"], text["rope_theta"]
    if not tiny:
        text |= {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4}
    vision |= {"model_type": "qwen3_5", "deepstack_visual_indexes": []}
    return config | {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}, processor


# An additional file in a folder of Qwen3-VL.
VIDEO_PROCESSOR = {
    "video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 4096, "longest_edge": 25165824}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
SETTINGS = {"qwen2.5-vl-7b": settings_of_qwen2_5_vl, "qwen3-vl-8b": settings_of_qwen3_vl,
            "qwen3-vl-30b-a3b": settings_of_qwen3_vl_moe, "qwen3.5-9b": settings_of_qwen3_5}  # fmt: skip


def write_settings(folder, config, processor):
    """Writes all files of a checkpoint except the weights."""
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", processor)
    if config["model_type"].startswith(("qwen3_vl", "qwen3_5")):
        write_json(folder / "video_preprocessor_config.json", VIDEO_PROCESSOR)
    write_json(folder / "generation_config.json", {"bos_token_id": 151643, "eos_token_id": [151645, 151643]})
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    (folder / "tokenizer.json").write_bytes(read_file("qwen2_5_tokenizer/tokenizer.json"))


@torch.no_grad()
def draw_weights(model):
    """Draws norms around one, biases large enough to matter, and matrices that keep the scale of their input. The states of
    gated delta nets decay within one token to hundreds of tokens."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(7)
    is_hybrid = model.config.model_type.startswith("qwen3_5")
    for name, weight in model.named_parameters():
        if name.endswith("conv1d.weight"):
            weight.normal_(0, 0.5, generator=generator)
        elif name.endswith("A_log"):
            weight.uniform_(math.log(0.005), math.log(8), generator=generator)
        elif name.endswith("dt_bias"):
            weight.normal_(-1, 1, generator=generator)
        elif weight.dim() > 1:
            weight.normal_(0, 0.02, generator=generator)
        elif name.endswith("bias"):
            weight.normal_(0, 0.1, generator=generator)
        elif is_hybrid and "language_model" in name and "linear_attn" not in name:
            weight.normal_(0, 0.1, generator=generator)  # these norms add one
        else:
            weight.normal_(1, 0.1, generator=generator)


def released_name(name, model_type):
    """The released tensor name. Qwen2.5-VL was released before transformers nested its names."""
    if model_type != "qwen2_5_vl":
        return name
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def released_axes(name, weight):
    """Experts of Qwen3-VL were released as [experts, in, out]. transformers swaps the last two axes."""
    return weight.transpose(1, 2) if ".mlp.experts." in name else weight


def write_safetensors(path, tensors):
    """Writes the format directly, because the safetensors package would copy each shard once more, 16 GB in all."""
    header, end = {}, 0
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tofile(file)
    return end


def write_weights(folder, model):
    """Writes shards of about the same size, each from a separate thread, and their index."""
    tensors = {released_name(name, model.config.model_type): released_axes(name, weight)
               for name, weight in model.named_parameters()}  # fmt: skip
    total = sum(weight.numel() for weight in tensors.values())
    shards, used = [{} for _ in range(SHARDS)], 0
    for name, weight in tensors.items():
        shards[min(SHARDS - 1, used * SHARDS // total)][name] = weight
        used += weight.numel()
    file = lambda index: f"model-{index + 1:05}-of-{SHARDS:05}.safetensors"  # noqa: E731
    with ThreadPoolExecutor(SHARDS) as pool:
        sizes = list(pool.map(lambda index: write_safetensors(folder / file(index), shards[index]), range(SHARDS)))
    weight_map = {name: file(index) for index, shard in enumerate(shards) for name in shard}
    write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})
    return sum(sizes)


def watch_activations(model):
    """Records the largest number that enters each projection from now on, by the name of its weight."""
    largest = {}

    def of(name):
        def before(_, inputs):
            found = inputs[0].abs().max().float()
            largest[name] = torch.maximum(largest.get(name, found), found)

        return before

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(of(released_name(f"{name}.weight", model.config.model_type)))
    return largest


def write_rounded(folder, model, config, largest):
    """Writes the folders of --rounded in the formats of `tests/golden/recording/fp8_formats.py`."""
    from recording.fp8_formats import MAX, Format

    plain = {released_name(name, config["model_type"]): weight.data for name, weight in model.named_parameters()}
    for name in ("block", "channel", "tensor"):
        to, how = folder.with_name(f"{folder.name}-{name}"), Format(name, ["visual"])
        to.mkdir(exist_ok=True)
        for file in [*folder.glob("*.json"), folder / "prompts"]:
            if file.name not in ("config.json", INDEX) and not (to / file.name).exists():
                (to / file.name).symlink_to(file.resolve())
        tensors = how.write(plain)
        if name == "tensor":
            tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith((".k_scale", ".v_scale"))}
            tensors |= {scale: largest[scale.replace("input_scale", "weight")] / MAX for scale in tensors
                        if scale.endswith("input_scale")}  # fmt: skip
            write_json(to / "config.json", config)
            write_json(to / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {
                "quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "visual*"]}})  # fmt: skip
        else:
            write_json(to / "config.json", config | {"quantization_config": how.config()})
        write_safetensors(to / "model.safetensors", tensors)


def bus_rate(device):
    """Bytes per second from page-locked memory, 1 GiB at a time: the upper limit for loading a checkpoint."""
    here, times = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), []
    there = torch.empty_like(here, device=device)
    for _ in range(3):
        started = time.monotonic()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.monotonic() - started)
    return here.nbytes / min(times)


def draw_picture(width, height, seed):
    """Colors that change across the picture, stripes, and noise, so that no two patches are equal."""
    random = np.random.default_rng(seed)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    waves = [128 + 90 * np.sin(x * a + y * b) for a, b in random.uniform(-0.15, 0.15, (3, 2))]
    pixels = np.stack(waves, 2) + random.normal(0, 12, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make_prompt(parts, seed):
    """Token ids with a placeholder per picture, and the names of the pictures."""
    random = np.random.default_rng(seed)
    ids, names = [], []
    for part in parts:
        if isinstance(part, int):
            ids += random.integers(0, PLAIN, part).tolist()
        else:
            ids += [VISION_START, IMAGE, VISION_END]
            names.append(part)
    return ids, names


@torch.no_grad()
def run(model, processor, ids, pictures):
    """Logits of the last rows [ROWS, vocabulary], and the rows of pictures [tokens of pictures, columns]: embeddings, followed
    by the features that later layers add, if the model has them."""
    device = model.device
    inputs, embeddings = {}, None
    if pictures:
        shown = processor(images=pictures, return_tensors="pt").to(device)
        counts = iter((shown["image_grid_thw"].prod(1) // 4).tolist())
        ids = [id for known in ids for id in ([IMAGE] * next(counts) if known == IMAGE else [known])]
        inputs = {"pixel_values": shown["pixel_values"], "image_grid_thw": shown["image_grid_thw"],
                  "mm_token_type_ids": torch.tensor([[int(id == IMAGE) for id in ids]], device=device)}  # fmt: skip
        seen = model.model.visual(shown["pixel_values"].to(model.dtype), shown["image_grid_thw"])
        parts = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or [])]
        embeddings = torch.cat(parts, 1).float().cpu()
    model.model.rope_deltas = None
    out = model(input_ids=torch.tensor([ids], device=device), use_cache=False, logits_to_keep=ROWS, **inputs)
    return out.logits[0].float().cpu(), embeddings, len(ids)


def error(found, expected):
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--shape", choices=SETTINGS, default="qwen2.5-vl-7b")
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--layers", type=int)
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--weights-only", action="store_true")
    arguments.add_argument("--rounded", action="store_true")
    arguments = arguments.parse_args()
    folder, prompts = arguments.folder, arguments.folder / "prompts"
    prompts.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    started = time.monotonic()
    said = lambda what: print(f"{time.monotonic() - started:6.1f} s  {what}", flush=True)  # noqa: E731

    config, settings = SETTINGS[arguments.shape](arguments.tiny)
    if arguments.layers:
        config.get("text_config", config)["num_hidden_layers"] = arguments.layers
    write_settings(folder, config, settings)
    with torch.device(arguments.device):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa")  # fmt: skip
    draw_weights(model.eval())
    said(f"{sum(weight.numel() for weight in model.parameters()) / 1e9:.2f} billion weights are drawn")
    said(f"{write_weights(folder, model) / 1e9:.2f} GB are written")
    if torch.device(arguments.device).type == "cuda":
        said(f"page-locked memory crosses the bus at {bus_rate(arguments.device) / 1e9:.1f} GB/s")
    if arguments.weights_only:
        return

    processor = AutoImageProcessor.from_pretrained(folder)
    side = settings["patch_size"] * settings["merge_size"]
    sizes = {name: [side * length for length in size] for name, size in PICTURES.items()}
    pictures = {name: draw_picture(*size, seed) for seed, (name, size) in enumerate(sizes.items())}
    for name, picture in pictures.items():
        picture.save(prompts / f"{name}.png", compress_level=1)
    made = {name: make_prompt(parts, seed) for seed, (name, parts) in enumerate(PROMPTS.items())}
    found = {name: {} for name in made}
    largest = watch_activations(model) if arguments.rounded else {}
    for kind in (torch.bfloat16, torch.float32):
        for weight in model.parameters():  # buffers are not converted: the rotary frequencies are f32 in both types
            weight.data = weight.data.to(kind)
        for name, (ids, names) in made.items():
            logits, embeddings, count = run(model, processor, ids, [pictures[name] for name in names])
            ending = "bf16" if kind == torch.bfloat16 else "f32"
            found[name][f"logits.{ending}"] = logits  # [32, vocabulary]
            if embeddings is not None:
                found[name][f"embeddings.{ending}"] = embeddings  # [merged patches, hidden], in reading order
            said(f"{name} of {count} tokens in {ending}")
        if arguments.rounded and kind == torch.bfloat16:
            write_rounded(folder, model, config, largest)
            said("the rounded checkpoints are written")
    for name, (ids, names) in made.items():
        write_safetensors(prompts / f"{name}.safetensors", found[name])
        write_json(prompts / f"{name}.json", {"ids": ids, "pictures": [f"{name}.png" for name in names]})
        for what in sorted({key.split(".")[0] for key in found[name]}, reverse=True):
            narrow, wide = found[name][f"{what}.bf16"], found[name][f"{what}.f32"]
            agreed = int((narrow.argmax(1) == wide.argmax(1)).sum())
            top = f", {agreed} of {len(wide)} greatest agree" if what == "logits" else ""
            said(f"{name}: transformers' {what} in bf16 are {error(narrow, wide):.2e} off f32{top}")


if __name__ == "__main__":
    main()
