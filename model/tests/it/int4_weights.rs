//! Weights that have 4-bit integers in memory: packed weights whose groups are in order, and
//! weights that are rounded while they load.

use bursar_budgets::Bytes;
use bursar_kernels::Target;
use bursar_model::{Model, checkpoint::WeightQuantization};
use serde_json::json;

use crate::{
    bench::{Bench, Case, GoesOn, alone, open, relative_error},
    copy::QWEN2,
    packed_weights::{
        PACKED, Packing, QWEN3, assert_same, both, compressed_settings, gptq, gptq_settings, is_projection,
    },
};

#[test]
fn gptq_weights_without_desc_act_stay_packed() {
    let mut settings = gptq_settings();
    settings["desc_act"] = json!(false);
    let packing = |module: &str| gptq(module).map(|packing| Packing { is_reordered: false, ..packing });
    for folder in [QWEN2, QWEN3] {
        assert_same(folder, "gptq", &both(folder, &settings, packing), PACKED);
    }
}

#[test]
fn a_scale_for_each_output_is_repeated_for_whole_groups_of_columns() {
    let channel =
        json!({ "num_bits": 4, "type": "int", "symmetric": false, "strategy": "channel", "group_size": null });
    let packing = Packing { group: None, is_symmetric: false, dtype: "BF16", ..Packing::COMPRESSED };
    let packed = |module: &str| is_projection(module).then_some(packing);
    assert_same(QWEN3, "compressed-tensors", &both(QWEN3, &compressed_settings(channel), packed), PACKED);
}

#[test]
fn weights_without_whole_groups_stay_unquantized() {
    let plan = |quantization| {
        let checkpoint = open(QWEN2).with_quantization(quantization);
        Model::plan(&checkpoint, &Target::Cpu { threads: 1 }).expect("the model is planned")
    };
    let (plain, rounded) = (plan(None), plan(Some(WeightQuantization::Int4)));
    // Only the attention output projections `[48, 896]` of the two layers have rows with a multiple
    // of 32 columns. Each row has a scale of four bytes for each 128 columns, and the scales of a
    // weight end at a multiple of 256 bytes.
    let saved = 2 * (48 * 896 * 2 - 48 * 896 / 2 - (48 * 7 * 4u64).next_multiple_of(256));
    assert_eq!((plain.weight_bytes() - rounded.weight_bytes()).0, saved);
    assert_eq!(rounded.int4_bytes().0, 2 * (48 * 896 / 2 + 48 * 7 * 4));
    assert_eq!((rounded.quantization(), rounded.quantization_in_memory()), (Some("int4"), Some("int4")));
    assert_eq!(rounded.parameters(), plain.parameters());
}

#[test]
fn weights_rounded_to_4_bits_change_logits_little() {
    for folder in [QWEN2, QWEN3] {
        let bench = |quantization| {
            let mut bench = Bench::of(open(folder).with_quantization(quantization), 2);
            // Every continuation is the recorded one, so that all logits are of the same text.
            bench.goes_on = GoesOn::Recorded;
            bench
        };
        let (plain, rounded) = (bench(None), bench(Some(WeightQuantization::Int4)));
        assert!(rounded.model.int4_bytes() > Bytes(0), "{folder} has weights with whole groups");
        for name in ["short", "long"] {
            let case = Case::read(folder, &plain.checkpoint, name);
            let logits = |bench: &Bench| alone(bench, &case, &[], &[usize::MAX]).logits.concat();
            let off = relative_error(&logits(&rounded), &logits(&plain));
            // Logits that have nothing in common are 1.4 off.
            assert!((0.02..0.3).contains(&off), "{folder}, {name}: {off:e}");
        }
    }
}
