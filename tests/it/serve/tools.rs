//! Tools that are not functions: which tools the model sees, how calls are returned, and
//! which tools are refused.

use bursar::{Envelope, LoadOptions};
use bursar_serve::ServeOptions;
use serde_json::{Value, json};

use super::client::{Answer, Fixture};
use crate::stage::{small, small_envelope, story};

/// A server whose context is large enough for tools.
async fn fixture() -> Fixture {
    let envelope = Some(Envelope { context_tokens: 800, ..small_envelope() });
    Fixture::with(LoadOptions { envelope, ..small() }, ServeOptions::default()).await
}

async fn responded(fixture: &Fixture, fields: Value) -> Answer {
    let mut body = json!({"model": "demo", "input": "Hello!", "max_output_tokens": 120, "temperature": 0});
    body.as_object_mut().expect("an object").extend(fields.as_object().cloned().unwrap_or_default());
    fixture.post("/v1/responses", &body).await
}

async fn messaged(fixture: &Fixture, fields: Value) -> Answer {
    let mut body = json!({"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0});
    body.as_object_mut().expect("an object").extend(fields.as_object().cloned().unwrap_or_default());
    fixture.post("/v1/messages", &body).await
}

/// A function whose arguments the demo model writes in a few tokens.
fn wait() -> Value {
    let parameters = json!({"type": "object", "properties": {"hours": {"enum": [1, 2]}}, "required": ["hours"],
        "additionalProperties": false});
    json!({"type": "function", "name": "wait", "parameters": parameters})
}

#[test]
fn hosted_tools_are_listed_but_not_shown_and_cannot_be_forced() {
    story(async {
        let fixture = fixture().await;
        let plain = responded(&fixture, json!({})).await.json();
        let hosted = json!([{"type": "web_search", "external_web_access": false}, {"type": "image_generation"}]);
        let answer = responded(&fixture, json!({"tools": hosted})).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let answer = answer.json();
        assert_eq!(answer["tools"], hosted);
        assert_eq!(answer["usage"]["input_tokens"], plain["usage"]["input_tokens"]);
        assert_eq!(answer["output"][0]["content"], plain["output"][0]["content"]);
        for choice in [json!("required"), json!({"type": "web_search"})] {
            let refused = responded(&fixture, json!({"tools": hosted, "tool_choice": choice})).await;
            assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("tool_choice")), "{choice}");
        }

        let plain = messaged(&fixture, json!({})).await.json();
        let hosted = json!([{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]);
        let answer = messaged(&fixture, json!({"tools": hosted})).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.json()["usage"]["input_tokens"], plain["usage"]["input_tokens"]);
        for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "web_search"})] {
            let refused = messaged(&fixture, json!({"tools": hosted, "tool_choice": choice})).await;
            assert_eq!(refused.status, 400, "{choice}");
            assert!(refused.body.contains("web_search"), "{}", refused.body);
        }
        fixture.end().await;
    });
}

#[test]
fn a_namespace_function_keeps_its_name_across_turns() {
    story(async {
        let fixture = fixture().await;
        let tools = json!([{"type": "namespace", "name": "agents", "description": "others", "tools": [wait()]}]);
        let choice = json!({"type": "function", "namespace": "agents", "name": "wait"});
        let first = responded(&fixture, json!({"tools": tools, "tool_choice": choice})).await.json();
        let call = &first["output"][0];
        assert_eq!(
            (&call["type"], &call["namespace"], &call["name"]),
            (&json!("function_call"), &json!("agents"), &json!("wait")),
            "{first}"
        );
        let value = json!([{"role": "user", "content": "Hello!"}, call,
            {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}]);
        let second = responded(&fixture, json!({"tools": tools, "input": value, "max_output_tokens": 2})).await;
        assert_eq!(second.status, 200, "{}", second.body);
        let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64();
        assert!(tokens(&second.json()) > tokens(&first), "the prompt contains the call and its result");
        fixture.end().await;
    });
}

#[test]
fn a_custom_tool_gets_its_input_as_text() {
    story(async {
        let fixture = fixture().await;
        let tools = json!([{"type": "custom", "name": "patch", "description": "edits files"}]);
        let forced = json!({"tools": tools, "tool_choice": {"type": "custom", "name": "patch"}, "stream": true});
        let answer = responded(&fixture, forced.clone()).await;
        let data = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
        let events: Vec<Value> = data.map(|event| serde_json::from_str(event).expect("JSON")).collect();
        let of = |kind: &str| events.iter().find(|event| event["type"] == kind).unwrap_or_else(|| panic!("no {kind}"));
        let input = of("response.custom_tool_call_input.done")["input"].as_str().expect("text");
        assert_eq!(of("response.custom_tool_call_input.delta")["delta"], input);
        let item = &of("response.output_item.done")["item"];
        assert_eq!(
            (&item["type"], &item["name"], &item["input"]),
            (&json!("custom_tool_call"), &json!("patch"), &json!(input))
        );
        assert!(!input.is_empty() && !input.contains("\"input\""), "{input}");
        let mut grammar = forced;
        grammar["tools"][0]["format"] = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"a\""});
        let refused = responded(&fixture, grammar.clone()).await;
        assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("tool_choice")));
        grammar["tool_choice"] = "auto".into();
        assert_eq!(responded(&fixture, grammar).await.status, 200);
        fixture.end().await;
    });
}
