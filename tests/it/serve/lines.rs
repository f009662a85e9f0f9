//! Log lines of `bursar serve`: one line per request, tagged with the request id returned in the
//! response, without any content of the chat.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, sync_channel},
    time::Duration,
};

use serde_json::{Value, json};

use super::client::{hello, posted};

/// A server process that logs JSON. Dropping this value kills the process.
pub(super) struct Program {
    process: Child,
    address: String,
    lines: Receiver<Value>,
    /// The lines up to the moment when the demo model was ready.
    pub(super) begun: Vec<Value>,
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

const SECRET: &str = "quetzalcoatl";

impl Program {
    pub(super) fn start(flags: &[&str]) -> Program {
        Program::on("host", flags)
    }

    /// Starts a server on these devices.
    pub(super) fn on(device: &str, flags: &[&str]) -> Program {
        let small = ["--context-tokens", "256", "--sequences", "2", "--step-tokens", "64", "--launch-patches", "64"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
        command.args(["serve", "--device", device, "--port", "0", "--profile-cache", "none", "--log", "json"]);
        // With these variables of `.ci/run`, freed memory would stay in the process.
        command.env_remove("MALLOC_TRIM_THRESHOLD_").env_remove("MALLOC_MMAP_THRESHOLD_");
        command.args(small).args(flags).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("the program runs");
        let (sender, lines) = sync_channel(10_000);
        let stderr = BufReader::new(process.stderr.take().expect("a pipe"));
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).unwrap_or_else(|_| panic!("not a JSON line: {line}"));
                drop(sender.send(line));
            }
        });
        let mut text = String::new();
        BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut text).expect("the address is printed");
        let address = text.trim().strip_prefix("listening on http://").expect("the line has an address").to_owned();
        let mut program = Program { process, address, lines, begun: Vec::new() };
        program.begun = program.until(|line| line["message"] == "ready: demo");
        program
    }

    /// Waits until the log has a message that begins with these words.
    pub(super) fn has_said(&self, words: &str) {
        let is_it = |line: &Value| line["message"].as_str().is_some_and(|text| text.starts_with(words));
        if !self.begun.iter().any(is_it) {
            self.until(is_it);
        }
    }

    /// The id of the process.
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// The address that the server listens on.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Reads lines up to and including the first for which `is_last` is true.
    pub(super) fn until(&self, is_last: impl Fn(&Value) -> bool) -> Vec<Value> {
        let mut lines: Vec<Value> = Vec::new();
        while !lines.last().is_some_and(&is_last) {
            let line = self.lines.recv_timeout(Duration::from_secs(60));
            lines.push(line.unwrap_or_else(|_| panic!("the expected line is missing: {lines:#?}")));
        }
        lines
    }

    /// Sends a request and returns the response with its headers.
    fn say(&self, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.write_all(bytes).expect("the server reads");
        let mut received = String::new();
        stream.read_to_string(&mut received).expect("the connection closes");
        received
    }

    pub(super) fn post(&self, path: &str, headers: &str, body: &Value) -> String {
        self.say(&posted(path, headers, body.to_string().as_bytes()))
    }

    pub(super) fn get(&self, path: &str, headers: &str) -> String {
        self.say(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n").as_bytes())
    }

    /// All lines so far. To find the last line, this function makes a request, whose line is left
    /// out.
    fn all(&self) -> Vec<Value> {
        self.get("/v1/nothing-more", "x-request-id: the-last\r\n");
        let mut lines = self.until(|line| id(line) == Some("the-last"));
        lines.pop();
        lines
    }
}

/// The id of the request that a line belongs to.
fn id(line: &Value) -> Option<&str> {
    let spans = line["spans"].as_array().into_iter().flatten().chain([&line["span"]]);
    spans.filter(|span| span["name"] == "http").find_map(|span| span["request_id"].as_str())
}

/// The request id in a response.
fn answered_id(answer: &str) -> String {
    let head = answer.split("\r\n\r\n").next().unwrap_or_default();
    let id = head.lines().find_map(|line| line.strip_prefix("x-request-id: "));
    id.unwrap_or_else(|| panic!("the answer has no id: {answer}")).to_owned()
}

