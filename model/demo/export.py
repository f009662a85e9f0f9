"""Writes the checkpoint as a Hugging Face folder with the layout of the released checkpoints, and
compares it (or random weights) with transformers."""

import json
import lzma
import math
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

import draw
import feed
import questions
import talk
import tokenizer as tokenizers_here
from hybrid import CHUNK
from network import Network

# As released with Qwen2.5-VL, except for the shorter system prompt and the added tools.
CHAT_TEMPLATE = (
    "{% macro shown_tools() %}{% if tools %}{{ '\n\n# Tools\n\nYou may call these functions:\n<tools>' }}{% for tool in "
    "tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>\n\nWrite a call as\n<tool_call>\n{\"name\": <name>, "
    "\"arguments\": <object>}\n</tool_call>' }}{% endif %}{% endmacro %}"
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n" + talk.SYSTEM + "{{ shown_tools() }}<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or "
    "'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}Picture "
    "{{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video' "
    "or 'video' in content %}{% set video_count.value = video_count.value + 1 %}{% if add_vision_id %}Video "
    "{{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in content %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{% for call in message['tool_calls'] or [] %}"
    "{{ '\n<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{% if loop.first and message['role'] == 'system' %}{{ shown_tools() }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}"
)

PREPROCESSOR = {
    "min_pixels": feed.MIN_PIXELS,
    "max_pixels": feed.MAX_PIXELS,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_processor_type": "Qwen2VLImageProcessor",
}


def tokenizer_configuration(tokenizer) -> dict:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in tokenizers_here.SPECIAL
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(tokenizers_here.SPECIAL[1:]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def write_folder(network: Network, folder: Path, kind: torch.dtype) -> None:
    """Writes the whole folder next to its final path and then moves it there, so that a reader
    never sees a partial folder."""
    tokenizer = tokenizers_here.build()
    fresh = folder.with_name(folder.name + ".writing")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    settings = network.configuration(tokenizer.token_to_id)
    settings["torch_dtype"] = str(kind).removeprefix("torch.")
    generation = {
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "do_sample": False,
        "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        # vLLM ignores `do_sample`.
        "temperature": 0.0,
        "transformers_version": "4.41.2",
    }
    tokenizer.save(str(fresh / "tokenizer.json"))
    for name, content in (
        ("config.json", settings),
        ("generation_config.json", generation),
        ("preprocessor_config.json", {**PREPROCESSOR, "processor_class": network.PROCESSOR}),
        ("tokenizer_config.json", tokenizer_configuration(tokenizer)),
        ("chat_template.json", {"chat_template": CHAT_TEMPLATE}),
    ):
        (fresh / name).write_text(json.dumps(content, indent=2) + "\n")
    tensors = {name: value.to(kind).contiguous() for name, value in network.released().items()}
    save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    (fresh / "model.safetensors").chmod(0o644)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def written(network: Network, state: Path, folder: Path) -> None:
    """Exports the running average of the weights in bf16, and rounds the weights of `network` in the
    same way."""
    network.load_state_dict(load_file(state / "average.safetensors"), strict=True)
    write_folder(network, folder, torch.bfloat16)
    # The repository and the program store the weights compressed. `lp` and `pb` configure LZMA for
    # numbers of two bytes.
    weights = folder / "model.safetensors"
    pairs = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lp": 1, "pb": 1}
    weights.with_name("model.safetensors.xz").write_bytes(lzma.compress(weights.read_bytes(), filters=[pairs]))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())


def check_random(network: Network) -> None:
    """Checks with random f32 weights, odd sizes and two pictures that the logits of every answer are
    close to those of transformers."""
    with torch.no_grad():  # initial zeros and ones would hide a missing bias or norm
        for parameter in network.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.2 * torch.randn_like(parameter))
    folder = Path("/tmp/bursar-demo-check")
    write_folder(network, folder, torch.float32)
    check(network, folder)


def check(network: Network, folder: Path) -> None:
    """Compares the logits of a packed batch with those of transformers for the same folder and the same pictures."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    import train

    processor = AutoProcessor.from_pretrained(folder)
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = tokenizers_here.build()
    capacity = feed.Capacity().part(4)
    slot = feed.empty_slot(capacity)
    packer = feed.Packer(slot, tokenizer, capacity)
    chats = []
    for index, (width, height) in enumerate(((112, 113), (431, 301), (150, 447), (640, 480), (308, 252))):
        rng = draw.random_of("evaluate", 5, index)
        scene, image = draw.draw_scene(rng)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        chats.append((image, packer.add_picture(scene, image), questions.one_question(rng, scene)))
    images, pictures = [chat[0] for chat in chats], [chat[1] for chat in chats]
    conversations = ((0,), (1,), (2,), (3,), (1, 0), (4,))
    for places in conversations:
        parts = [*(pictures[i] for i in places), chats[places[0]][2][1]]
        turns = [(parts, chats[places[0]][2][2], "describe"), (["How many stars are there?"], "0", "count_kind")]
        packer.add_conversation(talk.SYSTEM, turns)
    packer.close()
    batch = {name: torch.from_numpy(array.astype(np.int64) if array.dtype != np.uint8 else array) for name, array in slot.items()}
    # Keep only the used part, because the empty rest of the slot would take minutes on a CPU.
    batch = shortened(batch, packer)
    with torch.no_grad():
        ours = network.eval()({**batch, "patch": train.normalised(batch["patch"])}).answers
    worst = 0.0
    for row, places in enumerate(conversations):
        question, answer = chats[places[0]][2][1:]
        content = [{"type": "image"} for _ in places] + [{"type": "text", "text": question}]
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "How many stars are there?"},
            {"role": "assistant", "content": "0"},
        ]
        text = processor.apply_chat_template(messages, tokenize=False)
        inputs = processor(text=[text], images=[images[i] for i in places], return_tensors="pt")
        start, end = batch["cu_conversation"][row].item(), batch["cu_conversation"][row + 1].item()
        assert inputs["input_ids"][0].tolist() == batch["token"][start:end].tolist(), "the prompts differ"
        with torch.no_grad():
            theirs = reference(**inputs).logits[0]
        chosen = (batch["answer_at"] >= start) & (batch["answer_at"] < end) & (batch["answer"] >= 0)
        expected = theirs[batch["answer_at"][chosen] - start]
        difference = (ours[chosen] - expected).abs().max().item() / expected.abs().max().item()
        worst = max(worst, difference)
        print(f"pictures {[images[i].size for i in places]} tokens {end - start}: relative difference {difference:.2e}")
    # Resizing may differ by one 8-bit level (Pillow here, torchvision in transformers). The last
    # picture needs no resizing.
    assert worst < 1e-2 and difference < 2e-5, (worst, difference)


def shortened(batch: dict[str, torch.Tensor], packer: feed.Packer) -> dict[str, torch.Tensor]:
    """The arrays of a slot without the padding after the used part, except that the tokens are padded
    to a multiple of the delta rule's chunks."""
    patches, tokens = packer.patches, math.ceil(packer.tokens / CHUNK) * CHUNK
    limits = {"patch": patches, "patch_position": patches, "token": tokens, "unit": tokens}
    cut = {name: value[: limits[name]] if name in limits else value for name, value in batch.items()}
    cut["position"] = batch["position"][:, :tokens]
    for name, total in (("cu_window", patches), ("cu_picture", patches), ("cu_conversation", tokens)):
        cut[name] = F.pad(batch[name][batch[name] < total], (0, 1), value=total)
    return cut
