"""Writes JSON, PNG and safetensors files."""

import json

from PIL import Image
from safetensors.torch import save_file


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def write_png(path, picture):
    """`picture` is a Pillow image or a u8 array [height, width, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(path, optimize=True)


def write_case(folder, name, tensors, facts):
    """Writes a recorded case: `<name>.safetensors` and `<name>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    write_json(folder / f"{name}.json", facts)


def write_checkpoint_tensors(folder, tensors, shards=1):
    """Writes one model.safetensors, or `shards` files of about the same size and their index."""
    if shards == 1:
        return save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    names = list(tensors)
    bytes_total = sum(t.numel() * t.element_size() for t in tensors.values())
    weight_map, bytes_before = {}, 0
    for name in names:
        shard = min(shards - 1, bytes_before * shards // bytes_total)
        weight_map[name] = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        bytes_before += tensors[name].numel() * tensors[name].element_size()
    for file in sorted(set(weight_map.values())):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": bytes_total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)
