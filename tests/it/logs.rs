//! The log lines that a command writes to standard error.

use std::{
    fs::File,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::{command_line::path, stage::Folder};

/// Limits with a short stress phase.
const LIMITS: [&str; 12] = [
    "--device",
    "host",
    "--context-tokens",
    "128",
    "--sequences",
    "2",
    "--step-tokens",
    "32",
    "--launch-patches",
    "64",
    "--profile-cache",
    "none",
];

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// All lines of the log, each of which must be a JSON object.
#[track_caller]
fn log_lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    let object = |line: &str| serde_json::from_str::<Value>(line).unwrap_or_else(|_| panic!("{line:?} of\n{text}"));
    let lines: Vec<_> = text.lines().map(object).collect();
    assert!(lines.iter().all(Value::is_object), "{text}");
    lines
}

fn message(line: &Value) -> &str {
    line["message"].as_str().unwrap_or_default()
}

/// The lines that were logged within a request.
fn of_requests(lines: &[Value]) -> Vec<&Value> {
    lines.iter().filter(|line| id(line).is_some()).collect()
}

fn id(line: &Value) -> Option<u64> {
    let spans = line["spans"].as_array().into_iter().flatten().chain([&line["span"]]);
    spans.filter(|span| span["name"] == "request").find_map(|span| span["id"].as_u64())
}

#[test]
fn with_log_json_progress_notices_and_errors_are_json() {
    let json = ["--log", "json", "--metrics", "0"];
    let question = "Hello ".repeat(4000);
    let ask = [question.as_str()];
    let output = command(&[&["chat"], &LIMITS[..], &json[..], &ask[..]].concat()).output().expect("the program ends");
    assert_eq!(output.status.code(), Some(1));
    let lines = log_lines(&output);
    for words in ["metrics: http://127.0.0.1:", "planning the worst cases", "loading weights", "ready"] {
        assert!(lines.iter().any(|line| message(line).starts_with(words)), "{words}: {lines:?}");
    }
    let last = lines.iter().rfind(|line| line["level"] == "ERROR").expect("an error line");
    assert!(message(last).contains("tokens") && last["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{last}");
    // The address is logged even if the log level hides everything else.
    let quiet = ["--log", "json", "--log-level", "error", "--metrics", "0", &question];
    let output = command(&[&["chat"], &LIMITS[..], &quiet[..]].concat()).output().expect("the program ends");
    assert!(log_lines(&output).iter().any(|line| message(line).starts_with("metrics: ")));
}

#[test]
fn with_log_json_a_wrong_command_line_is_json() {
    for words in [&["--log", "json", "chat", "--nonsense"][..], &["chat", "--nonsense", "--log=json"]] {
        let output = command(words).output().expect("the program ends");
        assert_eq!(output.status.code(), Some(2));
        let [line] = log_lines(&output).try_into().expect("one line");
        assert!(message(&line).contains("--nonsense"), "{line}");
    }
    let output = command(&["chat", "--nonsense"]).env("BURSAR_LOG", "json").output().expect("the program ends");
    assert_eq!(log_lines(&output).len(), 1);
    let output = command(&["--log", "json", "--help"]).output().expect("the program ends");
    assert!(output.status.success() && output.stderr.is_empty(), "help is not an error");
}

/// Printing to a full disk makes a program panic if it does not check for errors.
#[cfg(target_os = "linux")]
#[test]
fn with_log_json_a_panic_is_json() {
    let full = File::options().write(true).open("/dev/full").expect("Linux has /dev/full");
    let output = command(&["--log", "json", "plan", "--gpu", "h200", "--json"]).stdout(full).output().expect("output");
    assert!(!output.status.success());
    let lines = log_lines(&output);
    assert!(lines.iter().any(|line| line["level"] == "ERROR" && !message(line).is_empty()), "{lines:?}");
}

#[test]
fn a_refused_request_is_logged_with_reason_and_id() {
    let too_long = "quetzalcoatl ".repeat(200);
    for level in ["info", "warn"] {
        let json = ["--log", "json", "--log-level", level];
        let output = command(&[&["chat"], &LIMITS[..], &json[..], &[&too_long]].concat()).output().expect("output");
        let lines = log_lines(&output);
        let refused: Vec<_> = lines.iter().filter(|line| message(line) == "refused").collect();
        let [refused] = refused[..] else { panic!("expected one line: {lines:?}") };
        assert_eq!(refused["reason"], "refused");
        assert!(refused["id"].as_u64().is_some() && refused["error"].as_str().is_some_and(|error| error.len() > 9));
        assert!(!refused.to_string().contains("quetzalcoatl"), "{refused}");
        if level == "info" {
            assert_eq!(id(refused), refused["id"].as_u64(), "the log line has the request's id");
        }
    }
}

#[test]
fn scheduler_and_lanes_log_under_the_requests_id() {
    let picture = path("model/demo/pictures/shapes.png");
    let limits =
        ["--device", "host", "--profile-cache", "none", "--launch-patches", "512", "--picture-pixels", "100352"];
    let sizes = ["--context-tokens", "1024", "--step-tokens", "256", "--sequences", "2"];
    let asked = ["--log", "json", "--log-level", "debug", "--temperature", "0", "--image", &picture, "What is it?"];
    let output = command(&[&["chat"], &limits[..], &sizes[..], &asked[..]].concat()).output().expect("output");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = log_lines(&output);
    let lines = of_requests(&lines);
    let found = |module: &str, words: &str| {
        let line = lines.iter().find(|line| message(line) == words && line["target"].as_str() == Some(module));
        id(line.unwrap_or_else(|| panic!("{module}: {words} is not in {lines:?}")))
    };
    let ids = [
        found("bursar_actors::scheduler::actor", "waiting for blocks"),
        found("bursar_actors::scheduler::actor", "started"),
        found("bursar_actors::compute::lane::pending", "pictures encoded"),
        found("bursar_actors::compute::lane::pending", "step finished"),
    ];
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
}

#[test]
fn an_omitted_vision_encoder_is_named_in_a_warning() {
    let folder = Folder::empty();
    let model = folder.path().join("model.gguf");
    std::fs::copy(bursar_golden::path("gguf/qwen3_5.gguf"), &model).expect("the file can be copied");
    std::fs::write(folder.path().join("mmproj-notes.gguf"), "notes").expect("the file can be written");
    let model = model.to_str().expect("a path in UTF-8");
    let asked = ["--log", "json", "--model", model, "--capacity", "96MiB", "--max-tokens", "2", "Hello"];
    let output = command(&[&["chat"], &LIMITS[..], &asked].concat()).output().expect("the program ends");
    let lines = log_lines(&output);
    assert!(output.status.success(), "the model serves text: {lines:?}");
    let warnings: Vec<_> = lines.iter().filter(|line| line["level"] == "WARN").collect();
    let [warning] = warnings[..] else { panic!("expected one warning: {lines:?}") };
    assert!(warning["error"].as_str().is_some_and(|error| error.contains("mmproj-notes.gguf")), "{warning}");
    let plan = ["plan", "--gpu", "h200", "--model", model];
    let output = command(&plan).output().expect("the program ends");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("pictures are not accepted") && text.contains("mmproj-notes.gguf"),
        "{text}"
    );
}
