//! Variants of checkpoints: settings left out, names from other versions, files in other places.
//! Each variant loads with the same result as in transformers 5.17. Some tests compare
//! configurations instead of logits, because the variant changes nothing else that reaches the
//! model. For those tests, `check_variants` of `tests/golden/recording/qwen2_5_vl.py` has checked
//! that transformers computes the same bits.

use bursar_budgets::Hint;
use bursar_kernels::Target;
use bursar_model::{
    LoadError, Model,
    blocks::{ConfigError, norm::NormKind},
    checkpoint::{Checkpoint, CheckpointSource},
    error::CheckpointError,
    processor::{ImageProcessor, VideoProcessor},
    registry::{self, FamilyConfig},
    text::Tokenizer,
};
use serde_json::{Map, Value, json};

use crate::bench::{Bench, Case, assert_recorded, encode};
use crate::common::golden_json;
use crate::copy::{Copy, INTERNVL, INTERNVL_CHAT, QWEN2, QWEN2_5_VL, QWEN2_VL, QWEN3_VL, QWEN3_VL_MOE};

/// The same tolerance as in `model/tests/it/golden_qwen2_5_vl.rs`.
const REFERENCE_TOLERANCE: f32 = 1e-4;
const CONFIG: &str = "config.json";

fn config(checkpoint: &Checkpoint) -> FamilyConfig {
    FamilyConfig::of(checkpoint).unwrap_or_else(|error| panic!("{error}"))
}

fn assert_single_image(folder: &str, checkpoint: Checkpoint) {
    assert_case(folder, "single_image", checkpoint);
}

/// Asserts that `checkpoint` computes the recorded case of `folder`.
fn assert_case(folder: &str, name: &str, checkpoint: Checkpoint) {
    let bench = Bench::of(checkpoint, 2);
    let case = Case::read(folder, &bench.checkpoint, name);
    case.assert_prompt_and_positions(&bench.checkpoint);
    let rows = encode(&bench, &case);
    assert_recorded(&bench, &case, &rows, REFERENCE_TOLERANCE);
    bench.forget(rows);
}

#[test]
fn a_checkpoint_with_minimal_settings_gives_the_recorded_answer() {
    let bare = "tests/golden/qwen2_5_vl_bare";
    let checkpoint = Copy::of(bare).open();
    let FamilyConfig::Qwen2_5Vl(config) = config(&checkpoint) else {
        panic!("the checkpoint belongs to another family")
    };
    let (tower, tokens_per_second) = (&config.vision.tower, config.vision.tokens_per_second);
    assert_eq!((tower.depth, tower.num_heads, tokens_per_second), (32, 16, 4));
    assert!(config.decoder.tied_embeddings, "text_config decides that the embeddings are tied");
    assert_single_image(bare, checkpoint);
}

#[test]
fn settings_equal_to_the_class_default_may_be_omitted() {
    let full = config(&Copy::of(QWEN2_5_VL).open());
    let left_out: [&[&str]; 13] = [
        &["architectures"],
        &["rope_theta"],
        &["rope_scaling"],
        &["tie_word_embeddings"],
        &["hidden_act"],
        &["use_sliding_window"],
        &["max_window_layers"],
        &["vision_config", "patch_size"],
        &["vision_config", "spatial_merge_size"],
        &["vision_config", "temporal_patch_size"],
        &["vision_config", "window_size"],
        &["vision_config", "hidden_act"],
        &["vision_config", "in_chans"],
    ];
    for field in left_out {
        let copy = Copy::of(QWEN2_5_VL).set(CONFIG, field, Value::Null);
        assert_eq!(config(&copy.open()), full, "without {field:?}");
    }
    let full = config(&Copy::of(QWEN2).open());
    for field in ["architectures", "rms_norm_eps", "hidden_act", "use_sliding_window"] {
        assert_eq!(config(&Copy::of(QWEN2).set(CONFIG, &[field], Value::Null).open()), full, "without {field}");
    }
}

