//! Request body of `POST /v1/completions`: prompts without a chat template.

use std::fmt;

use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Unexpected, Visitor},
};
use serde_json::Value;

use super::{chat_request::ResponseFormat, sampling::Sampling};
use crate::{
    body::{self, FromJson},
    error::ApiError,
};

/// `POST /v1/completions`.
pub(crate) struct CompletionRequest {
    pub(super) fields: CompletionFields,
    pub(super) sampling: Sampling,
}

impl FromJson for CompletionRequest {
    fn from_json(bytes: &[u8]) -> Result<Self, ApiError> {
        let (fields, sampling) = body::pair_of(body::json(bytes)?)?;
        Ok(CompletionRequest { fields, sampling })
    }
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct CompletionFields {
    pub(super) model: Option<String>,
    #[schemars(with = "Value")]
    pub(super) prompt: Prompts,
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

/// One or several prompts: a text, a list of texts, a list of token ids, or a list of such lists.
/// Prompts are not deserialized through an untagged enum, whose buffer of values would take 16
/// times the memory of the token ids.
#[derive(Debug, PartialEq)]
pub(super) struct Prompts(pub(super) Vec<Prompt>);

const EXPECTED: &str = "a text, a list of texts, or a list of token ids";

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Whole;
        impl<'de> Visitor<'de> for Whole {
            type Value = Prompts;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(EXPECTED)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![Prompt::Text(text.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompts, A::Error> {
                let (mut prompts, mut tokens) = (Vec::new(), Vec::new());
                while let Some(item) = items.next_element()? {
                    match item {
                        Item::Prompt(prompt) if tokens.is_empty() => prompts.push(prompt),
                        Item::Token(token) if prompts.is_empty() => tokens.push(token),
                        _ => return Err(Error::custom(format_args!("expected {EXPECTED}"))),
                    }
                }
                match (prompts.is_empty(), tokens.is_empty()) {
                    (true, true) => Err(Error::invalid_length(0, &self)),
                    (true, false) => Ok(Prompts(vec![Prompt::Tokens(tokens)])),
                    (false, _) => Ok(Prompts(prompts)),
                }
            }
        }
        deserializer.deserialize_any(Whole)
    }
}

/// An item of a list: a prompt, or a token of the only prompt.
enum Item {
    Prompt(Prompt),
    Token(u32),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Item;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text, a token id, or a list of token ids")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Prompt(Prompt::Text(text.to_owned())))
            }

            fn visit_u64<E: Error>(self, token: u64) -> Result<Item, E> {
                let unknown = |_| Error::invalid_value(Unexpected::Unsigned(token), &"a token id");
                token.try_into().map(Item::Token).map_err(unknown)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = items.next_element()? {
                    tokens.push(token);
                }
                Ok(Item::Prompt(Prompt::Tokens(tokens)))
            }
        }
        deserializer.deserialize_any(One)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::Shape;

    #[test]
    fn prompts_have_four_forms_and_other_forms_are_refused() {
        let all = |prompt: Value| {
            let body = json!({"prompt": prompt}).to_string();
            let fields = body::parsed::<CompletionFields>(body.as_bytes());
            fields.map(|fields| fields.prompt.0).map_err(|error| error.body(Shape::OpenAi)["error"]["param"].clone())
        };
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
