//! Checkpoints with 4-bit and 8-bit integers (AWQ, GPTQ, compressed-tensors). A model with packed
//! weights gives the same reply as a model with the dequantized weights in plain tensors. If
//! settings and files contradict each other, the error names the setting or the tensor. A unit test
//! of `weights::unpacking` compares dequantized weights with recorded weights.

use std::sync::Arc;

use bursar_budgets::Hint;
use bursar_kernels::{Rank, Target};
use bursar_model::{
    LoadError, Model,
    checkpoint::{Checkpoint, CheckpointSource, PackedFormat, QuantizationError, WeightQuantization},
    error::CheckpointError,
    registry,
    weights::WeightError,
};
use half::{bf16, f16};
use serde_json::{Value, json};

use crate::{
    bench::{Bench, Case, alone, assert_same_run, encode},
    copy::{Copy, QWEN2, QWEN2_5_VL, QWEN3_MOE},
    fp8_weights::{Stored, laid_out, tensors},
    ranks::{cases, loaded_bytes, logits},
};

const CONFIG: &str = "config.json";
const FILE: &str = "model.safetensors";
pub const QWEN3: &str = "tests/golden/qwen3";
const CPU: Target = Target::Cpu { threads: 1 };

/// How a weight is packed.
#[derive(Clone, Copy)]
pub struct Packing {
    pub format: PackedFormat,
    pub bits: usize,
    pub group: Option<usize>,
    pub is_symmetric: bool,
    pub is_reordered: bool,
    /// The type of the scales.
    pub dtype: &'static str,
}

impl Packing {
    pub const AWQ: Packing = Packing {
        format: PackedFormat::Awq,
        bits: 4,
        group: Some(32),
        is_symmetric: false,
        is_reordered: false,
        dtype: "F16",
    };
    pub const GPTQ: Packing = Packing { format: PackedFormat::Gptq, is_reordered: true, ..Packing::AWQ };
    pub const COMPRESSED: Packing =
        Packing { format: PackedFormat::CompressedTensors, is_symmetric: true, ..Packing::AWQ };
}

/// The number that 16 bits of this type hold.
pub fn number(bytes: [u8; 2], dtype: &str) -> f32 {
    if dtype == "F16" { f16::from_le_bytes(bytes).to_f32() } else { bf16::from_le_bytes(bytes).to_f32() }
}

fn rounded(number: f32, dtype: &str) -> [u8; 2] {
    if dtype == "F16" { f16::from_f32(number).to_le_bytes() } else { bf16::from_f32(number).to_le_bytes() }
}

/// A quantized weight. `integers` have the shape `[rows, columns]`. Zero points and scales have the
/// shape `[rows, groups]`.
pub struct Quantized {
    packing: Packing,
    rows: usize,
    columns: usize,
    count: usize,
    groups: Vec<usize>,
    integers: Vec<u8>,
    zero_points: Vec<u8>,
    scales: Vec<[u8; 2]>,
}

