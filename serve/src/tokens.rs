//! `POST /tokenize` and `/detokenize` as in vLLM.

use std::sync::Arc;

use axum::{Json, extract::State};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    body::{self, FromJson, JsonBody},
    error::ApiError,
    openai::{chat, chat_request::ChatFields},
    state::Shared,
};

/// A text, or a chat whose messages are rendered to a prompt.
pub(super) struct TokenizeRequest {
    fields: TokenizeFields,
    chat: Option<ChatFields>,
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct TokenizeFields {
    model: Option<String>,
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

impl FromJson for TokenizeRequest {
    fn from_json(bytes: &[u8]) -> Result<Self, ApiError> {
        let whole = body::json(bytes)?;
        if whole.get("prompt").is_some_and(|prompt| !prompt.is_null()) {
            return Ok(TokenizeRequest { fields: body::of(whole)?, chat: None });
        }
        let (chat, fields) = body::pair_of(whole)?;
        Ok(TokenizeRequest { fields, chat: Some(chat) })
    }
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

pub(super) async fn tokenize(
    State(shared): State<Arc<Shared>>,
    body: JsonBody<TokenizeRequest>,
) -> Result<Json<Tokenized>, ApiError> {
    let TokenizeRequest { fields, chat } = body.value;
    let (_, model) = shared.models.ready(fields.model.as_deref())?;
    let tokens = match (fields.prompt, chat) {
        (Some(text), _) => model.tokenize(text, fields.add_special_tokens.unwrap_or(true)).await?,
        (None, Some(chat)) => {
            // The memory stays reserved until the prompt is rendered.
            let mut permit = Some(body.permit);
            let (chat, places) = chat::chat(chat, &model, &shared, &mut permit).await?;
            model.prompt_of(chat).await.map_err(|error| places.error(error))?.token_ids
        }
        (None, None) => {
            return Err(ApiError::invalid("prompt", "`prompt` is missing").hint("send `prompt` or `messages`"));
        }
    };
    let token_strs =
        if fields.return_token_strs.unwrap_or_default() { Some(model.token_strs(tokens.clone()).await?) } else { None };
    let max_model_len = model.facts().await?.context_tokens;
    Ok(Json(Tokenized { count: tokens.len(), max_model_len, tokens, token_strs }))
}

#[derive(Deserialize, JsonSchema)]
pub(super) struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

impl FromJson for DetokenizeRequest {
    fn from_json(bytes: &[u8]) -> Result<Self, ApiError> {
        body::parsed(bytes)
    }
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Detokenized {
    prompt: String,
}

pub(super) async fn detokenize(
    State(shared): State<Arc<Shared>>,
    body: JsonBody<DetokenizeRequest>,
) -> Result<Json<Detokenized>, ApiError> {
    let (_, model) = shared.models.ready(body.value.model.as_deref())?;
    Ok(Json(Detokenized { prompt: model.detokenize(body.value.tokens).await? }))
}