#[test]
fn default_settings_match_transformers_for_each_family() {
    let recorded = golden_json("config_defaults.json");
    // The vision configuration has only this width, because decoder and tower would contradict each
    // other without it. All other settings are the class's defaults.
    let vision = json!({ "out_hidden_size": recorded["qwen2_5_vl"]["text"]["hidden_size"] });
    let vl = config(&Copy::of(QWEN2_5_VL).write(CONFIG, bare("qwen2_5_vl", &vision)).open());
    let qwen2 = config(&Copy::of(QWEN2).write(CONFIG, bare("qwen2", &Value::Null)).open());
    let text = |model_type: &str| {
        let windowless = json!({ "model_type": model_type, "sliding_window": null }).to_string();
        config(&Copy::of(QWEN2).write(CONFIG, windowless).open())
    };
    let texts = ["qwen3", "llama", "mistral", "qwen3_moe"].map(|name| (text(name), &recorded[name]));
    let vision = json!({ "out_hidden_size": recorded["qwen3_vl"]["text"]["hidden_size"] });
    let vl3 = config(&Copy::of(QWEN3_VL).write(CONFIG, bare("qwen3_vl", &vision)).open());
    let vision = json!({ "out_hidden_size": recorded["qwen3_vl_moe"]["text"]["hidden_size"] });
    let vl3_mixed = config(&Copy::of(QWEN3_VL).write(CONFIG, bare("qwen3_vl_moe", &vision)).open());
    let vision = json!({ "hidden_size": recorded["qwen2_vl"]["text"]["hidden_size"] });
    let vl2 = config(&Copy::of(QWEN2_VL).write(CONFIG, bare("qwen2_vl", &vision)).open());
    let text2 = &recorded["qwen2_vl"]["text"];
    let (text, text3) = (&recorded["qwen2_5_vl"]["text"], &recorded["qwen3_vl"]["text"]);
    let text3_mixed = &recorded["qwen3_vl_moe"]["text"];
    let all = [(&vl, text), (&vl2, text2), (&vl3, text3), (&vl3_mixed, text3_mixed), (&qwen2, &recorded["qwen2"])];
    for (config, recorded) in all.into_iter().chain(texts.iter().map(|(config, recorded)| (config, *recorded))) {
        let decoder = config.decoder();
        let found = json!({
            "vocab_size": decoder.vocabulary,
            "hidden_size": decoder.hidden,
            "intermediate_size": decoder.intermediate,
            "num_hidden_layers": decoder.layers,
            "num_attention_heads": decoder.heads,
            "num_key_value_heads": decoder.kv_heads,
            "max_position_embeddings": decoder.context_tokens,
        });
        found.as_object().expect("an object").iter().for_each(|(field, value)| assert_eq!(value, &recorded[field]));
        assert_eq!(Some(decoder.norm_epsilon), recorded["rms_norm_eps"].as_f64().map(|number| number as f32));
        assert_eq!(Some(decoder.rope_theta), recorded["rope_parameters"]["rope_theta"].as_f64());
        assert!(!decoder.tied_embeddings);
        // transformers 5.17 saves `num_experts` as `num_local_experts`. Models without experts do
        // not have the key.
        let experts = recorded["num_local_experts"].as_u64();
        assert_eq!(decoder.mixture.as_ref().map(|mixture| mixture.experts as u64), experts);
        if let Some(mixture) = &decoder.mixture {
            let found = json!({
                "num_experts_per_tok": mixture.top,
                "moe_intermediate_size": mixture.intermediate,
                "decoder_sparse_step": mixture.step,
                "mlp_only_layers": mixture.dense.clone().unwrap_or_default(),
            });
            found.as_object().expect("an object").iter().for_each(|(field, value)| assert_eq!(value, &recorded[field]));
            // One of the two classes has no `norm_topk_prob` and always renormalizes.
            assert_eq!(mixture.renormalized, recorded["norm_topk_prob"].as_bool().unwrap_or(true));
        }
    }
    let FamilyConfig::Qwen2_5Vl(vl) = vl else { panic!("the checkpoint belongs to another family") };
    let (vision, recorded) = (&vl.vision, &recorded["qwen2_5_vl"]["vision"]);
    let found = json!({
        "depth": vision.tower.depth,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.tower.num_heads,
        "in_channels": vision.tower.in_channels,
        "patch_size": vision.tower.patch_size,
        "spatial_merge_size": vision.tower.spatial_merge_size,
        "temporal_patch_size": vision.tower.temporal_patch_size,
        "tokens_per_second": vision.tokens_per_second,
        "window_size": vision.window_size,
        "fullatt_block_indexes": vision.fullatt_block_indexes,
    });
    found.as_object().expect("an object").iter().for_each(|(field, value)| assert_eq!(value, &recorded[field]));
    let FamilyConfig::Qwen2Vl(vl) = vl2 else { panic!("the checkpoint belongs to another family") };
    let (vision, recorded) = (&vl.vision, &golden_json("config_defaults.json")["qwen2_vl"]["vision"]);
    let found = json!({
        "depth": vision.tower.depth,
        "embed_dim": vision.embed_dim,
        "mlp_ratio": vision.mlp_ratio,
        "num_heads": vision.tower.num_heads,
        "in_channels": vision.tower.in_channels,
        "patch_size": vision.tower.patch_size,
        "spatial_merge_size": vision.tower.spatial_merge_size,
        "temporal_patch_size": vision.tower.temporal_patch_size,
    });
    found.as_object().expect("an object").iter().for_each(|(field, value)| assert_eq!(value, &recorded[field]));
    let FamilyConfig::Qwen3Vl(vl) = vl3 else { panic!("the checkpoint belongs to another family") };
    let (vision, recorded) = (&vl.vision, &golden_json("config_defaults.json")["qwen3_vl"]);
    assert_eq!(vl.decoder.head_dim, recorded["text"]["head_dim"]);
    let found = json!({
        "depth": vision.tower.depth,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.tower.num_heads,
        "in_channels": vision.tower.in_channels,
        "patch_size": vision.tower.patch_size,
        "spatial_merge_size": vision.tower.spatial_merge_size,
        "temporal_patch_size": vision.tower.temporal_patch_size,
        "num_position_embeddings": vision.num_position_embeddings,
        "deepstack_visual_indexes": vision.deepstack_visual_indexes,
    });
    found
        .as_object()
        .expect("an object")
        .iter()
        .for_each(|(field, value)| assert_eq!(value, &recorded["vision"][field]));
}