impl Quantized {
    /// Rounds each value to the nearest integer under the scale and zero point of its group.
    pub fn of(packing: Packing, values: &[f32], columns: usize) -> Self {
        let (rows, largest) = (values.len() / columns, ((1u32 << packing.bits) - 1) as f32);
        let group = packing.group.unwrap_or(columns);
        let order = |column: usize| if packing.is_reordered { column * 5 % columns } else { column };
        let groups: Vec<_> = (0..columns).map(|column| order(column) / group).collect();
        let count = columns.div_ceil(group);
        let (mut integers, mut zero_points, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        for row in values.chunks_exact(columns) {
            let mut of_groups = Vec::new();
            for group in 0..count {
                let members = row.iter().zip(&groups).filter(|(_, of)| **of == group).map(|(value, _)| *value);
                let (least, most) =
                    members.fold((0f32, 0f32), |(least, most), value| (least.min(value), most.max(value)));
                let middle = (largest + 1.0) / 2.0;
                let scale =
                    if packing.is_symmetric { most.max(-least) / (middle - 1.0) } else { (most - least) / largest };
                let scale = rounded(scale.max(1e-4), packing.dtype);
                let width = number(scale, packing.dtype);
                let zero_point =
                    if packing.is_symmetric { middle } else { (-least / width).round().clamp(1.0, largest) };
                of_groups.push((width, zero_point));
                zero_points.push(zero_point as u8);
                scales.push(scale);
            }
            integers.extend(row.iter().zip(&groups).map(|(value, group)| {
                let (width, zero_point) = of_groups[*group];
                ((value / width).round() + zero_point).clamp(0.0, largest) as u8
            }));
        }
        Quantized { packing, rows, columns, count, groups, integers, zero_points, scales }
    }

    /// The dequantized weight in the type of the scales.
    pub fn values(&self) -> Vec<u8> {
        let element = |(at, integer): (usize, &u8)| {
            let group = at / self.columns * self.count + self.groups[at % self.columns];
            let whole = f32::from(*integer) - f32::from(self.zero_points[group]);
            rounded(whole * number(self.scales[group], self.packing.dtype), self.packing.dtype)
        };
        self.integers.iter().enumerate().flat_map(element).collect()
    }

    /// The tensors of the packed weight.
    pub fn tensors(&self, module: &str) -> Vec<Stored> {
        let Packing { format, is_symmetric, dtype, .. } = self.packing;
        let Quantized { rows, columns, count, .. } = *self;
        let per_word = 32 / self.packing.bits;
        let column =
            |column: usize| -> Vec<u8> { (0..rows).map(|row| self.integers[row * columns + column]).collect() };
        let of_group = |group: usize, less: u8| -> Vec<u8> {
            (0..rows).map(|row| self.zero_points[row * count + group] - less).collect()
        };
        let by_row = || self.integers.chunks_exact(columns).map(|row| self.words(row)).collect::<Vec<_>>();
        let by_group = |less| (0..count).map(|group| self.words(&of_group(group, less))).collect::<Vec<_>>();
        let scales_by_group: Vec<_> =
            (0..count).flat_map(|group| (0..rows).flat_map(move |row| self.scales[row * count + group])).collect();
        let tensor = |suffix: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
            (format!("{module}.{suffix}"), dtype.to_owned(), json!(shape), bytes)
        };
        let ints = |suffix: &str, shape: &[usize], words: Vec<Vec<u32>>| {
            tensor(suffix, "I32", shape, words.into_iter().flatten().flat_map(u32::to_le_bytes).collect())
        };
        let (few_rows, few_columns) = (rows.div_ceil(per_word), columns.div_ceil(per_word));
        match format {
            PackedFormat::Awq => vec![
                ints("qweight", &[columns, few_rows], (0..columns).map(|at| self.words(&column(at))).collect()),
                ints("qzeros", &[count, few_rows], by_group(0)),
                tensor("scales", dtype, &[count, rows], scales_by_group),
            ],
            PackedFormat::Gptq | PackedFormat::GptqV2 => vec![
                ints("qweight", &[few_columns, rows], transposed(&by_row())),
                ints("qzeros", &[count, few_rows], by_group(u8::from(format == PackedFormat::Gptq))),
                tensor("scales", dtype, &[count, rows], scales_by_group),
                ints("g_idx", &[columns], vec![self.groups.iter().map(|group| *group as u32).collect()]),
            ],
            _ => {
                let shape = [rows, columns].iter().flat_map(|extent| (*extent as u64).to_le_bytes()).collect();
                let zero_points = ints("weight_zero_point", &[few_rows, count], transposed(&by_group(0)));
                let mut all = vec![
                    ints("weight_packed", &[rows, few_columns], by_row()),
                    tensor("weight_scale", dtype, &[rows, count], self.scales.concat()),
                    tensor("weight_shape", "I64", &[2], shape),
                ];
                all.extend((!is_symmetric).then_some(zero_points));
                all
            }
        }
    }

