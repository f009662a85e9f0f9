//! A server with models that fail to load: `bursar serve` serves the other models
//! and reports the failure.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{client::hello, lines::Program};

/// The body of a response.
fn body(answer: &str) -> Value {
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

fn is_error_of(line: &Value, model: &str) -> bool {
    let message = line["message"].as_str().unwrap_or_default();
    line["level"] == "ERROR"
        && message.starts_with(&format!("{model} failed to load: "))
        && message.contains("/no/such/")
}

#[test]
fn a_failed_model_is_logged_and_other_models_are_served() {
    let named = ["--name", "first", "demo", "last", "--model", "/no/such/first", "--model", "demo"];
    let program = Program::start(&[&named[..], &["--model", "/no/such/last"]].concat());
    let errors: Vec<_> = program.begun.iter().filter(|line| is_error_of(line, "first")).collect();
    let [error] = errors[..] else { panic!("expected one error: {:#?}", program.begun) };
    assert!(error["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{error}");
    let begin = "warning: these models failed to load";
    let is_logged = |line: &Value| line["message"].as_str().is_some_and(|text| text.starts_with(begin));
    let lines = program.until(is_logged);
    assert!(lines.iter().any(|line| is_error_of(line, "last")), "{lines:#?}");
    let last = lines.last().and_then(|line| line["message"].as_str()).unwrap_or_default();
    assert!(last.contains(": first, last; the other models"), "{last}");

    let list = body(&program.get("/v1/models", ""));
    let ids: Vec<_> = list["data"].as_array().into_iter().flatten().map(|model| &model["id"]).collect();
    assert_eq!(ids, [&json!("demo")]);
    let health = program.get("/health", "");
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    assert_eq!(body(&health)["models"]["last"]["state"], "failed");
    for name in ["first", "last"] {
        let answer = program.post("/v1/chat/completions", "", &hello(json!({"model": name})));
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
        let error = body(&answer)["error"].clone();
        assert_eq!(error["code"], "model_not_found");
        assert!(error["message"].as_str().is_some_and(|text| text.contains("failed to load: ")), "{error}");
    }
    let answer = program.post("/v1/chat/completions", "", &hello(json!({"max_tokens": 3})));
    assert_eq!(body(&answer)["usage"]["completion_tokens"], 3);
}

#[test]
fn a_server_without_any_loaded_model_ends_with_reasons() {
    let ended = |models: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
        command.args(["serve", "--device", "host", "--port", "0", "--profile-cache", "none"]);
        command.args(models.iter().flat_map(|model| ["--model", model])).stdin(Stdio::null());
        let output = command.output().expect("the program ends");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let outcome = ended(&["/no/such/a", "/no/such/b"]);
    let errors: Vec<_> = outcome.lines().filter(|line| line.starts_with("error: ")).collect();
    let [first, second, last] = errors[..] else { panic!("expected three errors: {outcome}") };
    for (error, model) in [(first, "/no/such/a"), (second, "/no/such/b")] {
        assert!(error.contains("failed to load: ") && error.contains(model), "{outcome}");
    }
    assert_eq!(last, "error: none of the 2 models could be loaded");
    assert_eq!(outcome.matches("\n hint: ").count(), 3, "{outcome}");
    let alone = ended(&["/no/such/a"]);
    assert_eq!(alone.matches("error: ").count(), 1, "a single reason is printed once: {alone}");
}
