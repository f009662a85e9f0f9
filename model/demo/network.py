"""The Qwen2.5-VL architecture in plain PyTorch, over packed batches, for training.

All pictures of a batch are concatenated in one stream of patches (in window order), and all
conversations in one stream of tokens. The `cu_*` arrays have the start of each window, picture and
conversation. Shapes never change, so torch.compile compiles once. Parameters have the names of the
released checkpoints. `train.py --check` compares this file with transformers.
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 864  # tokens of the tokenizer; a multiple of 16 suits tensor cores
    text_hidden: int = 192
    text_layers: int = 4
    text_heads: int = 6
    text_kv_heads: int = 2
    text_intermediate: int = 512
    # The rotary frequencies of the column axis come last and are the lowest. With Qwen's base of a
    # million, one column would rotate a head's elements by less than a thousandth of a radian, and
    # a model this small could not distinguish left from right.
    rope_theta: float = 20.0
    mrope_section: tuple[int, int, int] = (4, 6, 6)
    vision_hidden: int = 160
    vision_layers: int = 4
    vision_heads: int = 5
    vision_intermediate: int = 432
    full_attention_blocks: tuple[int, ...] = (1, 3)
    patch: int = 14
    window: int = 112
    norm_epsilon: float = 1e-6


class Outputs(NamedTuple):
    """The logits of a batch."""

    answers: torch.Tensor  # [answers, vocabulary]
    taught: torch.Tensor  # [units, 15 + 9]: the teacher layer's prediction for each unit
    drafts: torch.Tensor | None = None  # [answers, vocabulary]: of a draft head


def attend(query, key, value, starts, longest: int, causal: bool):
    """Attention within each segment of a packed stream; query, key, value: [stream, heads,
    head_dim]."""
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0) if causal else (-1, -1)
        half = [part.to(torch.bfloat16) for part in (query, key, value)]
        return varlen_attn(*half, starts, starts, longest, longest, window_size=window)
    pieces = []
    for start, end in zip(starts.tolist(), starts.tolist()[1:]):
        if end > start:
            part = [x[start:end].transpose(0, 1)[None] for x in (query, key, value)]
            pieces.append(F.scaled_dot_product_attention(*part, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(pieces)


def rotate(x, cosine, sine):
    """Rotary positions by halves; x: [stream, heads, head_dim], cosine and sine: [stream,
    head_dim]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cosine[:, None] + turned * sine[:, None]


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