#[test]
fn end_tokens_come_from_the_text_model_and_the_template() {
    let copy = Copy::of(INTERNVL_CHAT);
    let ends = copy.open().generation.eos_ids;
    std::fs::remove_file(copy.0.join("generation_config.json")).expect("the file existed");
    let found = copy.set(CONFIG, &["llm_config", "eos_token_id"], json!(5)).open().generation.eos_ids;
    assert_eq!(found, [5, ends[0]], "the ends are the text model's and the end of a turn");
}

#[test]
fn a_plan_without_weights_matches_the_checkpoint_with_omitted_settings() {
    for folder in [INTERNVL, INTERNVL_CHAT] {
        // The configuration as transformers 4.52 wrote it, without settings that equal the default.
        let copy = Copy::of(folder).set(CONFIG, &["tie_word_embeddings"], Value::Null);
        let loaded = Model::plan(&copy.open(), &Target::Cpu { threads: 1 }).expect("the model is planned");
        for file in ["model.safetensors", "preprocessor_config.json", "video_preprocessor_config.json"] {
            drop(std::fs::remove_file(copy.0.join(file)));
        }
        for file in ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "processor_config.json"] {
            drop(std::fs::remove_file(copy.0.join(file)));
        }
        let random =
            registry::without_weights(CheckpointSource::Folder(copy.0.clone())).expect("the folder has the settings");
        let checkpoint =
            Checkpoint::open(CheckpointSource::Random(std::sync::Arc::new(random))).expect("the checkpoint opens");
        let planned = Model::plan(&checkpoint, &Target::Cpu { threads: 1 }).expect("the model is planned");
        assert_eq!(planned.parameters(), loaded.parameters(), "{folder}");
        let most = |checkpoint: &Checkpoint| {
            checkpoint.image_processor.as_ref().and_then(|pictures| pictures.config().tiling).map(|tiling| tiling.most)
        };
        assert_eq!(most(&checkpoint), Some(if folder == INTERNVL_CHAT { 6 } else { 12 }));
    }
}

