//! Request body of `POST /v1/responses`.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::items::Item;
use crate::{
    body::{self, FromJson},
    error::ApiError,
    one_or_many::OneOrMany,
};

/// `POST /v1/responses`.
pub(crate) struct ResponsesRequest {
    pub(super) fields: Fields,
    /// Length of the body in bytes, which counts toward the limit of stored bytes.
    pub(super) bytes: usize,
}

impl FromJson for ResponsesRequest {
    fn from_json(bytes: &[u8]) -> Result<Self, ApiError> {
        Ok(ResponsesRequest { fields: body::parsed(bytes)?, bytes: bytes.len() })
    }
}

/// `POST /v1/responses`. Unknown fields are ignored, as on other servers.
#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "ResponseFields")]
pub(crate) struct Fields {
    pub(super) model: Option<String>,
    pub(super) input: Option<OneOrMany<Item>>,
    pub(super) instructions: Option<String>,
    pub(super) previous_response_id: Option<String>,
    pub(super) store: Option<bool>,
    pub(super) background: Option<bool>,
    pub(super) stream: Option<bool>,
    pub(super) max_output_tokens: Option<usize>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) tools: Option<Vec<Value>>,
    pub(super) tool_choice: Option<Value>,
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) text: Option<Text>,
    pub(super) reasoning: Option<Reasoning>,
    pub(super) metadata: Option<Map<String, Value>>,
    /// vLLM extension: variables of the chat template.
    pub(super) chat_template_kwargs: Option<Map<String, Value>>,
    /// vLLM extension: lower values are served earlier.
    pub(super) priority: Option<i32>,
    include: Option<Vec<String>>,
    top_logprobs: Option<usize>,
    truncation: Option<String>,
    conversation: Option<Value>,
    prompt: Option<Value>,
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct Text {
    pub(super) format: Option<Value>,
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct Reasoning {
    pub(super) effort: Option<String>,
}

impl Fields {
    pub(super) fn is_stored(&self) -> bool {
        self.store.unwrap_or(true)
    }

    pub(super) fn is_in_background(&self) -> bool {
        self.background.unwrap_or_default()
    }

    /// Rejects unsupported fields that would change the reply. The error names the field.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        let refused = |param: &str, message: &str, hint: &str| Err(ApiError::invalid(param, message).hint(hint));
        let has_scores = self.include.iter().flatten().any(|included| included == "message.output_text.logprobs");
        if has_scores || self.top_logprobs.unwrap_or_default() > 0 {
            let hint = "use POST /v1/chat/completions with `logprobs`";
            return refused("top_logprobs", "responses do not support log-probabilities", hint);
        }
        if self.truncation.as_deref() == Some("auto") {
            return refused(
                "truncation",
                "`truncation` is auto, but this server never truncates the input",
                "shorten the input, or leave `truncation` out",
            );
        }
        if self.conversation.is_some() {
            return refused("conversation", "`conversation` is not supported", "use `previous_response_id` instead");
        }
        if self.prompt.is_some() {
            return refused(
                "prompt",
                "`prompt` is not supported, because this server stores no prompts",
                "send `instructions` and `input` instead",
            );
        }
        if self.is_in_background() && !self.is_stored() {
            let message = "background responses are always stored, but `store` is false";
            return refused("store", message, "leave `store` out, or set it to true");
        }
        Ok(())
    }

    /// Returns the response before generation starts, which repeats the parameters of the request.
    pub(super) fn response(&self, id: &str, created: u64, model: &str) -> Value {
        let plain = json!({"type": "text"});
        json!({
            "id": id, "object": "response", "created_at": created, "model": model, "status": "in_progress",
            "background": self.is_in_background(), "store": self.is_stored(), "error": null,
            "incomplete_details": null, "instructions": self.instructions, "output": [], "usage": null,
            "max_output_tokens": self.max_output_tokens, "max_tool_calls": null,
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": self.previous_response_id, "temperature": self.temperature, "top_p": self.top_p,
            "tools": self.tools.as_deref().unwrap_or_default(), "truncation": "disabled", "top_logprobs": 0,
            "tool_choice": self.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            "text": {"format": self.text.as_ref().and_then(|text| text.format.clone()).unwrap_or(plain)},
            "reasoning": {"effort": self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone()), "summary": null},
            "metadata": self.metadata.clone().unwrap_or_default(), "service_tier": "default", "user": null,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Shape;

    fn refused(body: &Value) -> Value {
        let read = ResponsesRequest::from_json(body.to_string().as_bytes());
        let error = read.and_then(|request| request.fields.check()).expect_err("the request is refused");
        error.body(Shape::OpenAi)["error"]["param"].clone()
    }

    #[test]
    fn wrong_or_unsupported_fields_are_named() {
        for (body, param) in [
            (json!({"input": 1}), "input"),
            (json!({"input": [{"content": [{"type": "input_text", "text": 1}]}]}), "input[0].content[0].text"),
            (json!({"input": "a", "truncation": "auto"}), "truncation"),
            (json!({"input": "a", "conversation": "conv_1"}), "conversation"),
            (json!({"input": "a", "background": true, "store": false}), "store"),
            (json!({"input": "a", "include": ["message.output_text.logprobs"]}), "top_logprobs"),
        ] {
            assert_eq!(refused(&body), param, "{body}");
        }
    }
}
