//! The settings of FP4 weights: `nvfp4-pack-quantized` and `mxfp4-pack-quantized` of
//! compressed-tensors, and NVFP4 of ModelOpt. Unknown settings are refused by name.
//!
//! Only weights are FP4 here. Settings of FP4 or FP8 activations are accepted but not used, as in
//! vLLM on GPUs without FP4 tensor cores.

use serde_json::{Value, json};

use super::choice::QuantizationMethod;
use super::error::QuantizationError;
use super::fields::{Fields, QUANTIZATION_ARGS};
use super::formats::PackedQuantization;
use crate::checkpoint::packed::{PackedFormat, PackedScheme};

/// ModelOpt's names of NVFP4, with and without FP4 activations.
const MODELOPT_NAMES: [&str; 2] = ["NVFP4", "W4A16_NVFP4"];

/// Reads a group of modules in NVFP4 (compressed-tensors 0.20, `NVFP4PackedCompressor`).
pub(super) fn nvfp4(group: &Fields<'_>) -> Result<PackedScheme, QuantizationError> {
    let weights = weights(group)?;
    weights.require_one_of("strategy", &[json!("tensor_group")], "tensor_group")?;
    weights.require_one_of("group_size", &[json!(16)], "16")?;
    weights.require_one_of("scale_dtype", &[json!("torch.float8_e4m3fn"), Value::Null], "torch.float8_e4m3fn")?;
    Ok(PackedScheme::fp4(PackedFormat::Nvfp4))
}

/// Reads a group of modules in MXFP4 (compressed-tensors 0.20, `MXFP4PackedCompressor`).
pub(super) fn mxfp4(group: &Fields<'_>) -> Result<PackedScheme, QuantizationError> {
    let weights = weights(group)?;
    weights.require_one_of("strategy", &[json!("group")], "group")?;
    weights.require_one_of("group_size", &[json!(32)], "32")?;
    weights.require_one_of("scale_dtype", &[json!("torch.uint8"), Value::Null], "torch.uint8")?;
    Ok(PackedScheme::fp4(PackedFormat::Mxfp4))
}

/// Reads the weight settings that both compressed-tensors formats share.
fn weights<'c>(group: &Fields<'c>) -> Result<Fields<'c>, QuantizationError> {
    check_activations(group)?;
    let weights = group.inner("weights")?;
    require_fp4(&weights)?;
    weights.require_one_of("symmetric", &[json!(true)], "true")?;
    weights.require_one_of("actorder", &[json!(false), json!("weight"), json!("static"), Value::Null], "null")?;
    weights.refuse_unknown_keys(&QUANTIZATION_ARGS)?;
    Ok(weights)
}

/// Refuses weights that are not FP4.
fn require_fp4(weights: &Fields<'_>) -> Result<(), QuantizationError> {
    weights.require_one_of("num_bits", &[json!(4)], "4")?;
    weights.require_one_of("type", &[json!("float")], "float")?;
    weights.require_one_of("dynamic", &[json!(false), Value::Null], "false")
}

/// Checks that activations, if they are quantized, are FP4 or FP8. Other settings of activations do
/// not change how weights are read.
fn check_activations(group: &Fields<'_>) -> Result<(), QuantizationError> {
    let activations = Fields::part(group.file, &group.place, group.fields, "input_activations")?;
    let Some(activations) = activations else { return Ok(()) };
    activations.require_one_of("num_bits", &[json!(4), json!(8)], "4 and 8")?;
    activations.require_one_of("type", &[json!("float")], "float")
}

/// Whether the settings of ModelOpt describe NVFP4.
pub(super) fn is_modelopt_nvfp4(part: &Fields<'_>) -> bool {
    part.text("quant_algo").is_some_and(|name| MODELOPT_NAMES.iter().any(|known| known.eq_ignore_ascii_case(name)))
}

/// Reads the settings of ModelOpt's NVFP4, as in NVIDIA's releases (modelopt 0.47,
/// `convert_hf_config.py`). The settings of the KV cache are accepted but not read here.
pub(super) fn modelopt_nvfp4(part: &Fields<'_>) -> Result<PackedQuantization, QuantizationError> {
    let groups_of_16 = |part: &Fields<'_>| part.require_one_of("group_size", &[json!(16), Value::Null], "16");
    groups_of_16(part)?;
    if let Some(groups) = Fields::part(part.file, &part.place, part.fields, "config_groups")? {
        for name in groups.fields.keys() {
            let group = groups.inner(name)?;
            group.require_one_of("targets", &[json!(["Linear"]), Value::Null], "[\"Linear\"]")?;
            group.refuse_unknown_keys(&["targets", "weights", "input_activations"])?;
            check_activations(&group)?;
            let weights = group.inner("weights")?;
            require_fp4(&weights)?;
            groups_of_16(&weights)?;
            weights.refuse_unknown_keys(&["num_bits", "type", "dynamic", "group_size"])?;
        }
    }
    part.refuse_unknown_keys(&[
        "quant_method",
        "quant_algo",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "group_size",
        "config_groups",
        "ignore",
        "exclude_modules",
        "producer",
    ])?;
    let scheme = PackedScheme::fp4(PackedFormat::ModelOptNvfp4);
    let rules = vec![(part.modules(&["ignore", "exclude_modules"])?, None)];
    Ok(PackedQuantization { method: QuantizationMethod::ModelOpt, scheme, rules })
}
