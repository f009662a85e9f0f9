"""Tiny checkpoints with FP8 weights, and what a model computes from them in f64 by the released arithmetic.

`make.py --only fp8` calls it. The three formats are written here as their tools write them: names, shapes and types of
tensors, and the configuration. transformers (5.17) runs no FP8 on a CPU, so the oracle is its f64 model in which each
FP8 projection rounds its activations to E4M3 as the format says (scales and quotients in f32, torch's conversion) and
multiplies them by the widened weight. Two things are checked here against others' code: transformers' own
`Fp8Dequantize` widens the blocks of the first format to the same numbers, and where accelerate 1.15 and
compressed-tensors 0.20 can be imported (`PYTHONPATH`), these compute the second format, rounding activations as well.
"""

import importlib.util
import re
import types

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

BLOCK, MAX = 128, 448.0
MARGIN = 1e-3
PROJECTION = re.compile(r".*\.(self_attn|mlp|experts\.\d+)\.(q|k|v|o|gate|up|down)_proj\.weight")


class Tie(Exception):
    """An activation stands so near the middle of two numbers that f32 may round it to the other one than f64, which
    moves logits by some hundredths: choose another seed."""


def to_e4m3(numbers):
    """Saturating; torch makes NaN of what is too large."""
    return numbers.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def activations_to_e4m3(numbers):
    size = numbers.abs().double().clamp(max=MAX)
    unit = torch.exp2(size.clamp(min=2.0**-6).log2().floor() - 3)
    from_middle = ((size / unit).frac() - 0.5).abs() * unit
    if bool((from_middle < 2e-7 * size + 3e-6).any()):
        raise Tie
    return to_e4m3(numbers)


