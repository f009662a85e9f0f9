//! Checkpoints with FP4 weights (NVFP4 of compressed-tensors and ModelOpt, MXFP4). A model with FP4
//! weights gives the same reply as a model with the dequantized weights in plain tensors. If
//! settings and files contradict each other, the error names the setting or the tensor. A unit test
//! of `weights::unpacking` compares dequantized weights with recorded weights.

use std::sync::Arc;

use bursar_budgets::{Bytes, Hint};
use bursar_kernels::{E4m3, Target};
use bursar_model::{
    LoadError, Model,
    checkpoint::{Checkpoint, CheckpointSource, QuantizationError, WeightQuantization},
    error::CheckpointError,
    registry,
    weights::WeightError,
};
use half::bf16;
use serde_json::{Value, json};

use crate::{
    copy::{Copy, QWEN2, QWEN2_5_VL, QWEN3_MOE},
    fp8_weights::Stored,
    packed_weights::{QWEN3, WIDENED, assert_same, changed, golden, is_projection, number, with_tensors},
};

const CONFIG: &str = "config.json";
const MODELOPT_FILE: &str = "hf_quant_config.json";
const FILE: &str = "model.safetensors";
const CPU: Target = Target::Cpu { threads: 1 };
const QUERY: &str = "model.layers.0.self_attn.q_proj";

/// The magnitudes of FP4 numbers, by code.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// A file format of FP4 weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Format {
    Nvfp4,
    Mxfp4,
    ModelOpt,
}

impl Format {
    pub const ALL: [Format; 3] = [Format::Nvfp4, Format::Mxfp4, Format::ModelOpt];

    /// Number of columns that share a scale.
    pub fn group(self) -> usize {
        if self == Format::Mxfp4 { 32 } else { 16 }
    }

    pub fn method(self) -> &'static str {
        if self == Format::ModelOpt { "modelopt" } else { "compressed-tensors" }
    }

    /// `quantization_config` as the tools write it, with activations that are also quantized.
    pub fn settings(self) -> Value {
        let plain = ["lm_head", "re:.*mlp.gate$", "re:visual.*"];
        if self == Format::ModelOpt {
            let part = json!({ "dynamic": false, "num_bits": 4, "type": "float", "group_size": 16 });
            let group = json!({ "weights": part, "input_activations": part, "targets": ["Linear"] });
            return json!({
                "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": { "name": "modelopt" },
                "kv_cache_scheme": { "dynamic": false, "num_bits": 8, "type": "float" },
                "config_groups": { "group_0": group }, "ignore": ["lm_head", "*.mlp.gate", "visual*"],
            });
        }
        let (name, strategy, scale) = match self {
            Format::Nvfp4 => ("nvfp4-pack-quantized", "tensor_group", "torch.float8_e4m3fn"),
            _ => ("mxfp4-pack-quantized", "group", "torch.uint8"),
        };
        let part = |dynamic: Value| {
            json!({
                "num_bits": 4, "type": "float", "symmetric": true, "strategy": strategy, "group_size": self.group(),
                "dynamic": dynamic, "scale_dtype": scale, "zp_dtype": scale, "actorder": null, "observer": "minmax",
            })
        };
        let group = json!({
            "targets": ["Linear"], "format": name, "weights": part(json!(false)),
            "input_activations": part(json!("local")), "output_activations": null,
        });
        json!({
            "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
            "config_groups": { "group_0": group }, "ignore": plain, "kv_cache_scheme": null, "version": "0.20.1",
        })
    }
}

/// A weight rounded to FP4.
pub struct Fp4 {
    format: Format,
    pub packed: Vec<u8>,
    pub scales: Vec<u8>,
    /// The f32 that divides (NVFP4 of compressed-tensors) or multiplies (ModelOpt) the scales.
    /// MXFP4 files do not have it.
    pub factor: f32,
    /// The dequantized weight in bf16.
    pub values: Vec<u8>,
}

