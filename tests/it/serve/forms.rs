//! Request formats that clients of other servers send.

use std::io::Write;

use base64::{Engine, engine::general_purpose::STANDARD};
use bursar::{Bytes, LoadOptions, demo, knobs::Limits};
use bursar_serve::ServeOptions;
use serde_json::{Value, json};

use tokio::{io::AsyncWriteExt, net::TcpStream};

use super::{
    client::{Fixture, hello, posted, rest},
    lines::Program,
};
use crate::stage::{damaged_png, small, story};

fn number() -> String {
    STANDARD.encode(demo::pictures()[1].bytes)
}

#[test]
fn a_picture_is_accepted_in_every_client_format() {
    story(async {
        let fixture = Fixture::usual().await;
        let url = format!("data:image/png;base64,{}", number());
        let mut first = None;
        for part in [
            json!({"type": "image_url", "image_url": {"url": url}}),
            json!({"type": "image_url", "image_url": url}),
            json!({"type": "input_image", "image_url": url, "detail": "auto"}),
            json!({"type": "image", "image": url}),
            json!({"type": "image", "url": url}),
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": number()}}),
        ] {
            let content = json!([{"type": "text", "text": "What number is written?"}, part]);
            let answer = fixture.chat(json!({"messages": [{"role": "user", "content": content}]})).await;
            let mut shown = part.clone();
            shown.as_object_mut().expect("a part").values_mut().for_each(|value| {
                if value.to_string().len() > 99 {
                    *value = "…".into();
                }
            });
            let usage = answer.json()["usage"].clone();
            let seen = (usage["prompt_tokens"].as_u64(), usage["prompt_tokens_details"]["image_tokens"].as_u64());
            assert!(seen.1 > Some(0), "{shown}: {}", answer.body);
            assert_eq!(seen, *first.get_or_insert(seen), "{shown}");
        }
        fixture.end().await;
    });
}

