//! Tests that every known name is accepted, that contradictions are reported, and that
//! unknown names are refused.

use bursar_budgets::{Bytes, Hint};
use serde_json::json;

use super::*;
use crate::knobs::{Kind, NESTED, TABLE};

fn read(json: Value) -> Result<Knobs, KnobError> {
    let Value::Object(map) = json else { panic!("the settings are not an object") };
    Knobs::from_settings(map)
}

/// Returns two different values of this kind.
fn values(kind: Kind) -> [Value; 2] {
    match kind {
        Kind::Count(_) | Kind::CountOrNone(_) => [json!(640), json!("641")],
        Kind::Size | Kind::SizeOrNone => [json!("2GiB"), json!(4096)],
        Kind::Fraction => [json!(0.5), json!("0.25")],
        Kind::Gibibytes => [json!(0), json!("4")],
        Kind::Name => [json!("eyes"), json!("ears")],
        Kind::Type => [json!("half"), json!("bf16")],
        Kind::CacheType => [json!("fp8_e4m3"), json!("auto")],
        Kind::StateType => [json!("bf16"), json!("float32")],
        Kind::Format => [json!("fp8"), json!("fp8_per_block")],
        Kind::DraftFormat => [json!("int4"), json!("NONE")],
        Kind::Method => [json!("ngram"), json!("NONE")],
        Kind::Weights => [json!("gold=4,free=1"), json!({"gold": 4, "free": 2})],
        Kind::Switch => [json!(true), json!("false")],
    }
}

#[test]
fn every_alias_sets_its_knob_and_contradicting_aliases_are_refused() {
    for knob in TABLE {
        let [one, other] = values(knob.kind);
        let expected = read(json!({ knob.name: one })).unwrap_or_else(|error| panic!("{}: {error}", knob.name));
        assert_ne!(expected, Knobs::default(), "{} has an effect", knob.name);
        for alias in knob.aliases {
            assert_eq!(read(json!({ alias.name: one })), Ok(expected.clone()), "{}", alias.name);
            let both = json!({ knob.name: one, alias.name: one });
            assert_eq!(read(both), Ok(expected.clone()), "{} has the same effect as {}", alias.name, knob.name);
            let error = read(json!({ knob.name: one, alias.name: other })).expect_err("the two values differ");
            let KnobError::ConflictingValues { knob: of, .. } = &error else { panic!("{error:?}") };
            assert_eq!(*of, knob.name);
            let (message, hint) = (error.to_string(), error.hint());
            assert!(
                [knob.name, alias.name].iter().all(|name| message.contains(name) && hint.contains(name)),
                "{message}"
            );
        }
    }
}

#[test]
fn no_name_means_two_knobs() {
    let names = TABLE.iter().flat_map(|knob| std::iter::once(knob.name).chain(knob.aliases.iter().map(|a| a.name)));
    let mut names: Vec<_> = names.chain(NESTED.iter().map(|nested| nested.name)).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all, "{names:?}");
}

