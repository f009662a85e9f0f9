//! `GET` and `DELETE /v1/responses/{id}`, and `POST /v1/responses/{id}/cancel`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, RawQuery, State},
};
use serde_json::{Value, json};

use crate::serve::{error::ApiError, guard::Client, service::Shared};

pub(in crate::serve) async fn read(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, ApiError> {
    if query.is_some_and(|query| query.split('&').any(|field| field.eq_ignore_ascii_case("stream=true"))) {
        let error = ApiError::invalid("stream", "a stored response cannot be streamed");
        return Err(error.hint("poll the response, or create it with `stream`"));
    }
    Ok(Json(shared.responses.of(client.key(), &id)?.told()))
}

/// Ends a response that runs in the background. One that has ended is shown as it is.
pub(in crate::serve) async fn cancel(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let kept = shared.responses.of(client.key(), &id)?;
    if kept.told()["background"] != true {
        let error = ApiError::invalid("response_id", "only background responses can be cancelled");
        return Err(error.hint("close the connection instead"));
    }
    kept.stop("cancelled");
    Ok(Json(kept.told()))
}

pub(in crate::serve) async fn delete(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let kept = shared.responses.of(client.key(), &id)?;
    shared.responses.remove(&kept);
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}