#[test]
fn paths_work_with_and_without_the_root_path() {
    story(async {
        let serve = ServeOptions { root_path: "llm/7b".to_owned(), ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        for path in ["/llm/7b/v1/models", "/v1/models", "/llm/7b/health?verbose=1", "/llm/7b/"] {
            assert_eq!(fixture.get(path).await.status, 200, "{path}");
        }
        let chat = fixture.post("/llm/7b/v1/chat/completions", &hello(json!({"max_tokens": 1}))).await;
        assert_eq!(chat.status, 200, "{}", chat.body);
        let page = fixture.get("/llm/7b").await;
        assert!(page.status == 307 && page.head.contains("location: /llm/7b/\r\n"), "{page:?}");
        let page = fixture.get("/llm/7b?a=b&c").await;
        assert!(page.status == 307 && page.head.contains("location: /llm/7b/?a=b&c\r\n"), "{page:?}");
        for path in ["/llm/v1/models", "/llm/7bb/v1/models", "/llm/7b/none", "/v1/models/llm/7b/"] {
            assert_eq!(fixture.get(path).await.status, 404, "{path}");
        }
        fixture.end().await;
    });
}

#[test]
fn a_refused_schema_names_the_path_of_the_fault() {
    story(async {
        let fixture = Fixture::usual().await;
        for (schema, place) in [
            (json!({"properties": {"a b": {"type": "zebra"}}}), "#/properties/a b"),
            (json!({"type": "array", "prefixItems": [{}, {"type": "string", "pattern": "(a"}]}), "#/prefixItems/1"),
            (json!({"items": {"properties": {"s": {"unevaluatedProperties": 3}}}}), "#/items/properties/s"),
            (json!({"$ref": "#/$defs/q", "$defs": {"q": {"dependentRequired": {"a": ["b"]}}}}), "#/$defs/q"),
        ] {
            let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
            let answer = fixture.post("/v1/chat/completions", &hello(json!({"response_format": format}))).await;
            assert_eq!(answer.status, 400, "{}", answer.body);
            let error = &answer.json()["error"];
            assert_eq!(error["param"], "response_format", "{error}");
            assert!(error["message"].as_str().is_some_and(|text| text.contains(&format!("at {place}"))), "{error}");
        }
        fixture.end().await;
    });
}

#[test]
fn reply_changing_fields_are_served_or_refused_by_name() {
    story(async {
        let fixture = Fixture::usual().await;
        let schema = json!({"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]});
        let text = |answer: &Value| answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned();
        for fields in [
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": true}}}),
            json!({"guided_json": schema}),
        ] {
            let answer = fixture.chat(fields.clone()).await.json();
            let json: Value = serde_json::from_str(&text(&answer)).unwrap_or_else(|error| panic!("{error}: {answer}"));
            assert_eq!(json["a"], 7, "{fields}");
        }
        assert_eq!(text(&fixture.chat(json!({"guided_choice": ["yes"]})).await.json()), "yes");
        let formed = text(&fixture.chat(json!({"guided_regex": "ab{2}c"})).await.json());
        assert_eq!(formed, "abbc");
        for (field, value) in [
            ("allowed_token_ids", json!([1, 2])),
            ("bad_words", json!(["no"])),
            ("include_stop_str_in_output", json!(true)),
            ("truncate_prompt_tokens", json!(10)),
            ("guided_grammar", json!("root ::= a")),
            ("temperature", json!(-1)),
            ("top_p", json!(0)),
            ("stop_token_ids", json!([99_999])),
            ("logit_bias", json!({"99999": 1})),
            ("stop", json!(vec!["x".repeat(2000); 1])),
            ("top_logprobs", json!(50)),
        ] {
            let mut fields = json!({field: value});
            if field == "top_logprobs" {
                fields["logprobs"] = true.into();
            }
            let error = fixture.chat(fields).await;
            assert_eq!((error.status, error.error()["param"].as_str()), (400, Some(field)), "{}", error.body);
        }
        fixture.end().await;
    });
}

#[test]
fn a_damaged_picture_is_named_by_its_field_path() {
    story(async {
        let fixture = Fixture::usual().await;
        let url = |bytes: &str| format!("data:image/png;base64,{bytes}");
        let shown = |bytes: &str| json!({"type": "image_url", "image_url": {"url": url(bytes)}});
        let messages = json!([
            {"role": "user", "content": [{"type": "text", "text": "Look"}, shown(&number())]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": [{"type": "text", "text": "And?"}, shown("AAAA")]},
        ]);
        let refused = fixture.chat(json!({"messages": messages})).await;
        assert_eq!(refused.error()["param"], "messages[2].content[1].image_url.url", "{}", refused.body);
        let source = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}});
        let asked = json!({"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": [source]}]});
        assert_eq!(fixture.post("/v1/messages", &asked).await.status, 400);
        let asked = json!({"model": "demo", "input": [{"role": "user", "content": [
            {"type": "input_text", "text": "And?"}, {"type": "input_image", "image_url": url("AAAA")}]}]});
        let refused = fixture.post("/v1/responses", &asked).await;
        assert_eq!(refused.error()["param"], "input[0].content[1].image_url", "{}", refused.body);
        fixture.end().await;
    });
}

/// A picture whose error is found only when it is decoded.
fn damaged() -> String {
    STANDARD.encode(damaged_png())
}

#[test]
fn a_picture_that_fails_to_decode_is_reported_with_its_field() {
    story(async {
        let fixture = Fixture::usual().await;
        let url = |bytes: &str| format!("data:image/png;base64,{bytes}");
        let shown = |bytes: &str| json!({"type": "image_url", "image_url": {"url": url(bytes)}});
        let first = json!([{"role": "user", "content": [shown(&number()), {"type": "text", "text": "What is this?"}]}]);
        // Afterward the tokens of the first picture are in the prefix cache.
        assert_eq!(fixture.chat(json!({"messages": first, "max_tokens": 4})).await.status, 200);
        let messages = json!([first[0], {"role": "assistant", "content": "A number."},
                              {"role": "user", "content": [{"type": "text", "text": "And?"}, shown(&damaged())]}]);
        let place = "messages[2].content[1].image_url.url";
        let refused = fixture.chat(json!({"messages": messages})).await;
        assert_eq!((refused.status, &refused.error()["param"]), (400, &json!(place)), "{}", refused.body);
        let message = refused.error()["message"].as_str().unwrap_or_default().to_owned();
        assert!(message.contains("picture 1"), "{message}");
        let streamed = fixture.chat(json!({"messages": messages, "stream": true})).await;
        let error = streamed.events().into_iter().find_map(|event| event.get("error").cloned());
        assert_eq!(error.expect("an error event")["param"], place, "{}", streamed.body);
        let input = json!([{"role": "user", "content": [{"type": "input_text", "text": "And?"},
                            {"type": "input_image", "image_url": url(&damaged())}]}]);
        let refused = fixture.post("/v1/responses", &json!({"model": "demo", "input": input})).await;
        assert_eq!(refused.error()["param"], "input[0].content[1].image_url", "{}", refused.body);
        fixture.end().await;
    });
}

