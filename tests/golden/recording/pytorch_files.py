"""Three of the checkpoints as files of `torch.save`."""

import json
import shutil

import torch
from safetensors.torch import load_file


def save(value, path):
    """Writes a file named `made` and renames it to `path`, because torch.save stores the file's name in the file."""
    made = path.with_name("made")
    torch.save(value, made)
    made.rename(path)


def record(root, _):
    """Llama in one file, with the tied output head, Qwen2 in two shards with their index, and an EAGLE-3 head with token ids."""
    folder = root / "pytorch"
    folder.mkdir(exist_ok=True)
    llama, qwen2 = (load_file(root / name / "model.safetensors") for name in ("llama", "qwen2"))
    llama = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in llama.items()}
    llama["lm_head.weight"] = llama["model.embed_tokens.weight"]
    save(llama, folder / "pytorch_model.bin")
    (folder / "eagle3").mkdir(exist_ok=True)
    shutil.copy(root / "eagle3" / "config.json", folder / "eagle3")
    save(load_file(root / "eagle3" / "model.safetensors"), folder / "eagle3" / "pytorch_model.bin")
    names = sorted(qwen2)
    shards = {f"pytorch_model-{at + 1:05}-of-00002.bin": names[at::2] for at in range(2)}
    for shard, members in shards.items():
        # All tensors of a shard are views of one storage, as in a model that was sharded by hand.
        whole = torch.cat([qwen2[name].flatten() for name in members])
        pieces = whole.split([qwen2[name].numel() for name in members])
        save({name: piece.view(qwen2[name].shape) for name, piece in zip(members, pieces)}, folder / shard)
    index = {"metadata": {}, "weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1) + "\n")
