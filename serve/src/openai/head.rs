//! Fields that all responses and chunks of one request share.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;

use super::usage::UsageBody;
use crate::id;

pub(crate) struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

/// A response, or a chunk of a streamed response.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Answer<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
    /// vLLM extension, if requested. A stream has the ids in the first chunk after the chunk with
    /// the role.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Arc<[u32]>>,
}

impl Head {
    /// Creates the shared fields. `object` is the kind of the response, and `model` is the name
    /// that the client used.
    pub(super) fn new(prefix: &str, object: &'static str, model: String) -> Self {
        Head { id: id::fresh(prefix), object, created: id::now(), model }
    }

    pub(super) fn answer<C>(&self, choices: Vec<C>, usage: Option<Option<UsageBody>>) -> Answer<'_, C> {
        let Head { id, object, created, model } = self;
        Answer { id, object, created: *created, model, choices, usage, prompt_token_ids: None }
    }
}

impl<C> Answer<'_, C> {
    pub(super) fn with_prompt(mut self, token_ids: Option<Arc<[u32]>>) -> Self {
        self.prompt_token_ids = token_ids;
        self
    }
}