#[test]
fn internvl_defaults_match_transformers() {
    let recorded = &golden_json("config_defaults.json")["internvl"];
    // The processors must make tiles of the class's default size.
    let tiles = json!({ "height": 448, "width": 448 });
    let copy = ["preprocessor_config.json", "video_preprocessor_config.json"]
        .into_iter()
        .fold(Copy::of(INTERNVL), |copy, file| copy.set(file, &["size"], tiles.clone()));
    let windowless = json!({ "model_type": "internvl", "text_config": { "sliding_window": null } }).to_string();
    let FamilyConfig::InternVl(found) = config(&copy.write(CONFIG, windowless).open()) else {
        panic!("the checkpoint belongs to another family")
    };
    let (text, tower) = (&found.decoder, &found.vision);
    let expected = &recorded["text"];
    assert_eq!((text.vocabulary, text.hidden, text.layers), (151_936, 4096, 32));
    assert_eq!(json!([text.vocabulary, text.hidden, text.intermediate, text.layers, text.heads, text.kv_heads]), {
        let fields = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];
        let mut numbers: Vec<_> = fields.map(|field| expected[field].clone()).to_vec();
        numbers.push(expected["num_key_value_heads"].clone());
        Value::Array(numbers)
    });
    assert!(!text.tied_embeddings, "a checkpoint with its own output head is not tied, whatever the class says");
    assert_eq!(found.image_token, recorded["own"]["image_token_id"]);
    let found = json!({
        "hidden_size": tower.hidden,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "attention_bias": tower.has_qkv_bias,
        "use_qk_norm": tower.has_qk_norm,
        "intermediate_size": tower.intermediate,
        "image_size": [tower.image_size, tower.image_size],
        "patch_size": [tower.patch_size, tower.patch_size],
    });
    let expected = &recorded["vision"];
    found.as_object().expect("an object").iter().for_each(|(field, value)| assert_eq!(value, &expected[field]));
    assert_eq!((expected["norm_type"].as_str(), tower.norm), (Some("layer_norm"), NormKind::Layer));
    assert_eq!(expected["layer_norm_eps"].as_f64().map(|number| number as f32), Some(tower.norm_epsilon));
}

fn bare(model_type: &str, vision: &Value) -> String {
    json!({ "model_type": model_type, "vision_config": vision }).to_string()
}

#[test]
fn a_missing_rope_theta_takes_the_familys_default() {
    let theta =
        |folder: &str| config(&Copy::of(folder).set(CONFIG, &["rope_theta"], Value::Null).open()).decoder().rope_theta;
    assert_eq!((theta(QWEN2_5_VL), theta(QWEN2)), (1_000_000.0, 10_000.0));
}

#[test]
fn tensor_names_of_transformers_4_52_are_accepted() {
    let name = |old: &str| match old.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None if old.starts_with("visual.") => format!("model.{old}"),
        None => old.to_owned(),
    };
    let mut copy = Copy::of(QWEN2_5_VL);
    let index = "model.safetensors.index.json";
    let old = copy.json(index);
    let renamed: Map<String, Value> =
        old["weight_map"].as_object().expect("a map").iter().map(|(old, file)| (name(old), file.clone())).collect();
    for number in 1..=2 {
        copy = copy.rename(&format!("model-0000{number}-of-00002.safetensors"), name);
    }
    assert_single_image(QWEN2_5_VL, copy.set(index, &["weight_map"], renamed.into()).open());
}

/// The bytes of each matrix `[rows, columns]` of a bf16 tensor, with its axes swapped.
fn swapped(matrices: &[u8], rows: usize, columns: usize) -> Vec<Vec<u8>> {
    let swap = |matrix: &[u8]| {
        let at = |row: usize, column: usize| &matrix[2 * (row * columns + column)..][..2];
        (0..rows * columns).flat_map(|place| at(place % rows, place / rows).to_vec()).collect()
    };
    matrices.chunks(2 * rows * columns).map(swap).collect()
}