def block_scales(weight):
    """Scales `[ceil(out / 128), ceil(in / 128)]`, and each repeated for its block."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK)).abs()
    scales = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK).amax((1, 3)) / MAX
    return scales


def over_blocks(scales, shape):
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def rounded_by_group(x):
    """Activations by groups of 128 columns of a row: as they are once rounded and scaled back."""
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
    """One format: what stands in the file for a projection, and what its product does with activations."""

    def __init__(self, name, skipped):
        self.name, self.skipped = name, skipped

    def is_plain(self, name):
        return not PROJECTION.fullmatch(name) or any(part in name for part in self.skipped)

    def write(self, tensors):
        out = {}
        for name, weight in tensors.items():
            if self.is_plain(name):
                out[name] = weight
                continue
            at, wide = name.removesuffix("weight"), weight.float()
            if self.name == "block":
                # Rounded to bf16, as in Qwen's releases, before the weight is divided by it.
                scales = block_scales(wide).to(torch.bfloat16)
                out[name], out[at + "weight_scale_inv"] = to_e4m3(wide / over_blocks(scales.float(), wide.shape)), scales
            elif self.name == "channel":
                scales = wide.abs().amax(1, keepdim=True) / MAX
                out[name], out[at + "weight_scale"] = to_e4m3(wide / scales), scales
            else:
                scale = wide.abs().amax() / MAX
                out[name], out[at + "weight_scale"] = to_e4m3(wide / scale), scale
                # A calibrated one would not cut off much; these do cut off a little.
                seed = sum(map(ord, name))
                out[at + "input_scale"] = torch.tensor((3.0 + seed % 5 / 4) / MAX)
                if ".k_proj." in name or ".v_proj." in name:
                    out[at + name.split(".")[-2][0] + "_scale"] = torch.tensor(1.0)
        return out

    def config(self):
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
        """The f64 weight."""
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
        # Queries, keys and values are one product, and so are gate and up: the largest scale serves them all.
        fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": ("gate", "up"), "up": ("gate", "up")}
        before, part = name.removesuffix("_proj.weight").rsplit(".", 1)
        parts = fused.get(part, [part])
        return rounded_by(torch.stack([tensors[f"{before}.{part}_proj.input_scale"] for part in parts]).amax())


FORMATS = {
    "qwen3_fp8": ("qwen3", Format("block", ["model.layers.1.mlp.down_proj", "model.layers.1.self_attn"])),
    "qwen3_fp8_dynamic": ("qwen3", Format("channel", ["layers.0.self_attn"])),
    "qwen3_fp8_modelopt": ("qwen3", Format("tensor", ["model.layers.1.self_attn"])),
    "qwen3_moe_fp8": ("qwen3_moe", Format("block", [])),
    "qwen3_moe_fp8_dynamic": ("qwen3_moe", Format("channel", [])),
}
SEEDS = {"qwen3_fp8": 2, "qwen3_fp8_dynamic": 47, "qwen3_fp8_modelopt": 30, "qwen3_moe_fp8": 217, "qwen3_moe_fp8_dynamic": 34}


def write(tools, folder, real_config, name):
    """The checkpoint: blocks that are not whole, and projections that do not begin with one."""
    family, how = FORMATS[name]
    kind, config, _ = tools.text_family(family)
    config = config | {"hidden_size": 144, "intermediate_size": 136, "num_attention_heads": 4, "num_key_value_heads": 2,
                       "head_dim": 32, "moe_intermediate_size": 136, "num_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    if name == "qwen3_fp8":  # some matrices of whole blocks, which transformers can widen too
        config |= {"hidden_size": 256}
    if family == "qwen3_moe":
        config |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "qwen3_moe_fp8":  # whole blocks, so that all experts may stand in one tensor too
        config |= {"moe_intermediate_size": 128}
    if family == "qwen3":
        config = {key: value for key, value in config.items() if "expert" not in key and "moe" not in key}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, _ = tools.write_tiny_tokenizer(folder, real_config, real_config["chat_template"])
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    plain = config | {"eos_token_id": ends[0]}
    tools.write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": False})
    weights = tools.Weights(SEEDS[name], torch.bfloat16)
    weights.decoder(config, embedding_deviation=0.6, biases="", head_norms=True)
    # Not on the grid: a row's numbers would be simple fractions of its largest, and those are middles of two numbers.
    weights.vector("model.embed_tokens.weight", (config["vocab_size"], config["hidden_size"]), deviation=0.6)
    for key in [key for key in weights.tensors if key.endswith("layernorm.weight")] if name in ("qwen3_fp8", "qwen3_moe_fp8_dynamic") else []:
        weights.tensors[key] = weights.tensors[key].float() * (1 + torch.from_numpy(weights.random.random(weights.tensors[key].shape)).float() / 256)
    output = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    if not config["tie_word_embeddings"]:
        weights.matrix("lm_head.weight", config["vocab_size"], config["hidden_size"], gain=3.0)
    weights.quieten(output, 256 + 98)
    tensors = how.write(weights.tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if how.name == "tensor":
        tools.write_json(folder / "config.json", plain)
        tools.write_json(folder / "hf_quant_config.json", {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {
            "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", *(f"{part}*" for part in how.skipped)]}})
    else:
        tools.write_json(folder / "config.json", plain | {"quantization_config": how.config()})
    return kind, plain, how


def oracle(kind, config, how, tensors):
    """The f64 model whose FP8 projections round their activations."""
    model = kind._from_config(kind.config_class(**config), dtype=torch.float64).eval()
    wide = {}
    for name, tensor in tensors.items():
        if how.is_plain(name) or not name.endswith("weight"):
            if PROJECTION.fullmatch(name) or name.endswith("weight") and "scale" not in name:
                wide[name] = tensor.double()
            continue
        wide[name] = how.widened(tensors, name)
        if how.name == "block" and all(extent % BLOCK == 0 or extent < BLOCK for extent in tensor.shape):
            check_widening(tensors, name, wide[name])
    modules = dict(model.named_modules())
    experts = {name: module for name, module in modules.items() if type(module).__name__.endswith("Experts")}
    for at, module in experts.items():
        count = config["num_experts"]
        of = lambda part: torch.stack([wide.pop(f"{at}.{expert}.{part}_proj.weight") for expert in range(count)])  # noqa: E731
        gate, up, down = of("gate"), of("up"), of("down")
        wide[f"{at}.gate_up_proj"], wide[f"{at}.down_proj"] = torch.cat([gate, up], 1), down
        rounding = how.rounding(tensors, f"{at}.0.gate_proj.weight")
        module.forward = types.MethodType(experts_forward(rounding), module)
    found = model.load_state_dict(wide, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}, found
    model.tie_weights()
    for name, module in modules.items():
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" in tensors and not how.is_plain(f"{name}.weight"):
            rounding = how.rounding(tensors, f"{name}.weight")
            module.forward = types.MethodType(lambda self, x, rounding=rounding: F.linear(rounding(x), self.weight, self.bias), module)
    return model


def experts_forward(rounding):
    def forward(self, hidden, indices, weights):
        out = torch.zeros_like(hidden)
        for row in range(hidden.shape[0]):
            for rank in range(indices.shape[1]):
                expert = int(indices[row, rank])
                gate, up = F.linear(rounding(hidden[row]), self.gate_up_proj[expert]).chunk(2, -1)
                down = F.linear(rounding(F.silu(gate) * up), self.down_proj[expert])
                out[row] += weights[row, rank] * down
        return out

    return forward


def check_widening(tensors, name, expected):
    """transformers widens weights of whole blocks to the same numbers."""
    scales = tensors[name.removesuffix("weight") + "weight_scale_inv"]
    config = types.SimpleNamespace(weight_block_size=(BLOCK, BLOCK))
    quantizer = types.SimpleNamespace(quantization_config=config)
    theirs = Fp8Dequantize(quantizer)._dequantize_one(tensors[name], scales.float(), output_dtype=torch.float32)
    assert torch.equal(theirs.double(), expected.float().double()), name


def check_by_compressed_tensors(folder, ids, expected):
    """compressed-tensors' own layers, in f32."""
    if any(importlib.util.find_spec(name) is None for name in ("accelerate", "compressed_tensors")):
        return print("           (not compared with compressed-tensors, which is not here)")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits[0]
    error = float((theirs.double() - expected).abs().max() / expected.abs().max())
    print(f"           compressed-tensors differs by {error:.1e}")
    assert error < 1e-4, error


