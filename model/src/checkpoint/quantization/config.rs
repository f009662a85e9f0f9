//! `quantization_config` of `config.json`, and `hf_quant_config.json`: the FP8 formats of
//! transformers, compressed-tensors and ModelOpt. Unknown settings are refused by name.
//! [`packed_config`](super::packed_config) reads the settings of packed integers, and
//! [`fp4_config`](super::fp4_config) reads the settings of FP4.

use bursar_kernels::{Quantization, QuantizationScheme, ScaledBy};
use serde_json::{Map, Value, json};

use super::choice::QuantizationMethod;
use super::error::QuantizationError;
use super::fields::Fields;
use super::formats::{StoredFormat, StoredQuantization};
use super::fp4_config::{is_modelopt_nvfp4, modelopt_nvfp4};
use super::packed_config::{COMPRESSED_NAMES, awq, compressed_packed, gptq};

const CONFIG: &str = "config.json";
/// The key of `config.json` that has the quantization settings.
pub(crate) const SETTINGS: &str = "quantization_config";
/// ModelOpt's separate file, which older releases have instead of a key of `config.json`.
pub(crate) const MODELOPT: &str = "hf_quant_config.json";
/// The key of ModelOpt's file that has the settings.
const MODELOPT_PART: &str = "quantization";

/// The key of compressed-tensors' settings that describes the compression of zeros.
const SPARSITY: &str = "sparsity_config";

/// Formats of compressed-tensors with one byte per element. Early releases also used the
/// second name for FP8.
const FLOAT_QUANTIZED: [&str; 2] = ["float-quantized", "naive-quantized"];

/// Reads the quantization format of a checkpoint; `None` if its weights are not quantized. `place`
/// is the path of the settings in the file.
///
/// # Errors
/// A setting is unknown, or its value is not supported.
pub(crate) fn stored_formats(
    (config, place): (&Map<String, Value>, &str),
    modelopt: Option<&Value>,
) -> Result<Option<StoredFormat>, QuantizationError> {
    let scaled = |stored: Result<_, _>| stored.map(|stored| Some(StoredFormat::Scaled(stored)));
    let packed = |stored: Result<_, _>| stored.map(|stored| Some(StoredFormat::Packed(stored)));
    if let Some(part) = Fields::part(CONFIG, "", config, SETTINGS)? {
        let part = Fields { place: format!("{place}."), ..part };
        let own = Fields::part(part.file, &part.place, part.fields, MODELOPT_PART)?;
        return match (part.text("quant_method"), own) {
            // The object has the layout of ModelOpt's separate file.
            (Some("modelopt" | "modelopt_fp4") | None, Some(own)) => {
                part.refuse_unknown_keys(&["quant_method", "producer", MODELOPT_PART])?;
                modelopt_format(&own).map(Some)
            }
            (Some("fp8"), _) => scaled(block(&part)),
            (Some("awq"), _) => packed(awq(&part)),
            (Some("gptq"), _) => packed(gptq(&part)),
            (Some("compressed-tensors"), _) => {
                check_compressed(&part)?;
                match compressed_packed(&part)? {
                    Some(stored) => packed(Ok(stored)),
                    None => scaled(compressed(&part)),
                }
            }
            (Some("modelopt" | "modelopt_fp4"), None) => modelopt_format(&part).map(Some),
            _ => Err(part.refused("quant_method", "fp8, compressed-tensors, modelopt, awq and gptq")),
        };
    }
    let Some(modelopt) = modelopt.and_then(Value::as_object) else { return Ok(None) };
    match Fields::part(MODELOPT, "", modelopt, MODELOPT_PART)? {
        Some(part) if part.fields.get("quant_algo").is_some_and(|algorithm| !algorithm.is_null()) => {
            modelopt_format(&part).map(Some)
        }
        _ => Ok(None),
    }
}

/// Reads the FP8 format of transformers, as in Qwen's releases (5.17, `FineGrainedFP8Config`).
fn block(part: &Fields<'_>) -> Result<StoredQuantization, QuantizationError> {
    part.require_one_of("fmt", &[json!("e4m3"), Value::Null], "e4m3")?;
    part.require_one_of("activation_scheme", &[json!("dynamic"), Value::Null], "dynamic")?;
    part.require_one_of("weight_block_size", &[json!([128, 128])], "[128, 128]")?;
    part.require_one_of("scale_fmt", &[json!("float"), Value::Null], "float")?;
    part.refuse_unknown_keys(&[
        "quant_method",
        "fmt",
        "activation_scheme",
        "weight_block_size",
        "scale_fmt",
        "modules_to_not_convert",
        "ignored_layers",
    ])?;
    let plain = part.modules(&["modules_to_not_convert", "ignored_layers"])?;
    let (method, scheme) = (QuantizationMethod::Fp8, QuantizationScheme::BLOCK);
    Ok(StoredQuantization { method, scheme, scale: "weight_scale_inv", plain })
}

