//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{Extension, extract::State, response::Response};
use bursar::{Chat, ModelHandle, ToolChoice};
use serde_json::Value;

use super::{
    chat_chunks,
    chat_request::{ChatFields, ChatRequest, ResponseFormat},
    chat_whole,
    chunks::Chunks,
    head::Head,
    turns,
};
use crate::{
    body::{BodyPermit, JsonBody},
    effort::{with_effort, with_variables},
    error::ApiError,
    form::with_format,
    guard::Client,
    models::shortened,
    request_message::{self, MediaFields},
    state::Shared,
};

pub(crate) async fn complete(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    body: JsonBody<ChatRequest>,
) -> Result<Response, ApiError> {
    let JsonBody { value: ChatRequest { chat: fields, sampling }, permit } = body;
    let (name, model) = shared.models.ready(fields.model.as_deref())?;
    let is_streamed = sampling.stream.unwrap_or_default();
    let options = sampling.stream_options.unwrap_or_default();
    let samples = sampling.n.unwrap_or(1);
    if is_streamed && fields.prompt_logprobs.is_some() {
        return Err(
            ApiError::invalid("prompt_logprobs", "`prompt_logprobs` cannot be streamed").hint("leave out `stream`")
        );
    }
    let mut held = client.hold(samples, permit)?;
    let (chat, places) = chat(fields, &model, &shared, held.permit()).await?;
    let chat = client.header_params().apply(chat);
    let chat = sampling.apply(chat)?;
    let replies = model.samples(chat, samples).await.map_err(|error| places.error(error))?;
    let replies: Vec<_> = replies.into_iter().map(|reply| shared.served(reply)).collect();
    if is_streamed {
        let chunks = Chunks::new(Head::new("chatcmpl-", "chat.completion.chunk", name), options, replies.len(), held);
        Ok(chat_chunks::stream(chunks, places, replies, shared.options.keep_alive))
    } else {
        let answered = chat_whole::answer(Head::new("chatcmpl-", "chat.completion", name), replies, held).await;
        answered.map_err(|error| places.error(error))
    }
}

/// Builds the chat from the fields of a request.
pub(crate) async fn chat(
    fields: ChatFields,
    model: &ModelHandle,
    shared: &Shared,
    permit: &mut BodyPermit,
) -> Result<(Chat, MediaFields), ApiError> {
    if fields.modalities.iter().flatten().any(|modality| modality != "text") {
        return Err(ApiError::invalid("modalities", "replies can only be text").hint("set `modalities` to `text` only"));
    }
    let sizes = fields.mm_processor_kwargs.unwrap_or_default();
    let (mut chat, places) =
        request_message::chat(turns::request_messages(fields.messages, sizes)?, model, shared, permit).await?;
    chat = chat.max_tokens(fields.max_completion_tokens.or(fields.max_tokens));
    chat = scored(chat, fields.logprobs, fields.top_logprobs)?;
    if let Some(top) = fields.prompt_logprobs {
        let top = usize::try_from(top).map_err(|_| {
            ApiError::invalid("prompt_logprobs", format!("`prompt_logprobs` is {top}; expected 0 to 20"))
        })?;
        chat = chat.prompt_log_probabilities(top);
    }
    let choice = fields.tool_choice.as_ref().map(tool_choice).transpose()?;
    let tools = fields.tools.unwrap_or_default();
    tools.iter().enumerate().try_for_each(|(index, tool)| check_tool(tool, index))?;
    chat = chat.tools(tools);
    chat = chat.tool_choice(choice.clone());
    chat = chat.parallel_tool_calls(fields.parallel_tool_calls);
    let format = fields.response_format.map(ResponseFormat::form).transpose()?.flatten();
    chat = with_format(chat, choice.as_ref(), format);
    chat = with_effort(chat, fields.reasoning_effort);
    if fields.continue_final_message.unwrap_or_default() {
        chat = chat.continue_final_message();
    }
    chat = chat.add_generation_prompt(fields.add_generation_prompt);
    if fields.return_token_ids.unwrap_or_default() {
        chat = chat.token_ids();
    }
    Ok((with_variables(chat, fields.chat_template_kwargs), places))
}

fn scored(chat: Chat, logprobs: Option<bool>, top: Option<usize>) -> Result<Chat, ApiError> {
    match (logprobs.unwrap_or_default(), top) {
        (true, top) => Ok(chat.log_probabilities(top.unwrap_or(0))),
        (false, Some(1..)) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` is set, but `logprobs` is not")
            .hint("set `logprobs` too")),
        (false, _) => Ok(chat),
    }
}

/// Rejects a tool that is not a function with a name. The model could not call it, and the client
/// would not learn why.
fn check_tool(tool: &Value, index: usize) -> Result<(), ApiError> {
    let kind = tool.get("type").filter(|kind| !kind.is_null());
    if let Some(kind) = kind.filter(|kind| *kind != "function") {
        let message = format!("`tools[{index}].type`: {} is not supported", shortened(&kind.to_string()));
        return Err(ApiError::invalid(format!("tools[{index}].type"), message).hint("expected function"));
    }
    // Some chat templates are written for bare functions, without OpenAI's
    // `function` object around them.
    let (function, place) = match tool.get("function") {
        Some(function) => (function, "function.name"),
        None => (tool, "name"),
    };
    match function["name"].as_str() {
        Some(name) if !name.is_empty() => Ok(()),
        _ => {
            let param = format!("tools[{index}].{place}");
            let message = format!("`{param}` is missing");
            Err(ApiError::invalid(param, message))
        }
    }
}

/// Parses `tool_choice`: a keyword, or an object with the name of a tool.
pub(super) fn tool_choice(choice: &Value) -> Result<ToolChoice, ApiError> {
    let name = choice.pointer("/function/name").or_else(|| choice.get("name")).and_then(Value::as_str);
    match (choice.as_str(), name) {
        (Some("auto"), _) => Ok(ToolChoice::Auto),
        (Some("none"), _) => Ok(ToolChoice::None),
        (Some("required"), _) => Ok(ToolChoice::Required),
        (None, Some(name)) => Ok(ToolChoice::Named(name.to_owned())),
        _ => {
            let message = format!("`tool_choice` is `{}`, which is unknown", shortened(&choice.to_string()));
            let hint = "expected `auto`, `none`, `required`, or {\"type\": \"function\", \"function\": {\"name\": …}}";
            Err(ApiError::invalid("tool_choice", message).hint(hint))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::Shape;

    #[test]
    fn an_uncallable_tool_is_refused_with_its_path() {
        let param =
            |tool: Value| check_tool(&tool, 2).map_err(|error| error.body(Shape::OpenAi)["error"]["param"].clone());
        assert_eq!(param(json!({"type": "function", "function": {"name": "f"}})), Ok(()));
        assert_eq!(param(json!({"type": null, "name": "bare"})), Ok(()));
        for (tool, place) in [
            (json!({"type": "custom", "custom": {"name": "f"}}), "tools[2].type"),
            (json!({"type": "function", "function": {"description": "d"}}), "tools[2].function.name"),
            (json!({"type": "function", "function": {"name": ""}}), "tools[2].function.name"),
            (json!({"type": "function"}), "tools[2].name"),
            (json!("f"), "tools[2].name"),
        ] {
            assert_eq!(param(tool.clone()), Err(json!(place)), "{tool}");
        }
    }
}
