"""Weights of layers with experts, for Qwen3-MoE and Qwen3-VL-MoE."""

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


def fuse_experts(tensors):
    """Replaces the experts' tensors with one pair per layer and swaps the axes of each matrix, as Qwen3-VL was released."""
    expert_name = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    parts = {}
    for name in list(tensors):
        if found := expert_name.fullmatch(name):
            parts.setdefault((found[1], found[3]), []).append(tensors.pop(name).T)
    for layer in {layer for layer, _ in parts}:
        gate, up, down = (torch.stack(parts[layer, part]) for part in ("gate", "up", "down"))
        tensors[f"{layer}.gate_up_proj"] = torch.cat([gate, up], dim=2).contiguous()  # [experts, hidden, 2 * width]
        tensors[f"{layer}.down_proj"] = down.contiguous()  # [experts, width, hidden]