/// Checks the settings of compressed-tensors that all its formats have.
fn check_compressed(part: &Fields<'_>) -> Result<(), QuantizationError> {
    let [format, early] = FLOAT_QUANTIZED.map(Value::from);
    let formats: Vec<_> = [format, early].into_iter().chain(COMPRESSED_NAMES.map(Value::from)).collect();
    part.require_one_of("format", &formats, "float-quantized and pack-, nvfp4-pack- and mxfp4-pack-quantized")?;
    part.require_one_of("quantization_status", &[json!("compressed"), json!("frozen"), Value::Null], "compressed")?;
    part.refuse_unknown_keys(&[
        "quant_method",
        "format",
        "quantization_status",
        "config_groups",
        "ignore",
        "global_compression_ratio",
        "version",
        "kv_cache_scheme",
        SPARSITY,
    ])?;
    // Releases of 2024 have this key. It gives the number of zeros, and states that zeros are
    // stored like other values (`dense`).
    if let Some(sparsity) = Fields::part(part.file, &part.place, part.fields, SPARSITY)? {
        sparsity.require_one_of("format", &[json!("dense")], "dense")?;
    }
    check_cache_scheme(part, &[json!("tensor"), json!("attn_head")], "tensor and attn_head")
}

/// Reads the FP8 format of compressed-tensors as llm-compressor writes it: one group
/// of all linear layers.
fn compressed(part: &Fields<'_>) -> Result<StoredQuantization, QuantizationError> {
    let groups = part.inner("config_groups")?;
    let one = "one group";
    let mut names = groups.fields.keys();
    let (Some(name), None) = (names.next(), names.next()) else { return Err(part.refused("config_groups", one)) };
    let group = groups.inner(name)?;
    group.require_one_of("targets", &[json!(["Linear"])], "[\"Linear\"]")?;
    let [format, early] = FLOAT_QUANTIZED.map(Value::from);
    group.require_one_of("format", &[format, early, Value::Null], "float-quantized")?;
    group.refuse_unknown_keys(&["targets", "format", "weights", "input_activations"])?;
    let (weights, activations) = (group.inner("weights")?, group.inner("input_activations")?);
    for part in [&weights, &activations] {
        part.require_e4m3()?;
        part.refuse_unknown_keys(&[
            "num_bits",
            "type",
            "symmetric",
            "strategy",
            "dynamic",
            "block_structure",
            "group_size",
            "observer",
            "observer_kwargs",
        ])?;
    }
    weights.require_one_of("dynamic", &[json!(false), Value::Null], "false")?;
    let is_dynamic = activations.fields.get("dynamic") == Some(&json!(true));
    let scheme = match (weights.text("strategy"), activations.text("strategy"), is_dynamic) {
        (Some("channel"), Some("token"), true) => QuantizationScheme::ROW,
        (Some("tensor"), Some("token"), true) => QuantizationScheme::fp8(ScaledBy::Tensor, Quantization::Rows),
        (Some("channel"), Some("tensor"), false) => QuantizationScheme::fp8(ScaledBy::Row, Quantization::Fixed(())),
        (Some("tensor"), Some("tensor"), false) => QuantizationScheme::fp8(ScaledBy::Tensor, Quantization::Fixed(())),
        (Some("block"), Some("group"), true) => {
            weights.require_one_of("block_structure", &[json!([128, 128])], "[128, 128]")?;
            activations.require_one_of("group_size", &[json!(128)], "128")?;
            QuantizationScheme::BLOCK
        }
        (Some("channel" | "tensor"), _, _) => {
            return Err(activations.refused("strategy", "token if it is dynamic, else tensor"));
        }
        _ => return Err(weights.refused("strategy", "channel, tensor, and block with groups of activations")),
    };
    if scheme != QuantizationScheme::BLOCK {
        weights.require_one_of("block_structure", &[Value::Null], "null")?;
        [&weights, &activations]
            .iter()
            .try_for_each(|part| part.require_one_of("group_size", &[Value::Null], "null"))?;
    }
    let (method, plain) = (QuantizationMethod::CompressedTensors, part.modules(&["ignore"])?);
    Ok(StoredQuantization { method, scheme, scale: "weight_scale", plain })
}

