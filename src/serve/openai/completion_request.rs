//! A completion request as clients send it: prompts without a chat template.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::{chat_request::ResponseFormat, sampling::Sampling};
use crate::serve::{
    body::{self, FromJson},
    error::ApiError,
};

/// `POST /v1/completions`.
pub(in crate::serve) struct CompletionRequest {
    pub(super) fields: CompletionFields,
    pub(super) sampling: Sampling,
}

impl FromJson for CompletionRequest {
    fn from_json(bytes: &[u8]) -> Result<Self, ApiError> {
        Ok(CompletionRequest { fields: body::parsed(bytes)?, sampling: body::parsed(bytes)? })
    }
}

#[derive(Deserialize, JsonSchema)]
pub(in crate::serve) struct CompletionFields {
    pub(super) model: Option<String>,
    pub(super) prompt: Value,
    pub(super) suffix: Option<String>,
    pub(super) max_tokens: Option<usize>,
    pub(super) echo: Option<bool>,
    pub(super) best_of: Option<usize>,
    pub(super) logprobs: Option<usize>,
    pub(super) add_special_tokens: Option<bool>,
    pub(super) return_token_ids: Option<bool>,
    pub(super) response_format: Option<ResponseFormat>,
}

/// A prompt as text or tokens.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    /// One prompt, or several: a text, texts, token ids, or lists of them.
    pub(super) fn all(prompt: Value) -> Result<Vec<Prompt>, ApiError> {
        let wrong = |at: &str| {
            ApiError::invalid(format!("prompt{at}"), "expected a text, a list of texts, or a list of token ids")
        };
        match prompt {
            Value::String(text) => Ok(vec![Prompt::Text(text)]),
            Value::Array(items) if items.is_empty() => Err(wrong("")),
            Value::Array(items) if items.iter().all(Value::is_number) => Ok(vec![tokens(&items, "prompt")?]),
            Value::Array(items) => {
                let prompts = items.into_iter().enumerate().map(|(index, item)| match item {
                    Value::String(text) => Ok(Prompt::Text(text)),
                    Value::Array(items) => tokens(&items, &format!("prompt[{index}]")),
                    _ => Err(wrong(&format!("[{index}]"))),
                });
                prompts.collect()
            }
            _ => Err(wrong("")),
        }
    }
}

fn tokens(items: &[Value], param: &str) -> Result<Prompt, ApiError> {
    let ids = items.iter().enumerate().map(|(index, item)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| ApiError::invalid(format!("{param}[{index}]"), format!("{item} is not a token id")))
    });
    ids.collect::<Result<_, _>>().map(Prompt::Tokens)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::serve::error::Shape;

    #[test]
    fn prompts_come_in_four_forms_and_others_are_named() {
        let all = |prompt| Prompt::all(prompt).map_err(|error| error.body(Shape::OpenAi)["error"]["param"].clone());
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(all(json!("a")), Ok(vec![text("a")]));
        assert_eq!(all(json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
        assert_eq!(all(json!([1, 2])), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        assert_eq!(all(json!([[1], [2, 3]])), Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]));
        for (prompt, param) in [
            (json!([]), "prompt"),
            (json!([1, -2]), "prompt[1]"),
            (json!([[1], {}]), "prompt[1]"),
            (json!([[1.5]]), "prompt[0][0]"),
            (json!(5), "prompt"),
        ] {
            assert_eq!(all(prompt.clone()), Err(json!(param)), "{prompt}");
        }
    }
}