/// Replaces each expert tensor by the tensors (name, shape, bytes) that `tensors_of` returns, which
/// are stored one after the other in the bytes of the original tensor.
fn with_expert_tensors(
    copy: Copy,
    tensors_of: impl Fn(&str, &[usize; 3], Vec<Vec<u8>>) -> Vec<(String, Vec<usize>, Vec<u8>)>,
) -> Copy {
    copy.rewrite("model.safetensors", |header, data| {
        let names: Vec<String> = header.as_object().expect("an object").keys().cloned().collect();
        for name in names.iter().filter(|name| name.contains(".mlp.experts.")) {
            let entry = header.as_object_mut().expect("an object").remove(name).expect("the entry exists");
            let number = |value: &Value| value.as_u64().expect("a number") as usize;
            let shape = [0, 1, 2].map(|axis| number(&entry["shape"][axis]));
            let [mut start, end] = [0, 1].map(|side| number(&entry["data_offsets"][side]));
            let matrices = swapped(&data[start..end], shape[1], shape[2]);
            for (name, shape, bytes) in tensors_of(name, &shape, matrices) {
                data[start..start + bytes.len()].copy_from_slice(&bytes);
                let place = [start, start + bytes.len()];
                header[name] = json!({ "dtype": "BF16", "shape": shape, "data_offsets": place });
                start += bytes.len();
            }
        }
    })
}

#[test]
fn experts_load_fused_in_either_order_or_separate() {
    let case = "several_images";
    let upright = with_expert_tensors(Copy::of(QWEN3_VL_MOE), |name, [experts, rows, columns], matrices| {
        vec![(name.to_owned(), vec![*experts, *columns, *rows], matrices.concat())]
    });
    assert_case(QWEN3_VL_MOE, case, upright.open());
    let one_by_one = with_expert_tensors(Copy::of(QWEN3_VL_MOE), |name, [_, rows, columns], matrices| {
        let (prefix, part) = name.rsplit_once('.').expect("a name with a prefix");
        let tensors_of = |(expert, matrix): (usize, Vec<u8>)| -> Vec<(String, Vec<usize>, Vec<u8>)> {
            let parts: &[&str] = if part == "down_proj" { &["down"] } else { &["gate", "up"] };
            let bytes = matrix.chunks(matrix.len() / parts.len());
            let named = parts.iter().zip(bytes).map(|(part, bytes)| {
                let shape = vec![columns / parts.len(), *rows];
                (format!("{prefix}.{expert}.{part}_proj.weight"), shape, bytes.to_vec())
            });
            named.collect()
        };
        matrices.into_iter().enumerate().flat_map(tensors_of).collect()
    });
    assert_case(QWEN3_VL_MOE, case, one_by_one.open());
    // The name that transformers 5.17 uses for the number of experts when it saves a configuration.
    let copy = Copy::of(QWEN3_VL_MOE).set(CONFIG, &["text_config", "num_experts"], Value::Null);
    assert_case(QWEN3_VL_MOE, case, copy.set(CONFIG, &["text_config", "num_local_experts"], json!(8)).open());
}

