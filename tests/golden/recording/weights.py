"""Seeded random weights of the tiny checkpoints."""

import math

import numpy as np
import torch

from .mixtures import add_experts, has_experts


class Weights:
    """Seeded random tensors by name, in the order in which they are drawn.

    Matrix elements are multiples of one step, from -levels to levels. They are exact in bf16 and f16, and compress well.
    Norms and biases use every bit of the stored type."""

    def __init__(self, seed, dtype, levels=7, deviation=2.5):
        """`deviation` is the standard deviation of matrix elements, in steps. Fewer levels make smaller archives."""
        self.random, self.dtype, self.tensors = np.random.default_rng(seed), dtype, {}
        self.levels, self.deviation = levels, deviation

    def matrix(self, name, *shape, gain=1.0):
        """Elements with a standard deviation of gain / sqrt(columns)."""
        fan_in = math.prod(shape[1:])
        step = torch.tensor(gain / math.sqrt(fan_in) / self.deviation).to(torch.bfloat16)
        step = step.view(torch.int16).bitwise_and(-8).view(torch.bfloat16)  # 5 significant bits: 7 * step is exact
        grid = np.clip(np.rint(self.random.standard_normal(shape) * self.deviation), -self.levels, self.levels)
        grid = grid.astype(np.float32)
        self.tensors[name] = (torch.from_numpy(grid) * step.float()).to(self.dtype)

    def vector(self, name, size, mean=0.0, deviation=0.2, dtype=None):
        """`dtype` is the stored type if it is not that of the other tensors."""
        values = mean + deviation * self.random.standard_normal(size)
        self.tensors[name] = torch.from_numpy(values.astype(np.float32)).to(dtype or self.dtype)

    def linear(self, name, rows, *columns, gain=1.0):
        self.matrix(f"{name}.weight", rows, *columns, gain=gain)
        self.vector(f"{name}.bias", rows)

    def layer_norm(self, name, size):
        self.vector(f"{name}.weight", size, mean=1.0)
        self.vector(f"{name}.bias", size)

    def shrink_rows(self, name, first):
        """Divides the rows from `first` on by 4: the rows of added tokens and of padding.

        Greedy decoding then never chooses these tokens. Trained models hardly ever do, and padding has no text."""
        self.tensors[name][first:] *= 0.25

    def decoder(self, config, embedding_deviation, biases=("q", "k", "v"), head_norms=False):
        """The text decoder that all families share. `biases` are the letters or names of the projections with a bias."""
        hidden = config["hidden_size"]
        # The gain cancels the division by sqrt(fan_in), so the deviation does not depend on the width.
        self.matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=embedding_deviation * math.sqrt(hidden))
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            self.vector(f"{at}.input_layernorm.weight", hidden, mean=1.0)
            self.attention(at, config, biases, head_norms)
            self.vector(f"{at}.post_attention_layernorm.weight", hidden, mean=1.0)
            if has_experts(config, layer):
                add_experts(self, at, config)
            else:
                self.mlp(at, config, biases)
        self.vector("model.norm.weight", hidden, mean=1.0)

    def attention(self, at, config, biases, head_norms):
        hidden, heads, kv_heads = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        head_dim = config.get("head_dim", hidden // heads)
        # Queries and keys have a gain above 1, so that attention selects positions instead of averaging them.
        self.projection(at, "self_attn.q", heads * head_dim, hidden, biases, gain=1.4)
        self.projection(at, "self_attn.k", kv_heads * head_dim, hidden, biases, gain=1.4)
        self.projection(at, "self_attn.v", kv_heads * head_dim, hidden, biases)
        self.projection(at, "self_attn.o", hidden, heads * head_dim, biases, gain=1.5)
        if head_norms:
            for part in ("q", "k"):
                self.vector(f"{at}.self_attn.{part}_norm.weight", head_dim, mean=1.4)

    def mlp(self, at, config, biases):
        hidden, width = config["hidden_size"], config["intermediate_size"]
        self.projection(at, "mlp.gate", width, hidden, biases, gain=1.5)
        self.projection(at, "mlp.up", width, hidden, biases, gain=1.5)
        self.projection(at, "mlp.down", hidden, width, biases, gain=1.5)

    def projection(self, at, part, rows, columns, biases, gain=1.0):
        name = f"{at}.{part}_proj"
        if part.split(".")[1] in biases:
            self.linear(name, rows, columns, gain=gain)
        else:
            self.matrix(f"{name}.weight", rows, columns, gain=gain)
