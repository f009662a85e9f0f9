//! Request body of `POST /v1/messages`.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    body::{self, FromJson},
    error::ApiError,
    one_or_many::{OneOrMany, Wrapped},
};

/// `POST /v1/messages` and `/v1/messages/count_tokens`. Unknown fields are ignored. So is
/// `cache_control`: prompts with a common prefix share the prefix cache without it.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct MessagesRequest {
    pub(super) model: Option<String>,
    pub(super) messages: Vec<Message>,
    pub(super) max_tokens: Option<usize>,
    pub(super) system: Option<OneOrMany<Block>>,
    pub(super) stop_sequences: Option<Vec<String>>,
    pub(super) stream: Option<bool>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) top_k: Option<usize>,
    pub(super) tools: Option<Vec<Tool>>,
    pub(super) tool_choice: Option<Choice>,
    pub(super) thinking: Option<Thinking>,
    pub(super) output_config: Option<OutputConfig>,
    /// Older name of `output_config.format`.
    pub(super) output_format: Option<Format>,
    /// Refused: this server does not call tools itself.
    pub(super) mcp_servers: Option<Vec<Value>>,
}

impl FromJson for MessagesRequest {
    fn from_json(bytes: &[u8]) -> Result<Self, ApiError> {
        body::parsed(bytes)
    }
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "AnthropicMessage")]
pub(super) struct Message {
    pub(super) role: String,
    pub(super) content: OneOrMany<Block>,
}

/// A block of a message. `type` determines which of the other fields are used.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct Block {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) text: Option<String>,
    pub(super) thinking: Option<String>,
    /// A text in a `search_result`, an object in other blocks.
    pub(super) source: Option<Wrapped<Source>>,
    pub(super) title: Option<String>,
    pub(super) tool_name: Option<String>,
    pub(super) id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) input: Option<Value>,
    pub(super) tool_use_id: Option<String>,
    pub(super) content: Option<OneOrMany<Block>>,
    pub(super) is_error: Option<bool>,
}

impl From<String> for Block {
    fn from(text: String) -> Self {
        Block { kind: "text".to_owned(), text: Some(text), ..Block::default() }
    }
}

impl From<String> for Source {
    fn from(text: String) -> Self {
        Source { data: Some(text), ..Source::default() }
    }
}

/// Source of a picture or document.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct Source {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) data: Option<String>,
    pub(super) url: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct Tool {
    /// `custom` (the default), or one of Anthropic's tools.
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) name: Option<String>,
    pub(super) description: Option<String>,
    pub(super) input_schema: Option<Value>,
    /// Same as `input_schema`, in OpenAI's shape.
    pub(super) parameters: Option<Value>,
    pub(super) function: Option<Function>,
}

/// A tool in OpenAI's shape.
#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "OpenAiFunction")]
pub(super) struct Function {
    pub(super) name: Option<String>,
    pub(super) description: Option<String>,
    pub(super) parameters: Option<Value>,
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct Choice {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) name: Option<String>,
    pub(super) disable_parallel_tool_use: Option<bool>,
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct Thinking {
    #[serde(rename = "type")]
    pub(super) kind: String,
    /// `omitted` leaves the thinking text out of the reply.
    pub(super) display: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct OutputConfig {
    pub(super) effort: Option<String>,
    pub(super) format: Option<Format>,
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct Format {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) schema: Option<Value>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::Shape;

    #[test]
    fn a_wrong_field_is_named_in_an_anthropic_error() {
        let message = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
        for (body, place) in [
            (message(json!(1)), "messages[0].content"),
            (message(json!([{"type": "text", "text": 1}])), "messages[0].content[0].text"),
            (message(json!([{"type": "image", "source": {"data": ""}}])), "messages[0].content[0].source.type"),
            (
                message(json!([{"type": "tool_result", "content": [{"text": "a"}]}])),
                "messages[0].content[0].content[0].type",
            ),
            (json!({"messages": [], "max_tokens": -1}), "max_tokens"),
            (json!({"messages": [], "tools": [{"name": {}}]}), "tools[0].name"),
        ] {
            let error = MessagesRequest::from_json(body.to_string().as_bytes()).map(drop).expect_err("bad request");
            let answer = error.body(Shape::Anthropic);
            assert_eq!((&answer["type"], &answer["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
            let message = answer["error"]["message"].as_str().expect("a message");
            assert!(message.starts_with(&format!("`{place}`: ")), "{message}");
        }
    }

    #[test]
    fn caching_and_billing_fields_are_accepted() {
        let body = json!({
            "model": "demo", "max_tokens": 4, "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {},
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "b", "cache_control": null}]}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": true, "cache_control": {}}],
        });
        let request =
            MessagesRequest::from_json(body.to_string().as_bytes()).map_err(|error| error.body(Shape::Anthropic));
        assert_eq!(request.expect("the request is valid").system.expect("blocks").0[0].text.as_deref(), Some("a"));
    }
}
