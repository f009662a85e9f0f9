//! Responses of the server that the tests with real clients in `tests/serve/` do not cover.

use axum::{http::StatusCode, response::Redirect, routing::get};
use bursar_budgets::testing::HostControl;
use std::time::Duration;

use bursar::{Bytes, Hint, LoadOptions, demo};
use bursar_serve::{ModelState, ServeOptions, Server, Service};
use serde_json::json;

use super::client::{Fixture, hello, pause, posted};
use crate::stage::{answer, story};

const GREETING: &str = "Hello! Show me a picture.";

#[test]
fn a_model_is_served_under_each_name_streamed_or_whole() {
    story(async {
        let fixture = Fixture::usual().await;
        for name in ["demo", "other-name"] {
            let answer = fixture.chat(json!({"model": name})).await.json();
            assert_eq!(answer["choices"][0]["message"]["content"], GREETING);
            assert_eq!(answer["model"], name);
            assert_eq!(answer["usage"]["completion_tokens"], 7);
        }
        let streamed = fixture.chat(json!({"stream": true})).await;
        assert_eq!(streamed.streamed(), GREETING);
        assert!(streamed.head.contains("content-type: text/event-stream"), "{}", streamed.head);
        fixture.end().await;
    });
}

#[test]
fn a_loading_model_reports_its_progress() {
    story(async {
        let fixture = Fixture::usual().await;
        assert_eq!(fixture.get("/health").await.status, 200);
        fixture.service.set(["late"], ModelState::Loading("loading weights: 40 %".into()));
        let health = fixture.get("/health").await;
        assert_eq!(health.status, 503);
        assert_eq!(health.json()["models"]["late"], json!({"state": "loading", "detail": "loading weights: 40 %"}));
        assert_eq!(fixture.get("/health/live").await.status, 200);
        let answer = fixture.chat(json!({"model": "late"})).await;
        assert_eq!((answer.status, answer.error()["code"].as_str()), (503, Some("model_loading")));
        assert!(answer.head.contains("retry-after: "), "{}", answer.head);
        // Two models are listed now, so a request must name one.
        let unnamed = fixture.chat(json!({"model": null})).await;
        assert_eq!((unnamed.status, unnamed.error()["param"].as_str()), (400, Some("model")));
        fixture.end().await;
    });
}

#[test]
fn a_failed_model_is_reported_and_other_models_answer() {
    story(async {
        let fixture = Fixture::usual().await;
        fixture.service.set(["broken"], ModelState::Failed("no such file".into()));
        let why = json!({"state": "failed", "detail": "no such file"});
        for page in ["/health", "/health/ready"] {
            let health = fixture.get(page).await;
            assert_eq!((health.status, &health.json()["models"]["broken"]), (200, &why), "{page}");
        }
        let budget = fixture.get("/v1/budget").await.json();
        let row = budget["models"].as_array().and_then(|models| models.iter().find(|row| row["model"] == "broken"));
        assert_eq!(row.expect("the broken model is listed")["detail"], "no such file");
        let list = fixture.get("/v1/models").await.json();
        let ids: Vec<_> = list["data"].as_array().into_iter().flatten().map(|model| model["id"].as_str()).collect();
        assert_eq!(ids, [Some("demo"), Some("other-name")]);
        let asked = json!({"model": "broken", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3});
        let answers = [fixture.post("/v1/chat/completions", &asked).await, fixture.get("/v1/models/broken").await];
        for answer in answers {
            let error = answer.error();
            assert_eq!((answer.status, error["code"].as_str()), (404, Some("model_not_found")));
            let message = error["message"].as_str().unwrap_or_default();
            assert!(
                message.contains("failed to load: no such file") && message.contains("expected one of: demo"),
                "{message}"
            );
        }
        let message = fixture.post("/v1/messages", &asked).await;
        assert_eq!((message.status, &message.json()["error"]["type"]), (404, &json!("not_found_error")));
        // A request without a model name goes to the only model that is served.
        assert_eq!(fixture.chat(json!({"model": null})).await.json()["model"], "demo");
        fixture.service.set(["demo"], ModelState::Failed("no such file either".into()));
        assert_eq!(fixture.get("/health").await.status, 503);
        fixture.end().await;
    });
}