impl Fp4 {
    /// Rounds a weight whose rows have whole groups.
    pub fn of(format: Format, weight: &[f32]) -> Self {
        let largest = |values: &[f32]| values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let whole = largest(weight);
        let factor = if format == Format::ModelOpt { whole / (448.0 * 6.0) } else { 448.0 * 6.0 / whole };
        let (mut codes, mut scales, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for group in weight.chunks_exact(format.group()) {
            let exact = largest(group) / 6.0;
            let (code, scale) = match format {
                Format::Mxfp4 => {
                    let exponent = exact.log2().ceil() as i32;
                    ((exponent + 127) as u8, 2f32.powi(exponent))
                }
                Format::Nvfp4 => {
                    let stored = E4m3::from_f32(exact * factor);
                    (stored.0, stored.to_f32() / factor)
                }
                Format::ModelOpt => {
                    let stored = E4m3::from_f32(exact / factor);
                    (stored.0, stored.to_f32() * factor)
                }
            };
            scales.push(code);
            for value in group {
                let distance = |code: &usize| (MAGNITUDES[*code] * scale - value.abs()).abs();
                let nearest = (0..8).min_by(|one, other| distance(one).total_cmp(&distance(other))).expect("codes");
                codes.push(nearest as u8 | u8::from(value.is_sign_negative()) << 3);
                let rounded = MAGNITUDES[nearest] * scale;
                // ModelOpt reads code 8 as 0 without a sign.
                let has_sign = value.is_sign_negative() && !(format == Format::ModelOpt && nearest == 0);
                let rounded = if has_sign { -rounded } else { rounded };
                values.extend(bf16::from_f32(rounded).to_le_bytes());
            }
        }
        let packed = codes.as_chunks().0.iter().map(|[low, high]| low | high << 4).collect();
        Fp4 { format, packed, scales, factor, values }
    }

    /// The tensors of the packed weight of `shape`.
    fn tensors(&self, module: &str, [rows, columns]: [usize; 2]) -> Vec<Stored> {
        let tensor = |suffix: &str, dtype: &str, shape: Value, bytes: &[u8]| {
            (format!("{module}.{suffix}"), dtype.to_owned(), shape, bytes.to_vec())
        };
        let scales = |dtype| tensor("weight_scale", dtype, json!([rows, columns / self.format.group()]), &self.scales);
        let packed = |suffix| tensor(suffix, "U8", json!([rows, columns / 2]), &self.packed);
        let factor = |suffix, shape| tensor(suffix, "F32", shape, &self.factor.to_le_bytes());
        let unused = |suffix, shape| tensor(suffix, "F32", shape, &0.25f32.to_le_bytes());
        match self.format {
            Format::Mxfp4 => vec![packed("weight_packed"), scales("U8")],
            Format::Nvfp4 => vec![
                packed("weight_packed"),
                scales("F8_E4M3"),
                factor("weight_global_scale", json!([1])),
                unused("input_global_scale", json!([1])),
            ],
            Format::ModelOpt => vec![
                packed("weight"),
                scales("F8_E4M3"),
                factor("weight_scale_2", json!([])),
                unused("input_scale", json!([])),
            ],
        }
    }
}

/// A golden checkpoint with FP4 projections in the decoder, where rows have whole groups, and the
/// same checkpoint with the dequantized weights.
fn both(folder: &str, format: Format) -> [Copy; 2] {
    let copies = [Copy::of(folder), Copy::of(folder)];
    let (mut packed, mut plain, mut count) = (Vec::new(), Vec::new(), 0);
    golden(&copies[1]);
    for (name, dtype, shape, bytes) in golden(&copies[0]) {
        let extents: Vec<usize> = serde_json::from_value(shape.clone()).expect("a shape");
        let module = name.strip_suffix(".weight").filter(|module| is_projection(module) && !module.contains("visual"));
        let (Some(module), &[rows, columns]) = (module, &*extents) else {
            packed.push((name.clone(), dtype.clone(), shape.clone(), bytes.clone()));
            plain.push((name, dtype, shape, bytes));
            continue;
        };
        if !columns.is_multiple_of(format.group()) {
            packed.push((name.clone(), dtype.clone(), shape.clone(), bytes.clone()));
            plain.push((name, dtype, shape, bytes));
            continue;
        }
        let weight: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| number(*bytes, &dtype)).collect();
        let rounded = Fp4::of(format, &weight);
        packed.extend(rounded.tensors(module, [rows, columns]));
        plain.push((name, "BF16".to_owned(), shape, rounded.values));
        count += 1;
    }
    assert!(count > 1, "{folder}: only {count} weights are packed");
    let [one, other] = copies;
    let one = one.set(CONFIG, &["quantization_config"], format.settings());
    [with_tensors(one, packed), with_tensors(other, plain)]
}