/// Checks the scaling of keys and values, if `kv_cache_scheme` defines it: a layer has one scale
/// for keys and one for values, or one per head if `strategies` allows it.
fn check_cache_scheme(
    part: &Fields<'_>,
    strategies: &[Value],
    supported: &'static str,
) -> Result<(), QuantizationError> {
    let Some(scheme) = Fields::part(part.file, &part.place, part.fields, "kv_cache_scheme")? else { return Ok(()) };
    scheme.require_e4m3()?;
    scheme.require_one_of("dynamic", &[json!(false), Value::Null], "false")?;
    scheme.require_one_of("strategy", strategies, supported)?;
    scheme.require_one_of("group_size", &[Value::Null], "null")?;
    scheme.require_one_of("block_structure", &[Value::Null], "null")?;
    scheme.refuse_unknown_keys(&["num_bits", "type", "symmetric", "dynamic", "strategy", "observer", "observer_kwargs"])
}

/// Reads a format of ModelOpt, as in NVIDIA's releases.
fn modelopt_format(part: &Fields<'_>) -> Result<StoredFormat, QuantizationError> {
    let stored = if is_modelopt_nvfp4(part) {
        StoredFormat::Packed(modelopt_nvfp4(part)?)
    } else {
        StoredFormat::Scaled(tensor(part)?)
    };
    part.require_one_of("kv_cache_quant_algo", &[json!("FP8"), json!("fp8"), Value::Null], "FP8")?;
    check_cache_scheme(part, &[json!("tensor"), Value::Null], "tensor")?;
    Ok(stored)
}

/// Reads the FP8 format of ModelOpt.
fn tensor(part: &Fields<'_>) -> Result<StoredQuantization, QuantizationError> {
    let is_by_channel = match part.text("quant_algo") {
        Some("FP8" | "fp8") => false,
        Some("FP8_PER_CHANNEL_PER_TOKEN" | "fp8_per_channel_per_token") => true,
        _ => return Err(part.refused("quant_algo", "FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4 and W4A16_NVFP4")),
    };
    check_modelopt_groups(part, is_by_channel)?;
    part.refuse_unknown_keys(&[
        "quant_method",
        "quant_algo",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "config_groups",
        "ignore",
        "exclude_modules",
        "producer",
    ])?;
    let scheme = if is_by_channel {
        QuantizationScheme::ROW
    } else {
        QuantizationScheme::fp8(ScaledBy::Tensor, Quantization::Fixed(()))
    };
    let (method, plain) = (QuantizationMethod::ModelOpt, part.modules(&["ignore", "exclude_modules"])?);
    Ok(StoredQuantization { method, scheme, scale: "weight_scale", plain })
}