#[test]
fn processor_config_json_takes_precedence_over_preprocessor_config_json() {
    let full = Copy::of(QWEN2_5_VL).open();
    let image = |checkpoint: &Checkpoint| checkpoint.image_processor.as_ref().map(ImageProcessor::config).cloned();
    let video = |checkpoint: &Checkpoint| checkpoint.video_processor.as_ref().map(VideoProcessor::config).cloned();
    let file = "preprocessor_config.json";
    let copy = Copy::of(QWEN2_5_VL);
    let settings = copy.json(file);
    let mut of_videos = settings.clone();
    of_videos["video_processor_type"] = json!("Qwen2VLVideoProcessor");
    let both =
        json!({ "image_processor": settings, "video_processor": of_videos, "processor_class": "Qwen2_5_VLProcessor" });
    let copy = copy.remove(file).write("processor_config.json", both.to_string());
    let alone = copy.open();
    assert_eq!((image(&alone), video(&alone)), (image(&full), video(&full)));
    assert_ne!(alone.fingerprint(), full.fingerprint(), "the fingerprints of different files differ");
    Model::plan(&alone, &Target::Cpu { threads: 2 }).expect("the model takes pictures");
    // If both files are present, the older file is read only if the newer
    // file lacks these settings.
    let mut other = settings.clone();
    other["max_pixels"] = json!(200_704);
    let copy = copy.write(file, other.to_string());
    assert_eq!(image(&copy.open()), image(&full));
    let copy = copy.write("processor_config.json", r#"{"processor_class": "Qwen2_5_VLProcessor"}"#);
    assert_eq!(image(&copy.open()).map(|config| config.pixel_bounds.max), Some(200_704));
    let copy = copy.write("processor_config.json", "[]");
    let error = Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect_err("a list is not a config");
    assert!(matches!(&error, CheckpointError::Malformed { file, .. } if file == "processor_config.json"), "{error}");
}

#[test]
fn a_sliding_window_that_no_layer_uses_changes_nothing() {
    for folder in [QWEN2, QWEN2_5_VL] {
        let full = config(&Copy::of(folder).open());
        let with = |fields: &[(&str, Value)]| {
            let copy = Copy::of(folder).set(CONFIG, &["use_sliding_window"], json!(true));
            fields.iter().fold(copy, |copy, (field, value)| copy.set(CONFIG, &[field], value.clone()))
        };
        // The model has two layers, both below `max_window_layers`.
        assert_eq!(config(&with(&[("max_window_layers", json!(2))]).open()), full);
        assert_eq!(config(&with(&[("max_window_layers", Value::Null)]).open()), full);
        assert_eq!(config(&with(&[("layer_types", json!(["full_attention", "full_attention"]))]).open()), full);
        let windowed = config(&with(&[("max_window_layers", json!(1)), ("sliding_window", json!(64))]).open());
        assert_eq!([0, 1].map(|layer| windowed.decoder().window(layer)), [None, Some(64)]);
    }
}

#[test]
fn embeddings_are_tied_by_either_tie_word_embeddings_setting() {
    let tied = |top: Value, text: Value| {
        let checkpoint = Copy::of("tests/golden/qwen2_5_vl_bare")
            .set(CONFIG, &["tie_word_embeddings"], top)
            .set(CONFIG, &["text_config", "tie_word_embeddings"], text)
            .open();
        config(&checkpoint).decoder().tied_embeddings
    };
    assert!(tied(Value::Null, json!(true)) && tied(json!(false), json!(true)) && tied(json!(true), Value::Null));
    assert!(!tied(json!(false), json!(false)) && !tied(Value::Null, Value::Null));
}

#[test]
fn unsupported_settings_that_change_results_are_refused_by_name() {
    let refused = |folder: &str, field: &[&str], value: Value| {
        let error = Copy::of(folder).set(CONFIG, field, value).error();
        assert!(matches!(&error, LoadError::Config(_)), "{field:?}: {error:?}");
        assert!(error.to_string().len() < 250 && !error.hint().is_empty(), "{error}");
        error.to_string()
    };
    let table: [(&str, &[&str], Value, &str); 10] = [
        (QWEN2_5_VL, &["rope_scaling", "mrope_interleaved"], json!(true), "rope_scaling.mrope_interleaved is true"),
        (QWEN2_5_VL, &["rope_scaling", "factor"], json!(2.0), "rope_scaling.factor is 2.0"),
        (QWEN2_5_VL, &["rope_local_base_freq"], json!(1e4), "rope_local_base_freq is 10000.0"),
        (QWEN2_5_VL, &["partial_rotary_factor"], json!(0.25), "partial_rotary_factor is 0.25"),
        (QWEN2_5_VL, &["attn_output_gate"], json!(true), "attn_output_gate is true"),
        (QWEN2, &["rope_scaling"], json!({ "type": "mrope" }), "rope_scaling.type is mrope"),
        (QWEN2, &["layer_types"], json!(["full_attention", "linear_attention"]), "layer_types[1] is linear_attention"),
        (QWEN2, &["layer_types"], json!(["full_attention"]), "layer_types names 1 layers"),
        (
            QWEN2_5_VL,
            &["vision_config", "deepstack_visual_indexes"],
            json!([8]),
            "vision_config.deepstack_visual_indexes",
        ),
        (QWEN2_5_VL, &["vision_config", "rope_theta"], json!(1e5), "vision_config.rope_theta is 100000"),
    ];
    for (folder, field, value, words) in table {
        let error = refused(folder, field, value);
        assert!(error.contains(words), "the error for {field:?} should say '{words}': {error}");
    }
    // Keys in `text_config` are refused too, and the error names `text_config`.
    let bare = "tests/golden/qwen2_5_vl_bare";
    let gate = refused(bare, &["text_config", "attn_output_gate"], json!(true));
    assert!(gate.contains("text_config.attn_output_gate is true"), "{gate}");
    let tower = refused(bare, &["vision_config", "quantization_config"], json!({ "bits": 4 }));
    assert!(tower.contains("vision_config.quantization_config"), "{tower}");
    let inner = Copy::of(bare).set(CONFIG, &["text_config", "quantization_config"], json!({ "bits": 4 })).error();
    assert!(matches!(&inner, LoadError::Quantization(_)), "{inner:?}");
    assert!(inner.to_string().contains("text_config.quantization_config.quant_method is missing"), "{inner}");
    let unknown = Copy::of(QWEN2_5_VL).set(CONFIG, &["rope_scaling", "mrope_interleaved"], json!(true)).error();
    assert!(matches!(unknown, LoadError::Config(ConfigError::Unknown { .. })), "{unknown:?}");
    // Values that change nothing are allowed.
    for (field, value) in [("partial_rotary_factor", json!(1.0)), ("attn_output_gate", json!(false))] {
        config(&Copy::of(QWEN2_5_VL).set(CONFIG, &[field], value).open());
    }
}

/// Replaces `tokenizer.json` with the files of a release without `tokenizer.json`.
fn in_parts(copy: Copy, tokenizer: &Value) -> Copy {
    let merges = tokenizer["model"]["merges"].as_array().expect("merges").iter().map(|merge| match merge {
        Value::String(pair) => pair.clone(),
        pair => format!("{} {}", pair[0].as_str().expect("a token"), pair[1].as_str().expect("a token")),
    });
    let merges: Vec<String> = std::iter::once("#version: 0.2".to_owned()).chain(merges).collect();
    let added = tokenizer["added_tokens"].as_array().expect("added tokens").iter().map(|token| {
        let mut token = token.clone();
        let id = token.as_object_mut().expect("a token").remove("id").expect("an id");
        (id.to_string(), token)
    });
    let added: Map<String, Value> = added.collect();
    let config =
        json!({ "added_tokens_decoder": added, "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>" });
    copy.remove("tokenizer.json")
        .write("vocab.json", tokenizer["model"]["vocab"].to_string())
        .write("merges.txt", merges.join("\n") + "\n")
        .write("tokenizer_config.json", config.to_string())
}

fn assert_recorded_ids(tokenizer: &Tokenizer) {
    let recorded = golden_json("qwen2_5_tokenizer/strings.json");
    let cases = recorded["cases"].as_array().expect("cases");
    assert!(cases.len() > 40);
    for case in cases {
        let ids: Vec<Value> = tokenizer
            .encode(case["text"].as_str().expect("a text"), false)
            .expect("the text encodes")
            .into_iter()
            .map(Value::from)
            .collect();
        assert_eq!(&Value::from(ids.clone()), &case["ids"], "{}", case["text"]);
        let ids: Vec<u32> = ids.iter().filter_map(Value::as_u64).map(|id| id as u32).collect();
        assert_eq!(case["decoded"], tokenizer.decode(&ids, false).expect("the tokens decode"), "{}", case["text"]);
    }
}

#[test]
fn vocab_json_and_merges_txt_give_the_recorded_ids() {
    let copy = in_parts(Copy::of(QWEN2), &golden_json("qwen2_5_tokenizer/tokenizer.json"));
    assert_recorded_ids(copy.prompts().tokenizer());
}

#[test]
fn a_split_tokenizer_with_ambiguous_ids_is_refused() {
    let parts = || {
        let copy = Copy::of(QWEN2);
        let whole = copy.json("tokenizer.json");
        in_parts(copy, &whole)
    };
    let open = |copy: &Copy| Checkpoint::open(CheckpointSource::Folder(copy.0.clone()));
    let error = |copy: &Copy| open(copy).and_then(|opened| opened.prompts()).expect_err("the tokenizer is refused");
    let settings = "tokenizer_config.json";
    let assert_error = |copy: Copy, words: &str| {
        let error = error(&copy);
        assert!(matches!(error, CheckpointError::Text(_)) && error.to_string().contains(words), "{error}");
    };
    parts().prompts();
    assert_error(parts().set(settings, &["tokenizer_class"], json!("GPT2Tokenizer")), "GPT2Tokenizer");
    assert_error(parts().set(settings, &["added_tokens_decoder"], Value::Null), "added_tokens.json");
    assert_error(parts().set(settings, &["eos_token"], json!("<|nowhere|>")), "<|nowhere|>");
    assert_error(parts().write("merges.txt", "#version: 0.2\na b c\n"), "line 2");
    assert_error(parts().write("vocab.json", "[1]"), "vocab.json");
    let missing = error(&parts().remove("merges.txt"));
    assert!(matches!(&missing, CheckpointError::MissingFile { file, .. } if file == "tokenizer.json"), "{missing}");
    // Older checkpoints list added tokens in a separate file.
    let copy = parts();
    let ids: Map<String, Value> = copy.json(settings)["added_tokens_decoder"]
        .as_object()
        .expect("an object")
        .iter()
        .map(|(id, token)| {
            (token["content"].as_str().expect("a text").to_owned(), json!(id.parse::<u32>().expect("an id")))
        })
        .collect();
    let copy = copy.set(settings, &["added_tokens_decoder"], Value::Null);
    let copy = copy.write("added_tokens.json", Value::from(ids).to_string());
    let whole = Copy::of(QWEN2).prompts();
    let text = "<|im_start|>user\nHi<|im_end|>";
    assert_eq!(copy.prompts().tokenizer().encode(text, false).ok(), whole.tokenizer().encode(text, false).ok());
}

#[test]
fn rope_scaling_is_supported_or_refused_by_name() {
    let with = |rope: Value| {
        let copy = Copy::of("tests/golden/llama").set(CONFIG, &["rope_scaling"], rope).open();
        FamilyConfig::of(&copy).map(|config| config.decoder().clone()).map_err(|error| error.to_string())
    };
    let llama3 = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192 });
    let without = |key: &str| {
        let mut rope = llama3.clone();
        rope.as_object_mut().expect("an object").remove(key);
        with(rope).expect_err("the field is required")
    };
    assert!(with(llama3.clone()).is_ok());
    let place = "config.json: rope_scaling";
    assert_eq!(without("factor"), format!("{place}.factor must be 1 or more where the type is llama3"));
    assert!(without("low_freq_factor").starts_with(&format!("{place}.high_freq_factor must be greater")));
    let yarn = json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096 });
    assert_eq!(with(yarn).expect("YaRN scaling is accepted").context_tokens, 16_384);
    assert_eq!(
        with(json!({ "type": "linear", "factor": 4.0 })).expect("linear scaling is accepted").context_tokens,
        4096
    );
    let other = with(json!({ "rope_type": "longrope", "factor": 4.0 })).expect_err("longrope scaling is refused");
    assert!(other.starts_with(&format!("{place}.rope_type is longrope; supported: default")), "{other}");
    let unread = with(json!({ "rope_type": "linear", "factor": 4.0, "beta_fast": 32.0 }))
        .expect_err("linear scaling has no beta_fast");
    assert_eq!(unread, format!("{place}.beta_fast is 32.0; this changes what the model computes and is not supported"));
    let both = with(json!({ "rope_type": "yarn", "type": "linear", "factor": 4.0 }))
        .expect_err("two different types are ambiguous");
    assert_eq!(both, format!("{place}.rope_type and rope_scaling.type differ"));
    assert!(with(json!({ "rope_type": "yarn", "factor": 0.5 })).is_err());
}
