//! `POST /v1/responses`.

use std::sync::Arc;

use axum::{Extension, Json, extract::State, response::Response};
use serde_json::{Value, json};

use super::{
    chat,
    encoder::ResponseEncoder,
    request::{Fields, ResponsesRequest},
    run::{Keeping, Run},
    store::HeldTurn,
    tools::Tools,
};
use crate::{
    body::JsonBody, error::ApiError, guard::Client, id, models::shortened, one_or_many::OneOrMany, state::Shared,
};

/// Names that errors of a chat use for its fields, and the names of these fields in a Responses
/// request.
const NAMES: [(&str, &str); 3] =
    [("max_tokens", "max_output_tokens"), ("messages", "input"), ("response_format", "text.format")];

pub(crate) async fn create(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    body: JsonBody<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let JsonBody { value: ResponsesRequest { mut fields, bytes }, permit } = body;
    let (name, model) = shared.models.ready(fields.model.as_deref())?;
    fields.check()?;
    let mut tools = Tools::read(fields.tools.as_deref().unwrap_or_default())?;
    let mut turns = before(&fields, &shared, &client)?;
    let OneOrMany(items) = fields.input.take().ok_or_else(|| ApiError::invalid("input", "`input` is missing"))?;
    turns.push(shared.responses.hold(items, bytes));
    let mut held = client.hold(1, permit)?;
    let (chat, places) = chat::chat(&fields, &mut tools, &turns, &model, &shared, held.permit()).await?;
    let chat = client.header_params().apply(chat.priority(fields.priority));
    let refused = |error| places.error(error).renamed(&NAMES);
    let reply = shared.served(model.chat(chat).await.map_err(refused)?);
    let response = fields.response(&id::fresh("resp_"), id::now(), &name);
    let is_streamed = fields.stream.unwrap_or_default();
    let encoder = ResponseEncoder::new(response.clone(), tools);
    let run = |keeping| Run { shared: shared.clone(), encoder, keeping, held };
    if fields.is_in_background() {
        if !shared.responses.has_capacity() {
            let error =
                ApiError::full("the limit of responses in the background is reached").code("responses_exhausted");
            return Err(error.hint("poll one of them until it ends, or cancel one of them"));
        }
        let kept = shared.responses.keep(client.key(), turns, response);
        return Ok(run(Keeping::Now(kept.clone())).in_background(reply, &kept, is_streamed));
    }
    let keeping = if fields.is_stored() { Keeping::Later { owner: client.key(), turns } } else { Keeping::No };
    if is_streamed { Ok(run(keeping).streamed(reply)) } else { run(keeping).whole(reply).await.map_err(refused) }
}

/// `POST /v1/responses/input_tokens`: the number of prompt tokens that the response would have.
pub(crate) async fn input_tokens(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    body: JsonBody<ResponsesRequest>,
) -> Result<Json<Value>, ApiError> {
    let JsonBody { value: ResponsesRequest { mut fields, bytes }, permit } = body;
    let (_, model) = shared.models.ready(fields.model.as_deref())?;
    fields.check()?;
    let mut tools = Tools::read(fields.tools.as_deref().unwrap_or_default())?;
    let mut turns = before(&fields, &shared, &client)?;
    let items = fields.input.take().map(|items| items.0).unwrap_or_default();
    turns.push(shared.responses.hold(items, bytes));
    // The memory stays reserved until the prompt is rendered.
    let mut permit = Some(permit);
    let (chat, places) = chat::chat(&fields, &mut tools, &turns, &model, &shared, &mut permit).await?;
    let prompt = model.prompt_of(chat).await.map_err(|error| places.error(error).renamed(&NAMES))?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": prompt.token_ids.len()})))
}

/// Returns the conversation that the request continues (`previous_response_id`).
fn before(fields: &Fields, shared: &Shared, client: &Client) -> Result<Vec<Arc<HeldTurn>>, ApiError> {
    let Some(id) = &fields.previous_response_id else { return Ok(Vec::new()) };
    let refused = |message: &str, code, hint: &str| {
        let message = format!("the response `{}` {message}", shortened(id));
        ApiError::invalid("previous_response_id", message).code(code).hint(hint)
    };
    let kept = shared.responses.find(client.key(), id).ok_or_else(|| {
        let hint = "responses are kept in memory, and the oldest are dropped; send the whole conversation as `input`";
        refused("is not stored", "previous_response_not_found", hint)
    })?;
    kept.conversation().ok_or_else(|| {
        refused("has no answer to continue from", "previous_response_unfinished", "poll the response until it ends")
    })
}
