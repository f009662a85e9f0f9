"""The Qwen3.5 architecture in plain PyTorch, over packed batches, for training: three gated delta
nets for each layer with attention, Qwen3-VL's vision tower without DeepStack, and a draft head.

The batches are the same as for `network.py`, which also has the shared parts. Parameters have the
names of the released checkpoints. `train.py --hybrid --check` compares this file with transformers.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

from network import GatedMlp, Network, Outputs, Text, Vision, VisionAttention, attend, rotate

CHUNK = 64  # tokens per chunk, which the delta rule computes with matrix products
LONGEST = 1024  # maximum tokens of a conversation


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 864
    text_hidden: int = 160
    text_layers: int = 8
    attention_interval: int = 4  # every fourth layer has attention
    text_heads: int = 4
    text_kv_heads: int = 2
    head_dim: int = 32
    text_intermediate: int = 320
    delta_key_heads: int = 2
    delta_value_heads: int = 4
    delta_head_dim: int = 32
    convolution: int = 4
    rope_theta: float = 20.0  # see `network.Sizes`
    rotary_share: float = 0.5  # of a head's elements
    mrope_section: tuple[int, int, int] = (3, 3, 2)
    vision_hidden: int = 128
    vision_layers: int = 4
    vision_heads: int = 4
    vision_intermediate: int = 384
    vision_grid: int = 16  # rows and columns of the learned positions
    patch: int = 14
    norm_epsilon: float = 1e-6


class ZeroCentredNorm(nn.Module):
    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, x):
        x = x.float()
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


# ---- vision ----------------------------------------------------------------------------------------------------------


class VisionMlp(nn.Module):
    def __init__(self, width: int, intermediate: int):
        super().__init__()
        self.linear_fc1 = nn.Linear(width, intermediate)
        self.linear_fc2 = nn.Linear(intermediate, width)

    def forward(self, x):
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.vision_hidden, 1e-6)
        self.norm2 = nn.LayerNorm(sizes.vision_hidden, 1e-6)
        self.attn = VisionAttention(sizes)
        self.mlp = VisionMlp(sizes.vision_hidden, sizes.vision_intermediate)

    def forward(self, x, angles, starts, longest: int):
        x = x + self.attn(self.norm1(x), angles, starts, longest)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """See `network.PatchEmbed`."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.proj = nn.Conv3d(3, sizes.vision_hidden, (2, sizes.patch, sizes.patch))

    def forward(self, patches):
        return F.linear(patches, self.proj.weight.sum(dim=2).flatten(1), self.proj.bias)


class PatchMerger(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        wide = 4 * sizes.vision_hidden
        self.norm = nn.LayerNorm(sizes.vision_hidden, 1e-6)
        self.linear_fc1 = nn.Linear(wide, wide)
        self.linear_fc2 = nn.Linear(wide, sizes.text_hidden)

    def forward(self, x):
        x = self.norm(x).view(x.shape[0] // 4, -1)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class HybridVision(Vision):
    """Every block attends to the whole picture, so the order of the patches does not matter."""

    def __init__(self, sizes: Sizes):
        nn.Module.__init__(self)
        self.sizes = sizes
        self.patch_embed = PatchEmbed(sizes)
        self.pos_embed = nn.Embedding(sizes.vision_grid**2, sizes.vision_hidden)
        self.blocks = nn.ModuleList(VisionBlock(sizes) for _ in range(sizes.vision_layers))
        self.merger = PatchMerger(sizes)
        self.start_angles()

    def positions(self, batch):
        """The learned positions, interpolated between the four nearest points of their grid."""
        starts, place = batch["cu_picture"], batch["patch_position"].long()
        picture = torch.searchsorted(starts, torch.arange(len(place), device=place.device, dtype=starts.dtype), right=True) - 1
        last = place.new_zeros((len(starts), 2)).scatter_reduce(0, picture[:, None].expand(-1, 2), place, "amax")
        at = place * ((self.sizes.vision_grid - 1) / last.clamp(min=1)[picture])
        low = at.floor().long().clamp(max=self.sizes.vision_grid - 2)
        shares = (1 - (at - low), at - low)  # of the lower and the higher grid point, for rows and columns
        total = 0.0
        for row in (0, 1):
            for column in (0, 1):
                corner = (low[:, 0] + row) * self.sizes.vision_grid + low[:, 1] + column
                total = total + self.pos_embed(corner) * (shares[row][:, 0] * shares[column][:, 1])[:, None]
        return total

    def forward(self, patches, batch):
        angles = self.angles(batch)
        x = self.patch_embed(patches) + self.positions(batch)
        for block in self.blocks:
            x = block(x, angles, batch["cu_picture"], LONGEST)
        return self.merger(x)


# ---- text ------------------------------------------------------------------------------------------------------------


class UnitLowerInverse(torch.autograd.Function):
    """The inverse of I + A, where A is strictly lower triangular, by doubling inverted blocks along
    the diagonal."""

    @staticmethod
    def forward(context, lower):
        size = lower.shape[-1]
        place = torch.arange(size, device=lower.device)
        inverse = torch.eye(size, device=lower.device, dtype=lower.dtype).expand_as(lower)
        block = 1
        while block < size:
            row, column = place[:, None] // block, place[None, :] // block
            joins = (row == column + 1) & (row % 2 == 1)
            inverse = inverse - inverse @ torch.where(joins, lower, 0.0) @ inverse
            block *= 2
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context, gradient):
        (inverse,) = context.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ gradient @ turned)


