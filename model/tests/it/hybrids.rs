//! Hybrid models: configurations that are refused, memory by layer, states in bf16, heads divided
//! among ranks, and the tensors of released checkpoints.

use std::{fs, path::Path, sync::Arc};

use bursar_budgets::{Bytes, Hint};
use bursar_kernels::{CudaTarget, DType, StateDtype, Target};
use bursar_model::{
    Model,
    checkpoint::CheckpointSource,
    registry::{random_checkpoint, shape_settings, without_weights},
};
use serde_json::{Value, json};

use crate::{
    bench::{self, Bench, Case, alone, assert_recorded, assert_same_run, open_random, relative_error},
    copy::Copy,
};

const QWEN3_5: &str = "tests/golden/qwen3_5";

/// The refusal of a checkpoint in which one key of `text_config` is changed.
fn refused(key: &str, value: Value) -> String {
    let error = Copy::of(QWEN3_5).set("config.json", &["text_config", key], value).error();
    error.to_string().trim_start_matches("config.json: text_config.").trim_start_matches("config.json: ").to_owned()
}

#[test]
fn unsupported_hybrid_settings_are_refused_by_name() {
    let kinds = |last: &str| {
        json!([
            "linear_attention",
            "full_attention",
            last,
            "full_attention",
            "full_attention",
            "full_attention",
            "full_attention",
            "full_attention"
        ])
    };
    let supported = "supported: linear_attention and full_attention";
    let windowed = refused("layer_types", kinds("sliding_attention"));
    assert_eq!(windowed, format!("layer_types[2] is sliding_attention; {supported}"));
    assert_eq!(refused("layer_types", json!([])), "layer_types names 0 layers, but num_hidden_layers is 8");
    assert_eq!(refused("attn_output_gate", json!(false)), "attn_output_gate is false; supported: true");
    assert_eq!(refused("output_gate_type", json!("sigmoid")), "output_gate_type is sigmoid; supported: swish and silu");
    let heads = "5 value heads of gated delta nets cannot be divided among 2 key heads";
    assert_eq!(refused("linear_num_value_heads", json!(5)), heads);
    assert_eq!(refused("linear_key_head_dim", json!(0)), "linear_key_head_dim is 0; expected from 1 to 4096");
    assert!(
        refused("linear_conv_kernel_dim", json!(1)).starts_with("linear_conv_kernel_dim is 1; expected at least 2")
    );
    let rope = json!({ "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.01 });
    let none = "partial_rotary_factor 0.01 rotates 0 of a head's 64 elements; expected an even number from 2 to 64";
    assert_eq!(refused("rope_parameters", rope), none);
    let rope = json!({ "rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2] });
    let sections = "mrope_section [3, 3, 2] does not divide the 16 rotated pairs of a head among three axes";
    assert_eq!(refused("rope_parameters", rope), sections);
}

#[test]
fn only_draft_head_tensors_may_stay_unread() {
    Copy::of(QWEN3_5).open();
    let name = "model.layers.0.linear_attn.A_log";
    let copy = Copy::of("tests/golden/qwen3_5_text");
    let error = copy.edit_header("model.safetensors", name, "model.unknown", |_| {}).error();
    assert!(error.to_string().contains(name), "{error}");
}

#[test]
fn hybrid_layers_have_a_kv_cache_or_states() {
    let checkpoint = Copy::of(QWEN3_5).open();
    let gpu = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
    let model = Model::plan(&checkpoint, &gpu).expect("the model can be planned");
    let (kv, states) = (model.kv_shape(&gpu), model.state_shape(&gpu).expect("the model has states"));
    assert_eq!((kv.layers, states.layers), (2, 6));
    // Three inputs of 256 channels in bf16, and four matrices of 32 x 32 in f32.
    assert_eq!(states.slot_bytes(), Bytes(3 * 256 * 2 + 4 * 32 * 32 * 4));
}

#[test]
fn released_hybrid_shapes_have_the_expected_state_bytes() {
    let gpu = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
    for (shape, sequence, token, billions) in [
        ("qwen3.5-0.8b", 19_537_920, 12_288, 0.87),
        ("qwen3.5-9b", 51_511_296, 32_768, 9.4),
        ("qwen3.5-27b", 153_944_064, 65_536, 27.4),
        ("qwen3.5-35b-a3b", 64_389_120, 20_480, 35.1),
    ] {
        let random = random_checkpoint(shape, 0).expect("a known shape");
        let checkpoint = open_random(random);
        let model = Model::plan(&checkpoint, &gpu).expect("the model can be planned");
        assert_eq!(model.state_shape(&gpu).map(|shape| shape.sequence_bytes()), Some(Bytes(sequence)), "{shape}");
        assert_eq!(model.kv_shape(&gpu).token_bytes(), Bytes(token), "{shape}");
        let found = model.parameters() as f64 / 1e9;
        assert!((found / billions - 1.0).abs() < 0.02, "{shape} has {found} billion parameters");
    }
}

/// A prompt in one step rounds each state once, and a prompt in steps of one token rounds it once
/// per token, as decoding does.
#[test]
fn bf16_states_take_half_the_memory_and_change_logits_little() {
    let [exact, rounded] =
        [StateDtype::F32, StateDtype::Bf16].map(|states| Bench::of(bench::open(QWEN3_5).with_state_dtype(states), 2));
    let target = Target::Cpu { threads: 2 };
    let [of_exact, of_rounded] = [&exact, &rounded].map(|bench| bench.model.state_shape(&target).expect("states"));
    let matrices = of_exact.value_heads * of_exact.value_dim * of_exact.key_dim;
    assert_eq!(of_exact.slot_bytes() - of_rounded.slot_bytes(), Bytes(2 * matrices as u64));
    let case = Case::read(QWEN3_5, &exact.checkpoint, "tokens_200");
    let expected = alone(&exact, &case, &[], &[usize::MAX]);
    for (sizes, bounds) in [([usize::MAX], 1e-6..0.02), ([1], 1e-5..0.05)] {
        let found = alone(&rounded, &case, &[], &sizes);
        let errors = found.logits.iter().zip(&expected.logits).map(|(found, exact)| relative_error(found, exact));
        // After the first different token, the logits follow different texts and are not compared.
        let same = found.tokens.iter().zip(&expected.tokens).take_while(|(a, b)| a == b).count();
        let worst = errors.take(same + 1).fold(0.0, f32::max);
        println!("steps of {}: {same} equal tokens, logits differ by {worst:.1e}", sizes[0]);
        assert!(bounds.contains(&worst), "steps of {}: {worst:e}", sizes[0]);
    }
}

#[test]
fn ranks_divide_the_heads_of_gated_delta_nets() {
    use bursar_kernels::Rank;
    let checkpoint = Copy::of(QWEN3_5).open();
    let cpu = Target::Cpu { threads: 1 };
    let one = Model::plan(&checkpoint, &cpu).expect("the model can be planned");
    let half = Model::plan_rank(&checkpoint, &cpu, Rank::new(1, 2)).expect("two ranks divide two key heads");
    let bytes = |model: &Model| model.state_shape(&cpu).expect("the model has states").slot_bytes();
    assert_eq!(bytes(&half) * 2, bytes(&one));
    let error = Model::plan_rank(&checkpoint, &cpu, Rank::new(0, 4)).map(drop).expect_err("there are two key heads");
    assert_eq!(error.to_string(), "key heads of gated delta nets cannot be divided among 4 ranks: there are 2");
    assert!(error.hint().ends_with("1, 2"), "{}", error.hint());
}

#[test]
fn an_fp8_release_is_planned_with_its_projections_in_fp8() {
    let shape = CheckpointSource::Random(Arc::new(shape_settings("qwen3.5-27b").expect("a known shape")));
    let json = shape.read("config.json").expect("the settings are in memory").expect("the shape has settings");
    let mut config: Value = serde_json::from_slice(&json).expect("JSON");
    let cpu = Target::Cpu { threads: 1 };
    let planned = |config: &Value, has_head: bool| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fp8-release-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a temporary folder");
        fs::write(folder.join("config.json"), config.to_string()).expect("the file is written");
        let random = without_weights(CheckpointSource::Folder(folder.clone())).expect("the folder has settings");
        let checkpoint = open_random(random).with_draft_head(has_head);
        let model = Model::plan(&checkpoint, &cpu).expect("the model can be planned");
        fs::remove_dir_all(folder).expect("the folder is removed");
        (model.weight_bytes().0, model.parameters())
    };
    let (plain, parameters) = planned(&config, false);
    let modules = |layer: usize| {
        let net = format!("model.language_model.layers.{layer}.linear_attn");
        ["in_proj_a", "in_proj_b", "conv1d"].map(|part| format!("{net}.{part}"))
    };
    let unquantized: Vec<String> =
        ["lm_head", "model.visual", "mtp.fc"].map(str::to_owned).into_iter().chain((0..64).flat_map(modules)).collect();
    config["quantization_config"] = json!({
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": unquantized,
    });
    let (released, same) = planned(&config, false);
    assert_eq!(same, parameters, "scales do not count as parameters");
    // 48 gated delta nets with queries, keys, values, gates and outputs; 16 layers with attention,
    // whose queries have gates; 64 MLPs.
    let numbers = 48 * (2 * 2048 + 3 * 6144) * 5120 + 16 * (3 * 6144 + 2 * 1024) * 5120 + 64 * 3 * 5120 * 17_408u64;
    // FP8 takes one byte per number instead of two, and one f32 per block of 128 x 128 numbers.
    let expected = plain - numbers + numbers / (128 * 128) * 4;
    assert!((expected..expected + (1 << 20)).contains(&released), "{released} {expected}");
    // The layer of the draft head is in FP8 too, but the head's input projection is not.
    let (drafting, _) = planned(&config, true);
    let (numbers, projection) = ((3 * 6144 + 2 * 1024 + 3 * 17_408) * 5120, 2 * 5120 * 5120);
    let expected = numbers + numbers / (128 * 128) * 4 + 2 * projection;
    assert!((expected..expected + (1 << 18)).contains(&(drafting - released)), "{drafting} {released} {expected}");
}

#[test]
fn text_only_exports_may_keep_the_whole_models_names() {
    let folder = "tests/golden/qwen3_5_text";
    let copy = Copy::of(folder).rename("model.safetensors", |name| name.replace("model.", "model.language_model."));
    let bench = Bench::of(copy.open(), 2);
    assert_recorded(&bench, &Case::read(folder, &bench.checkpoint, "short"), &[], 1e-4);
}

/// Rewrites the f32 tensors of a checkpoint: rounds them to bf16, and stores them as bf16 or as
/// f32.
fn rounded(folder: &str, stores_bf16: bool) -> Copy {
    Copy::of(folder).rewrite("model.safetensors", |header, data| {
        let entries = header.as_object_mut().expect("an object").iter_mut();
        let mut entries: Vec<_> = entries.filter(|(name, _)| *name != "__metadata__").map(|(_, entry)| entry).collect();
        entries.sort_by_key(|entry| entry["data_offsets"][0].as_u64());
        let (mut out, mut changed) = (Vec::new(), 0);
        for entry in entries {
            let [start, end] = [0, 1].map(|side| entry["data_offsets"][side].as_u64().expect("a place") as usize);
            let first = out.len();
            if entry["dtype"] == "F32" {
                changed += 1;
                for bytes in data[start..end].as_chunks().0 {
                    let number = half::bf16::from_f32(f32::from_le_bytes(*bytes));
                    if stores_bf16 {
                        out.extend(number.to_le_bytes());
                    } else {
                        out.extend(number.to_f32().to_le_bytes());
                    }
                }
                entry["dtype"] = if stores_bf16 { "BF16" } else { "F32" }.into();
            } else {
                out.extend(&data[start..end]);
            }
            entry["data_offsets"] = json!([first, out.len()]);
        }
        assert_eq!(changed, 6, "three gated delta nets have decays and a norm in f32");
        *data = out;
    })
}

#[test]
fn decays_and_norms_are_read_from_bf16_as_from_f32() {
    let folder = "tests/golden/qwen3_5_text";
    let [one, other] = [true, false].map(|stores_bf16| {
        let bench = Bench::of(rounded(folder, stores_bf16).open(), 2);
        alone(&bench, &Case::read(folder, &bench.checkpoint, "short"), &[], &[usize::MAX])
    });
    assert_same_run("bf16 and f32", &one, &other, 0.0);
}
