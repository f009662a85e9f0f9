//! Tests of the `bursar top` command.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    process::{Command, Output},
    thread,
};

use serde_json::Value;

fn top(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    command.env_remove("NO_COLOR").env_remove("COLORTERM").arg("top").args(arguments);
    command.output().expect("the binary is there")
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Serves recorded scrapes. The first request for metrics gets the earlier scrape, and every later
/// request gets the later scrape.
fn recorded() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port of the loopback");
    let address = listener.local_addr().expect("a local address").to_string();
    thread::spawn(move || {
        let mut metrics = include_str!("../../cli/src/top/recorded/card_before.prom");
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client connects");
            let asked = BufReader::new(stream.try_clone().expect("a second handle"));
            let lines: Vec<_> = asked.lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
            let body = match lines.first().map(String::as_str) {
                Some("GET /metrics HTTP/1.1") => {
                    std::mem::replace(&mut metrics, include_str!("../../cli/src/top/recorded/card.prom"))
                }
                Some("GET /events HTTP/1.1") => include_str!("../../cli/src/top/recorded/card_events.json"),
                other => panic!("unexpected request: {other:?}"),
            };
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).expect("a client reads");
        }
    });
    address
}

#[test]
fn top_once_prints_text_or_one_json_object() {
    let output = top(&[&recorded(), "--once", "--every", "100ms"]);
    assert!(output.status.success(), "{}", text_of(&output.stderr));
    let text = text_of(&output.stdout);
    for expected in
        ["3.2 GiB of 149.0 GiB free", "K kv used 52.8 GiB", "61 of 256 sequences", "canary 96.0 MiB of 256.0 MiB"]
    {
        assert!(text.contains(expected), "{expected} is not in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "output to a file has no colors:\n{text}");

    let colored = text_of(&top(&[&recorded(), "--once", "--every", "100ms", "--color", "always"]).stdout);
    assert!(colored.contains("\u{1b}[38;5;"), "sixteen colors without COLORTERM:\n{colored}");

    let output = top(&[&recorded(), "--once", "--json", "--every", "100ms"]);
    let object: Value = serde_json::from_slice(&output.stdout).expect("one object");
    let view = &object["view"];
    assert_eq!(view["devices"][0]["total"], 159_987_531_776_u64);
    assert!(view["models"][0]["speed"]["generated_tokens"].as_f64().expect("two scrapes give a rate") > 0.0);
    assert_eq!(view["events"][7]["kind"], "moved");
}

#[test]
fn top_without_served_metrics_exits_1_with_a_hint() {
    let gone = TcpListener::bind("127.0.0.1:0").expect("a port of the loopback");
    let address = gone.local_addr().expect("a local address").to_string();
    drop(gone);
    let output = top(&[&address, "--once"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text_of(&output.stderr);
    assert!(stderr.contains(&address) && stderr.contains(&format!("--metrics {address}")), "{stderr}");
    let output = top(&[&address, "--once", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let object: Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert_eq!(object["type"], "error");
    let output = top(&[&address]);
    assert_eq!(output.status.code(), Some(1), "there is no terminal to draw on");
    assert!(text_of(&output.stderr).contains("--once"), "{}", text_of(&output.stderr));
    assert_eq!(top(&["host:port"]).status.code(), Some(2));
    assert_eq!(top(&["--json"]).status.code(), Some(2), "--json needs --once");
}