def delta_rule(query, key, value, decay, beta, age):
    """The gated delta rule within each conversation of a packed stream, without a loop over the
    stream. query, key, value: [stream, heads, head_dim]; decay (a logarithm) and beta: [stream, heads];
    age: a token's index in its conversation. The stream is a multiple of `CHUNK` long.

    Within a chunk, a triangular system relates the tokens. A chunk changes the state by an affine map,
    and a scan over the maps computes the state before each chunk."""
    length, heads, width = query.shape
    chunks = length // CHUNK

    def chunked(x):  # [chunks, heads, CHUNK, ...]
        return x.view(chunks, CHUNK, heads, -1).transpose(1, 2)

    query, key, value = (chunked(x) for x in (query, key, value))
    beta, decay = chunked(beta), chunked(decay)[..., 0]
    total = decay.cumsum(-1)  # [chunks, heads, CHUNK]
    age = age.view(chunks, 1, CHUNK)
    place = torch.arange(CHUNK, device=age.device)
    distance = place[:, None] - place[None, :]
    # The token itself and earlier tokens of its conversation.
    related = (distance >= 0) & (age[..., None] >= distance)
    fading = torch.where(related, total[..., :, None] - total[..., None, :], float("-inf")).exp()
    lower = torch.where(distance > 0, (beta * key) @ key.transpose(-1, -2) * fading, 0.0)
    solved = UnitLowerInverse.apply(lower)
    # Decay since the state before the chunk, if the conversation began before the chunk.
    before = torch.where(age > place, total, float("-inf")).exp()[..., None]
    # Decay until the end of the chunk, if the chunk's last token belongs to the same conversation.
    after = torch.where(age[..., -1:] >= CHUNK - 1 - place, total[..., -1:] - total, float("-inf")).exp()[..., None]
    new = solved @ (beta * value)
    known = solved @ (beta * key * before)
    kept = (key * after).transpose(-1, -2)
    through = torch.where(age[..., -1] >= CHUNK, total[..., -1], float("-inf")).exp()[..., None, None]
    change = through * torch.eye(width, device=key.device) - kept @ known  # [chunks, heads, width, width]
    state = kept @ new
    step = 1
    while step < LONGEST // CHUNK:  # a conversation reaches back over at most LONGEST / CHUNK chunks
        state = torch.cat((state[:step], change[step:] @ state[:-step] + state[step:]))
        change = torch.cat((change[:step], change[step:] @ change[:-step]))
        step *= 2
    state = torch.cat((torch.zeros_like(state[:1]), state[:-1]))  # before each chunk
    new = new - known @ state
    mixed = (query * before) @ state + (query @ key.transpose(-1, -2) * fading) @ new
    return mixed.transpose(1, 2).reshape(length, heads, width)


def unit_length(x):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class GatedNorm(nn.Module):
    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x, gate):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)) * F.silu(gate.float())