#[test]
fn an_unknown_name_is_refused_with_the_closest_known_one() {
    for (typed, meant) in [
        ("step_token", "step_tokens"),
        ("max-num-seqs", "max_num_seqs"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("MAX_TOTAL_TOKEN_NUM", "max_total_token_num"),
        ("swapspace", "swap_space"),
    ] {
        let error = read(json!({ typed: 4 })).expect_err("the knob does not exist");
        assert_eq!(error, KnobError::Unknown { name: typed.to_owned(), nearest: meant });
        assert!(error.hint().contains(meant), "{}", error.hint());
    }
}

#[test]
fn an_impossible_value_is_refused_with_the_expected_values() {
    for wrong in [
        json!({ "sequences": 0 }),
        json!({ "sequences": -1 }),
        json!({ "max_model_len": "auto" }),
        json!({ "step_tokens": 12.5 }),
        json!({ "memory_fraction": 0 }),
        json!({ "gpu_memory_utilization": 1.01 }),
        json!({ "device_fraction": "NaN" }),
        json!({ "kv_bytes": "2GB" }),
        json!({ "kv_cache_memory_bytes": 0 }),
        json!({ "max_model_len": "16x" }),
        json!({ "dtype": "int8" }),
        json!({ "kv_cache_dtype": "fp8_e5m2" }),
        json!({ "state_dtype": "float16" }),
        json!({ "served_model_name": " " }),
        json!({ "served_model_name": ["a", "b"] }),
        json!({ "disable_log_requests": "yes" }),
        json!({ "context_tokens": -1 }),
        json!({ "mm_processor_kwargs": "max_pixels" }),
        json!({ "mm_processor_kwargs": { "max_pixels": "large" } }),
        json!({ "limit_mm_per_prompt": { "image": 0 } }),
        json!({ "limit_mm_per_prompt": { "video": { "count": 1, "num_frames": "many" } } }),
    ] {
        let error = read(wrong.clone()).expect_err("the value is invalid");
        let KnobError::Value { name, expected, .. } = &error else { panic!("{wrong}: {error:?}") };
        assert!(error.to_string().contains(name) && error.hint().contains(expected), "{error}");
    }
    assert_eq!(
        read(json!({ "sequences": 8192.0, "step_tokens": "8_192" }))
            .expect("whole numbers are accepted in other notations")
            .step_tokens,
        Some(8192)
    );
    for unsaid in [json!(-1), json!("-1")] {
        assert_eq!(
            read(json!({ "max_model_len": unsaid })),
            Ok(Knobs::default()),
            "vLLM's value for \"unset\" is accepted"
        );
    }
    assert_eq!(read(json!({ "canary": 0 })).map(|knobs| knobs.canary), Ok(Some(Bytes::ZERO)));
    assert_eq!(read(json!({ "sequences": null })), Ok(Knobs::default()), "null means unset");
}

#[test]
fn a_setting_without_effect_is_reported_with_the_reason() {
    let notes = |json: Value| read(json).expect("the settings are valid").notes();
    assert_eq!(notes(json!({ "swap_space": 8, "disable_log_requests": false })), Vec::<&str>::new());
    let [log] = notes(json!({ "disable_log_requests": true })).try_into().expect("there is one note");
    assert!(log.contains("bursar serve"), "{log}");
}

#[test]
fn sizes_may_be_products() {
    for (json, pixels) in [
        (json!({ "mm_processor_kwargs": r#"{"max_pixels": 1920*1080}"# }), 2_073_600),
        (
            json!({ "mm_processor_kwargs": r#"{"min_pixels": 4*28*28, "size": {"longest_edge": 1280 * 28 * 28}}"# }),
            1_003_520,
        ),
        (json!({ "mm_processor_kwargs": { "max_pixels": "1280*28*28" } }), 1_003_520),
        (json!({ "max_pixels": "1920*1080" }), 2_073_600),
    ] {
        assert_eq!(read(json).map(|knobs| knobs.picture_pixels), Ok(Some(pixels)));
    }
    for wrong in [r#"{"max_pixels": 1920*}"#, r#"{"max_pixels": 1920**2}"#, r#"{"max_pixels": 4294967296*4294967296}"#]
    {
        let error = read(json!({ "mm_processor_kwargs": wrong })).expect_err("the kwargs are not an object");
        assert!(matches!(&error, KnobError::Value { name, .. } if name == "mm_processor_kwargs"), "{error}");
    }
}

#[test]
fn nested_vllm_settings_are_flattened() {
    let settings = json!({
        "mm_processor_kwargs": { "max_pixels": 1_003_520, "min_pixels": 3136 },
        "limit_mm_per_prompt": { "image": 4, "video": { "count": 2, "num_frames": 16 }, "audio": 0 },
    });
    let knobs = read(settings).expect("all knob names are known");
    assert_eq!((knobs.picture_pixels, knobs.picture_pixels_min), (Some(1_003_520), Some(3136)));
    assert_eq!((knobs.pictures, knobs.video_frames), (Some(4), Some(32)));
    let typed = read(json!({ "mm_processor_kwargs": r#"{"size": {"longest_edge": 9000, "shortest_edge": 800}}"# }));
    assert_eq!(typed.map(|knobs| (knobs.picture_pixels, knobs.picture_pixels_min)), Ok((Some(9000), Some(800))));

    let error = read(json!({ "mm_processor_kwargs": { "max_pixels": 1 }, "max_pixels": 2 }))
        .expect_err("the two values differ");
    assert!(error.to_string().contains("mm_processor_kwargs.max_pixels"), "{error}");
    for none in [json!(0), json!({ "count": 0 }), json!({ "count": 0, "num_frames": 32 })] {
        let knobs =
            read(json!({ "limit_mm_per_prompt": { "image": 2, "video": none } })).expect("zero videos are accepted");
        assert_eq!((knobs.pictures, knobs.video_frames), (Some(2), Some(0)));
    }
    assert_eq!(read(json!({ "video_frames": 0 })).map(|knobs| knobs.video_frames), Ok(Some(0)));

    let error =
        read(json!({ "limit_mm_per_prompt": { "video": 2 } })).expect_err("a video limit needs a number of frames");
    assert!(matches!(error, KnobError::Videos { videos: 2, .. }) && error.hint().contains("video_frames"), "{error}");
    let error = read(json!({ "limit_mm_per_prompt": { "audio": 1 } })).expect_err("audio is not supported");
    assert!(matches!(&error, KnobError::Modality { what, .. } if what == "audio"), "{error}");
    let error = read(json!({ "mm_processor_kwargs": { "max_pixel": 1 } })).expect_err("the knob does not exist");
    assert!(matches!(error, KnobError::Unknown { nearest: "max_pixels" | "mm_processor_kwargs", .. }), "{error}");
}

#[test]
fn mutually_exclusive_knobs_are_refused_by_their_bursar_names() {
    for (first, second) in [
        (json!({ "gpu_memory_utilization": 0.9, "memory_fraction": 0.9 }), ["memory_fraction", "device_fraction"]),
        (json!({ "max_total_token_num": 4096, "kv_cache_memory_bytes": "1GiB" }), ["kv_tokens", "kv_bytes"]),
        (json!({ "max_pixels": 4096, "picture_patches": 64 }), ["picture_pixels", "picture_patches"]),
    ] {
        let error = read(first).expect_err("both settings contradict each other");
        assert!(matches!(error, KnobError::Contradiction { .. }), "{error:?}");
        assert!(second.iter().all(|name| error.to_string().contains(name) && error.hint().contains(name)), "{error}");
    }
}

#[test]
fn set_knobs_override_the_base_options_and_the_rest_remain() {
    let settings = json!({
        "max_model_len": 2048, "max_num_seqs": 32, "batch_max_tokens": 256, "max_pixels": 401_408, "launch_patches": 4096,
        "gpu_memory_utilization": 0.8, "kv_cache_memory_bytes": "64MiB", "requests": 7, "threads": 2,
        "sleep_after": 90, "wake_within": 5, "sleep_for_memory": 10, "host_bytes": "20GiB",
        "picture_file_bytes": "1MiB", "picture_source_pixels": 5_000_000, "canary": "16MiB",
    });
    let knobs = read(settings).expect("all knob names are known");
    let base = LoadOptions { memory_fraction: Some(0.5), kv_tokens: Some(64), ..LoadOptions::small() };
    let options = knobs.over(base.clone()).expect("the options are consistent");
    assert_eq!(options.envelope, base.envelope);
    let expected = Limits {
        context_tokens: Some(2048),
        sequences: Some(32),
        step_tokens: Some(256),
        picture_pixels: Some(401_408),
        launch_patches: Some(4096),
        ..Limits::default()
    };
    assert_eq!(options.limits, expected);
    assert_eq!(
        (options.memory_fraction, options.device_fraction),
        (None, Some(0.8)),
        "the knob replaces the share of the base"
    );
    assert_eq!(
        (options.kv_tokens, options.kv_bytes),
        (None, Some(Bytes::mib(64))),
        "the knob replaces the size of the base"
    );
    assert_eq!((options.requests, options.threads), (Some(7), 2));
    let seconds = Duration::from_secs;
    assert_eq!((options.sleep_after, options.wake_within), (Some(seconds(90)), seconds(5)));
    assert_eq!((knobs.sleep_for_memory, knobs.host_bytes), (Some(10), Some(Bytes::gib(20))));
    assert_eq!((options.image_limits.bytes_max, options.image_limits.pixels_max), (Bytes::mib(1), 5_000_000));
    let untouched = Knobs::default().over(base).expect("empty knobs are consistent");
    assert_eq!((untouched.memory_fraction, untouched.kv_tokens, untouched.requests), (Some(0.5), Some(64), Some(16)));
}

#[test]
fn knobs_serialize_under_their_bursar_names_and_read_back() {
    let knobs = read(json!({ "max_num_seqs": 3, "swap_space": 0, "kv_cache_memory_bytes": 4096, "mem_fraction": 0.5 }));
    let knobs = knobs.expect("all knob names are known");
    let written = serde_json::to_value(&knobs).expect("the knobs serialize");
    assert_eq!(written, json!({ "sequences": 3, "swap_space": 0.0, "kv_bytes": 4096, "device_fraction": 0.5 }));
    assert_eq!(serde_json::from_value::<Knobs>(written).expect("the knobs deserialize"), knobs);
}

#[test]
fn a_draft_model_without_a_method_selects_eagle3() {
    let options = |settings: Value| read(settings).expect("the settings are valid").options();
    let place = |options: &LoadOptions| options.draft_model().map(|origin| origin.place());
    for settings in [
        json!({ "speculative_config": { "method": "eagle3", "model": "heads/a", "num_speculative_tokens": 2 } }),
        json!({ "speculative_config": { "model": "heads/a", "num_speculative_tokens": 2 } }),
        json!({ "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "heads/a", "draft_tokens": 2 }),
        #[cfg(feature = "hub")]
        json!({ "draft_model": "heads/a@main", "draft_tokens": 2 }),
    ] {
        let options = options(settings).expect("the options are consistent");
        assert_eq!(options.draft_source, DraftSource::DraftHead);
        assert_eq!(options.limits.draft_tokens, Some(2));
        // Without the `hub` feature, a name that is not a folder is kept as a path.
        let expected = if cfg!(feature = "hub") { "heads/a@main" } else { "heads/a" };
        assert_eq!(place(&options).as_deref(), Some(expected));
    }
    let folder = options(json!({ "draft_model": "." })).expect("the options are consistent");
    assert_eq!(folder.limits.draft_tokens, Some(3), "the default number of drafts");
    assert_eq!(place(&folder), std::env::current_dir().ok().map(|folder| folder.display().to_string()));
    let off = options(json!({ "draft_model": ".", "draft_tokens": 0 })).expect("the options are consistent");
    assert_eq!(place(&off), None, "without drafts, no draft model is fetched");
    // The form that vLLM's documentation gives for Gemma 4 assistants.
    let assistant = options(json!({ "speculative_config": { "method": "mtp", "model": "." } }));
    assert_eq!(assistant.expect("the options are consistent").limits.draft_tokens, Some(3));
    let mtp = Knobs { draft_method: Some(DraftMethod::Mtp), ..Knobs::default() };
    assert!(mtp.over(folder).expect("the options are consistent").draft_model.is_none());
}

#[test]
fn settings_of_drafts_without_their_method_are_refused() {
    for (settings, message) in [
        (json!({ "draft_method": "eagle3" }), "`draft_method` is eagle3; expected `draft_model` to be set"),
        (json!({ "draft_quantization": "int4" }), "`draft_quantization` is int4; expected no value"),
        (json!({ "draft_quantization": "int4", "draft_method": "ngram" }), "because int4 needs `draft_method` mtp"),
        (json!({ "draft_quantization": "int4", "draft_model": "a/b" }), "because int4 needs `draft_method` mtp"),
    ] {
        let error = read(settings).expect("each setting is valid").options().expect_err("the settings are refused");
        assert!(error.to_string().contains(message) || error.hint().contains(message), "{error}: {}", error.hint());
    }
}

#[test]
fn vllms_speculative_config_sets_drafts() {
    let config = |config: Value| read(json!({ "speculative_config": config }));
    let drafts = |knobs: Knobs| {
        let options = knobs.options().expect("the options are consistent");
        match options.draft_source {
            DraftSource::PromptLookup(NgramSizes { min, max }) => (options.limits.draft_tokens, min, max),
            DraftSource::DraftHead => (options.limits.draft_tokens, 0, 0),
        }
    };
    let all = json!({ "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2 });
    assert_eq!(config(all.clone()).map(drafts), Ok((Some(3), 2, 4)));
    assert_eq!(config(all.to_string().into()).map(drafts), Ok((Some(3), 2, 4)), "as typed on a command line");
    assert_eq!(config(json!({ "method": "ngram" })).map(drafts), Ok((Some(4), 5, 5)), "vLLM looks up 5 tokens");
    assert_eq!(config(json!({ "prompt_lookup_max": 3 })).map(drafts), Ok((None, 3, 3)), "one size sets both");
    let sglang = json!({ "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 2 });
    assert_eq!(read(sglang).map(drafts), Ok((Some(2), 5, 5)));
    let none = json!({ "draft_method": "none", "draft_tokens": 2 });
    assert_eq!(read(none).map(drafts), Ok((Some(0), 5, 5)));
    let head = json!({ "method": "mtp", "num_speculative_tokens": 3 });
    assert_eq!(config(head).map(drafts), Ok((Some(3), 0, 0)));
    for method in ["mtp", "qwen3_5_mtp", "NEXTN"] {
        assert_eq!(config(json!({ "method": method })).map(drafts), Ok((Some(1), 0, 0)), "{method}");
    }
    for (wrong, message, hint) in [
        (json!({ "method": "mtp", "prompt_lookup_max": 3 }), "`draft_ngram_max` is 3; expected no value", "is mtp"),
        (json!({ "method": "mtp", "prompt_lookup_min": 2 }), "`draft_ngram_min` is 2; expected no value", "is mtp"),
        (json!({ "method": "eagle" }), "`speculative_config.method` is eagle", "ngram, mtp, eagle3 or none"),
        (json!({ "draft_model": "a/b" }), "speculative_config.draft_model", "see docs/knobs.md"),
        (json!({ "method": "eagle3", "model": "a/b", "prompt_lookup_max": 3 }), "expected no value", "is eagle3"),
        (json!({ "method": "ngram", "model": "a/b" }), "`draft_model` is a/b; expected no value", "neither eagle3"),
        (json!({ "num_speculative_tokens": -1 }), "a whole number, 0 for none", "num_speculative_tokens"),
        (json!({ "prompt_lookup_max": 2, "prompt_lookup_min": 3 }), "at most `draft_ngram_max`", "draft_ngram_min"),
        (json!(4), "an object of names and values", "speculative_config"),
    ] {
        let error = config(wrong).expect_err("the settings are refused");
        assert!(error.to_string().contains(message) && error.hint().contains(hint), "{error}: {}", error.hint());
    }
}
