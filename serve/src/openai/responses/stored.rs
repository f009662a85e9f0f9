//! `GET` and `DELETE /v1/responses/{id}`, and `POST /v1/responses/{id}/cancel`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, RawQuery, State},
};
use serde_json::{Value, json};

use crate::{error::ApiError, guard::Client, state::Shared};

pub(crate) async fn read(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, ApiError> {
    if query.is_some_and(|query| query.split('&').any(|field| field.eq_ignore_ascii_case("stream=true"))) {
        let error = ApiError::invalid("stream", "a stored response cannot be streamed");
        return Err(error.hint("poll the response, or create it with `stream`"));
    }
    Ok(Json(shared.responses.of(client.key(), &id)?.response()))
}

/// `GET /v1/responses/{id}/input_items`: the response's input items, latest first, or oldest
/// first with `order=asc`. `limit` is the maximum number of items, from 1 to 100 and by default 20.
/// With `after`, the list starts after the item with this id.
pub(crate) async fn input_items(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, ApiError> {
    const LIMIT_USUAL: usize = 20;
    const LIMIT_MAX: usize = 100;
    let kept = shared.responses.of(client.key(), &id)?;
    let query = query.unwrap_or_default();
    let field = |name: &str| query.split('&').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
    let limit = match field("limit").map(str::parse::<usize>) {
        None => LIMIT_USUAL,
        Some(Ok(limit)) if (1..=LIMIT_MAX).contains(&limit) => limit,
        Some(_) => return Err(ApiError::invalid("limit", format!("expected a number from 1 to {LIMIT_MAX}"))),
    };
    let mut items = kept.input_items();
    if field("order") != Some("asc") {
        items.reverse();
    }
    let first = match field("after") {
        None => 0,
        Some(after) => match items.iter().position(|item| item["id"] == after) {
            Some(at) => at + 1,
            None => return Err(ApiError::invalid("after", "the response has no input item with this id")),
        },
    };
    let has_more = items.len() > first + limit;
    let data: Vec<Value> = items.into_iter().skip(first).take(limit).collect();
    let (first_id, last_id) = (data.first().map(|item| item["id"].clone()), data.last().map(|item| item["id"].clone()));
    Ok(Json(json!({"object": "list", "data": data, "first_id": first_id, "last_id": last_id, "has_more": has_more})))
}

/// Cancels a background response. A background response that has ended is returned unchanged. Other
/// responses are refused with 400.
pub(crate) async fn cancel(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let kept = shared.responses.of(client.key(), &id)?;
    if kept.response()["background"] != true {
        let error = ApiError::invalid("response_id", "only background responses can be canceled");
        return Err(error.hint("close the connection instead"));
    }
    kept.stop("cancelled");
    Ok(Json(kept.response()))
}

pub(crate) async fn delete(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let kept = shared.responses.of(client.key(), &id)?;
    shared.responses.remove(&kept);
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}