class GatedDeltaNet(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads, self.width = sizes.delta_value_heads, sizes.delta_head_dim
        self.parts = [sizes.delta_key_heads * self.width] * 2 + [self.heads * self.width]
        hidden, mixed = sizes.text_hidden, sum(self.parts)
        self.in_proj_qkv = nn.Linear(hidden, mixed, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.parts[2], bias=False)
        self.in_proj_b = nn.Linear(hidden, self.heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.heads, bias=False)
        self.conv1d = nn.Conv1d(mixed, mixed, sizes.convolution, groups=mixed, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.norm = GatedNorm(self.width, sizes.norm_epsilon)
        self.out_proj = nn.Linear(self.parts[2], hidden, bias=False)

    def start(self) -> None:
        """Initializes the decay so that the heads remember about 1.5, 10, 60 and 400 tokens."""
        share = torch.arange(self.heads) / max(1, self.heads - 1)
        nn.init.zeros_(self.A_log)
        step = 0.7 * (0.0025 / 0.7) ** share
        with torch.no_grad():
            self.dt_bias.copy_(torch.log(torch.expm1(step)))  # softplus' inverse

    def mixed(self, x, age):
        """The causal convolution within each conversation."""
        weight, lags = self.conv1d.weight[:, 0], self.conv1d.weight.shape[-1]
        padded = F.pad(x, (0, 0, lags - 1, 0))
        total = 0.0
        for lag in range(lags):
            earlier = padded[lags - 1 - lag : lags - 1 - lag + x.shape[0]]
            total = total + torch.where((age >= lag)[:, None], earlier, 0.0) * weight[:, lags - 1 - lag]
        return F.silu(total)

    def forward(self, x, age):
        length = x.shape[0]
        query, key, value = self.mixed(self.in_proj_qkv(x), age).float().split(self.parts, dim=-1)
        group = self.parts[2] // self.parts[0]
        query, key = (unit_length(part.view(length, -1, self.width)).repeat_interleave(group, dim=1) for part in (query, key))
        beta = self.in_proj_b(x).float().sigmoid()
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        value = value.view(length, self.heads, self.width)
        with torch.autocast(x.device.type, enabled=False):
            state = delta_rule(query * self.width**-0.5, key, value, decay, beta, age)
        gated = self.norm(state, self.in_proj_z(x).view(length, self.heads, self.width))
        return self.out_proj(gated.reshape(length, -1))


class GatedAttention(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads, self.kv_heads, self.head = sizes.text_heads, sizes.text_kv_heads, sizes.head_dim
        self.q_proj = nn.Linear(sizes.text_hidden, 2 * self.heads * self.head, bias=False)
        self.k_proj = nn.Linear(sizes.text_hidden, self.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(sizes.text_hidden, self.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head, sizes.text_hidden, bias=False)
        self.q_norm = ZeroCentredNorm(self.head, sizes.norm_epsilon)
        self.k_norm = ZeroCentredNorm(self.head, sizes.norm_epsilon)

    def forward(self, x, angles, starts):
        length, group = x.shape[0], self.heads // self.kv_heads
        query, gate = self.q_proj(x).view(length, self.heads, -1).chunk(2, dim=-1)  # a query and a gate for each head
        key = self.k_proj(x).view(length, self.kv_heads, -1)
        value = self.v_proj(x).view(length, self.kv_heads, -1).repeat_interleave(group, dim=1)
        turned = angles[0].shape[-1]  # elements of a head that are rotated
        query, key = (
            torch.cat((rotate(part[..., :turned], *angles), part[..., turned:]), dim=-1)
            for part in (self.q_norm(query), self.k_norm(key))
        )
        mixed = attend(query, key.repeat_interleave(group, dim=1), value, starts, LONGEST, causal=True)
        return self.o_proj((mixed * gate.sigmoid()).reshape(length, -1))


class HybridLayer(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.input_layernorm = ZeroCentredNorm(sizes.text_hidden, sizes.norm_epsilon)
        self.post_attention_layernorm = ZeroCentredNorm(sizes.text_hidden, sizes.norm_epsilon)
        self.mlp = GatedMlp(sizes.text_hidden, sizes.text_intermediate, bias=False)


class DeltaLayer(HybridLayer):
    def __init__(self, sizes: Sizes):
        super().__init__(sizes)
        self.linear_attn = GatedDeltaNet(sizes)

    def forward(self, x, angles, starts, age):
        x = x + self.linear_attn(self.input_layernorm(x), age)
        return x + self.mlp(self.post_attention_layernorm(x))


class AttentionLayer(HybridLayer):
    def __init__(self, sizes: Sizes):
        super().__init__(sizes)
        self.self_attn = GatedAttention(sizes)

    def forward(self, x, angles, starts, age):
        x = x + self.self_attn(self.input_layernorm(x), angles, starts)
        return x + self.mlp(self.post_attention_layernorm(x))


class HybridText(Text):
    def __init__(self, sizes: Sizes):
        nn.Module.__init__(self)
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.text_hidden)
        kinds = [(DeltaLayer, AttentionLayer)[(i + 1) % sizes.attention_interval == 0] for i in range(sizes.text_layers)]
        self.layers = nn.ModuleList(kind(sizes) for kind in kinds)
        self.norm = ZeroCentredNorm(sizes.text_hidden, sizes.norm_epsilon)
        width = int(sizes.head_dim * sizes.rotary_share)
        axis = torch.zeros(width // 2, dtype=torch.long)
        for place in (1, 2):  # rows and columns replace every third frequency of time
            axis[place : 3 * sizes.mrope_section[place] : 3] = place
        self.turn_by(sizes.rope_theta, width, axis)

    def forward(self, batch, x, angles, age):
        for layer in self.layers:
            x = layer(x, angles, batch["cu_conversation"], age)
        return self.norm(x)


class DraftHead(nn.Module):
    """Predicts the token after next from the hidden state of a token and the embedding of the next
    token. Its loss trains only its own weights."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.fc = nn.Linear(2 * sizes.text_hidden, sizes.text_hidden, bias=False)
        self.pre_fc_norm_embedding = ZeroCentredNorm(sizes.text_hidden, sizes.norm_epsilon)
        self.pre_fc_norm_hidden = ZeroCentredNorm(sizes.text_hidden, sizes.norm_epsilon)
        self.layers = nn.ModuleList([AttentionLayer(sizes)])
        self.norm = ZeroCentredNorm(sizes.text_hidden, sizes.norm_epsilon)

    def forward(self, embedded, hidden, angles, starts, age):
        following = torch.roll(embedded.detach(), -1, 0)
        both = self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden.detach())
        return self.norm(self.layers[0](self.fc(torch.cat(both, dim=-1)), angles, starts, age))


class HybridNetwork(Network):
    PROCESSOR = "Qwen3VLProcessor"

    def __init__(self, sizes: Sizes = Sizes()):
        nn.Module.__init__(self)
        self.sizes = sizes
        self.model = nn.Module()
        self.model.visual = HybridVision(sizes)
        self.model.language_model = HybridText(sizes)
        self.mtp = DraftHead(sizes)
        self.teacher = nn.Linear(sizes.text_hidden, 15 + 9)  # see `Network`
        self.start()
        for layer in self.model.language_model.layers:
            if isinstance(layer, DeltaLayer):
                layer.linear_attn.start()

    def forward(self, batch) -> Outputs:
        text, starts, at = self.model.language_model, batch["cu_conversation"], batch["answer_at"]
        units = self.model.visual(batch["patch"], batch)
        length = len(batch["token"])
        place = torch.arange(length, device=starts.device, dtype=starts.dtype)
        age = place - starts[torch.searchsorted(starts, place, right=True) - 1]
        x, angles = text.embedded(batch, units), text.angles(batch)
        hidden = text(batch, x, angles, age)
        drafted = self.mtp(x, hidden, angles, starts, age)
        words = text.embed_tokens.weight
        return Outputs(F.linear(hidden[at], words), self.teacher(units), F.linear(drafted[at], words.detach()))

    def repeated(self) -> list[nn.Module]:
        return [*self.model.visual.blocks, *self.model.language_model.layers, *self.mtp.layers]

    def configuration(self, token_id) -> dict:
        """config.json with the layout of the released Qwen3.5 checkpoints."""
        parts = asdict(self.sizes)
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "image_token_id": token_id("<|image_pad|>"),
            "video_token_id": token_id("<|video_pad|>"),
            "vision_start_token_id": token_id("<|vision_start|>"),
            "vision_end_token_id": token_id("<|vision_end|>"),
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "qwen3_5_text",
                "attention_bias": False,
                "attention_dropout": 0.0,
                "attn_output_gate": True,
                "eos_token_id": token_id("<|im_end|>"),
                "full_attention_interval": parts["attention_interval"],
                "head_dim": parts["head_dim"],
                "hidden_act": "silu",
                "hidden_size": parts["text_hidden"],
                "initializer_range": 0.02,
                "intermediate_size": parts["text_intermediate"],
                "layer_types": [
                    ("linear_attention", "full_attention")[isinstance(layer, AttentionLayer)]
                    for layer in self.model.language_model.layers
                ],
                "linear_conv_kernel_dim": parts["convolution"],
                "linear_key_head_dim": parts["delta_head_dim"],
                "linear_num_key_heads": parts["delta_key_heads"],
                "linear_num_value_heads": parts["delta_value_heads"],
                "linear_value_head_dim": parts["delta_head_dim"],
                "mamba_ssm_dtype": "float32",
                "max_position_embeddings": 4096,
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False,
                "num_attention_heads": parts["text_heads"],
                "num_hidden_layers": parts["text_layers"],
                "num_key_value_heads": parts["text_kv_heads"],
                "rms_norm_eps": parts["norm_epsilon"],
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": parts["rope_theta"],
                    "partial_rotary_factor": parts["rotary_share"],
                    "mrope_interleaved": True,
                    "mrope_section": list(parts["mrope_section"]),
                },
                "tie_word_embeddings": True,
                "use_cache": True,
                "vocab_size": parts["vocabulary"],
            },
            "vision_config": {
                "model_type": "qwen3_5",
                "deepstack_visual_indexes": [],
                "depth": parts["vision_layers"],
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": parts["vision_hidden"],
                "in_channels": 3,
                "initializer_range": 0.02,
                "intermediate_size": parts["vision_intermediate"],
                "num_heads": parts["vision_heads"],
                "num_position_embeddings": parts["vision_grid"] ** 2,
                "out_hidden_size": parts["text_hidden"],
                "patch_size": parts["patch"],
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        }
