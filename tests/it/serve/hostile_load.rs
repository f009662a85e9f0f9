//! Load from hostile clients: long texts, slow connections, long names, pipes. Other
//! clients are not affected.

use std::{fs, time::Duration};

use bursar::LoadOptions;
use bursar_serve::{ServeOptions, Server, Service};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};

use super::{
    client::{Fixture, hello, pause, posted, rest, until_requests},
    lines::Program,
};
use crate::stage::{Folder, Stage, small, story};

const MB: usize = 1_000_000;

/// A log file as people paste it into a chat.
fn pasted(bytes: usize) -> String {
    let line = "2026-11-27 03:00:01 INFO http{request_id=req_12ab}: answered method=POST path=/v1/chat status=200\n";
    line.repeat(bytes.div_ceil(line.len()))
}

/// Each way to send a text that is far too long for the model.
fn too_long(text: &str) -> Vec<(&'static str, Value)> {
    let chat = json!([{"role": "user", "content": text}]);
    let schema = json!({"type": "object", "properties": {"a": {"type": "string", "description": text}}});
    let tool = json!({"type": "function", "function": {"name": "f", "description": text, "parameters": schema}});
    vec![
        ("/v1/chat/completions", json!({"messages": chat})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]})),
        ("/v1/completions", json!({"prompt": text})),
        ("/v1/completions", json!({"prompt": vec![1; text.len() / 100]})),
        ("/v1/messages", json!({"messages": chat, "max_tokens": 1})),
        ("/v1/messages/count_tokens", json!({"messages": chat})),
        ("/v1/responses", json!({"input": text})),
        ("/tokenize", json!({"prompt": text})),
        ("/tokenize", json!({"messages": chat})),
    ]
}

#[test]
fn an_oversized_text_is_refused_without_tokenizing_it() {
    story(async {
        let fixture = Fixture::usual().await;
        let text = pasted(2 * MB);
        for (path, body) in too_long(&text) {
            let begun = Instant::now();
            let answer = fixture.post(path, &body).await;
            assert_eq!(answer.status, 400, "{path}: {}", &answer.body[..answer.body.len().min(300)]);
            let message = answer.error()["message"].as_str().expect("a message").to_owned();
            let is_named =
                message.contains("maximum context length is 256 tokens") || message.contains("prompt is too long");
            assert!(is_named && message.len() < 300, "{path}: {message}");
            assert!(begun.elapsed() < Duration::from_secs(5), "{path}: {:?}", begun.elapsed());
        }
        // If a prompt is only a little too long, its tokens are counted.
        let answer = fixture.chat(json!({"messages": [{"role": "user", "content": "shape ".repeat(1000)}]})).await;
        let message = answer.error()["message"].as_str().expect("a message").to_owned();
        assert!(message.contains("but the prompt has 1") && !message.contains("more than"), "{message}");
        assert_eq!(fixture.chat(json!({"max_tokens": 1})).await.status, 200);
        fixture.end().await;
    });
}

/// A field of /proc/PID/status, in bytes.
#[cfg(target_os = "linux")]
fn memory(program: &Program, field: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", program.id())).expect("the program runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("Linux reports this field");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") * 1024
}

#[cfg(target_os = "linux")]
#[test]
fn sixteen_large_requests_use_little_memory_and_free_it() {
    story(async {
        let program = Program::start(&[]);
        let ask = async |body: String| {
            let mut stream = TcpStream::connect(program.address()).await.expect("the server listens");
            stream.write_all(&posted("/v1/chat/completions", "", body.as_bytes())).await.expect("the server reads");
            String::from_utf8(rest(stream).await).expect("text")
        };
        let text = hello(json!({"messages": [{"role": "user", "content": pasted(8 * MB)}]})).to_string();
        let short = hello(json!({"max_tokens": 1})).to_string();
        assert!(ask(short.clone()).await.contains("200 OK"));
        let idle = memory(&program, "VmRSS:");
        let begun = Instant::now();
        let asked: Vec<_> = (0..16).map(|_| ask(text.clone())).collect();
        let (answers, beside) = tokio::join!(futures_util::future::join_all(asked), ask(short.clone()));
        let (took, peak) = (begun.elapsed(), memory(&program, "VmHWM:"));
        assert!(beside.contains("200 OK"), "{beside}");
        assert!(answers.iter().all(|answer| answer.contains("context_length_exceeded")), "{:?}", answers.first());
        // A debug build is several times slower than a release build.
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert!(peak < idle + 300 * MB, "the peak is {} MB above idle", (peak - idle) / MB);
        let until = Instant::now() + Duration::from_secs(10);
        while memory(&program, "VmRSS:") > idle + 60 * MB {
            assert!(Instant::now() < until, "{} MB are still held", (memory(&program, "VmRSS:") - idle) / MB);
            pause(Duration::from_millis(50)).await;
        }
    });
}