#[test]
fn scored_tokens_have_exact_bytes_and_cut_characters_are_omitted() {
    story(async {
        let fixture = Fixture::usual().await;
        let fields = json!({"guided_regex": "\u{1318f}!", "logprobs": true, "top_logprobs": 1});
        let whole = fixture.chat(fields.clone()).await.json();
        let choice = &whole["choices"][0];
        let tokens = choice["logprobs"]["content"].as_array().expect("tokens");
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| token["bytes"].as_array().expect("bytes").iter())
            .map(|byte| byte.as_u64().and_then(|byte| byte.try_into().ok()).expect("a byte"))
            .collect();
        assert!(tokens.len() > 2, "the character has several tokens: {whole}");
        assert_eq!(String::from_utf8(bytes).expect("text"), "\u{1318f}!", "{whole}");
        assert_eq!(choice["message"]["content"], "\u{1318f}!");
        let mut cut = fields;
        cut["max_tokens"] = 2.into();
        let cut = fixture.chat(cut).await.json();
        assert_eq!(cut["choices"][0]["message"]["content"], "", "{cut}");
        assert_eq!(cut["choices"][0]["finish_reason"], "length");
        fixture.end().await;
    });
}

/// The type of an Anthropic content block, and the name of the function that it calls.
fn shape(block: &Value) -> (String, Value) {
    (block["type"].as_str().unwrap_or_default().to_owned(), block["name"].clone())
}

#[test]
fn a_forced_tool_overrides_a_format_in_every_api() {
    story(async {
        let limits = Limits { context_tokens: Some(1024), ..Limits::default() };
        let fixture = Fixture::with(LoadOptions { limits, ..small() }, ServeOptions::default()).await;
        let parameters = json!({"type": "object", "properties": {"zone": {"enum": ["a"]}}, "required": ["zone"]});
        let function = json!({"name": "clock", "parameters": parameters});
        let format = json!({"type": "json_schema", "name": "f", "schema": {"type": "object", "properties": {"x": {"enum": [1]}}}});
        let chat = fixture.chat(json!({
            "tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": format},
        }));
        let chat = chat.await.json();
        let call = &chat["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(
            call["arguments"].as_str().map(|text| text.replace(' ', "")).as_deref(),
            Some("{\"zone\":\"a\"}"),
            "{chat}"
        );
        let asked = json!({
            "model": "demo", "input": "Hello!", "temperature": 0, "max_output_tokens": 60, "tool_choice": "required",
            "tools": [{"type": "function", "name": "clock", "parameters": parameters}], "text": {"format": format},
        });
        let response = fixture.post("/v1/responses", &asked).await.json();
        assert_eq!(response["output"][0]["type"], "function_call", "{response}");
        // At any token limit, no markup of a call appears as text, streamed or not.
        for tokens in [1, 4, 8, 12, 20] {
            let cut = json!({
                "tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": tokens,
            });
            let whole = fixture.chat(cut.clone()).await.json();
            let message = &whole["choices"][0]["message"];
            assert_eq!(whole["choices"][0]["finish_reason"], "length", "{whole}");
            assert!(message["content"].as_str().unwrap_or_default().is_empty(), "{tokens}: {whole}");
            let mut streamed = cut;
            streamed["stream"] = true.into();
            assert_eq!(fixture.chat(streamed).await.streamed(), "", "{tokens}");
        }
        for tokens in [8, 30, 40, 44] {
            let cut = json!({
                "model": "demo", "max_tokens": tokens, "messages": [{"role": "user", "content": "Hello!"}],
                "temperature": 0, "tools": [{"name": "clock", "input_schema": parameters}], "tool_choice": {"type": "any"},
            });
            let whole = fixture.post("/v1/messages", &cut).await.json();
            let whole: Vec<_> = whole["content"].as_array().expect("blocks").iter().map(shape).collect();
            let mut streamed = cut;
            streamed["stream"] = true.into();
            let answer = fixture.post("/v1/messages", &streamed).await;
            let events = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
            let events: Vec<Value> = events.map(|event| serde_json::from_str(event).expect("JSON")).collect();
            let begun = events.iter().filter(|event| event["type"] == "content_block_start");
            assert_eq!(whole, begun.map(|event| shape(&event["content_block"])).collect::<Vec<_>>(), "{tokens}");
            assert!(whole.iter().all(|(kind, _)| kind == "tool_use"), "{tokens}: {whole:?}");
        }
        // A function in OpenAI's format is also accepted from Anthropic clients.
        let asked = json!({
            "model": "demo", "max_tokens": 60, "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0,
            "tools": [{"type": "function", "function": function}], "tool_choice": {"type": "any"},
        });
        let message = fixture.post("/v1/messages", &asked).await.json();
        assert_eq!(message["content"][0]["type"], "tool_use", "{message}");
        fixture.end().await;
    });
}

