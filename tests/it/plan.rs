//! Tests of the `bursar plan` command. A configuration that a plan reports as fitting does fit when
//! a model is started with it.

mod suggestions;

use bursar_budgets::{grouped, testing::HostControl};
use std::process::{Command, Output};

use bursar::{
    Bytes, DeviceChoice, Envelope, Hint, LoadOptions, ModelSource, Runtime, RuntimeConfig, RuntimeError, StartError,
    knobs::Knobs,
};
use serde_json::{Value, json};

use crate::stage::{Folder, answer, device_of, runtime_on, small, story, text};

fn plan(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bursar")).arg("plan").args(arguments).output().expect("the binary is there")
}

fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    })
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("not a number of bytes: {value}"))
}

/// Tries each suggestion separately, as its flag. Returns the names of the knobs.
fn tried(arguments: &[&str]) -> Vec<String> {
    let output = plan(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let refused = object(&output);
    assert_eq!((&refused["fits"], &refused["kv_tokens"]), (&json!(false), &json!(0)));
    let suggestions = refused["suggestions"].as_array().expect("a list");
    let knob = |suggestion: &Value| suggestion["knob"].as_str().expect("a name").to_owned();
    for suggestion in suggestions {
        let field = |key: &str| suggestion[key].as_str().unwrap_or_else(|| panic!("no {key} in {suggestion}"));
        let (flag, to) = (field("flag"), field("value"));
        assert!(suggestion["frees"].is_u64(), "{suggestion}");
        // Replace a flag that is already in the arguments, because each flag may appear only once.
        let mut place = 0;
        let others = arguments.iter().filter(|argument| {
            let is_said = place == 1 || **argument == flag;
            place = if **argument == flag { 1 } else { 0 };
            !is_said
        });
        let with: Vec<&str> = others.copied().chain([flag, to]).collect();
        let output = plan(&with);
        let fitting = object(&output);
        assert!(output.status.success() && fitting["fits"] == true, "{flag} {to} does not fit: {fitting}");
        assert!(fitting["suggestions"].as_array().is_some_and(Vec::is_empty), "no suggestions: {fitting}");
    }
    suggestions.iter().map(knob).collect()
}

#[test]
fn each_suggestion_fits_when_applied_alone() {
    let tiny = ["--json", "--device", "host", "--shape", "qwen2.5-vl-tiny", "--total"];
    let knobs = tried(&[&tiny[..], &["46MiB"]].concat());
    assert!(knobs.len() > 2 && knobs[0] == "total", "{knobs:?}");
    let seven = ["--json", "--gpu", "h200", "--shape", "qwen2.5-vl-7b", "--total"];
    let knobs = tried(&[&seven[..], &["20132659200"]].concat());
    assert!(["total", "canary", "step_tokens", "picture_pixels"].iter().all(|known| knobs.iter().any(|k| k == known)));
    let ample = [&tiny[..], &["512MiB"]].concat();
    for (name, value, knob) in [
        ("--gpu-memory-utilization", "0.05", "device_fraction"),
        ("--memory-fraction", "0.001", "memory_fraction"),
        ("--kv-cache-memory-bytes", "8GiB", "kv_bytes"),
        ("--max-total-token-num", "100", "kv_tokens"),
    ] {
        let knobs = tried(&[&ample[..], &[name, value]].concat());
        assert!(knobs.iter().any(|found| found == knob), "{knob} is at fault, but these were suggested: {knobs:?}");
    }
}

#[test]
fn listed_shapes_have_the_kv_tokens_of_their_plans() {
    let output = plan(&["--shapes", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = object(&output);
    let shapes = listed["shapes"].as_array().expect("a list");
    let of = |name: &str| shapes.iter().find(|shape| shape["name"] == name).unwrap_or_else(|| panic!("no {name}"));
    let seven = of("qwen2.5-vl-7b");
    assert_eq!((&seven["parameters"], &seven["kv_bytes_per_token"]), (&json!(8_292_166_656u64), &json!(57_344)));
    for card in ["rtx4090", "h200"] {
        let alone = object(&plan(&["--shape", "qwen2.5-vl-7b", "--gpu", card, "--json"]));
        let tokens = if alone["fits"] == true { &alone["kv_tokens"] } else { &Value::Null };
        assert_eq!(&seven["kv_tokens"][card], tokens, "{card}");
    }
    let large = of("qwen2.5-72b");
    assert!(large["kv_tokens"]["l40s"].is_null() && number(&large["weight_bytes"]) > number(&seven["weight_bytes"]));
    let named: Vec<&str> =
        listed["cards"].as_array().expect("a list").iter().filter_map(|card| card["name"].as_str()).collect();
    let text = String::from_utf8(plan(&["--shapes"]).stdout).expect("text");
    let head = text.lines().next().expect("a head");
    assert!(named.iter().all(|card| head.contains(card)), "{head}");
    assert!(shapes.iter().all(|shape| text.contains(shape["name"].as_str().expect("a name"))), "{text}");
}

#[test]
fn shapes_can_be_listed_for_several_ranks() {
    let listed = object(&plan(&["--shapes", "--json", "-tp", "2"]));
    let shapes = listed["shapes"].as_array().expect("a list");
    let of = |name: &str| shapes.iter().find(|shape| shape["name"] == name).unwrap_or_else(|| panic!("no {name}"));
    let alone = object(&plan(&["--shape", "qwen2.5-vl-72b", "--gpu", "h200", "--tensor_parallel_size=2", "--json"]));
    let (shared, claims) = (of("qwen2.5-vl-72b"), &alone["claims"]);
    assert_eq!((&listed["ranks"], &shared["kv_tokens"]["h200"]), (&json!(2), &alone["kv_tokens"]));
    let over = number(&claims["weights"]) - number(&shared["weight_bytes"]);
    assert!(over < 2 << 20, "claims are rounded up to whole pages: {over} bytes more");
}

#[test]
fn an_unknown_shape_is_refused_with_the_nearest_names() {
    let report = object(&plan(&["--shape", "Qwen2.5-VL-8B", "--json"]));
    let error =
        "there is no shape \"Qwen2.5-VL-8B\"; the nearest names are qwen2.5-vl-3b, qwen2.5-vl-7b, qwen2.5-vl-32b";
    assert_eq!(
        (&report["error"], &report["hint"]),
        (&json!(error), &json!("list all shapes with `bursar plan --shapes`"))
    );
}

#[test]
fn a_suggestion_uses_the_flag_name_that_was_typed() {
    let limits =
        ["--max-num-seqs", "512", "--limit-mm-per-prompt", r#"{"image": 40, "video": 0}"#, "--max-model-len", "4000"];
    let tiny = ["--device", "host", "--shape", "qwen2.5-vl-tiny", "--total", "66MiB"];
    let typed = [&tiny[..], &limits].concat();
    let typed_for_json = [&typed[..], &["--json"]].concat();
    let knobs = tried(&typed_for_json);
    assert!(knobs.len() >= 5, "{knobs:?}");
    let report = object(&plan(&typed_for_json));
    let named = |knob: &str| {
        let suggestions = report["suggestions"].as_array().expect("a list");
        let suggestion = suggestions.iter().find(|suggestion| suggestion["knob"] == knob);
        suggestion.unwrap_or_else(|| panic!("no {knob} in {report}")).clone()
    };
    assert_eq!(named("sequences")["flag"], "--max-num-seqs");
    assert_eq!(named("pictures")["flag"], "--limit-mm-per-prompt");
    let images: Value = serde_json::from_str(named("pictures")["value"].as_str().expect("text")).expect("an object");
    assert_eq!(images, json!({ "image": named("pictures")["to"], "video": 0 }), "the other typed values stay");
    assert_eq!(named("picture_pixels")["flag"], "--picture-pixels", "a knob that was not typed has its own flag");
    let text = String::from_utf8(plan(&typed).stdout).expect("UTF-8");
    let sequences = named("sequences")["to"].to_string();
    for line in [
        format!("--max-num-seqs {sequences}"),
        "instead of max_num_seqs 512".to_owned(),
        format!("--limit-mm-per-prompt '{images}'"),
    ] {
        assert!(text.contains(&line), "{line} is not in {text}");
    }
    let seven = ["--json", "--gpu", "h200", "--shape", "qwen2.5-vl-7b", "--total", "20342374400"];
    let knobs = tried(&[&seven[..], &["--max-num-seqs", "1024"]].concat());
    assert!(knobs.iter().any(|knob| knob == "sequences"), "{knobs:?}");
}

#[test]
fn a_fitting_plan_reports_bytes_and_limits() {
    let output = plan(&["--json", "--gpu", "h200", "--shape", "qwen2.5-vl-7b"]);
    assert_eq!(output.status.code(), Some(0));
    let report = object(&output);
    let device = &report["device"];
    assert_eq!((&device["is_here"], &device["target"]), (&json!(false), &json!("cuda sm_90")));
    let claimed: u64 = report["claims"].as_object().expect("claims").values().map(number).sum();
    let rest: u64 = [&report["free"], &device["overhead"], &device["foreign"]].map(number).iter().sum();
    assert_eq!(claimed + rest, number(&device["total"]), "the claims add up to the total: {report}");
    // The value measured on an H200 is 2.26 million.
    assert!((2_200_000..2_300_000).contains(&number(&report["kv_tokens"])), "{}", report["kv_tokens"]);
    let tokens: Vec<_> =
        report["concurrency"].as_array().expect("a list").iter().map(|line| number(&line["tokens"])).collect();
    assert_eq!(tokens, [512, 2048, 8192]);
    let picture = &report["picture"];
    assert_eq!((&picture["pixels"], &picture["fits_context"]), (&json!(4_816_896), &json!(true)));
    assert_eq!(picture["model_pixels"], 12_845_056, "the model's own limit is reported");
    let limited = object(&plan(&["--json", "--gpu", "h200", "--shape", "qwen2.5-vl-7b", "--max-pixels", "1003520"]));
    let picture = &limited["picture"];
    assert_eq!((&picture["pixels"], &picture["tokens"]), (&json!(1_003_520), &json!(1280)));
    assert_eq!(picture["model_pixels"], json!(null), "a typed limit is not reported as lowered");
    let table = plan(&["--gpu", "h200", "--shape", "qwen2.5-vl-7b"]);
    let table = String::from_utf8(table.stdout).expect("UTF-8");
    assert!(table.contains("h200 by its specifications") && table.contains("It fits"), "{table}");
    assert!(table.contains("own limit is 12,845,056 pixels") && !table.contains("too short"), "{table}");
}

#[test]
fn an_fp8_plan_reports_its_savings_and_format() {
    let seven = ["--gpu", "h200", "--shape", "qwen2.5-vl-7b"];
    let of = |more: &[&str]| object(&plan(&[&seven[..], &["--json"], more].concat()));
    let plain = of(&[]);
    assert_eq!(
        [&plain["quantization"], &plain["unquantized"], &plain["kv_cache_dtype"]],
        [&json!(null), &json!(null), &json!("bf16")]
    );
    assert_eq!(plain["notes"], json!([]));
    let weights = |report: &Value| number(&report["claims"]["weights"]);
    for (more, quantization, cache) in [
        (&["--quantization", "fp8"][..], json!("fp8_per_channel"), json!("bf16")),
        (&["--quantization", "fp8_per_block", "--kv-cache-dtype", "fp8"], json!("fp8_per_block"), json!("fp8")),
        (&["--kv-cache-dtype", "fp8"], json!(null), json!("fp8")),
    ] {
        let report = of(more);
        assert_eq!((&report["quantization"], &report["kv_cache_dtype"]), (&quantization, &cache));
        let (unquantized, notes) = (&report["unquantized"], report["notes"].to_string());
        assert_eq!(unquantized["kv_tokens"], plain["kv_tokens"], "{more:?}");
        let page = 2 << 20;
        assert!(weights(&plain) - number(&unquantized["weight_bytes"]) < page, "{report}");
        let [found, before] = [&report, &plain].map(|plan| grouped(number(&plan["kv_tokens"])));
        let tokens = format!("holds {found} tokens instead of {before}");
        assert!(notes.contains(&tokens) && number(&report["kv_tokens"]) > number(&plain["kv_tokens"]), "{notes}");
        let is_said = notes.contains("weights take ") && notes.contains(" in FP8 instead of 15.");
        assert_eq!(is_said, !quantization.is_null(), "{notes}");
    }
    let table = String::from_utf8(plan(&[&seven[..], &["--quantization", "fp8"]].concat()).stdout).expect("UTF-8");
    assert!(table.contains("256-byte steps, FP8 (fp8_per_channel)"), "{table}");
    let tight = ["--total", "16GiB", "--quantization", "fp8", "--max-model-len", "4096", "--max-pixels", "1003520"];
    let notes = of(&tight)["notes"].to_string();
    assert!(notes.contains("tokens instead of none, because the model would not fit"), "{notes}");
    // Weights stored in FP8 have no unquantized weights to be compared with.
    for (folder, method, words) in [
        ("qwen3_fp8", "fp8", "FP8 with a scale for each block of 128 x 128 (fp8)"),
        ("qwen3_fp8_dynamic", "compressed-tensors", "FP8 with a scale for each output (compressed-tensors)"),
        ("qwen3_fp8_modelopt", "modelopt", "FP8 with a scale for each matrix (modelopt)"),
    ] {
        let folder = bursar_golden::path(folder).display().to_string();
        let report = object(&plan(&["--json", "--device", "host", "--total", "512MiB", "--model", &folder]));
        assert_eq!((&report["quantization"], &report["unquantized"]), (&json!(method), &json!(null)));
        assert!(report["notes"].to_string().contains(&format!("the checkpoint's weights are {words}")), "{report}");
    }
}

#[test]
fn a_plan_counts_the_packed_bytes_of_4_bit_weights_and_dequantized_bytes_of_others() {
    let copy = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("packed-plan-{}", std::process::id()));
    std::fs::create_dir_all(&copy).expect("a temporary folder");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        let golden = bursar_golden::path(format!("qwen2/{file}"));
        std::fs::copy(golden, copy.join(file)).expect("the file is recorded");
    }
    let of = || {
        let folder = copy.display().to_string();
        object(&plan(&["--json", "--device", "host", "--total", "512MiB", "--model", &folder]))
    };
    let config = std::fs::read(copy.join("config.json")).expect("the copy");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["hidden_size"] = json!(1024);
    config["intermediate_size"] = json!(4096);
    let mut with = |settings: Value| {
        config["quantization_config"] = settings;
        std::fs::write(copy.join("config.json"), config.to_string()).expect("the copy is written");
        of()
    };
    let weights = |report: &Value| number(&report["claims"]["weights"]);
    let plain = with(json!(null));
    let packed = with(json!({ "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm" }));
    // All projections of both layers have whole groups, each with a 16-bit scale and an 8-bit zero
    // point.
    let elements = 2 * 1024 * (896 + 128 + 128 + 896 + 3 * 4096);
    let saved = elements * 2 - elements / 2 - elements / 128 * 3;
    let page = 2 << 20;
    assert!((weights(&plain) - weights(&packed)).abs_diff(saved) < page, "{saved}: {plain} {packed}");
    assert_eq!((&packed["quantization"], &packed["unquantized"]), (&json!("awq"), &json!(null)));
    let words = "of them stay packed";
    assert!(packed["notes"].to_string().contains(words), "{packed}");
    let settings = json!({ "quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": false, "sym": true });
    let widened = with(settings);
    assert_eq!(weights(&widened), weights(&plain));
    let words = "8-bit integers, one scale per 128 input features (gptq); this plan counts them after dequantization";
    assert!(widened["notes"].to_string().contains(words), "{widened}");
    assert_eq!(widened["plan"]["claims"][0]["how"], "sum of tensors, 256-byte steps", "no weight in memory is FP8");
    let nvfp4 = with(json!({ "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"] }));
    assert_eq!((weights(&nvfp4), &nvfp4["quantization"]), (weights(&plain), &json!("modelopt")));
    let words = "FP4, one scale per 16 input features (modelopt); this plan counts them after dequantization";
    assert!(nvfp4["notes"].to_string().contains(words), "{nvfp4}");
    std::fs::remove_dir_all(copy).expect("the copy existed");
}

#[test]
fn smaller_pictures_leave_more_memory_for_the_kv_cache() {
    let at = |pixels: Option<&str>| {
        let pixels = pixels.map_or(Vec::new(), |pixels| vec!["--max-pixels", pixels]);
        let card = ["--json", "--gpu", "h200", "--shape", "qwen2.5-vl-7b", "--total", "24GiB"];
        let report = object(&plan(&[&card[..], &pixels].concat()));
        let vision = ["vision workspace", "vision cache"].map(|class| number(&report["claims"][class]));
        (number(&report["kv_tokens"]), vision)
    };
    let sizes = [Some("6422528"), None, Some("4000000"), Some("2073600"), Some("1003520")].map(at);
    for pair in sizes.windows(2) {
        let [(fewer, [workspace, cache]), (more, [less_workspace, less_cache])] = pair else { unreachable!("pairs") };
        assert!(more > fewer, "{sizes:?}");
        assert!(less_workspace < workspace && less_cache <= cache, "{sizes:?}");
    }
    let (small, smaller) = (at(Some("401408")), at(Some("100352")));
    assert!(small.0 >= sizes[4].0 && smaller.0 >= small.0, "fewer pixels, no fewer tokens: {small:?}, {smaller:?}");
}

#[test]
fn impossible_gpus_are_refused_by_name() {
    for (gpu, expected) in [
        ("sm_70:80", "sm_70"),
        ("sm_10", "sm_10"),
        ("sm_999", "sm_999"),
        ("sm_90:99999999999", "99999999999"),
        ("h300", "h200"),
    ] {
        let output = plan(&["--shape", "qwen2.5-vl-tiny", "--total", "24GiB", "--gpu", gpu]);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && stderr.contains(expected), "{gpu}: {stderr}");
    }
}