#[test]
fn pictures_in_low_detail_take_fewer_tokens() {
    story(async {
        let fixture = Fixture::with(LoadOptions::small(), ServeOptions::default()).await;
        let encoded = base64_of(demo::pictures()[1].bytes);
        let asked = |detail: &str, kwargs: serde_json::Value| {
            let image = json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{encoded}"), "detail": detail}});
            let content = json!([image, {"type": "text", "text": "What number is written?"}]);
            json!({"messages": [{"role": "user", "content": content}], "mm_processor_kwargs": kwargs, "max_tokens": 8})
        };
        let usual = fixture.chat(asked("auto", json!({}))).await.json();
        assert_eq!(usual["choices"][0]["message"]["content"], "427");
        let tokens = |answer: &serde_json::Value| answer["usage"]["prompt_tokens_details"]["image_tokens"].as_u64();
        let coarse = fixture.chat(asked("auto", json!({"max_pixels": 28 * 28 * 4}))).await.json();
        assert!(tokens(&coarse) < tokens(&usual), "{coarse} {usual}");
        // The demo's pictures are already smaller than OpenAI's low detail.
        assert_eq!(tokens(&fixture.chat(asked("low", json!({}))).await.json()), tokens(&usual));
        // Processor options that only other servers know are ignored, just as those servers ignore
        // unknown options.
        assert_eq!(tokens(&fixture.chat(asked("auto", json!({"use_fast": true}))).await.json()), tokens(&usual));
        let wrong = fixture.chat(asked("auto", json!({"max_pixels": "many"}))).await;
        assert_eq!((wrong.status, wrong.error()["param"].as_str()), (400, Some("mm_processor_kwargs.max_pixels")));
        fixture.end().await;
    });
}

