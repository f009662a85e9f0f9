//! Gemma 3: the settings of its two file formats, its defaults, the settings that are refused, the
//! names of its weights, and the parts of its layers that other families lack.
//! `golden_text_families.rs` and `golden_vision_families.rs` compare its logits with logits of
//! transformers.

use bursar_kernels::{Target, ops::gate_mul::GateActivation};
use bursar_model::{
    MergeSize, Model,
    checkpoint::{Checkpoint, CheckpointSource},
    flow::Grid,
    registry::FamilyConfig,
};
use serde_json::{Value, json};

use crate::{
    bench::{Bench, Case, alone, encode, relative_error},
    common::golden_json,
    copy::{Copy, GEMMA3, GEMMA3_TEXT, decoder, read_decoder},
};

const CPU: Target = Target::Cpu { threads: 2 };
const CONFIG: &str = "config.json";
/// The type of each layer of `gemma3_text`.
const KINDS: [&str; 7] = [SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL, SLIDING];
const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

#[test]
fn defaults_match_transformers() {
    let bare = decoder(&Copy::of(GEMMA3_TEXT).write(CONFIG, json!({ "model_type": "gemma3_text" }).to_string()));
    let recorded = &golden_json("config_defaults.json")["gemma3"];
    let found = json!({
        "vocab_size": bare.vocabulary,
        "hidden_size": bare.hidden,
        "intermediate_size": bare.intermediate,
        "num_hidden_layers": bare.layers,
        "num_attention_heads": bare.heads,
        "num_key_value_heads": bare.kv_heads,
        "head_dim": bare.head_dim,
        "max_position_embeddings": bare.context_tokens,
        "tie_word_embeddings": bare.tied_embeddings,
        "sliding_window": bare.window(0),
        "layer_types": (0..26).map(|layer| if bare.window(layer).is_some() { SLIDING } else { FULL }).collect::<Vec<_>>(),
    });
    found.as_object().expect("an object").iter().for_each(|(field, value)| assert_eq!(value, &recorded[field]));
    let theta = |kind: &str| recorded["rope_parameters"][kind]["rope_theta"].as_f64();
    assert_eq!([bare.rope_of(5).0, bare.rope_of(0).0].map(Some), [theta(FULL), theta(SLIDING)]);
    assert_eq!(recorded["hidden_activation"], "gelu_pytorch_tanh");
    assert_eq!(bare.activation, GateActivation::GeluTanh);
    assert_eq!(Some(f64::from(bare.attention_scale)), recorded["query_pre_attn_scalar"].as_f64().map(|n| n.powf(-0.5)));
    assert_eq!(bare.embedding_scale, 48.0, "the root of 2,304");
}

#[test]
fn both_file_formats_mean_the_same() {
    let released = decoder(&Copy::of(GEMMA3_TEXT));
    let saved = Copy::edited(
        GEMMA3_TEXT,
        json!({
            "rope_local_base_freq": null,
            "rope_theta": null,
            "sliding_window_pattern": null,
            "layer_types": KINDS,
            "tie_word_embeddings": true,
            "rope_parameters": {
                "full_attention": { "rope_type": "default", "rope_theta": 1_000_000.0 },
                "sliding_attention": { "rope_type": "default", "rope_theta": 10_000.0 },
            },
        }),
    );
    assert_eq!(decoder(&saved), released);
    let scaled = json!({ "rope_type": "linear", "factor": 8.0 });
    let [released, saved] = [
        json!({ "rope_scaling": scaled }),
        json!({ "rope_theta": null, "rope_parameters": { "full_attention": scaled } }),
    ];
    let [released, saved] = [released, saved].map(|edit| decoder(&Copy::edited(GEMMA3_TEXT, edit)));
    assert_eq!(released, saved);
    assert_ne!(released.rope_of(5).1, released.rope_of(0).1, "only full attention is scaled");
}

