//! Experts of FP8 checkpoints, under each of the names that tools have given them.

use serde_json::{Value, json};

use crate::{
    bench::{Bench, open},
    copy::Copy,
    fp8_weights::{EXPERTS, laid_out, logits, tensors},
};

const FILE: &str = "model.safetensors";

#[test]
fn fused_fp8_experts_match_separate_experts() {
    let expected = logits(&Bench::of(open(EXPERTS), 2), EXPERTS);
    for swapped in [false, true] {
        let copy = Copy::of(EXPERTS).rewrite(FILE, |header, data| fuse(header, data, swapped));
        assert_eq!(logits(&Bench::of(copy.open(), 2), EXPERTS), expected, "axes swapped: {swapped}");
        // The scales have another name.
        let copy = copy.rename(FILE, |name| name.replace("_proj_scale_inv", "_proj_weight_scale_inv"));
        assert_eq!(logits(&Bench::of(copy.open(), 2), EXPERTS), expected);
    }
}

#[test]
fn expert_tensors_may_have_the_part_before_the_number() {
    let copy = Copy::of(EXPERTS).rename(FILE, |name| {
        let Some((before, rest)) = name.split_once(".experts.") else { return name.to_owned() };
        let (expert, rest) = rest.split_once('.').expect("an expert's number");
        let (part, end) = rest.split_once('.').expect("a part");
        format!("{before}.experts.{part}.{expert}.{end}")
    });
    assert_eq!(logits(&Bench::of(copy.open(), 2), EXPERTS), logits(&Bench::of(open(EXPERTS), 2), EXPERTS));
}

/// Puts all experts of a layer into `gate_up_proj` and `down_proj`, with separate
/// tensors for their scales.
fn fuse(header: &mut Value, data: &mut Vec<u8>, swapped: bool) {
    let experts = "model.layers.0.mlp.experts";
    let entries = header.as_object_mut().expect("an object");
    let mut take = |name: &str| {
        let entry = entries.remove(name).expect("a tensor");
        let [start, end] = [0, 1].map(|side| entry["data_offsets"][side].as_u64().expect("a place") as usize);
        let width = entry["shape"][1].as_u64().expect("a width") as usize;
        (data[start..end].to_vec(), width)
    };
    let mut whole = Vec::new();
    for (fused, parts) in [("gate_up_proj", &["gate", "up"][..]), ("down_proj", &["down"])] {
        for (of, to, dtype, size) in [("weight", "", "F8_E4M3", 1), ("weight_scale_inv", "_scale_inv", "BF16", 2)] {
            let (mut bytes, mut shape) = (Vec::new(), [4, 0, 0]);
            for expert in 0..4 {
                let taken = parts.iter().map(|part| take(&format!("{experts}.{expert}.{part}_proj.{of}")));
                let (parts, widths): (Vec<_>, Vec<_>) = taken.unzip();
                let (matrix, width) = (parts.concat(), widths[0]);
                let rows = matrix.len() / width / size;
                shape = if swapped { [4, width, rows] } else { [4, rows, width] };
                let element = |row: usize, column: usize| &matrix[(row * width + column) * size..][..size];
                bytes.extend(if swapped {
                    (0..width).flat_map(|column| (0..rows).flat_map(move |row| element(row, column).to_vec())).collect()
                } else {
                    matrix.clone()
                });
            }
            whole.push((format!("{experts}.{fused}{to}"), dtype.to_owned(), json!(shape), bytes));
        }
    }
    whole.extend(tensors(header, data));
    (*header, *data) = laid_out(whole);
}