#[test]
fn files_are_read_only_below_the_media_root() {
    story(async {
        let root = std::env::temp_dir().join(format!("bursar-media-{}", std::process::id()));
        let (inside, outside) = (root.join("in"), root.join("out"));
        for folder in [&inside.join("video"), &outside] {
            std::fs::create_dir_all(folder).expect("a folder");
        }
        let number = demo::pictures()[1].bytes;
        for file in [
            inside.join("number.png"),
            outside.join("secret.png"),
            inside.join("video/1.png"),
            inside.join("video/2.png"),
        ] {
            std::fs::write(file, number).expect("a file");
        }
        std::os::unix::fs::symlink(outside.join("secret.png"), inside.join("link.png")).expect("a link");
        std::fs::create_dir_all(inside.join("escaping")).expect("a folder");
        std::os::unix::fs::symlink(outside.join("secret.png"), inside.join("escaping/1.png")).expect("a link");
        let serve = ServeOptions { media_root: Some(inside.clone()), ..ServeOptions::default() };
        let fixture = Fixture::with(LoadOptions::small(), serve).await;
        let shown = |url: &str| {
            json!({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What number is written?"}]}]})
        };
        let whole = format!("file://{}/number.png", inside.display());
        for url in ["file:number.png", "file:///number.png", &whole] {
            let answer = fixture.chat(shown(url)).await;
            assert_eq!(answer.json()["choices"][0]["message"]["content"], "427", "{url}");
        }
        let secret = format!("file://{}/secret.png", outside.display());
        for url in [
            "file:../out/secret.png",
            "file:link.png",
            &secret,
            "file:none.png",
            "file:///etc/passwd",
            "file:",
            "file:/",
        ] {
            assert_eq!(fixture.chat(shown(url)).await.status, 400, "{url}");
        }
        let escaping = json!({"messages": [{"role": "user", "content": [
            {"type": "video_url", "video_url": {"url": "file:escaping"}}, {"type": "text", "text": "What happens?"}]}]});
        assert_eq!(fixture.chat(escaping).await.status, 400, "a frame that is a link leads out of the media root");
        let video = json!({"messages": [{"role": "user", "content": [
            {"type": "video_url", "video_url": {"url": "file:video"}}, {"type": "text", "text": "What happens?"}]}], "max_tokens": 4});
        let answer = fixture.chat(video).await.json();
        assert!(answer["usage"]["prompt_tokens_details"]["image_tokens"].as_u64() > Some(0), "{answer}");
        fixture.end().await;
        std::fs::remove_dir_all(root).expect("the folder is removed");
    });
}

#[test]
fn request_ids_are_kept_and_info_routes_answer() {
    story(async {
        let fixture = Fixture::usual().await;
        let named = |name: &str| {
            posted(
                "/v1/chat/completions",
                &format!("x-request-id: {name}\r\n"),
                hello(json!({})).to_string().as_bytes(),
            )
        };
        assert!(fixture.say(&named("mine-7")).await.head.contains("x-request-id: mine-7"));
        let ugly = fixture.say(&named("a b\"c")).await;
        assert!(ugly.head.contains("x-request-id: req_"), "{}", ugly.head);
        let budget = fixture.get("/v1/budget").await.json();
        assert_eq!(budget["budget"]["total"], json!(Bytes::mib(64)));
        assert_eq!(budget["models"][0]["requests"], 0);
        assert_eq!(fixture.get("/version").await.json()["server"], "bursar");
        assert_eq!(fixture.get("/v1/models/other-name").await.json()["root"], "demo");
        let missing = fixture.get("/v1/nothing").await;
        assert_eq!((missing.status, missing.error()["type"].as_str()), (404, Some("not_found_error")));
        assert_eq!(fixture.get("/v1/chat/completions").await.status, 405);
        for path in ["/v1/embeddings", "/v1/conversations", "/v1/conversations/a/items", "/v1/responses/compact"] {
            assert_eq!(fixture.post(path, &json!({})).await.error()["code"], "not_served", "{path}");
        }
        fixture.end().await;
    });
}

#[test]
fn a_drill_simulates_another_process_on_a_host_device() {
    story(async {
        let fixture = Fixture::usual().await;
        let taken = fixture.post("/v1/budget/other_process", &json!({"bytes": 1 << 20, "seconds": 1})).await;
        assert_eq!(taken.json()["bytes"], 1 << 20);
        assert_eq!(fixture.stage.device.counts().foreign, Bytes::mib(1));
        assert_eq!(fixture.post("/v1/budget/other_process", &json!({"bytes": 1, "seconds": 1})).await.status, 429);
        assert_eq!(
            fixture.post("/v1/budget/neighbour", &json!({"bytes": 1, "seconds": 1})).await.status,
            429,
            "the path's former name works"
        );
        assert_eq!(fixture.post("/v1/budget/other_process", &json!({"bytes": 1, "seconds": 100})).await.status, 400);
        while fixture.stage.device.counts().foreign > Bytes(0) {
            pause(Duration::from_millis(10)).await;
        }
        fixture.end().await;
    });
}

#[test]
fn several_prompts_sum_their_usage_and_echoes_have_offsets() {
    story(async {
        let fixture = Fixture::usual().await;
        let ask = async |body: serde_json::Value| fixture.post("/v1/completions", &body).await.json();
        let one = ask(json!({"prompt": [11, 7, 9], "max_tokens": 2})).await;
        let other = ask(json!({"prompt": [12, 7, 9, 11], "max_tokens": 2})).await;
        let both = ask(json!({"prompt": [[11, 7, 9], [12, 7, 9, 11]], "max_tokens": 2, "n": 2})).await;
        let tokens = |answer: &serde_json::Value| answer["usage"]["prompt_tokens"].as_u64().expect("a number");
        assert_eq!(tokens(&both), tokens(&one) + tokens(&other));
        assert_eq!(both["usage"]["completion_tokens"], 8);
        let echo =
            ask(json!({"prompt": "Hello there", "max_tokens": 2, "echo": true, "logprobs": 0, "temperature": 0})).await;
        let (text, scores) = (echo["choices"][0]["text"].as_str().expect("text"), &echo["choices"][0]["logprobs"]);
        let pieces: Vec<_> =
            scores["tokens"].as_array().expect("tokens").iter().filter_map(|token| token.as_str()).collect();
        assert_eq!(pieces.concat(), text);
        for (offset, piece) in scores["text_offset"].as_array().expect("offsets").iter().zip(&pieces) {
            let at = usize::try_from(offset.as_u64().expect("a number")).expect("small");
            assert!(text[at..].starts_with(piece), "{echo}");
        }
        let scored = ask(json!({"prompt": "Hello there", "max_tokens": 0, "echo": true, "logprobs": 0})).await;
        assert_eq!(
            (&scored["choices"][0]["text"], &scored["usage"]["completion_tokens"]),
            (&json!("Hello there"), &json!(0))
        );
        assert_eq!(scored["usage"]["total_tokens"], scored["usage"]["prompt_tokens"]);
        let many = fixture.post("/v1/completions", &json!({"prompt": vec!["a"; 5000], "max_tokens": 1})).await;
        assert_eq!((many.status, many.error()["param"].as_str()), (400, Some("prompt")));
        fixture.end().await;
    });
}

#[test]
fn tokenize_and_detokenize_are_inverse() {
    story(async {
        let fixture = Fixture::usual().await;
        let value = fixture.post("/tokenize", &json!({"prompt": "Hello!", "return_token_strs": true})).await.json();
        assert_eq!(value["count"].as_u64(), Some(value["tokens"].as_array().expect("ids").len() as u64));
        assert_eq!(fixture.post("/detokenize", &json!({"tokens": value["tokens"]})).await.json()["prompt"], "Hello!");
        let chat = fixture.post("/tokenize", &hello(json!({}))).await.json();
        let answer = fixture.chat(json!({})).await.json();
        assert_eq!(chat["count"], answer["usage"]["prompt_tokens"]);
        let unknown = fixture.post("/detokenize", &json!({"tokens": [4_000_000]})).await;
        assert_eq!(unknown.status, 400);
        assert_eq!(fixture.post("/tokenize", &json!({})).await.status, 400);
        fixture.end().await;
    });
}

#[test]
fn the_openapi_document_lists_every_route_and_its_references_resolve() {
    story(async {
        let fixture = Fixture::usual().await;
        let document = fixture.get("/openapi.json").await.json();
        let (mut asked, mut queries) = (0, 0);
        for (path, methods) in document["paths"].as_object().expect("paths") {
            let is_kept = path.contains("{id}");
            let named = methods["parameters"].as_array().map_or(0, Vec::len);
            assert_eq!(named, path.matches('{').count(), "{path}");
            let path = path.replace("{name}", "demo").replace("{id}", "resp_none");
            for (method, operation) in methods.as_object().expect("methods") {
                if method == "parameters" || path == "/v1/budget/events" {
                    continue; // The stream of events does not end.
                }
                for parameter in operation["parameters"].as_array().into_iter().flatten() {
                    let query = format!("{path}?{}=x", parameter["name"].as_str().expect("a name"));
                    let answer = if method == "get" {
                        fixture.get(&query).await
                    } else {
                        fixture.post(&query, &json!({})).await
                    };
                    assert!(
                        answer.status >= 400 && !answer.body.contains("unknown query parameter"),
                        "{query}: {}",
                        answer.body
                    );
                    queries += 1;
                }
                let answer = match method.as_str() {
                    "get" => fixture.get(&path).await,
                    "delete" => {
                        fixture
                            .say(
                                format!("DELETE {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                                    .as_bytes(),
                            )
                            .await
                    }
                    _ => {
                        fixture
                            .post(&path, &json!({"tokens": "?", "prompt": 5, "messages": 5, "bytes": "?", "input": 5}))
                            .await
                    }
                };
                // No stored response has that id.
                let is_there = match (is_kept, path.as_str()) {
                    (true, _) => answer.status == 404,
                    // Another test may have installed a different recorder in this process.
                    (_, "/metrics") => answer.status == 200 || answer.body.contains("no Bursar metrics recorder"),
                    _ => matches!(answer.status, 200 | 400),
                };
                assert!(is_there, "{method} {path}: {}", answer.status);
                asked += 1;
            }
        }
        assert!(asked > 15, "only {asked} routes were asked");
        assert_eq!(queries, 8, "the number of query fields");
        let mut open = vec![&document];
        let mut references = 0;
        while let Some(value) = open.pop() {
            if let Some(reference) = value.get("$ref").and_then(serde_json::Value::as_str) {
                let at = reference.strip_prefix('#').expect("a reference within the document");
                assert!(document.pointer(at).is_some(), "{reference}");
                references += 1;
            }
            open.extend(value.as_object().into_iter().flat_map(|map| map.values()));
            open.extend(value.as_array().into_iter().flatten());
        }
        assert!(references > 10, "only {references} references were found");
        fixture.end().await;
    });
}

#[test]
fn the_web_page_loads_nothing_from_other_hosts() {
    story(async {
        let fixture = Fixture::usual().await;
        for (path, kind) in [
            ("/", "text/html"),
            ("/page.css", "text/css"),
            ("/page.js", "text/javascript"),
            ("/markdown.js", "text/javascript"),
        ] {
            let answer = fixture.get(path).await;
            assert_eq!(answer.status, 200, "{path}");
            assert!(answer.head.contains(&format!("content-type: {kind}")), "{}", answer.head);
            assert!(answer.head.contains("content-security-policy: default-src 'self'"), "{}", answer.head);
            assert!(!answer.body.contains("https://") && !answer.body.contains("innerHTML"), "{path}");
        }
        fixture.end().await;
    });
}

#[test]
fn pictures_are_fetched_only_from_allowed_hosts_even_after_redirects() {
    story(async {
        let pictures = axum::Router::new()
            .route("/number.png", get(|| async { demo::pictures()[1].bytes }))
            .route("/a%20number%20%C3%BC.png", get(|| async { demo::pictures()[1].bytes }))
            .route("/moved", get(|| async { Redirect::temporary("/number.png") }))
            .route("/away", get(|| async { Redirect::temporary("http://127.0.0.1:1/secret") }))
            .route("/round", get(|| async { Redirect::temporary("/round") }))
            .route("/large", get(|| async { vec![0_u8; 300_000] }))
            .route("/gone", get(|| async { StatusCode::NOT_FOUND }));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let host = format!("localhost:{}", listener.local_addr().expect("a bound address").port());
        tokio::spawn(async { axum::serve(listener, pictures).await });
        let serve = |private_url_hosts| ServeOptions {
            url_hosts: vec![host.clone()],
            private_url_hosts,
            body_bytes: Bytes::kib(256),
            ..ServeOptions::default()
        };
        let shown = |path: &str| {
            json!({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": format!("http://{host}{path}")}},
            {"type": "text", "text": "What number is written?"}]}]})
        };
        let fixture = Fixture::with(LoadOptions::small(), serve(true)).await;
        for path in ["/number.png", "/moved", "/a number ü.png", "/a%20number%20%C3%BC.png", "/number.png "] {
            assert_eq!(fixture.chat(shown(path)).await.json()["choices"][0]["message"]["content"], "427", "{path}");
        }
        for path in ["/away", "/round", "/large", "/gone"] {
            assert_eq!(fixture.chat(shown(path)).await.status, 400, "{path}");
        }
        // An embedder's own front end reads pictures by the same rules.
        let own = Service::new(&fixture.stage.runtime, serve(true));
        let inline = format!("data:image/png;base64,{}", base64_of(demo::pictures()[1].bytes));
        let lines = format!(" DATA:IMAGE/PNG; base64,{}", inline[22..].replace('4', "4\n").trim_end_matches('='));
        let percent: String = demo::pictures()[1].bytes.iter().map(|byte| format!("%{byte:02x}")).collect();
        let written = [lines, format!("data:image/png,{percent}")];
        let read = own
            .read_pictures(&[&inline, &written[0], &written[1], &format!("http://{host}/moved")])
            .await
            .expect("both kinds of URL are allowed");
        for picture in read.pictures {
            let chat = bursar::Chat::new().user("What number is written?").image(picture);
            assert_eq!(answer(&fixture.stage.model, chat).await, "427");
        }
        for url in [
            &format!("http://{host}/large"),
            "http://127.0.0.1:1/secret",
            "file:///etc/passwd",
            "data:image/png;base64,*",
        ] {
            let error = own.read_pictures(&[url]).await.err().expect("the picture is refused");
            assert!(!error.is_busy() && !error.hint().is_empty(), "{error}");
        }
        // By default the same host name is refused, because it resolves to this machine.
        let strict = Service::new(&fixture.stage.runtime, serve(false));
        strict.add(["demo"], fixture.stage.model.clone());
        let server = Server::start(strict, "127.0.0.1:0", None).await.expect("a port");
        let strict = Fixture { service: fixture.service.clone(), stage: fixture.stage, server };
        let refused = strict.chat(shown("/number.png")).await;
        assert_eq!(refused.status, 400);
        assert!(refused.body.contains("no address that this server may reach"), "{}", refused.body);
        strict.end().await;
    });
}

fn base64_of(bytes: &[u8]) -> String {
    use base64::{Engine, engine::general_purpose::STANDARD};
    STANDARD.encode(bytes)
}
