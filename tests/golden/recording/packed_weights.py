"""Weights of 4 and 8 bits as AutoAWQ, AutoGPTQ, GPTQModel, compressed-tensors and ModelOpt write them, and their values.

Each folder has `config.json` (only `quantization_config`), `model.safetensors` with the packed weights, and
`values.safetensors` with the values that the tool computes from them. The values of compressed-tensors come from the
package `compressed-tensors` 0.20.1. The values of AWQ and GPTQ come from the formulas of AutoAWQ (`dequantize_gemm`) and
AutoGPTQ (`QuantLinear.forward`), written here again and compared with a second reader: for AWQ the converter of
`compressed-tensors`, for GPTQ a loop over single elements. The values of ModelOpt's NVFP4 come from its formula
(`NVFP4QTensor.dequantize`), written here in numpy."""

import json

import numpy
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

WORD = 32
AWQ_ROWS = [0, 2, 4, 6, 1, 3, 5, 7]  # the rows of a word, from its lowest bits on


def pack(integers, bits, order=None):
    """Packs the last axis into words of 32 bits. Missing integers of the last word are zeros."""
    per_word = WORD // bits
    padded = torch.nn.functional.pad(integers.long(), (0, -integers.shape[-1] % per_word))
    words = padded.unflatten(-1, (-1, per_word))[..., order or list(range(per_word))]
    return (words << torch.arange(0, WORD, bits)).sum(-1).to(torch.int32).contiguous()


def unpack(words, bits, order=None):
    """The integers of the last axis, as AutoGPTQ and AutoAWQ read them: shift, then mask."""
    integers = words.unsqueeze(-1) >> torch.arange(0, WORD, bits, dtype=torch.int32) & 2**bits - 1
    if order:
        integers = integers[..., [order.index(at) for at in range(len(order))]]
    return integers.flatten(-2)