#[test]
fn slow_connections_of_one_address_do_not_block_health_checks() {
    story(async {
        let serve = ServeOptions { connections_per_address: 20, ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        let mut slow = Vec::new();
        for _ in 0..200 {
            let mut stream = fixture.connect().await;
            drop(stream.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n").await);
            slow.push(stream);
        }
        // Connections beyond the reserve are closed. Connections in the reserve have two seconds
        // to send their headers.
        let begun = Instant::now();
        loop {
            match fixture.get("/health").await.status {
                200 => break,
                status => assert_eq!(status, 0, "the connection is answered or closed"),
            }
            assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
            pause(Duration::from_millis(50)).await;
        }
        let refused = fixture.chat(json!({})).await;
        assert_eq!((refused.status, refused.error()["code"].as_str()), (503, Some("connections_exhausted")));
        drop(slow);
        while fixture.chat(json!({"max_tokens": 1})).await.status != 200 {
            pause(Duration::from_millis(10)).await;
        }
        fixture.end().await;
    });
}

#[test]
fn long_names_of_a_client_are_shortened_in_answers() {
    story(async {
        let fixture = Fixture::usual().await;
        let long = "x".repeat(1_000_000);
        for fields in [
            json!({"logit_bias": {long.clone(): 1}}),
            json!({"tool_choice": long}),
            json!({"model": long}),
            json!({"tools": [{"type": long}]}),
            json!({"messages": [{"role": long, "content": "a"}]}),
            json!({"response_format": {"type": long}}),
            json!({"reasoning_effort": long, "n": 0}),
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": long}]}]}),
        ] {
            let answer = fixture.chat(fields.clone()).await;
            let field = fields.as_object().expect("an object").keys().next().expect("a field").clone();
            assert!((400..500).contains(&answer.status), "{field}: {}", answer.status);
            assert!(answer.body.len() < 3000, "{field}: {} bytes", answer.body.len());
            let param = answer.error()["param"].as_str().unwrap_or_default().len();
            assert!(param < 140, "{field}: the answer quotes {param} bytes of a name");
        }
        fixture.end().await;
    });
}

#[test]
fn admin_routes_need_an_admin_key_unless_the_server_is_local() {
    story(async {
        let serve = ServeOptions::default().with_keys("one\ntwo\n").expect("keys");
        let serve = serve.with_admin_keys("boss\n").expect("keys");
        let fixture = Fixture::with(small(), serve).await;
        let with = |method: &str, path: &str, key: &str| {
            let head =
                format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-api-key: {key}\r\n");
            format!("{head}content-length: 2\r\n\r\n{{}}").into_bytes()
        };
        for (method, path) in [
            ("POST", "/sleep"),
            ("POST", "/wake_up"),
            ("POST", "/v1/budget/other_process"),
            ("GET", "/v1/budget"),
            ("GET", "/v1/budget/events"),
        ] {
            let refused = fixture.say(&with(method, path, "one")).await;
            assert_eq!((refused.status, refused.error()["code"].as_str()), (403, Some("admin_required")), "{path}");
            assert!(refused.error()["message"].as_str().expect("text").contains("--admin-key-file"), "{path}");
            if !path.ends_with("events") {
                assert_ne!(fixture.say(&with(method, path, "boss")).await.status, 403, "{path}");
            }
        }
        assert_eq!(fixture.say(&with("GET", "/v1/models", "boss")).await.status, 200, "the admin key is a client key");
        fixture.end().await;
        // With a single key, its holder may see the budget.
        let serve = ServeOptions::default().with_keys("one\n").expect("a key");
        let fixture = Fixture::with(small(), serve).await;
        assert_eq!(fixture.say(&with("GET", "/v1/budget", "one")).await.status, 200);
        assert_eq!(
            fixture.say(&with("POST", "/sleep", "one")).await.status,
            403,
            "local clients are not administrators"
        );
        fixture.end().await;
        // The server is reachable from other machines and has no key, so no client is
        // an administrator by default.
        let stage = Stage::set(small()).await;
        for (open_admin, status) in [(false, 403), (true, 200)] {
            let service = Service::new(&stage.runtime, ServeOptions { open_admin, ..ServeOptions::default() });
            service.add(["demo"], stage.model.clone());
            let server = Server::start(service, "0.0.0.0:0", None).await.expect("a free port");
            let mut stream = TcpStream::connect(("127.0.0.1", server.addr().port())).await.expect("the server listens");
            stream.write_all(&with("POST", "/wake_up", "")).await.expect("the server reads");
            let received = String::from_utf8(rest(stream).await).expect("text");
            assert!(received.starts_with(&format!("HTTP/1.1 {status} ")), "{received}");
            server.shutdown().await;
        }
        stage.runtime.shutdown().await;
    });
}

#[cfg(unix)]
#[test]
fn pipes_below_the_media_root_are_refused() {
    story(async {
        let folder = Folder::empty();
        let pipe = folder.path().join("picture.png");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo can be started");
        assert!(made.success());
        let serve = ServeOptions { media_root: Some(folder.path().to_owned()), ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        for kind in ["image_url", "video_url"] {
            let part = json!({"type": kind, kind: {"url": "file:///picture.png"}});
            let asked = fixture.chat(json!({"messages": [{"role": "user", "content": [part]}]}));
            let answer = timeout(Duration::from_secs(5), asked).await.expect("the server does not wait for a writer");
            let message = answer.error()["message"].as_str().expect("text").to_owned();
            assert!(answer.status == 400 && message.contains("not a regular file"), "{kind}: {message}");
        }
        fixture.end().await;
    });
}

#[test]
fn replies_that_outlast_the_drain_fail_while_health_is_answered() {
    story(async {
        let serve = ServeOptions { drain: Duration::from_millis(600), ..ServeOptions::default() };
        let fixture = Fixture::with(LoadOptions { token_interval: None, ..small() }, serve).await;
        let address = fixture.server.addr();
        let endless = json!({"ignore_eos": true, "max_tokens": 400, "n": 1});
        let streamed = hello(json!({"stream": true, "ignore_eos": true, "max_tokens": 400})).to_string();
        let whole = hello(endless).to_string();
        let mut streams = Vec::new();
        for body in [streamed, whole] {
            let mut stream = fixture.connect().await;
            stream.write_all(&posted("/v1/chat/completions", "", body.as_bytes())).await.expect("the server reads");
            streams.push(stream);
        }
        until_requests(&fixture.stage.model, 2).await;
        let ending = tokio::spawn(fixture.server.shutdown());
        let health = async || {
            let Ok(mut stream) = TcpStream::connect(address).await else { return String::new() };
            stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("the server reads");
            let mut received = String::new();
            drop(stream.read_to_string(&mut received).await);
            received
        };
        pause(Duration::from_millis(100)).await;
        let status = health().await;
        let has_ended = ending.is_finished();
        assert!(has_ended || status.contains("503") && status.contains("\"ending\":true"), "{status}");
        let mut received = Vec::new();
        for stream in streams {
            received.push(String::from_utf8(rest(stream).await).expect("text"));
        }
        ending.await.expect("the server ends");
        // A fast machine may have finished the replies in time.
        if !received[0].contains("\"finish_reason\":\"length\"") {
            assert!(received[0].contains("shutting down") && received[0].contains("data: [DONE]"), "{}", received[0]);
        }
        if !received[1].contains("\"finish_reason\":\"length\"") {
            assert!(
                received[1].starts_with("HTTP/1.1 503") && received[1].contains("shutting down"),
                "{}",
                received[1]
            );
        }
        fixture.stage.runtime.shutdown().await;
    });
}