#[test]
fn a_plan_shows_the_cache_groups_of_a_model_with_windows() {
    let folder = bursar_golden::path("qwen2_windowed").display().to_string();
    let limits = ["--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"];
    for place in [&["--device", "host", "--total", "1GiB"][..], &["--gpu", "h200"]] {
        let of = |more: &[&str]| plan(&[&["--model", &folder][..], &limits, place, more].concat());
        let report = object(&of(&["--json"]));
        let groups = json!([{ "window": null, "layers": 2 }, { "window": 23, "layers": 2 }]);
        // The window and the chunks of two steps lie in at most eleven blocks.
        assert_eq!((&report["cache_groups"], &report["context_blocks"]), (&groups, &json!(32 + 11)));
        let text = String::from_utf8_lossy(&of(&[]).stdout).into_owned();
        assert!(text.contains("  2 layers with a window of 23 tokens\n"), "{text}");
        assert!(text.contains("a sequence of 512 tokens holds at most 43 blocks"), "{text}");
    }
}

#[test]
fn a_plan_for_several_cards_reports_the_bytes_of_each() {
    let of = |cards: &str, code: i32| {
        let output = plan(&["--shape", "qwen2.5-vl-72b", "--gpu", "h200", "--tensor-parallel-size", cards, "--json"]);
        assert_eq!(output.status.code(), Some(code), "{cards} cards");
        object(&output)
    };
    let [one, two, four] = [("1", 1), ("2", 0), ("4", 0)].map(|(cards, code)| of(cards, code));
    assert_eq!([&one, &two, &four].map(|report| number(&report["ranks"])), [1, 2, 4]);
    let weights = |report: &Value| number(&report["claims"]["weights"]);
    assert!(weights(&two) > weights(&one) / 2, "each card holds weights that are not divided");
    assert!(2 * weights(&four) > weights(&two) && weights(&four) < weights(&two));
    assert!(number(&four["kv_tokens"]) > 2 * number(&two["kv_tokens"]), "heads are divided, so more tokens fit");
    let claim = "exchange between ranks";
    for (cards, is_exchanged) in [("1", false), ("2", true)] {
        let output = plan(&["--shape", "qwen2.5-vl-7b", "--gpu", "h200", "--tp", cards]);
        assert_eq!(String::from_utf8_lossy(&output.stdout).contains(claim), is_exchanged, "{cards} cards");
    }
    assert!(one["notes"].to_string().contains("it fits if 2 such devices share the model"), "{}", one["notes"]);
    assert_eq!(two["notes"], json!([]));
    let refused = of("3", 2);
    assert_eq!(refused["error"], "query heads cannot be divided among 3 ranks: there are 64");
    assert_eq!(refused["hint"], "use one of these numbers of ranks: 1, 2, 4, 8");
}