class GatedMlp(nn.Module):
    def __init__(self, width: int, intermediate: int, bias: bool):
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=bias)
        self.up_proj = nn.Linear(width, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, width, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class VisionAttention(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads = sizes.vision_heads
        self.qkv = nn.Linear(sizes.vision_hidden, 3 * sizes.vision_hidden)
        self.proj = nn.Linear(sizes.vision_hidden, sizes.vision_hidden)

    def forward(self, x, angles, starts, longest):
        query, key, value = self.qkv(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        mixed = attend(rotate(query, *angles), rotate(key, *angles), value, starts, longest, causal=False)
        return self.proj(mixed.reshape(x.shape[0], -1))


class VisionBlock(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.norm1 = RootMeanSquareNorm(sizes.vision_hidden, 1e-6)
        self.norm2 = RootMeanSquareNorm(sizes.vision_hidden, 1e-6)
        self.attn = VisionAttention(sizes)
        self.mlp = GatedMlp(sizes.vision_hidden, sizes.vision_intermediate, bias=True)

    def forward(self, x, angles, starts, longest):
        x = x + self.attn(self.norm1(x), angles, starts, longest)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """A linear layer over one patch. Both frames of a still picture are equal, so the weights of
    the two frames are added."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.proj = nn.Conv3d(3, sizes.vision_hidden, (2, sizes.patch, sizes.patch), bias=False)

    def forward(self, patches):  # [patches, 3 * 14 * 14]
        return F.linear(patches, self.proj.weight.sum(dim=2).flatten(1))


class PatchMerger(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        wide = 4 * sizes.vision_hidden
        self.ln_q = RootMeanSquareNorm(sizes.vision_hidden, 1e-6)
        self.mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, sizes.text_hidden))

    def forward(self, x):
        return self.mlp(self.ln_q(x).view(x.shape[0] // 4, -1))


class Vision(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.patch_embed = PatchEmbed(sizes)
        self.blocks = nn.ModuleList(VisionBlock(sizes) for _ in range(sizes.vision_layers))
        self.merger = PatchMerger(sizes)
        self.start_angles()

    def start_angles(self) -> None:
        axis = self.sizes.vision_hidden // self.sizes.vision_heads // 2  # dimensions of a head that each axis rotates
        self.register_buffer("frequencies", 1e4 ** -(torch.arange(0, axis, 2) / axis), persistent=False)

    def angles(self, batch):
        angles = (batch["patch_position"].float()[:, :, None] * self.frequencies).flatten(1)  # rows, then columns
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def forward(self, patches, batch):
        angles = self.angles(batch)
        x = self.patch_embed(patches)
        for place, block in enumerate(self.blocks):
            full = place in self.sizes.full_attention_blocks
            starts, longest = (batch["cu_picture"], 1024) if full else (batch["cu_window"], 64)
            x = block(x, angles, starts, longest)
        return self.merger(x)  # [patches / 4, text_hidden]


class TextAttention(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads, self.kv_heads = sizes.text_heads, sizes.text_kv_heads
        head = sizes.text_hidden // sizes.text_heads
        self.q_proj = nn.Linear(sizes.text_hidden, self.heads * head)
        self.k_proj = nn.Linear(sizes.text_hidden, self.kv_heads * head)
        self.v_proj = nn.Linear(sizes.text_hidden, self.kv_heads * head)
        self.o_proj = nn.Linear(self.heads * head, sizes.text_hidden, bias=False)

    def forward(self, x, angles, starts, longest):
        length, group = x.shape[0], self.heads // self.kv_heads
        query = rotate(self.q_proj(x).view(length, self.heads, -1), *angles)
        key = rotate(self.k_proj(x).view(length, self.kv_heads, -1), *angles).repeat_interleave(group, dim=1)
        value = self.v_proj(x).view(length, self.kv_heads, -1).repeat_interleave(group, dim=1)
        return self.o_proj(attend(query, key, value, starts, longest, causal=True).reshape(length, -1))


class TextLayer(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.input_layernorm = RootMeanSquareNorm(sizes.text_hidden, sizes.norm_epsilon)
        self.post_attention_layernorm = RootMeanSquareNorm(sizes.text_hidden, sizes.norm_epsilon)
        self.self_attn = TextAttention(sizes)
        self.mlp = GatedMlp(sizes.text_hidden, sizes.text_intermediate, bias=False)

    def forward(self, x, angles, starts, longest):
        x = x + self.self_attn(self.input_layernorm(x), angles, starts, longest)
        return x + self.mlp(self.post_attention_layernorm(x))


class Text(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.text_hidden)
        self.layers = nn.ModuleList(TextLayer(sizes) for _ in range(sizes.text_layers))
        self.norm = RootMeanSquareNorm(sizes.text_hidden, sizes.norm_epsilon)
        head = sizes.text_hidden // sizes.text_heads
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes.mrope_section))
        self.turn_by(sizes.rope_theta, head, axis)

    def turn_by(self, theta: float, width: int, axis) -> None:
        """Rotary frequencies of `width` elements of a head. `axis` is the position (time, row or
        column) that each frequency uses."""
        self.register_buffer("frequencies", theta ** -(torch.arange(0, width, 2) / width), persistent=False)
        self.register_buffer("axis", axis, persistent=False)

    def embedded(self, batch, units):
        unit = batch["unit"]  # index of the picture unit at this token, or -1
        return torch.where((unit >= 0)[:, None], units[unit.clamp(min=0)].float(), self.embed_tokens(batch["token"]))

    def angles(self, batch):
        angles = batch["position"].float()[self.axis].T * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def forward(self, batch, units):
        x, angles = self.embedded(batch, units), self.angles(batch)
        for layer in self.layers:
            x = layer(x, angles, batch["cu_conversation"], 1024)
        return self.norm(x)


class Network(nn.Module):
    PROCESSOR = "Qwen2_5_VLProcessor"  # class of the processor in transformers

    def __init__(self, sizes: Sizes = Sizes()):
        super().__init__()
        self.sizes = sizes
        self.visual = Vision(sizes)
        self.model = Text(sizes)
        # Only for training: predicts which shape or digit covers each unit, and its color. Without
        # this loss, the vision tower gets only the gradient through the text, which is weak until
        # the model can read anything at all.
        self.teacher = nn.Linear(sizes.text_hidden, 15 + 9)
        self.start()

    def start(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            if parameter.dim() < 2:
                continue
            deviation = parameter[0].numel() ** -0.5
            if name.endswith(("attn.proj.weight", "o_proj.weight", "down_proj.weight", "out_proj.weight", "mlp.linear_fc2.weight")):
                deviation /= (2 * self.sizes.text_layers) ** 0.5
            if "embed_tokens" in name:
                deviation = 0.05
            nn.init.normal_(parameter, std=deviation)

    def forward(self, batch) -> Outputs:
        """`batch["patch"]` is already normalized."""
        units = self.visual(batch["patch"], batch)
        hidden = self.model(batch, units)
        answers = F.linear(hidden[batch["answer_at"]], self.model.embed_tokens.weight)
        return Outputs(answers, self.teacher(units))

    def repeated(self) -> list[nn.Module]:
        """The modules to compile. Modules of one class share their code, which compiles once."""
        return [*self.visual.blocks, *self.model.layers]

    def configuration(self, token_id) -> dict:
        return configuration(self.sizes, token_id)

    def released(self) -> dict[str, torch.Tensor]:
        """The weights that a checkpoint contains."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("teacher")}


def configuration(sizes: Sizes, token_id) -> dict:
    """config.json with the layout of the released Qwen2.5-VL checkpoints."""
    parts = asdict(sizes)
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "vision_token_id": token_id("<|vision_pad|>"),
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "hidden_act": "silu",
        "hidden_size": parts["text_hidden"],
        "initializer_range": 0.02,
        "intermediate_size": parts["text_intermediate"],
        "max_position_embeddings": 4096,
        "max_window_layers": parts["text_layers"],
        "model_type": "qwen2_5_vl",
        "num_attention_heads": parts["text_heads"],
        "num_hidden_layers": parts["text_layers"],
        "num_key_value_heads": parts["text_kv_heads"],
        "rms_norm_eps": parts["norm_epsilon"],
        "rope_theta": parts["rope_theta"],
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {
            "depth": parts["vision_layers"],
            "hidden_act": "silu",
            "hidden_size": parts["vision_hidden"],
            "intermediate_size": parts["vision_intermediate"],
            "num_heads": parts["vision_heads"],
            "in_chans": 3,
            "out_hidden_size": parts["text_hidden"],
            "patch_size": parts["patch"],
            "spatial_merge_size": 2,
            "spatial_patch_size": parts["patch"],
            "window_size": parts["window"],
            "fullatt_block_indexes": list(parts["full_attention_blocks"]),
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": list(parts["mrope_section"])},
        "vocab_size": parts["vocabulary"],
    }
