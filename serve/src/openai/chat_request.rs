//! Request body of `POST /v1/chat/completions`.

use bursar::OutputFormat;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::sampling::Sampling;
use crate::{
    body::{self, FromJson},
    error::ApiError,
    form::{form, json_of},
    media::Sizes,
    one_or_many::{OneOrMany, Wrapped},
};

/// `POST /v1/chat/completions`. Unknown fields are ignored, as on other servers.
pub(crate) struct ChatRequest {
    pub(super) chat: ChatFields,
    pub(super) sampling: Sampling,
}

impl FromJson for ChatRequest {
    fn from_json(bytes: &[u8]) -> Result<Self, ApiError> {
        let (chat, sampling) = body::pair_of(body::json(bytes)?)?;
        Ok(ChatRequest { chat, sampling })
    }
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct ChatFields {
    pub(super) model: Option<String>,
    pub(super) messages: Vec<ChatMessage>,
    pub(super) max_tokens: Option<usize>,
    pub(super) max_completion_tokens: Option<usize>,
    pub(super) logprobs: Option<bool>,
    pub(super) top_logprobs: Option<usize>,
    pub(super) prompt_logprobs: Option<i64>,
    pub(super) tools: Option<Vec<Value>>,
    pub(super) tool_choice: Option<Value>,
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) response_format: Option<ResponseFormat>,
    pub(super) chat_template_kwargs: Option<Map<String, Value>>,
    pub(super) reasoning_effort: Option<String>,
    pub(super) continue_final_message: Option<bool>,
    pub(super) add_generation_prompt: Option<bool>,
    pub(super) return_token_ids: Option<bool>,
    pub(super) mm_processor_kwargs: Option<Sizes>,
    pub(super) modalities: Option<Vec<String>>,
}

/// A message of the chat.
#[derive(Default, Deserialize, JsonSchema)]
pub(crate) struct ChatMessage {
    pub(super) role: String,
    pub(super) content: Option<OneOrMany<ContentPart>>,
    pub(super) tool_calls: Option<Vec<Call>>,
    pub(super) tool_call_id: Option<String>,
    pub(super) reasoning: Option<String>,
    pub(super) reasoning_content: Option<String>,
}

/// A part of a message. `type` determines which of the other fields are used.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct ContentPart {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) text: Option<String>,
    pub(super) refusal: Option<String>,
    pub(super) thinking: Option<String>,
    pub(super) image_url: Option<Wrapped<Link>>,
    /// Source of a picture, as in the examples of Hugging Face.
    pub(super) image: Option<String>,
    pub(super) url: Option<String>,
    /// Source of a picture, in Anthropic's format.
    pub(super) source: Option<PictureSource>,
    pub(super) detail: Option<String>,
    pub(super) video_url: Option<Wrapped<Link>>,
    /// Frames of a video, as in Qwen's examples.
    pub(super) video: Option<OneOrMany<String>>,
    /// Frames per second of `video`, or the rate at which a video file is sampled.
    pub(super) fps: Option<f64>,
}

impl From<String> for ContentPart {
    fn from(text: String) -> Self {
        ContentPart { kind: "text".to_owned(), text: Some(text), ..ContentPart::default() }
    }
}

/// Source of a picture or video.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct Link {
    pub(super) url: String,
    /// Resolution of a picture: `low` is coarser; `high` and `auto` use the model's size.
    pub(super) detail: Option<String>,
}

impl From<String> for Link {
    fn from(url: String) -> Self {
        Link { url, detail: None }
    }
}

/// A picture in Anthropic's format.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct PictureSource {
    pub(super) data: Option<String>,
    pub(super) url: Option<String>,
}

/// A tool call in an earlier reply.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct Call {
    pub(super) id: Option<String>,
    pub(super) function: CalledFunction,
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct CalledFunction {
    pub(super) name: String,
    /// JSON as text, or the object itself.
    #[serde(default)]
    pub(super) arguments: Value,
}

/// Format of the reply.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct ResponseFormat {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) json_schema: Option<NamedSchema>,
    /// Schema of a `json_object`, as in llama.cpp and Together.
    pub(super) schema: Option<Value>,
}

impl ResponseFormat {
    pub(super) fn form(self) -> Result<Option<OutputFormat>, ApiError> {
        if self.kind == "json_object"
            && let Some(schema) = self.schema
        {
            return Ok(Some(json_of(schema)));
        }
        let schema = self.json_schema.and_then(|named| named.schema);
        form(&self.kind, schema, "response_format", "response_format.json_schema.schema")
    }
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct NamedSchema {
    pub(super) schema: Option<Value>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::Shape;

    #[test]
    fn a_wrong_field_of_a_chat_request_is_named() {
        for (body, param) in [
            (
                json!({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
                "messages[0].content[0].text",
            ),
            (json!({"messages": [{"role": "user", "content": 1}]}), "messages[0].content"),
            (json!({"messages": [], "stop": ["a", 1]}), "stop[1]"),
            (json!({"messages": [], "temperature": "hot"}), "temperature"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": []}}]}]}),
                "messages[0].content[0].image_url.url",
            ),
            (json!({"messages": [{"content": "a"}]}), "messages[0].role"),
            (json!({}), "messages"),
        ] {
            let error = ChatRequest::from_json(body.to_string().as_bytes()).map(drop).expect_err("bad request");
            assert_eq!(error.body(Shape::OpenAi)["error"]["param"], param, "{body}");
        }
    }

    #[test]
    fn unknown_fields_and_nulls_are_ignored() {
        let body = json!({"messages": [{"role": "user", "content": null, "name": null}], "n": null, "store": true, "user": "u"});
        let request = ChatRequest::from_json(body.to_string().as_bytes()).map_err(|error| error.body(Shape::OpenAi));
        assert!(request.expect("the request is valid").chat.messages[0].content.is_none());
    }
}
