"""Three formats of FP8 weights, written as their tools write them, and the arithmetic that each one prescribes.

`tools/gpu/released_shape.py` uses this module too."""

import re

import torch
import torch.nn.functional as F

BLOCK, MAX = 128, 448.0
PROJECTION = re.compile(
    r".*\.((self_attn|mlp|experts\.\d+|shared_expert)\.(q|k|v|o|gate|up|down)_proj|linear_attn\.(in_proj_(qkv|z)|out_proj))\.weight")


class Tie(Exception):
    """An activation is so close to the midpoint between two E4M3 numbers that f32 may round it up and f64 down.

    That moves logits by a few hundredths: choose another seed."""


def to_e4m3(numbers):
    """Converts with saturation. torch converts numbers that are too large to NaN."""
    return numbers.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def activations_to_e4m3(numbers):
    size = numbers.abs().double().clamp(max=MAX)
    unit = torch.exp2(size.clamp(min=2.0**-6).log2().floor() - 3)
    from_middle = ((size / unit).frac() - 0.5).abs() * unit
    if bool((from_middle < 2e-7 * size + 3e-6).any()):
        raise Tie
    return to_e4m3(numbers)


def block_scales(weight):
    """Scales [ceil(out / 128), ceil(in / 128)]."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK)).abs()
    return padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK).amax((1, 3)) / MAX


def over_blocks(scales, shape):
    """Each scale repeated for the elements of its block."""
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def rounded_by_group(x):
    """Activations rounded in groups of 128 columns of a row, and scaled back."""
    columns = x.shape[-1]
    wide = F.pad(x.float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = (wide.abs().amax(-1, keepdim=True) / MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (activations_to_e4m3(wide / scales).double() * scales.double()).flatten(-2)[..., :columns]


def rounded_by_row(x):
    scales = (x.float().abs().amax(-1, keepdim=True) / MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return activations_to_e4m3(x.float() / scales).double() * scales.double()


def rounded_by(scale):
    return lambda x: activations_to_e4m3(x.float() / scale).double() * scale.double()


class Format:
    """A format: how a projection is stored, and how its product rounds activations.

    `name` is `block`, `channel` or `tensor`. Projections whose names contain an entry of `skipped` stay unquantized."""

    def __init__(self, name, skipped):
        self.name, self.skipped = name, skipped

    def is_unquantized(self, name):
        return not PROJECTION.fullmatch(name) or any(part in name for part in self.skipped)

    def write(self, tensors):
        """The tensors of the file."""
        out = {}
        for name, weight in tensors.items():
            if self.is_unquantized(name):
                out[name] = weight
                continue
            at, wide = name.removesuffix("weight"), weight.float()
            if self.name == "block":
                # The scales are rounded to bf16 before the weight is divided by them, as in Qwen's
                # releases.
                scales = block_scales(wide).to(torch.bfloat16)
                out[name], out[at + "weight_scale_inv"] = to_e4m3(wide / over_blocks(scales.float(), wide.shape)), scales
            elif self.name == "channel":
                scales = wide.abs().amax(1, keepdim=True) / MAX
                out[name], out[at + "weight_scale"] = to_e4m3(wide / scales), scales
            else:
                scale = wide.abs().amax() / MAX
                out[name], out[at + "weight_scale"] = to_e4m3(wide / scale), scale
                # Calibrated scales would hardly clip. These clip a few activations.
                seed = sum(map(ord, name))
                out[at + "input_scale"] = torch.tensor((3.0 + seed % 5 / 4) / MAX)
                if ".k_proj." in name or ".v_proj." in name:
                    out[at + name.split(".")[-2][0] + "_scale"] = torch.tensor(1.0)
        return out

    def config(self):
        """`quantization_config` of the formats `block` and `channel`."""
        if self.name == "block":
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
                    "modules_to_not_convert": ["lm_head", *self.skipped]}  # fmt: skip
        group = lambda **more: {  # noqa: E731
            "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None,
            "actorder": None, "observer_kwargs": {}} | more  # fmt: skip
        return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
                "global_compression_ratio": None, "kv_cache_scheme": None, "ignore": ["lm_head", *map("re:.*{}.*".format, self.skipped)],
                "config_groups": {"group_0": {
                    "targets": ["Linear"], "output_activations": None,
                    "weights": group(strategy="channel", dynamic=False, observer="minmax"),
                    "input_activations": group(strategy="token", dynamic=True, observer=None)}}}  # fmt: skip

    def widened(self, tensors, name):
        """The weight in f64."""
        at, codes = name.removesuffix("weight"), tensors[name].double()
        if self.name == "block":
            scales = tensors[at + "weight_scale_inv"].double()
            return codes * over_blocks(scales, codes.shape)
        return codes * tensors[at + "weight_scale"].double()

    def rounding(self, tensors, name):
        if self.name == "block":
            return rounded_by_group
        if self.name == "channel":
            return rounded_by_row
        # Queries, keys and values are computed as one product, and so are gate and up. All
        # projections of a product share the largest of their scales.
        fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": ("gate", "up"), "up": ("gate", "up")}
        before, part = name.removesuffix("_proj.weight").rsplit(".", 1)
        parts = fused.get(part, [part])
        return rounded_by(torch.stack([tensors[f"{before}.{part}_proj.input_scale"] for part in parts]).amax())