#[test]
fn fp4_weights_load_as_their_dequantized_values() {
    for format in Format::ALL {
        for folder in [QWEN2, QWEN3, QWEN2_5_VL] {
            assert_same(folder, format.method(), &both(folder, format), WIDENED);
        }
    }
}

#[test]
fn fp4_experts_load_as_their_dequantized_values() {
    for format in [Format::Nvfp4, Format::ModelOpt] {
        assert_same(QWEN3_MOE, format.method(), &both(QWEN3_MOE, format), WIDENED);
    }
}

#[test]
fn modelopts_separate_file_has_the_same_settings() {
    for algorithm in ["NVFP4", "nvfp4", "W4A16_NVFP4"] {
        let [packed, plain] = both(QWEN2, Format::ModelOpt);
        let settings = json!({
            "producer": { "name": "modelopt", "version": "0.33.0" },
            "quantization": {
                "quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16,
                "exclude_modules": ["lm_head", "model.visual*"],
            },
        });
        let packed = packed.set(CONFIG, &["quantization_config"], Value::Null);
        let packed = packed.write(MODELOPT_FILE, settings.to_string());
        assert_same(QWEN2, "modelopt", &[packed, plain], WIDENED);
    }
}

#[test]
fn a_plan_counts_fp4_weights_after_dequantization() {
    for format in Format::ALL {
        let [packed, plain] = both(QWEN2_5_VL, format);
        let plan = |checkpoint: &Checkpoint| Model::plan(checkpoint, &CPU).expect("the model is planned");
        let (found, expected) = (plan(&packed.open()), plan(&plain.open()));
        assert_eq!(found.weight_bytes(), expected.weight_bytes(), "{format:?}");
        assert_eq!((found.int4_bytes(), found.quantization_in_memory()), (Bytes::ZERO, None), "{format:?}");
        // The settings are enough for a plan.
        let settings = packed.remove(FILE);
        let settings = registry::without_weights(CheckpointSource::Folder(settings.0.clone())).expect("a known family");
        let source = CheckpointSource::Random(Arc::new(settings));
        let found = plan(&Checkpoint::open(source).expect("the settings are supported"));
        let found = (found.weight_bytes(), found.quantization(), found.int4_bytes());
        assert_eq!(found, (expected.weight_bytes(), Some(format.method()), Bytes::ZERO), "{format:?}");
    }
}

