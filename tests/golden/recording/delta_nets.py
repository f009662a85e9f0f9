"""Gated delta nets: random weights, and the delta rule computed token by token."""

import math
import sys
from unittest import mock

import numpy as np
import torch


def add_delta_net(weights, at, config):
    """The gated delta net of the layer named `at`.

    The released checkpoints have `A_log` and the weight of the norm in f32. Decays range from forgetting at once to
    keeping the state for hundreds of tokens, so that a wrong state at the border of two chunks changes the logits."""
    at, hidden = f"{at}.linear_attn", config["hidden_size"]
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    values, keys = heads * config["linear_value_head_dim"], key_heads * config["linear_key_head_dim"]
    channels = 2 * keys + values
    weights.matrix(f"{at}.in_proj_qkv.weight", channels, hidden, gain=1.4)
    weights.matrix(f"{at}.in_proj_z.weight", values, hidden)
    weights.matrix(f"{at}.in_proj_b.weight", heads, hidden, gain=2.0)
    weights.matrix(f"{at}.in_proj_a.weight", heads, hidden)
    weights.matrix(f"{at}.conv1d.weight", channels, 1, config["linear_conv_kernel_dim"], gain=2.0)
    rates = weights.random.uniform(math.log(0.005), math.log(8.0), heads)
    weights.tensors[f"{at}.A_log"] = torch.from_numpy(rates.astype(np.float32))
    weights.vector(f"{at}.dt_bias", heads, mean=-1.0, deviation=1.0)
    weights.vector(f"{at}.norm.weight", config["linear_value_head_dim"], mean=1.0, dtype=torch.float32)
    weights.matrix(f"{at}.out_proj.weight", hidden, values)


def token_by_token(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel, **_):
    """The gated delta rule in the type of its inputs. Returns the outputs, and the states [batch, heads, key, value].

    transformers computes prompts in chunks of 64 tokens, and everything in f32."""
    assert use_qk_l2norm_in_kernel
    unit = lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    query, key = unit(query) * query.shape[-1] ** -0.5, unit(key)  # [batch, tokens, heads, key]
    batch, tokens, heads, width = value.shape
    state = value.new_zeros(batch, heads, key.shape[-1], width) if initial_state is None else initial_state
    outputs = []
    for token in range(tokens):
        state = state * g[:, token].exp()[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, token])
        update = beta[:, token, :, None] * (value[:, token] - known)
        state = state + key[:, token, :, :, None] * update[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, token]))
    return torch.stack(outputs, 1), state


def use_token_by_token_rule(model):
    """Makes the gated delta nets of `model` compute `token_by_token`, if it has any."""

    def with_rule(forward, modeling):
        def run(*inputs, **named):
            rule = dict(torch_chunk_gated_delta_rule=token_by_token, torch_recurrent_gated_delta_rule=token_by_token)
            with mock.patch.multiple(modeling, **rule):
                return forward(*inputs, **named)

        return run

    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            module.forward = with_rule(module.forward, sys.modules[type(module).__module__])
