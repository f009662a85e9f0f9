//! A model with Qwen3.5's formats over HTTP: calls in XML, and reasoning that the template opens.

use std::fs;

use bursar::ModelSource;
use bursar_serve::ServeOptions;
use serde_json::{Value, json};

use super::client::{Fixture, hello};
use crate::{
    stage::{Folder, story},
    tool_calls::{ample, folder_with_template},
};

/// A short template that renders calls and reasoning in the formats of Qwen3.5's template.
const TEMPLATE: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}\
Write <tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call><|im_end|>\n{% endif %}\
{% for message in messages %}<|im_start|>{{ message.role }}\n\
{% if message.reasoning_content and preserve_thinking %}<think>{{ message.reasoning_content }}</think>{% endif %}\
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n\
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n{{ value | string }}\n</parameter>\n\
{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
{% if reasoning_effort not in [undefined, 'low'] %}{{ raise_exception('unknown effort') }}{% endif %}\
<|im_start|>assistant\n{{ '<think>\n' }}{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}";

/// A token of the demo model that no text needs.
const SPARE: (&str, &str) = ("<|vision_pad|>", "861");

async fn fixture() -> (Fixture, Folder) {
    let fixture = Fixture::with(ample(), ServeOptions::default()).await;
    let folder = folder_with_template(TEMPLATE);
    // The demo model has no token for the end of reasoning, and would never spell it.
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let path = folder.path().join(file);
        let mut json: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
        let listed = json["added_tokens"].as_array_mut().into_iter().flatten();
        let spare = listed.filter(|token| token["content"] == SPARE.0);
        let renamed = |token: &mut Value| {
            token["content"] = "</think>".into();
            token["special"] = false.into();
        };
        spare.for_each(renamed);
        json.get_mut("added_tokens_decoder").and_then(|tokens| tokens.get_mut(SPARE.1)).into_iter().for_each(renamed);
        fs::write(&path, json.to_string()).expect("it is written");
    }
    let source = ModelSource::folder(folder.path());
    let model = fixture.stage.runtime.load_with(source, ample(), |_| {}).await.expect("it starts");
    fixture.service.add(["thinker"], model);
    (fixture, folder)
}

/// The fields of one choice, and the same fields collected from a stream.
async fn asked(fixture: &Fixture, mut fields: Value) -> [Value; 2] {
    fields["model"] = "thinker".into();
    let whole = fixture.chat(fields.clone()).await;
    assert_eq!(whole.status, 200, "{}", whole.body);
    let message = whole.json()["choices"][0]["message"].clone();
    fields["stream"] = true.into();
    let (mut content, mut reasoning, mut arguments) = (String::new(), String::new(), String::new());
    for event in fixture.chat(fields).await.events() {
        let delta = &event["choices"][0]["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        arguments += delta["tool_calls"][0]["function"]["arguments"].as_str().unwrap_or_default();
    }
    let text = |field: &Value| field.as_str().unwrap_or_default().to_owned();
    let call = &message["tool_calls"][0]["function"]["arguments"];
    [
        json!([text(&message["content"]), text(&message["reasoning_content"]), text(call)]),
        json!([content, reasoning, arguments]),
    ]
}

#[test]
fn forced_xml_calls_are_converted_to_json_and_back() {
    story(async {
        let (fixture, _folder) = fixture().await;
        let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
            "properties": {"place": {"enum": ["Bern", "Zug \"Süd\""]}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "exact": {"type": ["boolean", "null"]}},
            "required": ["place", "days", "exact"]}}}]);
        let call = json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 300,
            "chat_template_kwargs": {"enable_thinking": false}});
        let [whole, streamed] = asked(&fixture, call).await;
        assert_eq!(whole, streamed);
        assert_eq!((&whole[0], &whole[1]), (&json!(""), &json!("")));
        let arguments: Value = serde_json::from_str(whole[2].as_str().expect("text")).expect("JSON");
        assert!(["Bern", "Zug \"Süd\""].contains(&arguments["place"].as_str().expect("text")), "{arguments}");
        assert!((1..=9).contains(&arguments["days"].as_u64().expect("a number")), "{arguments}");
        assert!(arguments["exact"].is_boolean() || arguments["exact"].is_null(), "{arguments}");
        let history = json!([{"role": "user", "content": "Hm?"},
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function",
                "function": {"name": "weather", "arguments": whole[2]}}]},
            {"role": "tool", "tool_call_id": "1", "content": "dry"}]);
        let next = json!({"model": "thinker", "messages": history, "tools": tools, "max_tokens": 1});
        assert_eq!(fixture.chat(next).await.status, 200);
        fixture.end().await;
    });
}

#[test]
fn a_schema_applies_after_reasoning_opened_by_the_template() {
    story(async {
        let (fixture, _folder) = fixture().await;
        let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false});
        let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
        let of = |fields: Value| {
            let mut body = json!({"response_format": format, "max_tokens": 24});
            body.as_object_mut().expect("an object").extend(fields.as_object().cloned().unwrap_or_default());
            body
        };
        let is_json = |text: &Value| ["{\"n\": 1}", "{\"n\": 2}"].contains(&text.as_str().expect("text"));
        // The model never ends its reasoning by itself.
        let [whole, streamed] = asked(&fixture, of(json!({"reasoning_effort": "low"}))).await;
        assert!(whole[0] == "" && whole[1] != "" && whole == streamed, "{whole} {streamed}");
        // With these fields, the model ends its reasoning at once or has no reasoning.
        for fields in [
            json!({"logit_bias": {SPARE.1: 100}}),
            json!({"reasoning_effort": "none"}),
            json!({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false}}),
        ] {
            let [whole, streamed] = asked(&fixture, of(fields.clone())).await;
            assert!(is_json(&whole[0]) && whole[1] == "" && whole == streamed, "{fields} {whole} {streamed}");
        }
        // Variables reach the template on both routes.
        let history = json!([{"role": "user", "content": "Hm?"}, {"role": "user", "content": "So?"},
            {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}, {"role": "user", "content": "Sure?"}]);
        let tokens = async |preserved: bool| {
            let kwargs = json!({"preserve_thinking": preserved});
            let body = hello(
                json!({"model": "thinker", "messages": history, "max_tokens": 1, "chat_template_kwargs": kwargs}),
            );
            fixture.post("/v1/chat/completions", &body).await.json()["usage"]["prompt_tokens"]
                .as_u64()
                .expect("a number")
        };
        assert!(tokens(true).await > tokens(false).await);
        let refused = fixture.chat(json!({"model": "thinker", "reasoning_effort": "huge"})).await;
        assert_eq!(refused.status, 400, "{}", refused.body);
        let response = json!({"model": "thinker", "input": "Hi", "max_output_tokens": 12,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
            "chat_template_kwargs": {"enable_thinking": false}});
        let answered = fixture.post("/v1/responses", &response).await.json();
        assert!(is_json(&answered["output"][0]["content"][0]["text"]), "{answered}");
        fixture.end().await;
    });
}