#[test]
fn an_fp4_checkpoint_accepts_only_its_own_format_by_name() {
    for (format, own) in [
        (Format::Nvfp4, WeightQuantization::CompressedTensors),
        (Format::Mxfp4, WeightQuantization::CompressedTensors),
        (Format::ModelOpt, WeightQuantization::ModelOpt),
    ] {
        let [packed, _] = both(QWEN2, format);
        for asked in WeightQuantization::ROUNDING.into_iter().chain(WeightQuantization::STORED) {
            match Model::plan(&packed.open().with_quantization(Some(asked)), &CPU) {
                Ok(_) => assert_eq!(asked, own, "{format:?}"),
                Err(LoadError::Quantization(QuantizationError::AlreadyQuantized { .. })) => {
                    assert_ne!(asked, own, "{format:?}")
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    }
}

#[test]
fn unsupported_fp4_settings_are_refused_by_name() {
    let weights = |name: &'static str| vec!["config_groups", "group_0", "weights", name];
    let inputs = |name: &'static str| vec!["config_groups", "group_0", "input_activations", name];
    for (format, field, value, words) in [
        (Format::Nvfp4, weights("num_bits"), json!(6), "weights.num_bits is 6; supported: 4"),
        (Format::Nvfp4, weights("type"), json!("int"), "weights.type is int; supported: float"),
        (Format::Nvfp4, weights("group_size"), json!(32), "weights.group_size is 32; supported: 16"),
        (Format::Nvfp4, weights("strategy"), json!("group"), "weights.strategy is group; supported: tensor_group"),
        (Format::Nvfp4, weights("symmetric"), json!(false), "weights.symmetric is false; supported: true"),
        (
            Format::Nvfp4,
            weights("scale_dtype"),
            json!("torch.uint8"),
            "weights.scale_dtype is torch.uint8; supported: t",
        ),
        (
            Format::Nvfp4,
            weights("rotation"),
            json!("hadamard"),
            "weights.rotation is hadamard; this setting is unknown",
        ),
        (Format::Nvfp4, inputs("type"), json!("int"), "input_activations.type is int; supported: float"),
        (
            Format::Nvfp4,
            vec!["kv_cache_scheme"],
            json!({ "num_bits": 4 }),
            "kv_cache_scheme.num_bits is 4; supported: 8",
        ),
        (Format::Mxfp4, weights("group_size"), json!(16), "weights.group_size is 16; supported: 32"),
        (Format::Mxfp4, weights("actorder"), json!("group"), "weights.actorder is group; supported: null"),
        (
            Format::ModelOpt,
            vec!["quant_algo"],
            json!("NVFP4_AWQ"),
            "quant_algo is NVFP4_AWQ; supported: FP8, FP8_PER_CH",
        ),
        (
            Format::ModelOpt,
            vec!["quant_algo"],
            json!("MIXED_PRECISION"),
            "quant_algo is MIXED_PRECISION; supported: FP8",
        ),
        (Format::ModelOpt, vec!["group_size"], json!(32), "group_size is 32; supported: 16"),
        (Format::ModelOpt, vec!["kv_cache_quant_algo"], json!("NVFP4"), "kv_cache_quant_algo is NVFP4; supported: FP8"),
        (Format::ModelOpt, vec!["pre_quant_scale"], json!(true), "pre_quant_scale is true; this setting is unknown"),
        (Format::ModelOpt, weights("num_bits"), json!(8), "weights.num_bits is 8; supported: 4"),
    ] {
        let copy = Copy::of(QWEN2).set(CONFIG, &["quantization_config"], format.settings());
        let error = copy.set(CONFIG, &[&["quantization_config"], &*field].concat(), value).error();
        assert!(matches!(error, LoadError::Quantization(_)), "{error:?}");
        assert!(error.to_string().contains(words), "'{error}' does not say '{words}'");
        assert!(error.hint().contains("NVFP4"), "{}", error.hint());
    }
}

#[test]
fn tensors_that_do_not_form_an_fp4_weight_are_named() {
    type Change = fn(&mut Stored);
    let damages: [(Format, &str, Change, &str); 11] = [
        (Format::Nvfp4, "weight_scale", |it| it.0 += "_", "weight_scale is missing"),
        (Format::Nvfp4, "weight_global_scale", |it| it.0 += "_", "weight_global_scale is missing"),
        (
            Format::Nvfp4,
            "weight_scale",
            |it| it.1 = "U8".to_owned(),
            "weight_scale is U8 [896, 3]; a packed weight of this module needs F8_E4M3 [896, 3]",
        ),
        (
            Format::Nvfp4,
            "weight_scale",
            |it| it.2 = json!([3, 896]),
            "weight_scale is F8_E4M3 [3, 896]; a packed weight of this module needs F8_E4M3 [896, 3]",
        ),
        (
            Format::Nvfp4,
            "weight_packed",
            |it| it.2 = json!([1344, 16]),
            "weight_scale is F8_E4M3 [896, 3]; a packed weight of this module needs F8_E4M3 [1344, 2]",
        ),
        (
            Format::Nvfp4,
            "weight_packed",
            |it| it.2 = json!([1024, 21]),
            "weight_packed is U8 [1024, 21]; a packed weight of this module needs U8 with two axes and rows of whole",
        ),
        (Format::ModelOpt, "weight_scale", |it| it.0 += "_", "weight_scale is missing"),
        (Format::ModelOpt, "weight_scale_2", |it| it.0 += "_", "weight_scale_2 is missing"),
        (
            Format::ModelOpt,
            "weight_scale_2",
            |it| (it.1, it.2) = ("BF16".to_owned(), json!([2])),
            "weight_scale_2 is BF16 [2]; a packed weight of this module needs F32 [1]",
        ),
        (
            Format::ModelOpt,
            "weight",
            |it| it.2 = json!([21504]),
            "weight is U8 [21504]; a packed weight of this module needs U8 with two axes",
        ),
        (
            Format::ModelOpt,
            "weight_scale",
            |it| it.1 = "I8".to_owned(),
            "weight_scale is I8 [896, 3]; a packed weight of this module needs F8_E4M3 [896, 3]",
        ),
    ];
    for (format, suffix, change, words) in damages {
        let [packed, _] = both(QWEN2, format);
        let copy = changed(packed, &format!("{QUERY}.{suffix}"), change);
        let error = Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect_err("the file is refused");
        let is_typed = matches!(error, CheckpointError::PackedTensor { .. } | CheckpointError::MissingPart { .. });
        assert!(is_typed, "{error:?}");
        let words = format!("the tensor {QUERY}.{words}");
        assert!(error.to_string().starts_with(&words), "'{error}' does not say '{words}'");
        assert!(error.hint().contains("quantization_config"), "{}", error.hint());
    }
    let [packed, _] = both(QWEN2, Format::ModelOpt);
    let listed = packed.set(CONFIG, &["quantization_config", "ignore"], json!(["*q_proj"]));
    let error = Checkpoint::open(CheckpointSource::Folder(listed.0.clone())).expect_err("the list is wrong");
    let words = format!("the tensor {QUERY}.weight is packed, but quantization_config lists module {QUERY} as not");
    assert!(error.to_string().starts_with(&words), "{error}");
    for (format, words) in
        [(Format::ModelOpt, "U8 tensor has a name that ends in .weight"), (Format::Mxfp4, "ends in .weight_packed")]
    {
        let plain = Copy::of(QWEN2).set(CONFIG, &["quantization_config"], format.settings());
        let error = Checkpoint::open(CheckpointSource::Folder(plain.0.clone())).expect_err("nothing is packed");
        assert!(error.to_string().ends_with(words), "{error}");
    }
}

#[test]
fn bad_scales_of_fp4_weights_are_refused_with_their_tensor() {
    type Change = fn(&mut Stored);
    let sign = "expected a finite number without a sign";
    let above = "expected a finite number above 0";
    let damages: [(Format, &str, Change, &str, &str); 9] = [
        (Format::Nvfp4, "weight_scale", |it| it.3[7] = 0x7f, "NaN", sign),
        (Format::Nvfp4, "weight_scale", |it| it.3[2000] = 0x80, "-0", sign),
        (Format::Nvfp4, "weight_scale", |it| it.3[0] = 0xb8, "-1", sign),
        (Format::Nvfp4, "weight_global_scale", |it| it.3 = 0f32.to_le_bytes().into(), "0", above),
        (Format::Nvfp4, "weight_global_scale", |it| it.3 = f32::NAN.to_le_bytes().into(), "NaN", above),
        (Format::Nvfp4, "weight_global_scale", |it| it.3 = 1e-37f32.to_le_bytes().into(), "0.0000000000000", above),
        (Format::Mxfp4, "weight_scale", |it| it.3[0] = 0xff, "NaN", sign),
        (Format::ModelOpt, "weight_scale", |it| it.3[0] = 0xff, "NaN", sign),
        (Format::ModelOpt, "weight_scale_2", |it| it.3 = (-1f32).to_le_bytes().into(), "-1", above),
    ];
    const OUTPUT: &str = "model.layers.0.self_attn.o_proj";
    for (format, suffix, change, value, expected) in damages {
        let [packed, _] = both(QWEN2, format);
        let error = changed(packed, &format!("{OUTPUT}.{suffix}"), change).error();
        assert!(matches!(error, LoadError::Weights(WeightError::Scale { .. })), "{error:?}");
        let error = error.to_string();
        let words = format!("{OUTPUT}.{suffix} holds the scale {value}");
        assert!(error.contains(&words) && error.ends_with(expected), "'{error}' does not say '{words}'");
    }
}
