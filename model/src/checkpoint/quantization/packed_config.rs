//! The settings of packed integers: AWQ (4 bits), and GPTQ and `pack-quantized` of
//! compressed-tensors (4 or 8 bits). This file also reads the module groups of all packed formats
//! of compressed-tensors. Unknown settings are refused by name.

use serde_json::{Value, json};

use super::choice::QuantizationMethod;
use super::error::QuantizationError;
use super::fields::{Fields, QUANTIZATION_ARGS};
use super::formats::PackedQuantization;
use super::fp4_config::{mxfp4, nvfp4};
use super::modules::Modules;
use crate::checkpoint::packed::{PackedFormat, PackedScheme};

/// Reads the scheme of a group of modules.
type ReadGroup = fn(&Fields<'_>) -> Result<PackedScheme, QuantizationError>;

/// The packed formats of compressed-tensors, by name.
const COMPRESSED: [(&str, ReadGroup); 3] =
    [("pack-quantized", integers), ("nvfp4-pack-quantized", nvfp4), ("mxfp4-pack-quantized", mxfp4)];

/// The names of the packed formats of compressed-tensors.
pub(super) const COMPRESSED_NAMES: [&str; 3] = [COMPRESSED[0].0, COMPRESSED[1].0, COMPRESSED[2].0];

/// Keys of GPTQ settings that say how the weights were computed, or which kernels to use. They do
/// not change how weights are read.
const GPTQ_IGNORED: [&str; 32] = [
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "gptaq",
    "hyb_act",
    "lm_head",
    "max_input_length",
    "meta",
    "method",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "offload_to_disk",
    "offload_to_disk_path",
    "pad_token_id",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "v2",
    "version",
];

/// Keys of GPTQ settings that may differ among modules.
const GPTQ_PER_MODULE: [&str; 4] = ["bits", "group_size", "sym", "desc_act"];

/// Keys of AWQ settings that do not change how weights are read.
const AWQ_IGNORED: [&str; 6] = ["do_fuse", "exllama_config", "fuse_max_seq_len", "lm_head", "meta", "modules_to_fuse"];

/// Reads the settings of AutoAWQ, as in Qwen's releases (transformers 5.17, `AwqConfig`), and of
/// GPTQModel, which also writes this format.
pub(super) fn awq(part: &Fields<'_>) -> Result<PackedQuantization, QuantizationError> {
    const VERSIONS: [&str; 3] = ["version", "format", "checkpoint_format"];
    let is_gemm = |name: &&str| part.text(name).is_none_or(|version| version.eq_ignore_ascii_case("gemm"));
    if let Some(name) = VERSIONS.iter().find(|name| !is_gemm(name)) {
        return Err(part.refused(name, "gemm"));
    }
    part.require_one_of("bits", &[json!(4)], "4")?;
    part.require_one_of("zero_point", &[json!(true), Value::Null], "true")?;
    part.require_one_of("backend", &[json!("autoawq"), json!("auto"), Value::Null], "autoawq")?;
    part.require_one_of("pack_dtype", &[json!("int32"), Value::Null], "int32")?;
    let lists = ["modules_to_not_convert", "ignore"];
    let others = ["quant_method", "bits", "group_size", "zero_point", "backend", "pack_dtype", "dynamic"];
    part.refuse_unknown_keys(&[&others[..], &VERSIONS, &lists, &AWQ_IGNORED].concat())?;
    let (group, format) = (group_size(part)?, PackedFormat::Awq);
    let scheme = PackedScheme { format, bits: 4, group, has_zero_points: true, is_reordered: false };
    let mut rules = vec![(part.modules(&lists)?, None)];
    rules.extend(dynamic_rules(part, scheme)?);
    if rules.iter().any(|(_, changed)| changed.is_some_and(|changed| changed.bits != 4 || changed.is_reordered)) {
        return Err(part.refused("dynamic", "rules that exclude modules or change only group_size"));
    }
    Ok(PackedQuantization { method: QuantizationMethod::Awq, scheme, rules })
}

/// Reads the settings of AutoGPTQ and GPTQModel. Files have zero points even if the quantization is
/// symmetric, so `sym` changes nothing.
pub(super) fn gptq(part: &Fields<'_>) -> Result<PackedQuantization, QuantizationError> {
    let formats = [json!("gptq"), json!("gptq_v2"), Value::Null];
    ["checkpoint_format", "format"]
        .iter()
        .try_for_each(|name| part.require_one_of(name, &formats, "gptq and gptq_v2"))?;
    let is_v2 = ["checkpoint_format", "format"].iter().any(|name| part.text(name) == Some("gptq_v2"));
    part.require_one_of("pack_dtype", &[json!("int32"), Value::Null], "int32")?;
    let of_files = ["quant_method", "checkpoint_format", "format", "pack_dtype", "dynamic", "modules_to_not_convert"];
    part.refuse_unknown_keys(&[&GPTQ_PER_MODULE[..], &of_files, &GPTQ_IGNORED].concat())?;
    let format = if is_v2 { PackedFormat::GptqV2 } else { PackedFormat::Gptq };
    let whole = PackedScheme { format, bits: 0, group: None, has_zero_points: true, is_reordered: false };
    let scheme = gptq_scheme(part, whole, true)?;
    let mut rules = vec![(part.modules(&["modules_to_not_convert"])?, None)];
    rules.extend(dynamic_rules(part, scheme)?);
    Ok(PackedQuantization { method: QuantizationMethod::Gptq, scheme, rules })
}

/// Reads the rules of GPTQModel for some modules (`dynamic_get` in its `quantization/config.py`). A
/// key is a regular expression for the start of a module's name. The prefix `-:` means that the
/// modules are not quantized. Other rules change settings of `scheme`.
fn dynamic_rules(
    part: &Fields<'_>,
    scheme: PackedScheme,
) -> Result<Vec<(Modules, Option<PackedScheme>)>, QuantizationError> {
    let Some(dynamic) = Fields::part(part.file, &part.place, part.fields, "dynamic")? else { return Ok(Vec::new()) };
    let rule = |key: &String| {
        let (pattern, is_plain) = match key.strip_prefix("-:") {
            Some(pattern) => (pattern, true),
            None => (key.strip_prefix("+:").unwrap_or(key), false),
        };
        let modules = Modules::new(part.file, [&*format!("re:{pattern}")])?;
        let changed = match Fields::part(part.file, &dynamic.place, dynamic.fields, key)? {
            Some(changes) if !is_plain => {
                changes.refuse_unknown_keys(&[&GPTQ_PER_MODULE[..], &GPTQ_IGNORED].concat())?;
                gptq_scheme(&changes, scheme, false)?
            }
            _ => scheme,
        };
        Ok((modules, (!is_plain).then_some(changed)))
    };
    dynamic.fields.keys().map(rule).collect()
}

/// The scheme of GPTQ settings. Missing keys are taken from `base`. If `is_whole`, `bits` and
/// `group_size` must be present, and missing flags are false.
fn gptq_scheme(part: &Fields<'_>, base: PackedScheme, is_whole: bool) -> Result<PackedScheme, QuantizationError> {
    let has = |name: &str| is_whole || part.fields.contains_key(name);
    let flag = |name: &str| {
        part.require_one_of(name, &[json!(true), json!(false), Value::Null], "true and false")?;
        Ok::<_, QuantizationError>(part.fields.get(name) == Some(&json!(true)))
    };
    flag("sym")?;
    let bits = if has("bits") { bits(part, "bits")? } else { base.bits };
    let group = if has("group_size") { group_size(part)? } else { base.group };
    let is_reordered = if has("desc_act") { flag("desc_act")? } else { base.is_reordered };
    Ok(PackedScheme { bits, group, is_reordered, ..base })
}

/// Reads the settings of a packed format of compressed-tensors as llm-compressor writes them:
/// groups of modules. `None` if the format is not packed.
pub(super) fn compressed_packed(part: &Fields<'_>) -> Result<Option<PackedQuantization>, QuantizationError> {
    let format = part.text("format");
    let Some((format, read)) = COMPRESSED.into_iter().find(|(name, _)| Some(*name) == format) else { return Ok(None) };
    let groups = part.inner("config_groups")?;
    let mut rules = vec![(part.modules(&["ignore"])?, None)];
    let mut others = Vec::new();
    for name in groups.fields.keys() {
        let group = groups.inner(name)?;
        group.require_one_of("format", &[json!(format), Value::Null], format)?;
        group.refuse_unknown_keys(&["targets", "format", "weights", "input_activations"])?;
        let scheme = read(&group)?;
        match group.fields.get("targets") {
            Some(targets) if *targets == json!(["Linear"]) => others.push(scheme),
            _ => rules.push((group.modules(&["targets"])?, Some(scheme))),
        }
    }
    // The scheme of the group with the targets `["Linear"]` applies to every packed weight that no
    // other group names. If the only group has other targets, its scheme applies to every packed
    // weight, even outside its targets.
    let scheme = match (&*others, &rules[1..]) {
        ([scheme], _) | ([], [(_, Some(scheme))]) => *scheme,
        ([], _) => return Err(part.refused("config_groups", "a group with the targets [\"Linear\"]")),
        _ => return Err(part.refused("config_groups", "one group with the targets [\"Linear\"]")),
    };
    Ok(Some(PackedQuantization { method: QuantizationMethod::CompressedTensors, scheme, rules }))
}

/// Reads a group of modules with integer weights and unquantized activations (compressed-tensors
/// 0.20, `QuantizationArgs`).
fn integers(group: &Fields<'_>) -> Result<PackedScheme, QuantizationError> {
    group.require_one_of("input_activations", &[Value::Null], "null")?;
    let part = &group.inner("weights")?;
    let bits = bits(part, "num_bits")?;
    part.require_one_of("type", &[json!("int"), Value::Null], "int")?;
    part.require_one_of("symmetric", &[json!(true), json!(false), Value::Null], "true and false")?;
    part.require_one_of("dynamic", &[json!(false), Value::Null], "false")?;
    part.require_one_of("block_structure", &[Value::Null], "null")?;
    // `weight` changes only the order in which the tool quantized the columns, not their order in
    // the file.
    let orders = [json!("group"), json!("dynamic"), json!("weight"), json!("static"), json!(false), Value::Null];
    part.require_one_of("actorder", &orders, "group, weight, static and null")?;
    part.refuse_unknown_keys(&QUANTIZATION_ARGS)?;
    let group = match part.text("strategy") {
        Some("group") => match group_size(part)? {
            None => return Err(part.refused("group_size", "32, 64 and 128")),
            group => group,
        },
        Some("channel") => {
            part.require_one_of("group_size", &[Value::Null, json!(-1)], "null")?;
            None
        }
        _ => return Err(part.refused("strategy", "group and channel")),
    };
    let has_zero_points = part.fields.get("symmetric") == Some(&json!(false));
    let is_reordered = matches!(part.text("actorder"), Some("group" | "dynamic"));
    Ok(PackedScheme { format: PackedFormat::CompressedTensors, bits, group, has_zero_points, is_reordered })
}

fn bits(part: &Fields<'_>, name: &str) -> Result<usize, QuantizationError> {
    part.require_one_of(name, &[json!(4), json!(8)], "4 and 8")?;
    Ok(if part.fields.get(name) == Some(&json!(8)) { 8 } else { 4 })
}

/// The number of columns that share a scale; `None` if all columns of a row do.
fn group_size(part: &Fields<'_>) -> Result<Option<usize>, QuantizationError> {
    match part.fields.get("group_size").and_then(Value::as_i64) {
        Some(-1) => Ok(None),
        Some(columns @ (32 | 64 | 128)) => Ok(Some(columns as usize)),
        _ => Err(part.refused("group_size", "32, 64, 128 and -1")),
    }
}