#[test]
fn a_plan_finds_the_fewest_cards_that_fit() {
    let of = |arguments: &[&str], code: i32| {
        let output = plan(&[arguments, &["--tensor-parallel-size", "auto", "--json"]].concat());
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        object(&output)
    };
    for (shape, ranks, expected) in
        [("qwen2.5-vl-72b", 2, "over 2 devices (1: "), ("qwen2.5-vl-7b", 1, "on one device")]
    {
        let report = of(&["--shape", shape, "--gpu", "h200"], 0);
        assert!(number(&report["ranks"]) == ranks && report["notes"].to_string().contains(expected), "{report}");
    }
    let none = of(&["--shape", "qwen2.5-vl-72b", "--gpu", "h200", "--total", "8GiB"], 1);
    let notes = none["notes"].to_string();
    assert_eq!((&none["fits"], number(&none["ranks"])), (&json!(false), 8), "at most 8 ranks divide the model");
    assert!(
        notes.matches(" short on each; ").count() == 2 && notes.contains("(1: ") && notes.contains("8: "),
        "{notes}"
    );
    assert!(notes.contains("3: query heads cannot be divided among 3 ranks"), "{notes}");
    let host = of(&["--shape", "qwen2.5-vl-tiny", "--device", "host:2", "--capacity", "8MiB"], 1);
    assert_eq!(number(&host["ranks"]), 2, "at most the named devices are used");
}

