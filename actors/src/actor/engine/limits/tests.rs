//! Tests of limits: a limit that the user set is kept or refused, and default limits adapt to it.

use bursar_budgets::Hint;
use bursar_model::{
    checkpoint::{Checkpoint, CheckpointSource},
    demo,
    processor::ImageProcessorConfig,
    registry::{FamilyConfig, shape_settings},
};
use serde_json::{Value, json};

use super::*;
use crate::knobs::Knobs;

fn shape(name: &str) -> Checkpoint {
    let random = shape_settings(name).expect("a known shape");
    Checkpoint::open(CheckpointSource::Random(std::sync::Arc::new(random))).expect("the checkpoint opens")
}

fn released_shape() -> Checkpoint {
    shape("qwen2.5-vl-7b")
}

fn lowered(checkpoint: &Checkpoint, options: &LoadOptions, is_host: bool) -> Result<EffectiveLimits, StartError> {
    let family = FamilyConfig::of(checkpoint).expect("the family is known");
    options.lowered(&ModelBounds { family: &family, pictures: checkpoint.image_processor.as_ref(), is_host })
}

/// The effective limits of these settings on a GPU.
fn on_a_gpu(checkpoint: &Checkpoint, settings: Value) -> Result<EffectiveLimits, StartError> {
    let Value::Object(settings) = settings else { panic!("the settings are not an object") };
    let (knobs, names) = Knobs::named_from(settings).expect("all knob names are known");
    let options = LoadOptions { names, ..knobs.options().expect("the options are consistent") };
    lowered(checkpoint, &options, false)
}

#[test]
fn launches_follow_the_largest_picture_unless_set() {
    let released = released_shape();
    let sizes = |settings| {
        let envelope = on_a_gpu(&released, settings).expect("the limits are consistent").envelope;
        (envelope.picture_patches, envelope.launch_patches)
    };
    assert_eq!(sizes(json!({ "max_pixels": 2_073_600 })), (10_579, 10_579));
    assert_eq!(sizes(json!({ "picture_patches": 30_000 })), (30_000, 30_000));
    assert_eq!(sizes(json!({ "max_pixels": 200_704 })), (1024, 4096), "small pictures share a launch");
    assert_eq!(sizes(json!({ "max_pixels": 2_073_600, "launch_patches": 20_000 })), (10_579, 20_000));
    assert_eq!(
        sizes(json!({ "max_pixels": 2_073_600, "launch_patches": 5000 })),
        (5000, 5000),
        "explicit settings are kept"
    );
    let given = LoadOptions::small();
    let envelope = lowered(&released, &given, false).expect("the limits are consistent").envelope;
    assert_eq!(Some(envelope), given.envelope, "a given envelope is used unchanged");
}

#[test]
fn the_default_picture_limit_leaves_text_a_quarter_of_the_context() {
    let released = released_shape();
    for (settings, patches) in [(json!({}), 24_576), (json!({ "max_model_len": 4096 }), 12_288)] {
        let EffectiveLimits { envelope, own_pixels, .. } =
            on_a_gpu(&released, settings).expect("the limits are consistent");
        assert_eq!((envelope.picture_patches, envelope.launch_patches), (patches, patches));
        assert!(
            own_pixels.is_some_and(|own| own > patches as u64 * 196),
            "the model's own limit on pixels is reported: {own_pixels:?}"
        );
    }
    let explicit = on_a_gpu(&released, json!({ "max_pixels": 6_422_528 })).expect("the limits are consistent");
    assert_eq!((explicit.envelope.picture_patches, explicit.own_pixels), (32_768, None), "explicit settings are kept");
}

#[test]
fn launches_hold_pictures_rounded_up_beyond_the_processors_maximum() {
    let mut fixed = released_shape();
    let own = fixed.image_processor.as_ref().expect("the checkpoint takes pictures").config().clone();
    let pixel_bounds = PixelBounds { min: 1_003_520, max: 1_003_520 };
    let config = ImageProcessorConfig { pixel_bounds, ..own };
    fixed.image_processor = Some(ImageProcessor::new(config).expect("valid settings"));
    let EffectiveLimits { envelope, pictures, .. } = on_a_gpu(&fixed, json!({})).expect("the limits are consistent");
    let pictures = pictures.expect("the checkpoint takes pictures");
    assert_eq!(pictures.config().pixel_bounds, pixel_bounds, "the pixel bounds are unchanged");
    let patches = pictures.plan(640, 480).expect("a plan").patches;
    assert!(
        (5120 + 1..=envelope.picture_patches).contains(&patches),
        "{patches} patches are not above 5120 and within {}",
        envelope.picture_patches
    );
}