    /// Integers in words of 32 bits.
    fn words(&self, integers: &[u8]) -> Vec<u32> {
        let (bits, is_awq) = (self.packing.bits, self.packing.format == PackedFormat::Awq);
        let order = |at: usize| if is_awq { [0, 2, 4, 6, 1, 3, 5, 7][at] } else { at };
        let word = |integers: &[u8]| {
            let places = (0..32 / bits).map(|at| (at, integers.get(order(at)).copied().unwrap_or(0)));
            places.fold(0, |word, (at, integer)| word | u32::from(integer) << (bits * at))
        };
        integers.chunks(32 / bits).map(word).collect()
    }
}

fn transposed(lines: &[Vec<u32>]) -> Vec<Vec<u32>> {
    (0..lines[0].len()).map(|at| lines.iter().map(|line| line[at]).collect()).collect()
}

/// All tensors of a golden checkpoint.
pub fn golden(copy: &Copy) -> Vec<Stored> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&copy.0).expect("the copy") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(&path).expect("a file");
            let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
            let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
            all.extend(tensors(&serde_json::from_slice(header).expect("a header"), data));
            std::fs::remove_file(path).expect("the file existed");
        }
    }
    all
}

/// Writes the tensors as the only file of weights.
pub fn with_tensors(copy: Copy, all: Vec<Stored>) -> Copy {
    let (header, data) = laid_out(all);
    let header = header.to_string();
    copy.write(FILE, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat())
}

/// A golden checkpoint with packed weights and these settings, and the same checkpoint with the
/// dequantized weights. `packing` chooses the modules.
pub fn both(folder: &str, settings: &Value, packing: impl Fn(&str) -> Option<Packing>) -> [Copy; 2] {
    let copies = [Copy::of(folder), Copy::of(folder)];
    let (mut packed, mut plain, mut count) = (Vec::new(), Vec::new(), 0);
    let all = golden(&copies[0]);
    golden(&copies[1]);
    for (name, dtype, shape, bytes) in all {
        let module = name.strip_suffix(".weight").filter(|_| shape.as_array().is_some_and(|shape| shape.len() == 2));
        let Some((module, packing)) = module.and_then(|module| Some((module, packing(module)?))) else {
            packed.push((name.clone(), dtype.clone(), shape.clone(), bytes.clone()));
            plain.push((name, dtype, shape, bytes));
            continue;
        };
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| number(*bytes, &dtype)).collect();
        let quantized = Quantized::of(packing, &values, shape[1].as_u64().expect("columns") as usize);
        packed.extend(quantized.tensors(module));
        plain.push((name, packing.dtype.to_owned(), shape, quantized.values()));
        count += 1;
    }
    assert!(count > 3, "{folder}: only {count} weights are packed");
    let [one, other] = copies;
    [with_tensors(one.set(CONFIG, &["quantization_config"], settings.clone()), packed), with_tensors(other, plain)]
}

pub fn is_projection(module: &str) -> bool {
    module.contains("layers.") && module.ends_with("_proj")
}

fn awq_settings() -> Value {
    json!({
        "quant_method": "awq", "version": "GEMM", "bits": 4, "group_size": 32, "zero_point": true, "backend": "autoawq",
        "modules_to_not_convert": ["visual", "gate_proj", "up_proj"],
    })
}

pub fn gptq_settings() -> Value {
    json!({
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true, "sym": false, "lm_head": false,
        "true_sequential": true, "damp_percent": 0.1, "meta": { "quantizer": ["gptqmodel:5.0.0"] },
        "dynamic": {
            "-:.*(gate|up)_proj": {},
            r"+:model\.layers\.1\.mlp": { "bits": 8, "group_size": -1, "desc_act": false },
        },
    })
}

pub fn compressed_settings(weights: Value) -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights, "input_activations": null } },
        "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": null, "version": "0.12.2",
    })
}