/// Checks the groups that ModelOpt writes into `config.json`. Each group repeats that all numbers
/// are E4M3 and, unless the scales are per channel, that each matrix has one scale. For scales per
/// channel and per token, `convert_hf_config.py` writes nothing more.
fn check_modelopt_groups(part: &Fields<'_>, is_by_channel: bool) -> Result<(), QuantizationError> {
    let Some(groups) = Fields::part(part.file, &part.place, part.fields, "config_groups")? else { return Ok(()) };
    for name in groups.fields.keys() {
        let group = groups.inner(name)?;
        group.require_one_of("targets", &[json!(["Linear"]), Value::Null], "[\"Linear\"]")?;
        group.refuse_unknown_keys(&["targets", "weights", "input_activations"])?;
        for part in [group.inner("weights")?, group.inner("input_activations")?] {
            part.require_e4m3()?;
            part.refuse_unknown_keys(&["num_bits", "type", "symmetric", "dynamic", "strategy"])?;
            if !is_by_channel {
                part.require_one_of("dynamic", &[json!(false), Value::Null], "false")?;
                part.require_one_of("strategy", &[json!("tensor"), Value::Null], "tensor")?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(config: Value, modelopt: Option<Value>) -> StoredQuantization {
        let config = config.as_object().expect("an object");
        match stored_formats((config, SETTINGS), modelopt.as_ref()).expect("the stored format is served") {
            Some(StoredFormat::Scaled(stored)) => stored,
            other => panic!("{other:?} is not FP8"),
        }
    }

    #[test]
    fn qwens_releases_have_blocks_with_or_without_a_list() {
        let settings = json!({
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        });
        let found = read(json!({ "quantization_config": settings }), None);
        assert_eq!((found.scheme, found.scale), (QuantizationScheme::BLOCK, "weight_scale_inv"));
        assert!(!found.plain.has("model.layers.0.mlp.up_proj"));
        let mut settings = settings;
        settings["ignored_layers"] = json!(["model.layers.0.mlp.up_proj"]);
        assert!(read(json!({ "quantization_config": settings }), None).plain.has("model.layers.0.mlp.up_proj"));
    }

    #[test]
    fn each_pair_of_strategies_of_compressed_tensors_is_one_scheme() {
        let settings = |weights: Value, activations: Value| {
            let part = |more: Value| {
                let mut part = json!({ "num_bits": 8, "type": "float", "symmetric": true });
                part.as_object_mut()
                    .expect("an object")
                    .extend(more.as_object().expect("the additional settings are an object").clone());
                part
            };
            let group =
                json!({ "targets": ["Linear"], "weights": part(weights), "input_activations": part(activations) });
            json!({ "quantization_config": {
                "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                "config_groups": { "group_0": group }, "sparsity_config": {}, "transform_config": {},
            } })
        };
        let token = json!({ "strategy": "token", "dynamic": true });
        let fixed = json!({ "strategy": "tensor", "dynamic": false });
        let groups = json!({ "strategy": "group", "dynamic": true, "group_size": 128 });
        let blocks = json!({ "strategy": "block", "block_structure": [128, 128] });
        let [channel, tensor] = ["channel", "tensor"].map(|strategy| json!({ "strategy": strategy, "dynamic": false }));
        let scheme = QuantizationScheme::fp8;
        for (weights, activations, expected) in [
            (&channel, &token, QuantizationScheme::ROW),
            (&tensor, &token, scheme(ScaledBy::Tensor, Quantization::Rows)),
            (&channel, &fixed, scheme(ScaledBy::Row, Quantization::Fixed(()))),
            (&tensor, &fixed, scheme(ScaledBy::Tensor, Quantization::Fixed(()))),
            (&blocks, &groups, QuantizationScheme::BLOCK),
        ] {
            let found = read(settings(weights.clone(), activations.clone()), None);
            assert_eq!((found.scheme, found.scale), (expected, "weight_scale"), "{weights} {activations}");
        }
    }

    #[test]
    fn modelopts_settings_stand_in_either_file() {
        let fixed = QuantizationScheme::fp8(ScaledBy::Tensor, Quantization::Fixed(()));
        let of_all = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
        let part = json!({
            "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": { "name": "modelopt" },
            "kv_cache_scheme": of_all,
            "config_groups": {
                "group_0": { "weights": of_all, "input_activations": of_all, "targets": ["Linear"] },
            },
        });
        let own = json!({
            "producer": { "name": "modelopt" },
            "quantization": { "quant_algo": "fp8", "kv_cache_quant_algo": null, "exclude_modules": ["lm_head"] },
        });
        let mut named = own.clone();
        named["quant_method"] = json!("modelopt");
        let in_config = |part: Value| read(json!({ "quantization_config": part }), None);
        let found = [in_config(part), in_config(own.clone()), in_config(named), read(json!({}), Some(own))];
        for found in found {
            let is_modelopt = found.method == QuantizationMethod::ModelOpt;
            assert!(is_modelopt && found.scheme == fixed && found.plain.has("lm_head"), "{found:?}");
        }
        let of_all = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
        let mut of_weights = of_all.clone();
        of_weights["strategy"] = json!("channel");
        let mut by_channel = json!({
            "quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"],
            "config_groups": { "group_0": { "weights": of_weights, "input_activations": of_all } },
        });
        assert_eq!(in_config(by_channel.clone()).scheme, QuantizationScheme::ROW);
        by_channel["quant_algo"] = json!("FP8");
        let config = json!({ "quantization_config": by_channel });
        stored_formats((config.as_object().expect("an object"), SETTINGS), None)
            .expect_err("the settings of its groups disagree");
        let none = json!({ "quantization": { "quant_algo": null } });
        assert!(stored_formats((&Map::new(), SETTINGS), Some(&none)).expect("the stored format is served").is_none());
    }

    #[test]
    fn early_names_of_compressed_tensors_are_known() {
        let linear = |strategy, is_dynamic| json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy, "dynamic": is_dynamic });
        let group = json!({
            "targets": ["Linear"], "weights": linear("tensor", false), "input_activations": linear("tensor", false),
        });
        let settings = json!({
            "quant_method": "compressed-tensors", "format": "naive-quantized", "quantization_status": "frozen",
            "ignore": ["lm_head"], "config_groups": { "group_0": group },
        });
        let found = read(json!({ "quantization_config": settings }), None);
        assert_eq!(found.scheme, QuantizationScheme::fp8(ScaledBy::Tensor, Quantization::Fixed(())));
    }
}