#[test]
fn unsupported_content_blocks_of_agents_become_text() {
    story(async {
        let fixture = Fixture::usual().await;
        let with = |content: Value| {
            json!({
                "model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": content}],
            })
        };
        for content in [
            json!([{"type": "search_result", "source": "https://a", "title": "A", "content": [{"type": "text", "text": "b"}]}]),
            json!([{"type": "tool_reference", "tool_name": "clock"}, {"type": "text", "text": "b"}]),
            json!([{"type": "web_search_tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "b"}]}]),
        ] {
            let answer = fixture.post("/v1/messages", &with(content.clone())).await;
            assert_eq!(answer.status, 200, "{content}: {}", answer.body);
        }
        let history = json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}]},
            {"role": "user", "content": "b"},
        ]);
        let asked = json!({"model": "demo", "max_tokens": 1, "messages": history});
        let counted = fixture.post("/v1/messages/count_tokens", &asked).await.json();
        assert!(counted["input_tokens"].as_u64().is_some_and(|tokens| tokens > 20), "{counted}");
        fixture.end().await;
    });
}

#[test]
fn a_responses_tokens_are_counted_and_its_input_is_listed() {
    story(async {
        let fixture = Fixture::usual().await;
        let asked = json!({"model": "demo", "instructions": "Be brief.", "input": [
            {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "So?"},
        ], "max_output_tokens": 1});
        let counted = fixture.post("/v1/responses/input_tokens", &asked).await.json();
        let response = fixture.post("/v1/responses", &asked).await.json();
        assert_eq!(counted["object"], "response.input_tokens");
        assert_eq!(counted["input_tokens"], response["usage"]["input_tokens"], "{response}");
        let id = response["id"].as_str().expect("an id");
        let list = async |query: &str| fixture.get(&format!("/v1/responses/{id}/input_items{query}")).await.json();
        let texts = |list: &Value| -> Vec<String> {
            let items = list["data"].as_array().expect("items");
            items.iter().map(|item| item["content"][0]["text"].as_str().expect("text").to_owned()).collect()
        };
        assert_eq!(texts(&list("").await), ["So?", "Hi.", "Hello!"]);
        let first = list("?order=asc&limit=2").await;
        assert_eq!((texts(&first), &first["has_more"]), (vec!["Hello!".to_owned(), "Hi.".to_owned()], &json!(true)));
        let after = first["last_id"].as_str().expect("an id");
        assert_eq!(texts(&list(&format!("?order=asc&after={after}")).await), ["So?"]);
        assert_eq!(fixture.get(&format!("/v1/responses/{id}/input_items?limit=0")).await.status, 400);
        assert_eq!(fixture.get("/v1/responses/resp_none/input_items").await.status, 404);
        fixture.end().await;
    });
}

