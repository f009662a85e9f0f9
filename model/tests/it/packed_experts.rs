//! Packed weights of experts: one matrix for each projection of an expert, or the matrices of all
//! experts of a layer in one tensor. A model with packed experts gives the same reply as a model
//! with the dequantized weights in plain tensors.

use bursar_model::checkpoint::{Checkpoint, CheckpointSource, PackedFormat};
use serde_json::{Value, json};

use crate::{
    copy::{Copy, QWEN3_MOE, QWEN3_VL_MOE},
    fp4_weights::{Format, Fp4},
    fp8_weights::Stored,
    packed_weights::{
        Packing, Quantized, WIDENED, assert_same, both, changed, compressed_settings, golden, number, with_tensors,
    },
};

const CONFIG: &str = "config.json";
const QWEN3_5_MOE: &str = "tests/golden/qwen3_5_moe";

fn is_of_expert(module: &str) -> bool {
    module.contains(".experts.")
}

#[test]
fn awq_and_gptq_experts_load_as_their_dequantized_values() {
    // AWQ packs 8 rows into a word. The 48 rows of the down projections fill whole words.
    let packing = Packing { dtype: "BF16", group: None, ..Packing::AWQ };
    let settings = json!({
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": -1, "zero_point": true,
        "modules_to_not_convert": ["self_attn", "gate", "gate_proj", "up_proj", "lm_head"],
    });
    let down = |module: &str| (is_of_expert(module) && module.ends_with("down_proj")).then_some(packing);
    assert_same(QWEN3_MOE, "awq", &both(QWEN3_MOE, &settings, down), WIDENED);
    for (format, is_reordered, name) in [
        (PackedFormat::Gptq, true, "gptq"),
        (PackedFormat::GptqV2, false, "gptq_v2"),
        (PackedFormat::Gptq, false, "gptq"),
    ] {
        let packing = Packing { format, is_reordered, dtype: "BF16", ..Packing::GPTQ };
        let settings = json!({
            "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": is_reordered, "sym": false,
            "checkpoint_format": name, "dynamic": { "-:.*self_attn": {}, "-:.*mlp.gate$": {} },
        });
        let experts = |module: &str| is_of_expert(module).then_some(packing);
        assert_same(QWEN3_MOE, "gptq", &both(QWEN3_MOE, &settings, experts), WIDENED);
    }
}

/// Packs the experts `[count, rows, columns]` of a layer. Returns the packed tensors, named by
/// their suffix in a module, and the dequantized experts in bf16.
type PackExperts = fn(&[f32], [usize; 3]) -> (Vec<Stored>, Vec<u8>);

/// Packs to 4-bit integers, with or without zero points. The matrices of all experts can be packed
/// as one matrix, because each expert has whole words of zero points.
fn integers(weight: &[f32], [count, _, columns]: [usize; 3], is_symmetric: bool) -> (Vec<Stored>, Vec<u8>) {
    let packing = Packing { dtype: "BF16", is_symmetric, ..Packing::COMPRESSED };
    let quantized = Quantized::of(packing, weight, columns);
    let part = |(name, dtype, shape, bytes): Stored| {
        let suffix = name.strip_prefix("x.").filter(|suffix| *suffix != "weight_shape")?.to_owned();
        let rows = shape[0].as_u64().expect("rows") as usize / count;
        Some((suffix, dtype, json!([count, rows, shape[1]]), bytes))
    };
    (quantized.tensors("x").into_iter().filter_map(part).collect(), quantized.values())
}

fn symmetric(weight: &[f32], shape: [usize; 3]) -> (Vec<Stored>, Vec<u8>) {
    integers(weight, shape, true)
}

fn asymmetric(weight: &[f32], shape: [usize; 3]) -> (Vec<Stored>, Vec<u8>) {
    integers(weight, shape, false)
}

/// Packs to NVFP4, with one global scale in f32 for each expert.
fn nvfp4(weight: &[f32], [count, rows, columns]: [usize; 3]) -> (Vec<Stored>, Vec<u8>) {
    let experts: Vec<_> = weight.chunks_exact(rows * columns).map(|expert| Fp4::of(Format::Nvfp4, expert)).collect();
    let joined = |part: fn(&Fp4) -> Vec<u8>| experts.iter().flat_map(part).collect::<Vec<u8>>();
    let tensor = |suffix: &str, dtype: &str, shape, bytes| (suffix.to_owned(), dtype.to_owned(), shape, bytes);
    let parts = vec![
        tensor("weight_packed", "U8", json!([count, rows, columns / 2]), joined(|it| it.packed.clone())),
        tensor("weight_scale", "F8_E4M3", json!([count, rows, columns / 16]), joined(|it| it.scales.clone())),
        tensor("weight_global_scale", "F32", json!([count]), joined(|it| it.factor.to_le_bytes().into())),
        tensor("input_global_scale", "F32", json!([count]), vec![0; 4 * count]),
    ];
    (parts, joined(|it| it.values.clone()))
}