#[test]
fn a_window_that_no_sequence_exceeds_keeps_the_local_frequencies() {
    let checkpoint = Copy::of(GEMMA3_TEXT).open().with_context_limit(23);
    let model = Model::plan(&checkpoint, &CPU).expect("the model is planned");
    let decoder = model.config().decoder();
    assert_eq!(decoder.window(0), None, "23 tokens see each other");
    assert_eq!([decoder.rope_of(0).0, decoder.rope_of(5).0], [10_000.0, 1_000_000.0]);
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    let refused = |edit: Value| read_decoder(&Copy::edited(GEMMA3_TEXT, edit)).expect_err("the settings are refused");
    let changes =
        |key: &str, value: &str| format!("{key} is {value}; this changes what the model computes and is not supported");
    assert_eq!(refused(json!({ "final_logit_softcapping": 30.0 })), changes("final_logit_softcapping", "30.0"));
    assert_eq!(refused(json!({ "attn_logit_softcapping": 50.0 })), changes("attn_logit_softcapping", "50.0"));
    assert_eq!(refused(json!({ "use_bidirectional_attention": true })), changes("use_bidirectional_attention", "true"));
    let flat = json!({ "rope_parameters": { "rope_theta": 5.0 } });
    assert_eq!(refused(flat), changes("rope_parameters.rope_theta", "5.0"));
    let partial = json!({ "rope_parameters": { "full_attention": { "partial_rotary_factor": 0.5 } } });
    assert_eq!(refused(partial), changes("rope_parameters.full_attention.partial_rotary_factor", "0.5"));
    assert_eq!(
        refused(json!({ "hidden_activation": "relu" })),
        "hidden_activation is relu; supported: silu and gelu_pytorch_tanh"
    );
    assert_eq!(
        refused(json!({ "query_pre_attn_scalar": 0 })),
        "query_pre_attn_scalar is 0; supported: numbers greater than 0"
    );
    assert_eq!(refused(json!({ "sliding_window_pattern": 0 })), "sliding_window_pattern is 0; expected from 1 to 4096");
    assert_eq!(
        refused(json!({ "layer_types": ["chunked_attention", FULL, FULL, FULL, FULL, FULL, FULL] })),
        "layer_types[0] is chunked_attention; supported: full_attention and sliding_attention"
    );
    assert_eq!(
        refused(json!({ "layer_types": [FULL, SLIDING] })),
        "layer_types names 2 layers, but num_hidden_layers is 7"
    );
}

#[test]
fn settings_of_gemma_are_refused_for_other_families() {
    let other = |key: &str, value: Value| read_decoder(&Copy::of("tests/golden/llama").set(CONFIG, &[key], value));
    for (key, value) in [("query_pre_attn_scalar", json!(256)), ("rope_local_base_freq", json!(10_000))] {
        let error = other(key, value.clone()).expect_err("the key is refused");
        assert_eq!(error, format!("{key} is {value}; this changes what the model computes and is not supported"));
    }
}

/// Each setting that only Gemma has changes logits by more than the tolerance of the recording.
#[test]
fn every_setting_of_gemma_changes_the_logits() {
    let logits = |copy: &Copy| {
        let bench = Bench::of(copy.open(), 2);
        let case = Case::read(GEMMA3_TEXT, &bench.checkpoint, "long");
        alone(&bench, &case, &[], &[usize::MAX]).logits.swap_remove(0)
    };
    let whole = logits(&Copy::of(GEMMA3_TEXT));
    for edit in [
        json!({ "hidden_activation": "silu" }),
        json!({ "query_pre_attn_scalar": 64 }),
        json!({ "rope_local_base_freq": 1_000_000 }),
        json!({ "rope_theta": 10_000 }),
        json!({ "sliding_window": 24 }),
        json!({ "sliding_window_pattern": 7 }),
        json!({ "rope_scaling": { "rope_type": "linear", "factor": 8.0 } }),
    ] {
        let error = relative_error(&logits(&Copy::edited(GEMMA3_TEXT, edit.clone())), &whole);
        assert!(error > 1e-3, "{edit} changes the logits by only {error:e}");
    }
}