#[test]
fn compressed_bodies_are_read_within_the_limit() {
    story(async {
        let serve = ServeOptions { body_bytes: Bytes::kib(64), ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        let gzip = |bytes: &[u8]| {
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            packed.write_all(bytes).expect("memory");
            packed.finish().expect("memory")
        };
        let body = hello(json!({"max_tokens": 1})).to_string();
        let sent = posted("/v1/chat/completions", "content-encoding: gzip\r\n", &gzip(body.as_bytes()));
        assert_eq!(fixture.say(&sent).await.status, 200);
        let bomb = hello(json!({"user": "u".repeat(10_000_000)})).to_string();
        let sent = posted("/v1/chat/completions", "content-encoding: gzip\r\n", &gzip(bomb.as_bytes()));
        assert!(sent.len() < 64 << 10);
        assert_eq!(fixture.say(&sent).await.status, 413);
        for (coding, bytes, status) in
            [("gzip", &b"no gzip"[..], 400), ("br", b"x", 415), ("identity", body.as_bytes(), 200)]
        {
            let sent = posted("/v1/chat/completions", &format!("content-encoding: {coding}\r\n"), bytes);
            assert_eq!(fixture.say(&sent).await.status, status, "{coding}");
        }
        fixture.end().await;
    });
}

#[test]
fn http_metrics_count_requests_under_bursar_and_vllm_names() {
    story(async {
        // A process has only one metrics recorder, so this test starts a separate process.
        let program = Program::start(&["--metrics-names", "vllm"]);
        let say = async |bytes: Vec<u8>| {
            let mut stream = TcpStream::connect(program.address()).await.expect("the server listens");
            stream.write_all(&bytes).await.expect("the server reads");
            String::from_utf8(rest(stream).await).expect("text")
        };
        let get =
            |path: &str| format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").into_bytes();
        for (fields, status) in [(json!({"max_tokens": 1}), 200), (json!({"model": "no-such-model"}), 404)] {
            let answer = say(posted("/v1/chat/completions", "", hello(fields).to_string().as_bytes())).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        }
        for path in ["/v1/models/demo", "/no/such/path"] {
            say(get(path)).await;
        }
        // A request is counted after its response was sent.
        let mut scraped = String::new();
        crate::stage::eventually("all requests are counted", async || {
            scraped = say(get("/metrics")).await;
            scraped.contains("bursar_http_requests_total{route=\"other\",status=\"404\"}")
        })
        .await;
        for line in [
            "bursar_http_requests_total{route=\"/v1/chat/completions\",status=\"200\"} ",
            "bursar_http_requests_total{route=\"/v1/chat/completions\",status=\"404\"} ",
            "bursar_http_requests_total{route=\"/v1/models/{*name}\",status=\"200\"} ",
            "bursar_http_errors_total{code=\"model_not_found\"} ",
            "bursar_http_connections ",
            "vllm:num_requests_running{model_name=",
            "vllm:kv_cache_usage_perc{model_name=",
            "vllm:time_to_first_token_seconds_bucket{model_name=",
            "vllm:request_success_total{model_name=",
        ] {
            assert!(scraped.lines().any(|text| text.starts_with(line)), "{line}\n{scraped}");
        }
    });
}

#[test]
fn clients_without_a_key_see_no_failure_details() {
    story(async {
        let serve = ServeOptions::default().with_keys("one\n").expect("a key");
        let fixture = Fixture::with(small(), serve).await;
        let refused = fixture.get("/v1/models").await;
        assert!(refused.status == 401 && refused.head.contains("www-authenticate: bearer"), "{}", refused.head);
        let failed = bursar_serve::ModelState::Failed("no such folder: /secret/place".into());
        fixture.service.set(["lost"], failed);
        assert!(!fixture.get("/health").await.body.contains("/secret"));
        let with = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-api-key: one\r\n\r\n";
        assert!(fixture.say(with).await.body.contains("/secret/place"));
        fixture.end().await;
    });
}