def random_parts(generator, columns, rows, group, bits, dtype):
    """Integers [columns, rows], zero points and scales [groups, rows]."""
    groups = -(-columns // group)
    integers = torch.randint(0, 2**bits, (columns, rows), generator=generator)
    zero_points = torch.randint(1, 2**bits, (groups, rows), generator=generator)
    scales = torch.rand((groups, rows), generator=generator) * 0.02 + 1e-4
    scales[0, 0], scales[-1, -1] = 6e-8, 5000  # products that are subnormal, or infinite in f16
    return integers, zero_points, scales.to(dtype)


def record_awq(folder):
    generator, tensors, values = torch.Generator().manual_seed(1), {}, {}
    for name, rows, columns, dtype in [("f16", 24, 96, torch.float16), ("bf16", 136, 64, torch.bfloat16)]:
        integers, zero_points, scales = random_parts(generator, columns, rows, 32, 4, dtype)
        parts = {"qweight": pack(integers, 4, AWQ_ROWS), "qzeros": pack(zero_points, 4, AWQ_ROWS), "scales": scales}
        weights, zeros = (unpack(parts[part], 4, AWQ_ROWS).to(torch.int8) for part in ("qweight", "qzeros"))
        scale, zero = (part.repeat_interleave(32, dim=0) for part in (scales, zeros))
        value = ((weights - zero) * scale).T.contiguous()
        converted = AutoAWQConverter(group_size=32).process({f"x.{part}": tensor.clone() for part, tensor in parts.items()})
        arguments = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
        assert torch.equal(value, decompressed(converted, "x", arguments)), name
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        values[f"{name}.weight"] = value
    write(folder, {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True}, tensors, values)


def record_gptq(folder, version):
    """`version` is 1 or 2. The first one stores zero points minus one."""
    generator, tensors, values, dynamic = torch.Generator().manual_seed(version), {}, {}, {}
    # Names, rows, columns, group, bits, whether columns are reordered, and whether the file has the
    # group of each column.
    for name, rows, columns, group, bits, is_reordered, has_groups, dtype in [
        ("asymmetric", 24, 96, 32, 4, False, True, torch.float16),
        ("partial", 16, 76, 32, 4, False, True, torch.float16),  # the last group and the last words are not full
        ("reordered", 72, 96, 32, 4, True, True, torch.float16),
        ("channel", 24, 40, -1, 4, False, False, torch.bfloat16),
        ("eight", 20, 68, 32, 8, False, True, torch.bfloat16),
        ("symmetric", 16, 128, 64, 8, False, False, torch.float16),
    ]:
        integers, zero_points, scales = random_parts(generator, columns, rows, columns if group < 0 else group, bits, dtype)
        if name == "symmetric":
            zero_points[:] = 2 ** (bits - 1)
        groups = torch.arange(columns) // (columns if group < 0 else group)
        if is_reordered:
            groups = groups[torch.randperm(columns, generator=generator)]
        stored = zero_points - 1 if version == 1 else zero_points
        parts = {"qweight": pack(integers.T, bits).T.contiguous(), "qzeros": pack(stored, bits), "scales": scales}
        if has_groups:
            parts["g_idx"] = groups.to(torch.int32)
        weights, zeros = unpack(parts["qweight"].T, bits).T[:columns], unpack(parts["qzeros"], bits)[:, :rows]
        zeros = zeros + 1 & 2**bits - 1 if version == 1 else zeros
        value = (scales[groups] * (weights.to(torch.int16) - zeros.to(torch.int16)[groups])).T.contiguous()
        per_word = WORD // bits
        for row, column in [(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3), (1, columns - 2)]:
            word = int(parts["qweight"][column // per_word, row]) % 2**WORD
            integer = (word >> bits * (column % per_word)) % 2**bits
            group_of = int(groups[column])
            word = int(parts["qzeros"][group_of, row // per_word]) % 2**WORD
            zero = ((word >> bits * (row % per_word)) + (version == 1)) % 2**bits
            one = (torch.tensor(float(integer - zero)) * scales[group_of, row].float()).to(dtype)
            assert torch.equal(one, value[row, column]), (name, row, column)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        values[f"{name}.weight"] = value
        dynamic[f"+:{name}$"] = {"bits": bits, "group_size": group, "desc_act": is_reordered}
    formats = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False, "dynamic": dynamic}
    write(folder, settings | formats, tensors, values)


def decompressed(tensors, name, arguments):
    parts = {part.removeprefix(f"{name}."): tensor for part, tensor in tensors.items() if part.startswith(f"{name}.")}
    return PackedQuantizationCompressor.decompress(parts, QuantizationScheme(targets=["Linear"], weights=arguments))["weight"]


def record_compressed(folder):
    generator, tensors, values, groups = torch.Generator().manual_seed(3), {}, {}, {}
    for at, (name, rows, columns, group, bits, is_symmetric, dtype) in enumerate([
        ("symmetric", 21, 96, 32, 4, True, torch.bfloat16),
        ("asymmetric", 21, 96, 32, 4, False, torch.bfloat16),
        ("group_64", 9, 128, 64, 4, False, torch.float16),
        ("channel", 70, 45, None, 4, True, torch.bfloat16),  # the last words are not full
        ("asymmetric_channel", 13, 45, None, 4, False, torch.float32),
        ("eight", 10, 64, 32, 8, True, torch.bfloat16),
        ("asymmetric_eight", 10, 45, None, 8, False, torch.float16),
    ]):
        strategy = "group" if group else "channel"
        arguments = QuantizationArgs(num_bits=bits, symmetric=is_symmetric, strategy=strategy, group_size=group)
        count, half = columns // group if group else 1, 2 ** (bits - 1)
        scales = (torch.rand((rows, count), generator=generator) * 0.02 + 1e-4).to(dtype)
        zero_points = torch.zeros((rows, count)) if is_symmetric else torch.randint(-half, half, (rows, count), generator=generator)
        weight = (torch.randn((rows, columns), generator=generator) * 0.05).to(dtype)
        parts = {"weight": weight, "weight_scale": scales, "weight_zero_point": zero_points.to(torch.int8)}
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        parts = PackedQuantizationCompressor.compress(parts, scheme)
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        values[f"{name}.weight"] = decompressed(tensors, name, arguments).contiguous()
        groups[f"group_{at}"] = {
            "targets": ["Linear"] if at == 0 else [f"re:{name}$"],
            "weights": arguments.model_dump(mode="json"),
            "input_activations": None,
            "output_activations": None,
        }
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    write(folder, settings | {"config_groups": groups, "ignore": ["lm_head"]}, tensors, values)


def record_experts(folder):
    """The experts of a layer in three tensors, as llm-compressor names them, and as modules."""
    generator, tensors, values = torch.Generator().manual_seed(4), {}, {}
    arguments = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
    for name, separator, rows, columns in [("gate_up_proj", "_", 48, 64), ("down_proj", ".weight_", 32, 96)]:
        experts = []
        for _ in range(3):
            parts = {
                "weight": (torch.randn((rows, columns), generator=generator) * 0.05).bfloat16(),
                "weight_scale": (torch.rand((rows, columns // 32), generator=generator) * 0.02 + 1e-4).bfloat16(),
                "weight_zero_point": torch.randint(-8, 8, (rows, columns // 32), generator=generator).to(torch.int8),
            }
            parts = PackedQuantizationCompressor.compress(parts, QuantizationScheme(targets=["Linear"], weights=arguments))
            experts.append((parts, decompressed({f"x.{part}": tensor for part, tensor in parts.items()}, "x", arguments)))
        for part in ["weight_packed", "weight_scale", "weight_zero_point"]:
            stacked = torch.stack([parts[part] for parts, _ in experts])
            tensors[f"mlp.experts.{name}{separator}{part.removeprefix('weight_')}"] = stacked.contiguous()
        values[f"mlp.experts.{name}"] = torch.stack([value for _, value in experts])
    write(folder, compressed_settings("pack-quantized", arguments), tensors, values)


def compressed_settings(form, arguments):
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments.model_dump(mode="json"), "input_activations": None}}
    settings = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return settings | {"config_groups": groups, "ignore": ["lm_head"]}


def random_fp4(generator, shape, group):
    """Random bytes with all pairs of FP4 numbers, and their scales.

    Scales for NVFP4 (`group` is 16) are E4M3 numbers with every exponent. Other scales are powers of two."""
    *outer, columns = shape
    packed = torch.randint(0, 256, (*outer, columns // 2), generator=generator).to(torch.uint8)
    if group == 16:
        codes = torch.randint(0, 0x7F, (*outer, columns // 16), generator=generator).to(torch.uint8)
        return packed, codes.view(torch.float8_e4m3fn)
    exponents = torch.randint(96, 140, (*outer, columns // 32), generator=generator).to(torch.uint8)
    exponents.view(-1)[:4] = torch.tensor([0, 1, 253, 254])  # elements that are subnormal, or infinite
    return packed, exponents


def decompressed_fp4(compressor, arguments, parts):
    return compressor.decompress(dict(parts), QuantizationScheme(targets=["Linear"], weights=arguments))["weight"]


def record_nvfp4(folder):
    generator, tensors, values = torch.Generator().manual_seed(5), {}, {}
    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", symmetric=True, group_size=16, scale_dtype="torch.float8_e4m3fn"
    )
    weight = (torch.randn((21, 96), generator=generator) * 0.05).bfloat16()
    factor = (448 * 6 / weight.abs().max().float()).reshape(1)
    largest = weight.float().unflatten(-1, (-1, 16)).abs().amax(-1)
    scale = (factor * largest / 6).to(torch.float8_e4m3fn)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    parts = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": factor}
    all_parts = {"rounded": NVFP4PackedCompressor.compress(parts, scheme)}
    for name, shape, factor in [("random", (24, 112), 12345.6), ("small", (17, 48), 2e-36), ("large", (9, 32), 2e38)]:
        packed, scale = random_fp4(generator, shape, 16)
        all_parts[name] = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([factor])}
    for name, parts in all_parts.items():
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        tensors[f"{name}.input_global_scale"] = torch.tensor([100.0])
        values[f"{name}.weight"] = decompressed_fp4(NVFP4PackedCompressor, arguments, parts)
    packed, scale = random_fp4(generator, (3, 16, 64), 16)
    factors = torch.tensor([1000.0, 777.7, 3.3])
    tensors |= {f"experts.down_proj_{part}": tensor for part, tensor in [("packed", packed), ("scale", scale), ("global_scale", factors)]}
    experts = [
        {"weight_packed": packed[at], "weight_scale": scale[at], "weight_global_scale": factors[at : at + 1]} for at in range(3)
    ]
    values["experts.down_proj"] = torch.stack([decompressed_fp4(NVFP4PackedCompressor, arguments, parts) for parts in experts])
    write(folder, compressed_settings("nvfp4-pack-quantized", arguments), tensors, values)


def record_mxfp4(folder):
    generator, tensors, values = torch.Generator().manual_seed(6), {}, {}
    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="group", symmetric=True, group_size=32, scale_dtype="torch.uint8"
    )
    for name, shape in [("random", (24, 96)), ("narrow", (70, 32))]:
        packed, scale = random_fp4(generator, shape, 32)
        parts = {"weight_packed": packed, "weight_scale": scale}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        values[f"{name}.weight"] = decompressed_fp4(MXFP4PackedCompressor, arguments, parts)
    write(folder, compressed_settings("mxfp4-pack-quantized", arguments), tensors, values)


def record_modelopt(folder):
    generator, tensors, values = torch.Generator().manual_seed(7), {}, {}
    # Unlike compressed-tensors, ModelOpt reads code 8 as 0 without a sign.
    numbers = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], numpy.float32)
    for name, shape, factor in [("random", (24, 96), 8.1e-5), ("small", (9, 32), 3e-38), ("experts.0.up_proj", (16, 48), 0.37)]:
        packed, scale = random_fp4(generator, shape, 16)
        parts = {"weight": packed, "weight_scale": scale, "weight_scale_2": torch.tensor(factor), "input_scale": torch.tensor(0.1)}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        codes = numpy.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).reshape(shape)
        scales = scale.float().numpy() * numpy.float32(factor)
        value = numbers[codes] * numpy.repeat(scales, 16, axis=-1)
        values[f"{name}.weight"] = torch.from_numpy(value).bfloat16()
    tensors["lm_head.weight"] = values["lm_head.weight"] = torch.randn((8, 16), generator=generator).bfloat16()
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    groups = {"group_0": {"weights": group, "input_activations": group, "targets": ["Linear"]}}
    write(folder, settings | {"config_groups": groups}, tensors, values)


def write(folder, settings, tensors, values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors")
    save_file(values, folder / "values.safetensors")


def record(root, _):
    folder = root / "packed"
    record_awq(folder / "awq")
    record_gptq(folder / "gptq", 1)
    record_gptq(folder / "gptq_v2", 2)
    record_compressed(folder / "compressed_tensors")
    record_experts(folder / "experts")
    record_nvfp4(folder / "nvfp4")
    record_mxfp4(folder / "mxfp4")
    record_modelopt(folder / "modelopt")