fn chat(fields: Value) -> Value {
    let mut fields = fields;
    fields["messages"] = json!([{"role": "user", "content": format!("Hello, {SECRET}!")}]);
    fields["max_tokens"] = json!(3);
    hello(fields)
}

#[test]
fn a_waking_model_is_not_reported_as_loading() {
    let program = Program::start(&[]);
    for _ in 0..2 {
        for path in ["/sleep", "/wake_up"] {
            let answer = program.post(path, "", &json!({}));
            assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        }
        let answer = program.post("/v1/chat/completions", "", &chat(json!({})));
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

#[test]
fn top_reads_the_port_of_a_server() {
    let program = Program::start(&[]);
    program.post("/v1/chat/completions", "", &chat(json!({})));
    let mut top = Command::new(env!("CARGO_BIN_EXE_bursar"));
    let seen = top.args(["top", program.address(), "--once", "--every", "100ms"]).output().expect("the program runs");
    let text = String::from_utf8_lossy(&seen.stdout);
    assert!(seen.status.success(), "{text}{}", String::from_utf8_lossy(&seen.stderr));
    for expected in ["demo", "of 2 sequences", "events"] {
        assert!(text.contains(expected), "{expected} is not in\n{text}");
    }
}

#[test]
fn each_request_has_one_info_line_with_its_id() {
    let program = Program::start(&[]);
    let whole = program.post("/v1/chat/completions", "", &chat(json!({})));
    let streamed =
        program.post("/v1/chat/completions", "x-request-id: mine-1\r\n", &chat(json!({"stream": true, "n": 2})));
    let text = program.post("/v1/completions", "", &json!({"prompt": SECRET, "max_tokens": 3}));
    let message = json!({"max_tokens": 3, "messages": [{"role": "user", "content": SECRET}]});
    let message = program.post("/v1/messages", "", &message);
    let response = program.post("/v1/responses", "", &json!({"input": SECRET, "max_output_tokens": 3, "stream": true}));
    let wrong = program.post("/v1/chat/completions", "", &json!({"messages": [{"role": SECRET, "content": SECRET}]}));
    let missing = program.get("/v1/nothing", "");
    for probe in ["/health", "/health/live", "/metrics"] {
        program.get(probe, "");
    }
    let lines = program.all();
    let of = |answer: &str| {
        let id = answered_id(answer);
        let of: Vec<_> = lines.iter().filter(|line| self::id(line) == Some(&id)).collect();
        let [line] = of[..] else { panic!("expected one line of {id}: {of:#?}") };
        assert_eq!((line["level"].as_str(), line["message"].as_str()), (Some("INFO"), Some("answered")), "{line}");
        assert!(line["milliseconds"].is_u64(), "{line}");
        line.clone()
    };
    for (answer, path, tokens) in [
        (&whole, "/v1/chat/completions", 3),
        (&streamed, "/v1/chat/completions", 6),
        (&text, "/v1/completions", 3),
        (&message, "/v1/messages", 3),
        (&response, "/v1/responses", 3),
    ] {
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let line = of(answer);
        assert_eq!((line["method"].as_str(), line["path"].as_str()), (Some("POST"), Some(path)));
        assert_eq!((line["status"].as_u64(), line["completion_tokens"].as_u64()), (Some(200), Some(tokens)), "{line}");
        assert!(line["prompt_tokens"].as_u64() > Some(0) && line["cached_tokens"].is_u64(), "{line}");
    }
    assert_eq!(answered_id(&streamed), "mine-1");
    let line = of(&wrong);
    assert_eq!((line["status"].as_u64(), line["param"].as_str()), (Some(400), Some("messages[0].role")), "{line}");
    assert_eq!(of(&missing)["error"], "not_found_error");
    let of_requests = lines.iter().filter(|line| id(line).is_some()).count();
    assert_eq!(of_requests, 7, "probes are not logged: {lines:#?}");
    assert!(!format!("{lines:?}").contains(SECRET), "{lines:#?}");
}

#[test]
fn debug_lines_of_actors_have_the_requests_id() {
    let program = Program::start(&["--log-level", "debug"]);
    let answer = program.post("/v1/chat/completions", "", &chat(json!({"stream": true})));
    program.get("/health", "x-request-id: probe\r\n");
    let lines = program.all();
    let ours: Vec<_> = lines.iter().filter(|line| id(line) == Some(&answered_id(&answer))).collect();
    for (module, message) in [
        ("bursar_actors::scheduler::actor", "waiting for blocks"),
        ("bursar_actors::scheduler::actor", "started"),
        ("bursar_actors::compute::lane::pending", "step finished"),
        ("bursar_actors::chat::driver", "ended"),
        ("bursar::serve::access", "answered"),
    ] {
        let is_it = |line: &&&Value| line["target"] == module && line["message"] == message;
        assert_eq!(ours.iter().filter(is_it).count(), 1, "{module}: {message} in {ours:#?}");
    }
    assert!(lines.iter().any(|line| id(line) == Some("probe")), "{lines:#?}");
    assert!(!format!("{lines:?}").contains(SECRET), "{lines:#?}");
}

#[test]
fn with_request_logs_disabled_only_failures_are_logged() {
    let program = Program::start(&["--disable-log-requests", "--log-level", "debug"]);
    assert!(program.post("/v1/chat/completions", "", &chat(json!({}))).starts_with("HTTP/1.1 200"));
    let long = json!({"messages": [{"role": "user", "content": format!("{SECRET} ").repeat(300)}]});
    let refused = program.post("/v1/chat/completions", "", &long);
    assert!(refused.starts_with("HTTP/1.1 400"), "{refused}");
    let lines = program.until(|line| line["message"] == "refused");
    let of_requests: Vec<_> = lines.iter().filter(|line| id(line).is_some()).collect();
    let [line] = of_requests[..] else { panic!("expected only the refusal: {of_requests:#?}") };
    assert_eq!((line["level"].as_str(), id(line)), (Some("WARN"), Some(answered_id(&refused).as_str())), "{line}");
    assert!(!format!("{lines:?}").contains(SECRET), "{lines:#?}");
}

#[test]
fn disconnected_clients_and_background_responses_are_logged() {
    let program = Program::start(&[]);
    let mut leaving = TcpStream::connect(&program.address).expect("the server listens");
    let endless = hello(json!({"stream": true, "ignore_eos": true, "max_tokens": 200}));
    let asked = posted("/v1/chat/completions", "x-request-id: leaves\r\n", endless.to_string().as_bytes());
    leaving.write_all(&asked).expect("the server reads");
    leaving.read_exact(&mut [0; 600]).expect("the reply streams");
    drop(leaving);
    let lines = program.until(|line| id(line) == Some("leaves"));
    let line = lines.last().expect("the log has a line");
    let expected = (Some("the client disconnected"), Some(200));
    assert_eq!((line["message"].as_str(), line["status"].as_u64()), expected, "{line}");
    let asked = json!({"input": SECRET, "max_output_tokens": 3, "background": true});
    let answer = program.post("/v1/responses", "x-request-id: later\r\n", &asked);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let is_end = |line: &Value| line["message"] == "a background response ended";
    let lines = program.until(is_end);
    let line = lines.last().expect("the log has a line");
    assert_eq!((id(line), line["completion_tokens"].as_u64()), (Some("later"), Some(3)), "{line}");
    assert!(answer.contains(line["id"].as_str().expect("the line has an id")), "{line}");
    assert!(!format!("{lines:?}").contains(SECRET), "{lines:#?}");
}

#[test]
fn a_missing_ffmpeg_is_reported_before_loading() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    command.args([
        "serve",
        "--device",
        "host",
        "--port",
        "0",
        "--profile-cache",
        "none",
        "--ffmpeg",
        "/no/such/ffmpeg",
    ]);
    let output = command.stdin(Stdio::null()).output().expect("the program ends");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("--ffmpeg /no/such/ffmpeg") && stderr.contains("hint: give the path of the program"),
        "{stderr}"
    );
    assert!(output.stdout.is_empty(), "the server did not listen");
}
