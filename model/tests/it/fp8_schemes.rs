//! FP8 schemes without a recorded checkpoint. Each test expresses the numbers of a recorded
//! checkpoint in another scheme.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    bench::{Bench, open},
    copy::Copy,
    fp8_weights::{Stored, laid_out, logits, tensors},
};

const FILE: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const BLOCK: &str = "tests/golden/qwen3_fp8";
const CHANNEL: &str = "tests/golden/qwen3_fp8_dynamic";
const TENSOR: &str = "tests/golden/qwen3_fp8_modelopt";

/// Settings of compressed-tensors for weights and activations with these scales, except for
/// the modules in `plain`.
fn settings(weights: Value, activations: Value, plain: &[&str]) -> Value {
    let part = |how: Value| {
        let mut part = json!({ "num_bits": 8, "type": "float", "symmetric": true });
        part.as_object_mut()
            .expect("an object")
            .extend(how.as_object().expect("the additional settings are an object").clone());
        part
    };
    let group = json!({ "targets": ["Linear"], "weights": part(weights), "input_activations": part(activations) });
    json!({
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": plain,
        "config_groups": { "group_0": group },
    })
}

/// A copy of `folder` with these settings, where `change` may rewrite each tensor.
fn copy_with(folder: &str, settings: Value, change: impl Fn(&mut Stored)) -> Copy {
    let copy = Copy::of(folder).set(CONFIG, &["quantization_config"], settings);
    copy.rewrite(FILE, |header, data| {
        let mut whole = tensors(header, data);
        whole.iter_mut().for_each(&change);
        (*header, *data) = laid_out(whole);
    })
}

fn answers(copy: &Copy, folder: &str) -> Vec<f32> {
    logits(&Bench::of(copy.open(), 2), folder)
}

#[test]
fn compressed_tensors_blocks_load_like_the_fp8_format() {
    let blocks = json!({ "strategy": "block", "block_structure": [128, 128] });
    let groups = json!({ "strategy": "group", "dynamic": true, "group_size": 128 });
    let copy = copy_with(
        BLOCK,
        settings(blocks, groups, &["lm_head", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn"]),
        |(name, ..)| {
            *name = name.replace("weight_scale_inv", "weight_scale");
        },
    );
    assert_eq!(answers(&copy, BLOCK), logits(&Bench::of(open(BLOCK), 2), BLOCK));
}

#[test]
fn a_tensor_scale_equals_the_same_scale_for_each_row() {
    const SCALE: f32 = 3e-3;
    let token = json!({ "strategy": "token", "dynamic": true });
    let of = |strategy: &str, is_one: bool| {
        let weights = json!({ "strategy": strategy, "dynamic": false });
        let copy = copy_with(
            CHANNEL,
            settings(weights, token.clone(), &["lm_head", "re:.*layers.0.self_attn.*"]),
            |(name, dtype, shape, bytes)| {
                if name.ends_with("weight_scale") {
                    let rows = if is_one { 1 } else { shape[0].as_u64().expect("rows") as usize };
                    (*dtype, *shape, *bytes) = ("F32".to_owned(), json!([rows, 1]), SCALE.to_le_bytes().repeat(rows));
                }
            },
        );
        answers(&copy, CHANNEL)
    };
    assert_eq!(of("tensor", true), of("channel", false));
}

#[test]
fn fixed_activation_scales_work_with_a_scale_per_weight_row() {
    let mut rows = BTreeMap::new();
    drop(Copy::of(TENSOR).rewrite(FILE, |header, data| {
        let of = |(name, _, shape, _): Stored| (name, shape[0].as_u64().unwrap_or_default());
        rows = tensors(header, data).into_iter().map(of).collect();
    }));
    let fixed = json!({ "strategy": "tensor", "dynamic": false });
    let channel = json!({ "strategy": "channel", "dynamic": false });
    let copy = copy_with(
        TENSOR,
        settings(channel, fixed, &["lm_head", "model.layers.1.self_attn*"]),
        |(name, _, shape, bytes)| {
            if let Some(module) = name.strip_suffix("_scale").filter(|name| name.ends_with(".weight")) {
                let rows = rows[module];
                (*shape, *bytes) = (json!([rows, 1]), bytes.repeat(rows as usize));
            }
        },
    );
    assert_eq!(answers(&copy.remove("hf_quant_config.json"), TENSOR), logits(&Bench::of(open(TENSOR), 2), TENSOR));
}
