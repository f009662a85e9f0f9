//! Sampling parameters of chat and completion requests: OpenAI's fields and vLLM's extensions.

use std::collections::BTreeMap;

use bursar::{Chat, OutputFormat};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    error::ApiError,
    form::{any_object, json_of},
    one_or_many::OneOrMany,
};

/// Fields that chat and completion requests share.
#[derive(Default, Deserialize, JsonSchema)]
pub(crate) struct Sampling {
    temperature: Option<f64>,
    top_p: Option<f64>,
    /// -1 and 0 set no limit.
    top_k: Option<i64>,
    min_p: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    logit_bias: Option<BTreeMap<String, f64>>,
    seed: Option<i64>,
    stop: Option<OneOrMany<String>>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    min_tokens: Option<usize>,
    cache_salt: Option<String>,
    /// Lower values are served earlier, as in vLLM.
    priority: Option<i32>,
    structured_outputs: Option<StructuredOutputs>,
    /// Earlier vLLM names for `structured_outputs`.
    guided_json: Option<Value>,
    guided_regex: Option<String>,
    guided_choice: Option<Vec<String>>,
    guided_grammar: Option<Value>,
    allowed_token_ids: Option<Value>,
    bad_words: Option<Vec<String>>,
    include_stop_str_in_output: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    use_beam_search: Option<bool>,
    /// Number of replies to generate.
    pub(super) n: Option<usize>,
    pub(super) stream: Option<bool>,
    pub(super) stream_options: Option<StreamOptions>,
}

/// Options of a streamed reply.
#[derive(Clone, Copy, Default, Deserialize, JsonSchema)]
pub(crate) struct StreamOptions {
    /// Sends a last chunk with the token usage.
    pub(super) include_usage: Option<bool>,
}

/// Format of the reply, as in vLLM. At most one field may be set.
#[derive(Default, Deserialize, JsonSchema)]
struct StructuredOutputs {
    json: Option<Value>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    json_object: Option<bool>,
    grammar: Option<String>,
    structural_tag: Option<Value>,
}

impl StructuredOutputs {
    fn format(&self) -> Result<Option<OutputFormat>, ApiError> {
        let refused = |name: &str| {
            ApiError::invalid(format!("structured_outputs.{name}"), format!("`{name}` is not supported"))
                .hint("use `json`, `regex` or `choice`")
        };
        if self.grammar.is_some() {
            return Err(refused("grammar"));
        }
        if self.structural_tag.is_some() {
            return Err(refused("structural_tag"));
        }
        let object = self.json_object.unwrap_or_default().then(any_object);
        let forms = [
            self.json.as_ref().map(schema_of).transpose()?,
            self.regex.clone().map(OutputFormat::Regex),
            self.choice.clone().map(OutputFormat::Choice),
            object,
        ];
        let mut forms = forms.into_iter().flatten();
        match (forms.next(), forms.next()) {
            (_, Some(_)) => {
                Err(ApiError::invalid("structured_outputs", "several formats are given; expected only one"))
            }
            (form, None) => Ok(form),
        }
    }
}

/// Parses a schema, which may also be JSON in a string.
fn schema_of(schema: &Value) -> Result<OutputFormat, ApiError> {
    let parsed = match schema {
        Value::String(text) => serde_json::from_str(text).map_err(|error| {
            ApiError::invalid("structured_outputs.json", format!("the schema is not JSON: {error}"))
        })?,
        schema => schema.clone(),
    };
    Ok(json_of(parsed))
}

impl Sampling {
    /// The structured output under its earlier field names.
    fn guided(&self) -> Option<StructuredOutputs> {
        let (json, regex, choice) = (self.guided_json.clone(), self.guided_regex.clone(), self.guided_choice.clone());
        (json.is_some() || regex.is_some() || choice.is_some()).then(|| StructuredOutputs {
            json,
            regex,
            choice,
            ..StructuredOutputs::default()
        })
    }

    /// Rejects unsupported fields that change the reply on other servers. The
    /// error names the field.
    fn check_unsupported(&self) -> Result<(), ApiError> {
        let unsupported = [
            (self.allowed_token_ids.is_some(), "allowed_token_ids", "use `structured_outputs.choice` or `regex`"),
            (self.bad_words.as_ref().is_some_and(|words| !words.is_empty()), "bad_words", "use `logit_bias`"),
            (
                self.include_stop_str_in_output.unwrap_or_default(),
                "include_stop_str_in_output",
                "add `stop_reason` to the text in the client",
            ),
            (self.truncate_prompt_tokens.is_some(), "truncate_prompt_tokens", "shorten the prompt in the client"),
            (self.guided_grammar.is_some(), "guided_grammar", "use `structured_outputs` with `json` or `regex`"),
        ];
        match unsupported.into_iter().find(|(is_set, ..)| *is_set) {
            Some((_, field, hint)) => Err(ApiError::invalid(field, format!("`{field}` is not supported")).hint(hint)),
            None => Ok(()),
        }
    }

    /// Applies the parameters to the chat. The model rejects numbers out of range,
    /// and names the field.
    pub(super) fn apply(&self, mut chat: Chat) -> Result<Chat, ApiError> {
        if self.use_beam_search.unwrap_or_default() {
            let error = ApiError::invalid("use_beam_search", "beam search is not supported");
            return Err(error.hint("request several replies with `n`"));
        }
        self.check_unsupported()?;
        chat = chat.temperature(self.temperature);
        chat = chat.top_p(self.top_p);
        chat = chat.min_p(self.min_p);
        chat = chat.presence_penalty(self.presence_penalty);
        chat = chat.frequency_penalty(self.frequency_penalty);
        chat = chat.repetition_penalty(self.repetition_penalty);
        if let Some(top_k) = self.top_k {
            let top_k = match top_k {
                -1 => 0,
                top_k => usize::try_from(top_k)
                    .map_err(|_| ApiError::invalid("top_k", format!("`top_k` is {top_k}; expected -1 or above")))?,
            };
            chat = chat.top_k(top_k);
        }
        for (token, bias) in self.logit_bias.iter().flatten() {
            let id = token
                .parse()
                .map_err(|_| ApiError::invalid(format!("logit_bias.{token}"), "the name is not a token id"))?;
            chat = chat.logit_bias(id, *bias);
        }
        // Negative seeds are valid too.
        chat = chat.seed(self.seed.map(i64::cast_unsigned));
        let stops = self.stop.iter().flat_map(|stops| &stops.0);
        chat = stops.filter(|stop| !stop.is_empty()).fold(chat, Chat::stop);
        chat = self.stop_token_ids.iter().flatten().fold(chat, |chat, &token| chat.stop_token(token));
        chat = chat.min_tokens(self.min_tokens);
        chat = self.cache_salt.iter().fold(chat, Chat::cache_salt);
        chat = chat.priority(self.priority);
        if self.ignore_eos.unwrap_or_default() {
            chat = chat.ignore_end();
        }
        let guided = self.guided();
        let format = self.structured_outputs.as_ref().or(guided.as_ref());
        let format = format.map(StructuredOutputs::format).transpose()?.flatten();
        Ok(chat.format(format))
    }
}