#[test]
fn an_invalid_plan_has_a_separate_exit_code() {
    for (arguments, expected) in [
        (&["--shape", "gpt-9"][..], "gpt-9"),
        (&["--model", "/no/such/model"], "/no/such/model"),
        (&["--swap-space", "-4"], "--swap-space is -4"),
        (&["--max-num-seqs", "4", "--sequences", "8"], "both set --sequences"),
        (&["--shape", "qwen2.5-vl-tiny", "--gpu", "sm_120:170"], "is not known"),
        (&["--sequences", "600", "--step-tokens", "500"], "--step-tokens is 500"),
        (&["--max-num-seqs", "600", "--max-num-batched-tokens", "500"], "--max-num-batched-tokens is 500"),
        (&["--min-pixels", "900000", "--max-pixels", "400000"], "--min-pixels is 900000"),
        (&["--min-pixels", "99999999"], "--min-pixels is 99999999"),
    ] {
        let output = plan(&[arguments, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let report = object(&output);
        assert!(report["error"].as_str().is_some_and(|error| error.contains(expected)), "{report}");
        assert!(report["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{report}");
        assert_eq!(report["type"], "error", "an error has the type of other commands");
    }
    let folder = Folder::empty();
    let file = folder.path().join("knobs.json");
    std::fs::write(&file, json!({ "max_num_seqs": 3, "step_token": 4 }).to_string()).expect("a file is written");
    let output = plan(&["--json", "--knobs", &file.display().to_string()]);
    assert!(
        object(&output)["error"].as_str().is_some_and(|error| error.contains("--step-tokens")),
        "the message names the nearest flag"
    );
    std::fs::write(&file, r#"{ "max_num_seqs": 4, "max_num_seqs": 8 }"#).expect("a file is written");
    let output = plan(&["--json", "--knobs", &file.display().to_string()]);
    let error = object(&output)["error"].to_string();
    assert!(error.contains("--max-num-seqs is 4 and --max-num-seqs is 8"), "{error}");
    std::fs::write(&file, json!({ "max_num_seqs": 3 }).to_string()).expect("a file is written");
    let output = plan(&["--json", "--device", "host", "--knobs", &file.display().to_string(), "--step-tokens", "64"]);
    let envelope = &object(&output)["envelope"];
    assert_eq!((&envelope["sequences"], &envelope["step_tokens"]), (&json!(3), &json!(64)));
}

/// The error of a chat with these flags, whose start must fail.
fn refused_chat(arguments: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    command.args(["chat", "--json", "--profile-cache", "none"]).args(arguments).arg("Who are you?");
    let output = command.output().expect("the binary is there");
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    object(&output)
}

#[test]
fn a_refused_start_gives_the_same_suggestions_as_the_plan() {
    let host = ["--device", "host", "--capacity", "96MiB", "--threads", "1"];
    for more in [
        &["--kv-tokens", "1000000"][..],
        &["--max-total-tokens", "100"],
        &["--kv-cache-memory-bytes", "1GiB"],
        &["--gpu-memory-utilization", "0.05"],
        &["--memory-fraction", "0.001"],
        &["--max-model-len", "100000", "--max-num-seqs", "4096"],
        &["--capacity", "24MiB"],
    ] {
        let host = if more[0] == "--capacity" { [&host[..2], &host[4..]].concat() } else { host.to_vec() };
        let arguments = [&host[..], more].concat();
        let planned = plan(&[&["--json"][..], &arguments].concat());
        assert_eq!(planned.status.code(), Some(1), "{arguments:?}");
        let planned = object(&planned);
        let refused = refused_chat(&arguments);
        assert!(planned["error"].is_string() && planned["error"] == refused["error"], "{planned} {refused}");
        let hint = refused["hint"].as_str().expect("text");
        assert!(!hint.contains("tokens to 0 "), "the hint suggests no value of 0: {hint}");
        assert!(planned["suggestions"].as_array().is_some_and(|list| !list.is_empty()), "{planned}");
        for suggestion in planned["suggestions"].as_array().into_iter().flatten() {
            let flag = suggestion["flag"].as_str().expect("text");
            let value = suggestion["value"].as_str().expect("text");
            assert!(hint.contains(&format!("{flag} to {value} instead")), "{suggestion} is not in {hint}");
        }
    }
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_any_allocation() {
    story(async {
        let device = device_of(Bytes::mib(64));
        let runtime = runtime_on(&device).await;
        for options in [
            LoadOptions { kv_tokens: Some(1_000_000), ..small() },
            LoadOptions { kv_tokens: None, device_fraction: Some(0.05), ..small() },
            LoadOptions { kv_tokens: None, kv_bytes: Some(Bytes::gib(1)), ..small() },
        ] {
            let error = runtime.load_with(ModelSource::demo(), options.clone(), |_| {}).await.err().expect("refused");
            let RuntimeError::Start(start) = &error else { panic!("{error:?}") };
            let StartError::DoesNotFit(unfit) = start.as_ref() else { panic!("{start:?}") };
            assert_eq!(device.counts().backs, 0, "no memory was backed");
            let changed: Vec<_> = unfit.suggestions.iter().filter_map(|suggestion| suggestion.over(&options)).collect();
            assert!(!changed.is_empty(), "{error}: {}", error.hint());
            for options in changed {
                // A model starts with each suggestion separately.
                let (device, context) = (device_of(Bytes::mib(64)), format!("{options:?}"));
                let model = runtime_on(&device).await.load_with(ModelSource::demo(), options, |_| {}).await;
                model.unwrap_or_else(|error| panic!("{error}: {context}"));
            }
        }
    });
}

/// Starts the demo model on a host device of this size. Returns the tokens of its KV cache after
/// checking that it answers.
async fn start(total: Bytes, canary: Option<Bytes>, options: LoadOptions) -> Result<usize, RuntimeError> {
    let config = RuntimeConfig { device: DeviceChoice::Host(total), canary, ..RuntimeConfig::default() };
    let runtime = Runtime::start(config).await?;
    let loaded = runtime.load_with(ModelSource::demo(), options, |_| {}).await;
    let tokens = match &loaded {
        Ok(model) => {
            assert!(!answer(model, text("Who are you?").max_tokens(2)).await.is_empty());
            Ok(model.serving().await.expect("the model serves").record.kv_tokens())
        }
        Err(_) => Ok(0),
    };
    runtime.shutdown().await;
    loaded.and(tokens)
}

#[test]
fn ranks_on_the_host_start_as_planned() {
    let host = ["--device", "host:2", "--capacity", "40MiB", "--threads", "64"];
    let planned = object(&plan(&[&["--json"], &host[..]].concat()));
    assert_eq!((&planned["fits"], &planned["error"]), (&json!(false), &refused_chat(&host)["error"]), "{planned}");
}

#[test]
fn a_start_matches_its_plan_and_each_suggestion_starts() {
    story(async {
        let knobs = json!({ "max_model_len": 512, "max_num_seqs": 4, "step_tokens": 128, "picture_patches": 1024,
            "launch_patches": 1024, "pictures": 2, "threads": 1 });
        let options = |more: &Value| {
            let (Value::Object(mut all), Value::Object(more)) = (knobs.clone(), more.clone()) else {
                panic!("one of the settings is not an object")
            };
            all.extend(more);
            let knobs = Knobs::from_settings(all).expect("all knobs are known");
            (knobs.canary, knobs.options().expect("the knobs agree"))
        };
        let folder = Folder::empty();
        let file = folder.path().join("knobs.json");
        std::fs::write(&file, knobs.to_string()).expect("a file is written");
        let file = file.display().to_string();
        let planned =
            |total: Bytes| plan(&["--json", "--device", "host", "--knobs", &file, "--total", &total.0.to_string()]);

        let ample = Bytes::mib(64);
        let plan_report = object(&planned(ample));
        let (canary, load) = options(&json!({}));
        assert_eq!(load.envelope, None::<Envelope>, "the knobs file sets no envelope");
        let tokens = start(ample, canary, load).await.expect("the plan says that the model fits");
        assert_eq!(plan_report["kv_tokens"], tokens as u64, "the plan predicts the exact number of tokens");

        let scarce = Bytes::mib(28);
        let report = object(&planned(scarce));
        assert_eq!(report["fits"], false, "{report}");
        let (canary, load) = options(&json!({}));
        let refused = start(scarce, canary, load).await.expect_err("the plan says that the model does not fit");
        assert!(
            matches!(&refused, RuntimeError::Start(start) if matches!(**start, StartError::DoesNotFit(_))),
            "{refused}"
        );
        let suggestions = report["suggestions"].as_array().expect("a list");
        assert!(suggestions.len() >= 2, "{report}");
        for suggestion in suggestions {
            let (flag, to) = (suggestion["flag"].as_str().expect("a name"), &suggestion["to"]);
            let knob = flag.trim_start_matches("--").replace('-', "_");
            let total = if knob == "total" { Bytes(number(to)) } else { scarce };
            let more = if knob == "total" { json!({}) } else { json!({ knob.as_str(): to }) };
            let (canary, load) = options(&more);
            let started = start(total, canary, load).await;
            let tokens = started.unwrap_or_else(|error| panic!("{knob} {to}: {error}"));
            assert!(tokens >= 256, "{knob} {to}: {tokens}");
        }
    });
}

#[test]
fn documented_plans_of_a_hybrid_model_match_the_command() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/budget.md");
    let page = std::fs::read_to_string(path).expect("the page is there");
    let table = page.split("## Plans of a hybrid model").nth(1).expect("the page has the section");
    let table = table.split("\n## ").next().expect("the section has text");
    let mut rows = 0;
    for row in table.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [gpu, weights, gpus, of_weights, of_states, of_kv, sequences, tokens] = cells[..] else {
            panic!("a row has other columns: {row}")
        };
        let gpu = gpu.split('`').nth(1).expect("the name of a GPU");
        let mut arguments = vec!["--json", "--shape", "qwen3.5-27b", "--gpu", gpu, "--tensor-parallel-size", gpus];
        if weights == "FP8" {
            arguments.extend(["--quantization", "fp8_per_block"]);
        }
        let plan = object(&plan(&arguments));
        let gibibytes = |class: &str| format!("{:.1}", number(&plan["claims"][class]) as f64 / f64::from(1 << 30));
        assert_eq!([of_weights, of_states, of_kv], ["weights", "states", "kv"].map(gibibytes), "{row}");
        let count = |text: &str| text.replace(',', "").parse::<u64>().expect("a number");
        assert_eq!(count(sequences), number(&plan["envelope"]["sequences"]), "{row}");
        assert_eq!(count(tokens), number(&plan["kv_tokens"]), "{row}");
        rows += 1;
    }
    assert_eq!(rows, 8, "the table has a row for each plan");
}
