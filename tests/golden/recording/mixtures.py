"""Weights of layers with experts, for Qwen3-MoE, Qwen3-VL-MoE and Qwen3.5-MoE."""

import re

import torch


def has_experts(config, layer):
    if "num_experts" not in config or layer in config["mlp_only_layers"]:
        return False
    return (layer + 1) % config["decoder_sparse_step"] == 0


def add_experts(weights, at, config):
    """The router and the experts of the layer named `at`."""
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    # The gain keeps router scores apart. Near a tie, f32 would choose different experts than f64.
    weights.matrix(f"{at}.mlp.gate.weight", config["num_experts"], hidden, gain=2.0)
    for expert in range(config["num_experts"]):
        for part, *shape in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            weights.matrix(f"{at}.mlp.experts.{expert}.{part}_proj.weight", *shape, gain=1.5)


def fuse_experts(tensors, is_swapped):
    """Replaces the experts' tensors with one pair per layer.

    Qwen3-VL was released with the axes of each matrix swapped, Qwen3.5 was not."""
    expert_name = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    parts = {}
    for name in list(tensors):
        if found := expert_name.fullmatch(name):
            parts.setdefault((found[1], found[3]), []).append(tensors.pop(name))
    for layer in {layer for layer, _ in parts}:
        gate, up, down = (torch.stack(parts[layer, part]) for part in ("gate", "up", "down"))
        gate_up = torch.cat([gate, up], dim=1)  # [experts, 2 * width, hidden]; `down` is [experts, hidden, width]
        gate_up, down = (gate_up.mT, down.mT) if is_swapped else (gate_up, down)
        tensors[f"{layer}.gate_up_proj"], tensors[f"{layer}.down_proj"] = gate_up.contiguous(), down.contiguous()