#[test]
fn a_picture_limit_of_a_tiling_model_counts_whole_tiles() {
    let tiled = shape("internvl3-8b");
    let limit = |settings: Value| {
        let lowered = on_a_gpu(&tiled, settings).expect("the limits are consistent");
        let plan = lowered.pictures.expect("the checkpoint takes pictures").plan(4000, 3000).expect("a plan");
        assert!(plan.patches <= lowered.envelope.picture_patches);
        (lowered.envelope.picture_patches, plan.patches)
    };
    assert_eq!(limit(json!({})), (13 * 1024, 13 * 1024));
    assert_eq!(limit(json!({ "picture_patches": 12_000 })), (12_000, 7 * 1024), "six tiles and the thumbnail fit");
    assert_eq!(limit(json!({ "max_pixels": 448 * 448 })), (1024, 1024));
    assert_eq!(
        limit(json!({ "max_pixels": 12_845_056 })),
        (13 * 1024, 13 * 1024),
        "no picture has more patches than the largest tiling"
    );
    let short = on_a_gpu(&tiled, json!({ "max_model_len": 300 })).expect("a model that serves only text starts");
    assert_eq!(short.envelope.picture_patches, 1024, "pictures have no explicit limit");
    let short = on_a_gpu(&tiled, json!({ "max_model_len": 300, "launch_patches": 2000 }))
        .expect("a model that serves only text starts");
    assert_eq!(short.envelope.picture_patches, 1024, "a launch has space for one tile");
    for (settings, message) in [
        (json!({ "launch_patches": 1000 }), "`launch_patches` is 1000; expected at least 1024"),
        (json!({ "picture_patches": 1000 }), "`picture_patches` is 1000; expected at least 1024"),
        (json!({ "max_pixels": 200_703 }), "`max_pixels` is 200703; expected at least 200704"),
        (json!({ "min_pixels": 200_704 }), "`min_pixels` is 200704; expected at most 1"),
    ] {
        let error = on_a_gpu(&tiled, settings.clone()).map(drop).expect_err("the setting is refused").to_string();
        assert!(error.contains(message), "{settings}: {error}");
    }
}

#[test]
fn more_sequences_than_step_tokens_raise_an_unset_step() {
    let demo = Checkpoint::open(demo::checkpoint()).expect("the checkpoint opens");
    let with = |step_tokens| {
        let limits = Limits { sequences: Some(500), step_tokens, ..Limits::default() };
        lowered(&demo, &LoadOptions { limits, ..LoadOptions::small() }, true)
    };
    assert_eq!(with(None).expect("the limits are consistent").envelope.step_tokens, 500);
    assert!(with(Some(100)).is_err(), "an explicit value is kept, and refused if it contradicts another setting");
}

#[test]
fn a_step_has_space_for_a_whole_picture_and_drafts() {
    let gemma = shape("gemma-3-4b");
    let with = |draft_tokens, step_tokens| {
        let limits = Limits { draft_tokens: Some(draft_tokens), step_tokens, ..Limits::default() };
        let envelope = Some(Envelope { picture_patches: 4096, launch_patches: 4096, ..Envelope::small() });
        lowered(&gemma, &LoadOptions { envelope, limits, ..LoadOptions::small() }, true)
    };
    let of = |draft_tokens, step_tokens| {
        with(draft_tokens, step_tokens).expect("the limits are consistent").envelope.step_tokens
    };
    assert_eq!(of(0, None), 4 + 256, "a token of each sequence and a picture");
    assert_eq!(of(3, None), 4 + 256 + 2 * 12);
    assert_eq!(of(3, Some(260)), 260, "an explicit value is kept");
    let error = with(0, Some(259)).map(drop).expect_err("the picture does not fit").to_string();
    assert!(error.contains("`step_tokens` is 259; expected at least 260 (4 sequences + 256 tokens"), "{error}");
    let default = on_a_gpu(&gemma, json!({})).expect("the limits are consistent").envelope;
    assert_eq!(default.step_tokens, Envelope::gpu().step_tokens);
}

#[test]
fn impossible_limits_are_blamed_on_the_users_setting() {
    let released = released_shape();
    for (settings, message, blamed) in [
        (json!({ "min_pixels": 2_000_000, "max_pixels": 1_000_000 }), "`min_pixels` is 2000000", "max_pixels"),
        (json!({ "picture_pixels_min": 9_000_000 }), "`picture_pixels_min` is 9000000", "at most 4816896"),
        (
            json!({ "mm_processor_kwargs": { "min_pixels": 99_999_999 } }),
            "`mm_processor_kwargs.min_pixels` is 99999999",
            "at most 4816896",
        ),
        (json!({ "max_pixels": 500 }), "`max_pixels` is 500", "at least 784"),
        (json!({ "launch_patches": 2 }), "`launch_patches` is 2", "at least 4"),
        (
            json!({ "max_num_seqs": 600, "max_num_batched_tokens": 500 }),
            "`max_num_batched_tokens` is 500",
            "at least 600",
        ),
        (json!({ "max_total_tokens": 1_u64 << 40 }), "`max_total_tokens` is", "at most"),
        (json!({ "kv_cache_memory_bytes": 1_u64 << 60 }), "`kv_cache_memory_bytes` is", "at most"),
    ] {
        let error = on_a_gpu(&released, settings.clone()).map(drop).expect_err("the setting is refused");
        let error_text = format!("{error}; {}", error.hint());
        assert!(error_text.contains(message) && error_text.contains(blamed), "{settings}: {error_text}");
        assert!(!error_text.contains("preprocessor_config"), "the hint does not blame a file: {error_text}");
    }
    // A maximum below the model's own minimum lowers that minimum, because the user did not set a
    // minimum.
    on_a_gpu(&released, json!({ "max_pixels": 1600 })).expect("the setting is accepted");
}
