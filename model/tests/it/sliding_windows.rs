//! Sliding windows: the layers that have a window, the settings that are refused, and the effect of
//! the window on logits. `golden_text_families.rs` compares these logits with logits of
//! transformers.

use bursar_kernels::Target;
use bursar_model::{Model, registry::FamilyConfig};
use serde_json::{Value, json};

use crate::{
    bench::{Bench, Case, alone, relative_error},
    copy::{Copy, QWEN2},
    golden_text_families::WINDOWED,
};

const CPU: Target = Target::Cpu { threads: 2 };
const CONFIG: &str = "config.json";

/// The windows of four layers with a context of 8,192 tokens, or the error message.
fn windows(model_type: &str, edit: Value) -> Result<Vec<Option<usize>>, String> {
    let mut fields = json!({ "model_type": model_type, "num_hidden_layers": 4, "max_position_embeddings": 8192 });
    fields.as_object_mut().expect("an object").extend(edit.as_object().expect("an object").clone());
    let read = FamilyConfig::of(&Copy::of(QWEN2).write(CONFIG, fields.to_string()).open());
    let config = read.map_err(|error| error.to_string().trim_start_matches("config.json: ").to_owned())?;
    Ok((0..4).map(|layer| config.decoder().window(layer)).collect())
}

#[test]
fn sliding_window_layers_follow_the_rule_of_the_model_class() {
    let all = |window| Ok(vec![window; 4]);
    let used = |more: Value| {
        let mut fields = json!({ "use_sliding_window": true });
        fields.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        fields
    };
    assert_eq!(windows("mistral", json!({})), all(Some(4096)), "the default of the model class");
    assert_eq!(windows("mistral", json!({ "sliding_window": 8191 })), all(Some(8191)));
    assert_eq!(windows("mistral", json!({ "sliding_window": 8192 })), all(None), "the window holds the full context");
    assert_eq!(windows("mistral", json!({ "sliding_window": null })), all(None));
    assert_eq!(windows("llama", used(json!({ "sliding_window": 64 }))), all(None), "the class has no window");
    assert_eq!(windows("qwen3_moe", json!({ "sliding_window": 64 })), all(None));
    assert_eq!(windows("qwen3_moe", used(json!({ "max_window_layers": 4 }))), all(Some(4096)));
    let kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"];
    for model_type in ["qwen2", "qwen3"] {
        assert_eq!(windows(model_type, json!({ "sliding_window": 64, "max_window_layers": 0 })), all(None));
        assert_eq!(windows(model_type, used(json!({ "sliding_window": null, "max_window_layers": 0 }))), all(None));
        assert_eq!(windows(model_type, used(json!({}))), all(None), "the first 28 layers have full attention");
        let later = used(json!({ "sliding_window": 1, "max_window_layers": 3 }));
        assert_eq!(windows(model_type, later), Ok(vec![None, None, None, Some(1)]));
        let named = used(json!({ "sliding_window": 64, "max_window_layers": 0, "layer_types": kinds }));
        assert_eq!(windows(model_type, named), Ok(vec![None, Some(64), Some(64), None]));
    }
}

#[test]
fn a_window_that_contradicts_the_class_is_refused_by_name() {
    let refused = |model_type: &str, edit: Value| windows(model_type, edit).expect_err("the window is refused");
    let zero = "sliding_window is 0; supported: null, or at least 1";
    assert_eq!(refused("mistral", json!({ "sliding_window": 0 })), zero);
    let of_kind = |kind: &str| json!(["full_attention", kind, "full_attention", "full_attention"]);
    let sliding = of_kind("sliding_attention");
    let unused = "layer_types[1] is sliding_attention, but sliding_window is not set or use_sliding_window is not true";
    assert_eq!(refused("qwen2", json!({ "layer_types": sliding })), unused);
    let chunked = json!({ "use_sliding_window": true, "layer_types": of_kind("chunked_attention") });
    assert_eq!(
        refused("qwen2", chunked),
        "layer_types[1] is chunked_attention; supported: full_attention and sliding_attention"
    );
    let ignored = "layer_types[1] is sliding_attention; supported: full_attention";
    assert_eq!(refused("llama", json!({ "layer_types": sliding })), ignored);
    let mixed = "layer_types[0] is full_attention; supported: sliding_attention";
    assert_eq!(refused("mistral", json!({ "layer_types": sliding })), mixed, "the class has a window in all layers");
    let short = json!({ "use_sliding_window": true, "layer_types": ["sliding_attention"] });
    assert_eq!(refused("qwen3", short), "layer_types names 1 layers, but num_hidden_layers is 4");
    let negative = refused("mistral", json!({ "sliding_window": -1 }));
    assert!(negative.contains("invalid value: integer `-1`, expected usize"), "{negative}");
    let null = json!({ "use_sliding_window": true, "max_window_layers": null });
    assert_eq!(refused("qwen2", null), "max_window_layers is null; supported: a number of layers");
}

#[test]
fn a_window_that_no_sequence_exceeds_is_dropped() {
    let window = |tokens: usize| {
        let checkpoint = Copy::of(WINDOWED[0]).open().with_context_limit(tokens);
        Model::plan(&checkpoint, &CPU).expect("the model is planned").config().decoder().window(0)
    };
    assert_eq!(window(33), Some(32));
    assert_eq!(window(32), None, "32 tokens see each other");
}

#[test]
fn removing_the_sliding_window_changes_the_recorded_logits() {
    for (folder, key) in WINDOWED.into_iter().zip(["sliding_window", "layer_types"]) {
        // Without `layer_types`, the first `max_window_layers` layers have full attention. Here
        // these are all four layers.
        let copy = Copy::of(folder).set(CONFIG, &[key], json!(null));
        let full = Bench::of(copy.open(), 2);
        assert_eq!(full.model.config().decoder().sliding, None);
        let case = Case::read(folder, &full.checkpoint, "long");
        let (_, expected) = case.logits("logit_positions", "logits").pop().expect("the last token's logits");
        let found = alone(&full, &case, &[], &[usize::MAX]);
        let error = relative_error(&found.logits[0], &expected);
        assert!(error > 1e-2, "{folder}: the window changes the logits by only {error:e}");
    }
}

#[test]
fn layers_from_max_window_layers_have_the_window() {
    // The windowed layers are the last two, so `layer_types` and `max_window_layers` mean the same.
    let named = json!(["full_attention", "full_attention", "sliding_attention", "sliding_attention"]);
    let named = Copy::of(WINDOWED[1]).set(CONFIG, &["layer_types"], named);
    let counted = Copy::of(WINDOWED[1]).set(CONFIG, &["layer_types"], json!(null));
    let counted = counted.set(CONFIG, &["max_window_layers"], json!(2));
    let [named, counted] = [&named, &counted].map(|copy| Bench::of(copy.open(), 2));
    assert_eq!(
        (0..4).map(|layer| counted.model.config().decoder().window(layer)).collect::<Vec<_>>(),
        [None, None, Some(23), Some(23)]
    );
    let case = Case::read(WINDOWED[1], &named.checkpoint, "long");
    let [named, counted] = [&named, &counted].map(|bench| alone(bench, &case, &[], &[usize::MAX]).logits);
    assert_eq!(named, counted);
}