/// Swaps the axes of each matrix.
fn swapped(weight: &[f32], [_, rows, columns]: [usize; 3]) -> Vec<f32> {
    let swap = |matrix: &[f32]| -> Vec<f32> {
        (0..columns)
            .flat_map(|column| (0..rows).map(move |row| (row, column)))
            .map(|(row, column)| matrix[row * columns + column])
            .collect()
    };
    weight.chunks_exact(rows * columns).flat_map(swap).collect()
}

/// A golden checkpoint whose experts are packed, if their columns fill whole words, and the same
/// checkpoint with the dequantized experts. A packed tensor is named `NAME.SUFFIX`, as in a module,
/// or `NAME_SUFFIX` if `is_flat`.
fn both_of_layers(folder: &str, settings: Value, pack: PackExperts, is_flat: bool) -> [Copy; 2] {
    let copies = [Copy::of(folder), Copy::of(folder)];
    let (mut packed, mut plain, mut count) = (Vec::new(), Vec::new(), 0);
    golden(&copies[1]);
    for (name, dtype, shape, bytes) in golden(&copies[0]) {
        let extents: Vec<usize> = serde_json::from_value(shape.clone()).expect("a shape");
        let shape = match *extents {
            // Qwen3-VL is released with swapped axes, and packed experts are not swapped.
            [experts, columns, rows] if folder == QWEN3_VL_MOE => [experts, rows, columns],
            [experts, rows, columns] => [experts, rows, columns],
            _ => [0; 3],
        };
        if !name.contains(".experts.") || !shape[2].is_multiple_of(8) {
            packed.push((name.clone(), dtype.clone(), json!(extents), bytes.clone()));
            plain.push((name, dtype, json!(extents), bytes));
            continue;
        }
        let weight: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| number(*bytes, &dtype)).collect();
        let is_swapped = *extents != shape;
        let weight = if is_swapped { swapped(&weight, [extents[0], extents[1], extents[2]]) } else { weight };
        let (parts, values) = pack(&weight, shape);
        packed.extend(parts.into_iter().map(|(suffix, dtype, shape, bytes)| {
            let flat = format!("{name}_{}", suffix.trim_start_matches("weight_"));
            (if is_flat { flat } else { format!("{name}.{suffix}") }, dtype, shape, bytes)
        }));
        plain.push((name, "BF16".to_owned(), json!(shape), values));
        count += 1;
    }
    assert!(count > 1, "{folder}: only {count} tensors are packed");
    let [one, other] = copies;
    [with_tensors(one.set(CONFIG, &["quantization_config"], settings), packed), with_tensors(other, plain)]
}

fn integer_settings(is_symmetric: bool) -> Value {
    compressed_settings(json!({
        "num_bits": 4, "type": "int", "symmetric": is_symmetric, "strategy": "group", "group_size": 32,
    }))
}

#[test]
fn packed_experts_in_one_tensor_load_as_their_dequantized_values() {
    for is_flat in [true, false] {
        for (pack, settings) in [
            (symmetric as PackExperts, integer_settings(true)),
            (asymmetric, integer_settings(false)),
            (nvfp4, Format::Nvfp4.settings()),
        ] {
            // The down projections of this checkpoint have 20 columns and stay plain.
            let both = both_of_layers(QWEN3_5_MOE, settings, pack, is_flat);
            assert_same(QWEN3_5_MOE, "compressed-tensors", &both, WIDENED);
        }
    }
}

#[test]
fn packed_experts_are_not_swapped_where_the_release_is() {
    // Rows of 24 columns form one group, which is shorter than the group size of 32.
    let both = both_of_layers(QWEN3_VL_MOE, integer_settings(false), asymmetric, true);
    assert_same(QWEN3_VL_MOE, "compressed-tensors", &both, WIDENED);
}

#[test]
fn parts_of_packed_experts_must_match() {
    const EXPERTS: &str = "model.language_model.layers.0.mlp.experts.gate_up_proj";
    type Change = fn(&mut Stored);
    let damages: [(&str, Change, &str); 3] = [
        ("scale", |it| it.0 += "_", "_scale is missing"),
        (
            "scale",
            |it| it.2 = json!([8, 2, 40]),
            "_scale is BF16 [8, 2, 40]; a packed weight of this module needs BF16 [8, 40, 2]",
        ),
        (
            "packed",
            |it| it.2 = json!([320, 8]),
            "_packed is I32 [320, 8]; a packed weight of this module needs three axes",
        ),
    ];
    for (suffix, change, words) in damages {
        let [packed, _] = both_of_layers(QWEN3_5_MOE, integer_settings(true), symmetric, true);
        let copy = changed(packed, &format!("{EXPERTS}_{suffix}"), change);
        let error = Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect_err("the file is refused");
        let words = format!("the tensor {EXPERTS}{words}");
        assert!(error.to_string().starts_with(&words), "'{error}' does not say '{words}'");
    }
}