@torch.no_grad()
def make(tools, here, real_config, names=None):
    for name in names or FORMATS:
        folder = here / name
        kind, config, how = write(tools, folder, real_config, name)
        tensors = load_file(folder / "model.safetensors")
        model = oracle(kind, config, how, tensors)
        tools.norms_in_f64(model)
        tokenizer = tools.AutoTokenizer.from_pretrained(folder)
        print(name)
        for case, messages in {"short": [tools.text("user", "Hi!")], "long": [tools.text("user", tools.LONG[:60])]}.items():
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            prefill, tokens, logits = tools.greedy(model, {"input_ids": ids})
            if name == "qwen3_fp8_dynamic":
                check_by_compressed_tensors(folder, ids, prefill)
            top = logits.topk(2).values
            margin = float(((top[:, 0] - top[:, 1]) / logits.abs().amax(1)).min())
            print(f"  {case:8} {ids.shape[1]} tokens, {len(set(tokens.tolist()))} distinct, margin {margin:.1e}")
            assert int(tokens.max()) < 256 + 98, "a greedy token has no text"
            assert margin > MARGIN, f"a greedy step of {case} is nearly a tie ({margin:.1e}): choose another seed"
            positions = tools.kept_positions(ids[0].tolist(), set())
            steps = tools.DECODE_STEPS_STORED
            recorded = {"input_ids": ids[0], "logit_positions": torch.tensor(positions), "logits": prefill[positions].float(),
                        "greedy_tokens": tokens, "decode_steps": torch.tensor(steps), "decode_logits": logits[steps].float()}  # fmt: skip
            facts = {"messages": messages, "prompt": prompt, "checks": {"greedy_margin_min": float(f"{margin:.1e}")}}
            facts["greedy_text"] = tokenizer.decode(tokens, skip_special_tokens=False)
            tools.write_case(folder / "cases", case, recorded, facts)