#[test]
fn picture_settings_are_read_and_wrong_ones_refused() {
    let family = FamilyConfig::of(&Copy::of(GEMMA3).open()).expect("the family serves it");
    assert_eq!(family.tile(), Some(Grid { t: 1, h: 12, w: 12 }));
    assert_eq!((family.merge().map(MergeSize::side), family.whole_picture_tokens(0)), (Some(2), 36));
    let refused = |edit: fn(Copy) -> Copy| read_decoder(&edit(Copy::of(GEMMA3))).expect_err("the settings are refused");
    assert_eq!(
        refused(|copy| copy.set(CONFIG, &["mm_tokens_per_image"], json!(35))),
        "mm_tokens_per_image is 35; expected the square of a divisor of 12, the patches along a side"
    );
    assert_eq!(
        refused(|copy| copy.set(CONFIG, &["vision_config", "hidden_act"], json!("gelu"))),
        "vision_config.hidden_act is gelu; supported: gelu_pytorch_tanh"
    );
    assert_eq!(
        refused(|copy| copy.set(CONFIG, &["image_token_index"], json!(1 << 20))),
        "image_token_index is 1048576, but vocab_size is 384"
    );
    assert_eq!(
        refused(|copy| copy.set("preprocessor_config.json", &["size"], json!({ "height": 112, "width": 112 }))),
        "the model takes tiles of 168, but the image processor makes tiles of 112"
    );
    let null = refused(|copy| copy.set(CONFIG, &["mm_tokens_per_image"], Value::Null));
    assert!(null.starts_with("mm_tokens_per_image is 256; expected"), "null is the default: {null}");
}

#[test]
fn unsupported_crop_settings_are_refused_by_name() {
    for (field, value, expected) in [
        ("pan_and_scan_max_num_crops", json!(1), "`pan_and_scan_max_num_crops` is 1; expected from 2 to 64"),
        ("pan_and_scan_min_crop_size", json!(0), "`pan_and_scan_min_crop_size` is 0; expected above 0"),
        ("pan_and_scan_min_ratio_to_activate", json!(-1.0), "`pan_and_scan_min_ratio_to_activate` is -1"),
        ("max_pixels", json!(1000), "`max_pixels` is 1000; expected null"),
    ] {
        let file = "preprocessor_config.json";
        let copy = Copy::of(GEMMA3).set(file, &["do_pan_and_scan"], json!(true)).set(file, &[field], value);
        let error = Checkpoint::open(CheckpointSource::Folder(copy.0.clone())).expect_err("the setting is refused");
        assert!(error.to_string().contains(expected), "{field}: {error}");
    }
}

#[test]
fn gemma3_has_no_video_processor() {
    let family = FamilyConfig::of(&Copy::of(GEMMA3).open()).expect("the family serves it");
    let checkpoint = Copy::of(GEMMA3).open();
    assert!(family.video_processor(&checkpoint).is_none());
}

#[test]
fn names_that_transformers_saves_are_read() {
    let logits = |copy: &Copy| {
        let bench = Bench::of(copy.open(), 2);
        let case = Case::read(GEMMA3, &bench.checkpoint, "one_image");
        let rows = encode(&bench, &case);
        alone(&bench, &case, &rows, &[usize::MAX]).logits.swap_remove(0)
    };
    let released = logits(&Copy::of(GEMMA3));
    for tower in ["model.vision_tower", "model.vision_tower.vision_model"] {
        let renamed = Copy::of(GEMMA3).rename("model.safetensors", |name| {
            let name = name.replace("vision_tower.vision_model", tower);
            let name = name.replace("language_model.model", "model.language_model");
            if name.starts_with("multi_modal_projector") { format!("model.{name}") } else { name }
        });
        assert_eq!(logits(&renamed), released, "{tower}");
    }
}