fn awq(module: &str) -> Option<Packing> {
    let is_wide = ["visual", "gate_proj", "up_proj"].iter().any(|part| module.contains(part));
    (is_projection(module) && !is_wide).then_some(Packing::AWQ)
}

pub fn gptq(module: &str) -> Option<Packing> {
    let first = Packing { bits: 8, group: None, is_reordered: false, ..Packing::GPTQ };
    awq(module).map(|_| if module.contains("layers.1.mlp") { first } else { Packing::GPTQ })
}

/// Values of `is_packed` in [`assert_same`]: some weights stay 4-bit integers in memory, or all are
/// dequantized.
pub const PACKED: bool = true;
pub const WIDENED: bool = false;
/// Asserts that a model with packed weights and a model with the dequantized weights have equal
/// logits. The first has fewer weight bytes if its weights stay packed, and otherwise equal bytes.
pub fn assert_same(folder: &str, method: &str, [packed, plain]: &[Copy; 2], is_packed: bool) {
    for rank in [Rank::ALONE, Rank::new(0, 2), Rank::new(1, 2)] {
        let [found, expected] = [packed, plain].map(|copy| loaded_bytes(&copy.open(), rank));
        let is_right = if is_packed { found.len() < expected.len() } else { found == expected };
        assert!(is_right, "{folder} {method}: the weights of {rank:?}, {} bytes", found.len());
    }
    if [QWEN2, QWEN3].contains(&folder) {
        let of_ranks = |copy: &Copy| logits(|| copy.open(), folder, 2);
        assert!(of_ranks(packed) == of_ranks(plain), "{folder} {method}: two ranks reply differently");
    }
    let [found, expected] = [packed, plain].map(|copy| {
        let bench = Bench::of(copy.open(), 2);
        let case = Case::read(folder, &bench.checkpoint, &cases(folder)[0]);
        let run = alone(&bench, &case, &encode(&bench, &case), &[usize::MAX]);
        (run, bench.model.quantization())
    });
    assert_same_run(&format!("{folder} {method}"), &found.0, &expected.0, 0.0);
    assert_eq!((found.1, expected.1), (Some(method), None));
}

#[test]
fn awq_weights_load_as_their_dequantized_values() {
    for folder in [QWEN2, QWEN2_5_VL] {
        assert_same(folder, "awq", &both(folder, &awq_settings(), awq), PACKED);
    }
    // As GPTQModel writes this format.
    let mut settings = awq_settings();
    settings["checkpoint_format"] = json!("gemm");
    settings["dynamic"] = json!({ ".*down_proj": { "group_size": 64 }, "-:lm_head": {} });
    let grouped = |module: &str| {
        let group = Some(if module.ends_with("down_proj") { 64 } else { 32 });
        awq(module).map(|packing| Packing { group, ..packing })
    };
    assert_same(QWEN3, "awq", &both(QWEN3, &settings, grouped), PACKED);
}

#[test]
fn gptq_weights_load_as_their_dequantized_values() {
    assert_same(QWEN2, "gptq", &both(QWEN2, &gptq_settings(), gptq), WIDENED);
    let second = |module: &str| gptq(module).map(|packing| Packing { format: PackedFormat::GptqV2, ..packing });
    let mut settings = gptq_settings();
    settings["checkpoint_format"] = json!("gptq_v2");
    assert_same(QWEN3, "gptq", &both(QWEN3, &settings, second), WIDENED);
}

