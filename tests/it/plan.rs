//! `bursar plan`, as somebody who types it sees it: what it says would fit does fit, also when it is tried.

use std::process::{Command, Output};

use bursar::{
    Bytes, DeviceChoice, Envelope, LoadOptions, ModelSource, Runtime, RuntimeConfig, RuntimeError, StartError,
    knobs::Knobs,
};
use serde_json::{Value, json};

use crate::stage::{Folder, answer, story, text};

fn plan(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bursar")).arg("plan").args(arguments).output().expect("the binary is there")
}

/// The one object that it printed.
fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    })
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number of bytes"))
}

/// Tries each suggestion as its flag, alone; gives the knobs that were tried.
fn tried(arguments: &[&str]) -> Vec<String> {
    let output = plan(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let refused = object(&output);
    assert_eq!((&refused["fits"], &refused["kv_tokens"]), (&json!(false), &json!(0)));
    let suggestions = refused["suggestions"].as_array().expect("a list");
    let knob = |suggestion: &Value| suggestion["knob"].as_str().expect("a name").to_owned();
    for suggestion in suggestions {
        // By the name that it was said by.
        let name = suggestion["as"].as_str().map_or_else(|| knob(suggestion), str::to_owned);
        let (outer, inner) = name.split_once('.').map_or((&*name, None), |(outer, inner)| (outer, Some(inner)));
        let flag = format!("--{}", outer.replace('_', "-"));
        let to = inner.map_or(suggestion["to"].clone(), |inner| json!({ inner: suggestion["to"] })).to_string();
        assert!(suggestion["frees"].is_u64(), "{suggestion}");
        // Its own flag is there once.
        let mut place = 0;
        let others = arguments.iter().filter(|argument| {
            let is_said = place == 1 || **argument == flag;
            place = if **argument == flag { 1 } else { 0 };
            !is_said
        });
        let with: Vec<&str> = others.copied().chain([flag.as_str(), to.as_str()]).collect();
        let output = plan(&with);
        let fitting = object(&output);
        assert!(output.status.success() && fitting["fits"] == true, "{flag} {to} was said to fit: {fitting}");
        assert!(fitting["suggestions"].as_array().is_some_and(Vec::is_empty), "nothing is missing: {fitting}");
    }
    suggestions.iter().map(knob).collect()
}

#[test]
fn each_suggestion_fits_when_it_is_typed_alone() {
    let tiny = ["--json", "--device", "host", "--shape", "qwen2.5-vl-tiny", "--total"];
    let knobs = tried(&[&tiny[..], &["46MiB"]].concat());
    assert!(knobs.len() > 2 && knobs[0] == "total", "{knobs:?}");
    let seven = ["--json", "--gpu", "h200", "--shape", "qwen2.5-vl-7b", "--total"];
    let knobs = tried(&[&seven[..], &["20401094656"]].concat());
    assert!(["total", "canary", "step_tokens", "launch_patches"].iter().all(|known| knobs.iter().any(|k| k == known)));
    let roomy = [&tiny[..], &["512MiB"]].concat();
    for (name, value, knob) in [
        ("--gpu-memory-utilization", "0.05", "device_fraction"),
        ("--memory-fraction", "0.001", "memory_fraction"),
        ("--kv-cache-memory-bytes", "8GiB", "kv_bytes"),
        ("--max-total-token-num", "100", "kv_tokens"),
    ] {
        let knobs = tried(&[&roomy[..], &[name, value]].concat());
        assert!(knobs.iter().any(|found| found == knob), "{knob} is at fault, said was {knobs:?}");
    }
}

#[test]
fn a_suggestion_takes_the_place_of_the_name_that_was_typed() {
    let limits = ["--max-num-seqs", "512", "--limit-mm-per-prompt", r#"{"image": 40}"#, "--max-model-len", "4000"];
    let tiny = ["--device", "host", "--shape", "qwen2.5-vl-tiny", "--total", "66MiB"];
    let typed = [&tiny[..], &limits].concat();
    let typed_for_json = [&typed[..], &["--json"]].concat();
    let knobs = tried(&typed_for_json);
    assert!(knobs.len() >= 5, "{knobs:?}");
    let told = object(&plan(&typed_for_json));
    let named = |knob: &str| {
        let suggestions = told["suggestions"].as_array().expect("a list");
        let suggestion = suggestions.iter().find(|suggestion| suggestion["knob"] == knob);
        suggestion.unwrap_or_else(|| panic!("no {knob} in {told}")).clone()
    };
    assert_eq!(named("sequences")["as"], "max_num_seqs");
    assert_eq!(named("pictures")["as"], "limit_mm_per_prompt.image");
    assert_eq!(named("launch_patches").get("as"), None, "nothing was said of it");
    let text = String::from_utf8(plan(&typed).stdout).expect("UTF-8");
    let (sequences, pictures) = (named("sequences")["to"].to_string(), named("pictures")["to"].to_string());
    for line in [
        format!("--max-num-seqs {sequences}"),
        "instead of max_num_seqs 512".to_owned(),
        format!("--limit-mm-per-prompt '{{\"image\": {pictures}}}'"),
    ] {
        assert!(text.contains(&line), "{line} is not in {text}");
    }
    let seven = ["--json", "--gpu", "h200", "--shape", "qwen2.5-vl-7b", "--total", "20342374400"];
    let knobs = tried(&[&seven[..], &["--max-num-seqs", "1024"]].concat());
    assert!(knobs.iter().any(|knob| knob == "sequences"), "{knobs:?}");
}

#[test]
fn a_plan_that_fits_says_where_every_byte_goes_and_what_is_served() {
    let output = plan(&["--json", "--gpu", "h200", "--shape", "qwen2.5-vl-7b"]);
    assert_eq!(output.status.code(), Some(0));
    let told = object(&output);
    let device = &told["device"];
    assert_eq!((&device["is_here"], &device["target"]), (&json!(false), &json!("cuda sm_90")));
    let claimed: u64 = told["claims"].as_object().expect("claims").values().map(number).sum();
    let rest: u64 = [&told["free"], &device["overhead"], &device["foreign"]].map(number).iter().sum();
    assert_eq!(claimed + rest, number(&device["total"]), "every byte has its line: {told}");
    // Measured on the card: 2.26 million.
    assert!((2_200_000..2_300_000).contains(&number(&told["kv_tokens"])), "{}", told["kv_tokens"]);
    let tokens: Vec<_> =
        told["concurrency"].as_array().expect("a list").iter().map(|line| number(&line["tokens"])).collect();
    assert_eq!(tokens, [512, 2048, 8192]);
    assert_eq!(told["picture"]["pixels"], 6_422_528);
    let limited = object(&plan(&["--json", "--gpu", "h200", "--shape", "qwen2.5-vl-7b", "--max-pixels", "1003520"]));
    assert_eq!((&limited["picture"]["pixels"], &limited["picture"]["tokens"]), (&json!(1_003_520), &json!(1280)));
    let table = plan(&["--gpu", "h200", "--shape", "qwen2.5-vl-7b"]);
    let table = String::from_utf8(table.stdout).expect("UTF-8");
    assert!(table.contains("h200 by its numbers") && table.contains("It fits"), "{table}");
}

#[test]
fn what_cannot_be_planned_is_told_by_another_exit_code() {
    for (arguments, said) in [
        (&["--shape", "gpt-9"][..], "gpt-9"),
        (&["--model", "/no/such/model"], "/no/such/model"),
        (&["--swap-space", "4"], "swap_space is 4"),
        (&["--max-num-seqs", "4", "--sequences", "8"], "both set sequences"),
        (&["--shape", "qwen2.5-vl-tiny", "--gpu", "sm_120:170"], "how much memory"),
        (&["--sequences", "600", "--step-tokens", "500"], "--step-tokens is 500"),
    ] {
        let output = plan(&[arguments, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let told = object(&output);
        assert!(told["error"].as_str().is_some_and(|error| error.contains(said)), "{told}");
        assert!(told["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{told}");
        assert_eq!(told["type"], "error", "as other commands tell it");
    }
    let folder = Folder::empty();
    let file = folder.path().join("knobs.json");
    std::fs::write(&file, json!({ "max_num_seqs": 3, "step_token": 4 }).to_string()).expect("a file is written");
    let output = plan(&["--json", "--knobs", &file.display().to_string()]);
    assert!(
        object(&output)["error"].as_str().is_some_and(|error| error.contains("step_tokens")),
        "the nearest is named"
    );
    std::fs::write(&file, r#"{ "max_num_seqs": 4, "max_num_seqs": 8 }"#).expect("a file is written");
    let output = plan(&["--json", "--knobs", &file.display().to_string()]);
    let error = object(&output)["error"].to_string();
    assert!(error.contains("max_num_seqs is 4 and max_num_seqs is 8"), "{error}");
    std::fs::write(&file, json!({ "max_num_seqs": 3 }).to_string()).expect("a file is written");
    let output = plan(&["--json", "--device", "host", "--knobs", &file.display().to_string(), "--step-tokens", "64"]);
    let envelope = &object(&output)["envelope"];
    assert_eq!((&envelope["sequences"], &envelope["step_tokens"]), (&json!(3), &json!(64)));
}

/// Starts the demo model on a host device of so many bytes; the tokens of keys and values, and whether it answers.
async fn start(total: Bytes, canary: Option<Bytes>, options: LoadOptions) -> Result<usize, RuntimeError> {
    let config = RuntimeConfig { device: DeviceChoice::Host(total), canary, ..RuntimeConfig::default() };
    let runtime = Runtime::start(config).await?;
    let loaded = runtime.load_with(ModelSource::demo(), options, |_| {}).await;
    let tokens = match &loaded {
        Ok(model) => {
            assert!(!answer(model, text("Who are you?").max_tokens(2)).await.is_empty());
            Ok(model.serving().await.expect("it serves").record.kv_tokens())
        }
        Err(_) => Ok(0),
    };
    runtime.shutdown().await;
    loaded.and(tokens)
}

#[test]
fn a_start_comes_to_what_was_planned_and_with_each_suggestion_it_starts() {
    story(async {
        let knobs = json!({ "max_model_len": 512, "max_num_seqs": 4, "step_tokens": 128, "picture_patches": 1024,
            "launch_patches": 1024, "pictures": 2, "threads": 1 });
        let options = |more: &Value| {
            let (Value::Object(mut all), Value::Object(more)) = (knobs.clone(), more.clone()) else {
                panic!("objects")
            };
            all.extend(more);
            let knobs = Knobs::from_settings(all).expect("all of it is known");
            (knobs.canary, knobs.options().expect("it goes together"))
        };
        let folder = Folder::empty();
        let file = folder.path().join("knobs.json");
        std::fs::write(&file, knobs.to_string()).expect("a file is written");
        let file = file.display().to_string();
        let planned =
            |total: Bytes| plan(&["--json", "--device", "host", "--knobs", &file, "--total", &total.0.to_string()]);

        let roomy = Bytes::mib(64);
        let told = object(&planned(roomy));
        let (canary, load) = options(&json!({}));
        assert_eq!(load.envelope, None::<Envelope>, "knobs lie over what is expected of a device");
        let tokens = start(roomy, canary, load).await.expect("it was planned to fit");
        assert_eq!(told["kv_tokens"], tokens as u64, "to the token");

        let scarce = Bytes::mib(28);
        let told = object(&planned(scarce));
        assert_eq!(told["fits"], false, "{told}");
        let (canary, load) = options(&json!({}));
        let refused = start(scarce, canary, load).await.expect_err("it was planned not to fit");
        assert!(
            matches!(&refused, RuntimeError::Start(start) if matches!(**start, StartError::DoesNotFit(_))),
            "{refused}"
        );
        let suggestions = told["suggestions"].as_array().expect("a list");
        assert!(suggestions.len() >= 2, "{told}");
        for suggestion in suggestions {
            let (knob, to) = (suggestion["knob"].as_str().expect("a name"), &suggestion["to"]);
            let total = if knob == "total" { Bytes(number(to)) } else { scarce };
            let more = if knob == "total" { json!({}) } else { json!({ knob: to }) };
            let (canary, load) = options(&more);
            let started = start(total, canary, load).await;
            let tokens = started.unwrap_or_else(|error| panic!("{knob} {to}: {error}"));
            assert!(tokens >= 256, "{knob} {to}: {tokens}");
        }
    });
}