#[test]
fn weights_of_compressed_tensors_load_as_their_dequantized_values() {
    let group = json!({ "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32 });
    let packing = Packing { dtype: "BF16", ..Packing::COMPRESSED };
    // Each expert is packed separately, and routers are not packed.
    let packed = |module: &str| is_projection(module).then_some(packing);
    assert_same(QWEN3_MOE, "compressed-tensors", &both(QWEN3_MOE, &compressed_settings(group), packed), PACKED);
    // The fused projections of the vision tower and the output head are packed too.
    let channel =
        json!({ "num_bits": 8, "type": "int", "symmetric": false, "strategy": "channel", "group_size": null });
    let packing = Packing { bits: 8, group: None, is_symmetric: false, ..packing };
    let packed = |module: &str| {
        (is_projection(module) || module.ends_with("attn.qkv") || module == "lm_head").then_some(packing)
    };
    let mut settings = compressed_settings(channel);
    settings["ignore"] = json!(["re:visual.merger"]);
    assert_same(QWEN2_5_VL, "compressed-tensors", &both(QWEN2_5_VL, &settings, packed), WIDENED);
}

#[test]
fn packed_and_plain_weights_are_joined_as_f32() {
    let settings = json!({
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": true,
        "modules_to_not_convert": ["k_proj", "v_proj", "mlp"],
    });
    let packing = Packing { dtype: "BF16", ..Packing::AWQ };
    let is_packed = |module: &str| (is_projection(module) && module.ends_with(".q_proj")).then_some(packing);
    let copies = [Copy::of(QWEN2), Copy::of(QWEN2)];
    let (mut packed, mut plain) = (Vec::new(), Vec::new());
    golden(&copies[1]);
    for (name, dtype, shape, bytes) in golden(&copies[0]) {
        let wide = |bytes: &[u8], dtype: &str| -> Vec<u8> {
            bytes.as_chunks().0.iter().flat_map(|bytes| number(*bytes, dtype).to_le_bytes()).collect()
        };
        let module = name.strip_suffix(".weight").unwrap_or("");
        if let Some(packing) = is_packed(module) {
            let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| number(*bytes, &dtype)).collect();
            let quantized = Quantized::of(packing, &values, shape[1].as_u64().expect("columns") as usize);
            packed.extend(quantized.tensors(module));
            plain.push((name.clone(), "F32".to_owned(), shape, wide(&quantized.values(), "BF16")));
            continue;
        }
        packed.push((name.clone(), dtype.clone(), shape.clone(), bytes.clone()));
        let is_joined = module.ends_with(".k_proj") || module.ends_with(".v_proj");
        let (dtype, bytes) = if is_joined { ("F32".to_owned(), wide(&bytes, &dtype)) } else { (dtype, bytes) };
        plain.push((name, dtype, shape, bytes));
    }
    let [one, other] = copies;
    let packed = with_tensors(one.set(CONFIG, &["quantization_config"], settings), packed);
    assert_same(QWEN2, "awq", &[packed, with_tensors(other, plain)], WIDENED);
}

#[test]
fn an_unused_bias_must_be_all_zeros() {
    let [mut packed, _] = both(QWEN2, &gptq_settings(), gptq);
    let (all, name) = (golden(&packed), "model.layers.0.self_attn.o_proj.bias");
    let bias = |bytes: Vec<u8>| (name.to_owned(), "F16".to_owned(), json!([48]), bytes);
    // An element of two bytes has its sign in the highest bit of the second byte.
    for (last, is_zero) in [([0, 0], true), ([0, 0x80], true), ([0, 1], false), ([0x80, 0], false)] {
        let bias = bias([vec![0; 94], last.to_vec()].concat());
        packed = with_tensors(packed, [all.clone(), vec![bias]].concat());
        let error = Model::plan(&packed.open(), &CPU).err().map(|error| error.to_string());
        assert_eq!(error.is_none(), is_zero, "AutoGPTQ writes a bias of zeros");
        assert!(error.is_none_or(|error| error.contains("no layer for 1 tensors of the checkpoint: model.layers.0")));
    }
}

#[test]
fn a_packed_checkpoint_accepts_only_its_own_format_by_name() {
    let group = json!({ "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32 });
    let compressed = |module: &str| is_projection(module).then_some(Packing::COMPRESSED);
    for (own, [packed, plain]) in [
        (WeightQuantization::Awq, both(QWEN2, &awq_settings(), awq)),
        (WeightQuantization::Gptq, both(QWEN2, &gptq_settings(), gptq)),
        (WeightQuantization::CompressedTensors, both(QWEN2, &compressed_settings(group), compressed)),
    ] {
        let plan = |copy: &Copy, asked| Model::plan(&copy.open().with_quantization(asked), &CPU);
        let expected = plan(&plain, None).expect("the model is planned").weight_bytes();
        for asked in WeightQuantization::ROUNDING.into_iter().chain(WeightQuantization::STORED) {
            match plan(&packed, Some(asked)) {
                Ok(model) => {
                    assert!(asked == own || asked == WeightQuantization::Int4, "{asked}");
                    let is_packed = model.weight_bytes() < expected;
                    assert_eq!(is_packed, own != WeightQuantization::Gptq, "`desc_act` weights are dequantized");
                }
                Err(error) => {
                    assert!(
                        matches!(error, LoadError::Quantization(QuantizationError::AlreadyQuantized { .. })),
                        "{error:?}"
                    );
                    assert!(asked != own && asked != WeightQuantization::Int4, "{asked}");
                    let words = format!("quantization is {asked}, but the checkpoint is already quantized");
                    assert!(error.to_string().starts_with(&words) && error.to_string().contains(own.name()), "{error}");
                }
            }
        }
    }
}

#[test]
fn unsupported_packed_settings_are_refused_by_name() {
    let weights = json!({ "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32 });
    let compressed = compressed_settings(weights);
    let weights = |name: &'static str| vec!["config_groups", "group_0", "weights", name];
    for (settings, field, value, words) in [
        (awq_settings(), vec!["version"], json!("gemv"), "version is gemv; supported: gemm"),
        (awq_settings(), vec!["version"], json!("marlin"), "version is marlin; supported: gemm"),
        (awq_settings(), vec!["bits"], json!(8), "bits is 8; supported: 4"),
        (awq_settings(), vec!["format"], json!("gemv_fast"), "format is gemv_fast; supported: gemm"),
        (
            awq_settings(),
            vec!["dynamic"],
            json!({ "x": { "bits": 8 } }),
            "dynamic is {\"x\":{\"bits\":8}}; supported: rules that exclude",
        ),
        (awq_settings(), vec!["group_size"], json!(16), "group_size is 16; supported: 32, 64, 128 and -1"),
        (awq_settings(), vec!["group_size"], Value::Null, "group_size is missing"),
        (awq_settings(), vec!["zero_point"], json!(false), "zero_point is false; supported: true"),
        (awq_settings(), vec!["backend"], json!("llm-awq"), "backend is llm-awq; supported: autoawq"),
        (awq_settings(), vec!["rotation"], json!("hadamard"), "rotation is hadamard; this setting is unknown"),
        (awq_settings(), vec!["quant_method"], json!("auto-round"), "quant_method is auto-round; supported: fp8, comp"),
        (gptq_settings(), vec!["bits"], json!(3), "bits is 3; supported: 4 and 8"),
        (
            gptq_settings(),
            vec!["checkpoint_format"],
            json!("marlin"),
            "checkpoint_format is marlin; supported: gptq and",
        ),
        (gptq_settings(), vec!["is_marlin_format"], json!(true), "is_marlin_format is true; this setting is unknown"),
        (gptq_settings(), vec!["desc_act"], json!("yes"), "desc_act is yes; supported: true and false"),
        (gptq_settings(), vec!["pack_dtype"], json!("int64"), "pack_dtype is int64; supported: int32"),
        (gptq_settings(), vec!["dynamic", "x"], json!({ "bits": 2 }), "dynamic.x.bits is 2; supported: 4 and 8"),
        (gptq_settings(), vec!["dynamic", "+:("], json!({}), "the module pattern \"re:(\" is not valid"),
        (compressed.clone(), vec!["format"], json!("mixed-precision"), "format is mixed-precision; supported: float-q"),
        (compressed.clone(), weights("num_bits"), json!(2), "weights.num_bits is 2; supported: 4 and 8"),
        (compressed.clone(), weights("type"), json!("float"), "weights.type is float; supported: int"),
        (compressed.clone(), weights("strategy"), json!("tensor"), "weights.strategy is tensor; supported: group and"),
        (compressed.clone(), weights("group_size"), json!(-1), "weights.group_size is -1; supported: 32, 64 and 128"),
        (compressed.clone(), weights("actorder"), json!("random"), "weights.actorder is random; supported: group, we"),
        (
            compressed.clone(),
            vec!["config_groups", "group_0", "input_activations"],
            json!({ "num_bits": 8 }),
            "input_activations is {\"num_bits\":8}; supported: null",
        ),
        (compressed.clone(), vec!["config_groups"], json!({}), "config_groups is {}; supported: an object that"),
    ] {
        let copy = Copy::of(QWEN2).set(CONFIG, &["quantization_config"], settings);
        let error = copy.set(CONFIG, &[&["quantization_config"], &*field].concat(), value).error();
        assert!(matches!(error, LoadError::Quantization(_)), "{error:?}");
        assert!(error.to_string().contains(words), "'{error}' does not say '{words}'");
        assert!(error.hint().contains("bf16") && error.hint().contains("AWQ"), "{}", error.hint());
    }
}

/// Changes a tensor by its name.
pub fn changed(copy: Copy, name: &str, change: impl FnOnce(&mut Stored)) -> Copy {
    let mut all = golden(&copy);
    change(all.iter_mut().find(|(found, ..)| found == name).expect("the tensor"));
    with_tensors(copy, all)
}

#[test]
fn tensors_that_do_not_form_a_packed_weight_are_named() {
    const QUERY: &str = "model.layers.0.self_attn.q_proj";
    let group = json!({ "num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 32 });
    let asymmetric = Packing { is_symmetric: false, ..Packing::COMPRESSED };
    let compressed = |module: &str| is_projection(module).then_some(asymmetric);
    let of = |method: &str| match method {
        "awq" => both(QWEN2, &awq_settings(), awq),
        "gptq" => both(QWEN2, &gptq_settings(), gptq),
        _ => both(QWEN2, &compressed_settings(group.clone()), compressed),
    };
    type Change = fn(&mut Stored);
    let damages: [(&str, &str, Change, &str); 9] = [
        (
            "awq",
            "qweight",
            |it| it.2 = json!([24, 224]),
            "scales is F16 [2, 896]; a packed weight of this module needs F16 [1, 1792]",
        ),
        (
            "awq",
            "scales",
            |it| it.1 = "I16".to_owned(),
            "scales is I16 [2, 896]; a packed weight of this module needs F16, BF16 or",
        ),
        ("awq", "qzeros", |it| it.0 += "_", "qzeros is missing"),
        (
            "awq",
            "qweight",
            |it| it.2 = json!([5376]),
            "qweight is I32 [5376]; a packed weight of this module needs I32 with two axes",
        ),
        ("gptq", "g_idx", |it| it.0 += "_", "g_idx is missing"),
        (
            "gptq",
            "scales",
            |it| it.2 = json!([896, 2]),
            "scales is F16 [896, 2]; a packed weight of this module needs F16 [2, 896]",
        ),
        (
            "compressed-tensors",
            "weight_shape",
            |it| it.3[0] = 40,
            "weight_packed is I32 [896, 6]; a packed weight of this module needs I32 [808, 6]",
        ),
        (
            "compressed-tensors",
            "weight_shape",
            |it| it.3[15] = 255,
            "weight_shape is [896, -72057594037927888]; a packed",
        ),
        ("compressed-tensors", "weight_zero_point", |it| it.0 += "_", "weight_zero_point is missing"),
    ];
    for (method, suffix, change, words) in damages {
        let [packed, _] = of(method);
        let copy = changed(packed, &format!("{QUERY}.{suffix}"), change);
        let error = Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect_err("the file is refused");
        let is_typed = matches!(error, CheckpointError::PackedTensor { .. } | CheckpointError::MissingPart { .. });
        assert!(is_typed, "{error:?}");
        assert!(error.to_string().starts_with(&format!("the tensor {QUERY}.")), "{error}");
        assert!(error.to_string().contains(words), "'{error}' does not say '{words}'");
        assert!(error.hint().contains("quantization_config"));
    }
    let [packed, _] = of("awq");
    let listed = packed.set(CONFIG, &["quantization_config", "modules_to_not_convert"], json!(["q_proj"]));
    let error = Checkpoint::open(CheckpointSource::Folder(listed.0.clone())).expect_err("the list is wrong");
    let words = format!("the tensor {QUERY}.qweight is packed, but quantization_config lists module {QUERY}");
    assert!(error.to_string().starts_with(&words), "{error}");
    let [packed, _] = of("awq");
    let mut all = golden(&packed);
    all.push((format!("{QUERY}.weight"), "F16".to_owned(), json!([1]), vec![0; 2]));
    let twice = with_tensors(packed, all);
    let error = Checkpoint::open(CheckpointSource::Folder(twice.0.clone())).expect_err("the weight exists twice");
    let words = format!("module {QUERY} has both {QUERY}.weight and {QUERY}.qweight; expected one");
    assert!(error.to_string().starts_with(&words), "{error}");
    let plain = Copy::of(QWEN2).set(CONFIG, &["quantization_config"], awq_settings());
    let error = Checkpoint::open(CheckpointSource::Folder(plain.0.clone())).expect_err("nothing is packed");
    assert!(error.to_string().ends_with("no I32 tensor has a name that ends in .qweight"), "{error}");
}

#[test]
fn wrong_shapes_and_group_numbers_are_refused() {
    const OUTPUT: &str = "model.layers.0.self_attn.o_proj";
    let [packed, _] = both(QWEN2, &gptq_settings(), gptq);
    let packed = changed(packed, &format!("{OUTPUT}.g_idx"), |(.., bytes)| bytes[4 * 77] = 28);
    let error = packed.error();
    assert!(
        matches!(error, LoadError::Weights(WeightError::Group { column: 77, group: 28, groups: 28, .. })),
        "{error:?}"
    );
    assert!(
        error.to_string().ends_with("o_proj.weight has column 77 in group 28, but its groups are 0 to 27"),
        "{error}"
    );
    let [packed, _] = both(QWEN2, &gptq_settings(), gptq);
    let packed = changed(packed, &format!("{OUTPUT}.scales"), |(.., bytes)| bytes[..2].copy_from_slice(&[0, 0x7c]));
    assert!(packed.error().to_string().contains("o_proj.scales holds the scale inf"));
    let [packed, _] = both(QWEN2, &gptq_settings(), gptq);
    let error = packed.set(CONFIG, &["num_attention_heads"], json!(12)).error();
    let words = "q_proj.weight has shape [896, 48], but config.json asks for [768, 48]";
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn settings_without_weights_are_planned_as_the_packed_file() {
    let copy = Copy::of(QWEN2).set(CONFIG, &["quantization_config"], awq_settings()).remove(FILE);
    let settings = registry::without_weights(CheckpointSource::Folder(copy.0.clone())).expect("a known family");
    let settings = Checkpoint::open(CheckpointSource::Random(Arc::new(settings))).expect("the settings are supported");
    let [found, expected] = [settings, both(QWEN2, &awq_settings(), awq)[0].open()]
        .map(|checkpoint| Model::plan(&checkpoint, &CPU).expect("a plan"));
    assert_eq!((found.weight_bytes(), found.quantization()), (expected.weight_bytes(), Some("awq")));
    assert!(found.int4_bytes() == expected.int4_bytes() && found.int4_bytes().0 > 0);
}
