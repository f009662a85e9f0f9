//! `POST /v1/messages` and `/v1/messages/count_tokens`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response},
};
use bursar::{Chat, ModelHandle, Role, ToolChoice};
use serde_json::{Value, json};

use super::{
    answer::{self, Head},
    events,
    request::{Choice, MessagesRequest, Thinking},
    turns,
};
use crate::{
    body::{BodyPermit, JsonBody},
    effort::with_effort,
    error::ApiError,
    form::form,
    guard::Client,
    id,
    models::shortened,
    request_message::{self, MediaFields},
    state::Shared,
    tool::LeftOut,
};

pub(crate) async fn create(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    body: JsonBody<MessagesRequest>,
) -> Result<Response, ApiError> {
    let JsonBody { value: request, permit } = body;
    let (name, model) = shared.models.ready(request.model.as_deref())?;
    let tokens_max = request.max_tokens.ok_or_else(|| ApiError::invalid("max_tokens", "`max_tokens` is missing"))?;
    let head = Head {
        id: id::fresh("msg_"),
        model: name,
        omits_thinking: request.thinking.as_ref().is_some_and(Thinking::is_omitted),
        tokens_max,
    };
    let is_streamed = request.stream.unwrap_or_default();
    let mut held = client.hold(1, permit)?;
    let (chat, places) = chat(request, &model, &shared, held.permit()).await?;
    let chat = client.header_params().apply(chat.max_tokens(tokens_max));
    let refused = |error| places.error(error);
    if is_streamed {
        let reply = shared.served(model.chat(chat.token_ids()).await.map_err(refused)?);
        return Ok(events::stream(head, reply, held, shared.options.keep_alive));
    }
    let reply = shared.served(model.chat(chat).await.map_err(refused)?);
    let whole = answer::whole(&head, reply, held).await.map_err(refused)?;
    Ok(Json(whole).into_response())
}

/// Counts the prompt tokens that the message would have, including the tokens of pictures.
pub(crate) async fn count_tokens(
    State(shared): State<Arc<Shared>>,
    body: JsonBody<MessagesRequest>,
) -> Result<Json<Value>, ApiError> {
    let (_, model) = shared.models.ready(body.value.model.as_deref())?;
    // The memory stays reserved until the prompt is rendered.
    let mut permit = Some(body.permit);
    let (chat, places) = chat(body.value, &model, &shared, &mut permit).await?;
    let prompt = model.prompt_of(chat).await.map_err(|error| places.error(error))?;
    Ok(Json(json!({"input_tokens": prompt.token_ids.len()})))
}

/// Builds the chat of the request, without `max_tokens`.
async fn chat(
    mut request: MessagesRequest,
    model: &ModelHandle,
    shared: &Shared,
    permit: &mut BodyPermit,
) -> Result<(Chat, MediaFields), ApiError> {
    if request.mcp_servers.as_ref().is_some_and(|servers| !servers.is_empty()) {
        let error =
            ApiError::invalid("mcp_servers", "`mcp_servers` is not supported: this server does not call tools itself");
        return Err(error.hint("offer the tools in `tools`, and call them in the client"));
    }
    let request_messages = turns::request_messages(&mut request)?;
    // A final assistant message is the beginning of the reply (Anthropic's prefill). A message with
    // tool calls is complete and is not continued.
    let continues = request_messages.last().is_some_and(|last| last.role == Role::Assistant && last.calls.is_empty());
    let (mut chat, places) = request_message::chat(request_messages, model, shared, permit).await?;
    if continues {
        chat = chat.continue_final_message();
    }
    chat = offered(chat, &mut request)?;
    chat = chat.temperature(request.temperature);
    chat = chat.top_p(request.top_p);
    chat = chat.top_k(request.top_k);
    let stops = request.stop_sequences.into_iter().flatten();
    chat = stops.filter(|stop| !stop.is_empty()).fold(chat, Chat::stop);
    // As with Anthropic's models, thinking is off unless requested.
    let thinks = request.thinking.map(|thinking| thinking.is_enabled()).transpose()?.unwrap_or_default();
    chat = chat.template_variable("enable_thinking", thinks);
    let (effort, format) = request.output_config.map(|config| (config.effort, config.format)).unwrap_or_default();
    chat = with_effort(chat, effort);
    let format = format.or(request.output_format);
    let format = format.map(|format| form(&format.kind, format.schema, "format", "format.schema")).transpose()?;
    Ok((chat.format(format.flatten()), places))
}

/// Sets the tools and the tool choice of the chat.
fn offered(chat: Chat, request: &mut MessagesRequest) -> Result<Chat, ApiError> {
    let tools = request.tools.take().unwrap_or_default().into_iter().enumerate();
    let mut left_out = LeftOut::default();
    let tools = tools.filter_map(|(index, tool)| turns::offered(tool, index, &mut left_out).transpose());
    let tools: Vec<Value> = tools.collect::<Result<_, _>>()?;
    let Some(choice) = request.tool_choice.take() else { return Ok(chat.tools(tools)) };
    let is_alone = choice.disable_parallel_tool_use.unwrap_or_default();
    let choice = tool_choice(choice)?;
    left_out.check(&choice, &tools)?;
    let chat = chat.tools(tools).tool_choice(choice);
    Ok(if is_alone { chat.parallel_tool_calls(false) } else { chat })
}

fn tool_choice(choice: Choice) -> Result<ToolChoice, ApiError> {
    match (choice.kind.as_str(), choice.name) {
        ("auto", _) => Ok(ToolChoice::Auto),
        ("any", _) => Ok(ToolChoice::Required),
        ("none", _) => Ok(ToolChoice::None),
        ("tool", Some(name)) => Ok(ToolChoice::Named(name)),
        ("tool", None) => {
            Err(ApiError::invalid("tool_choice.name", "`tool_choice.name` is missing; `tool` requires it"))
        }
        (other, _) => {
            let message = format!("`tool_choice.type` is `{}`, which is unknown", shortened(other));
            Err(ApiError::invalid("tool_choice.type", message).hint("expected auto, any, tool or none"))
        }
    }
}

impl Thinking {
    fn is_enabled(&self) -> Result<bool, ApiError> {
        match self.kind.as_str() {
            "enabled" | "adaptive" => Ok(true),
            "disabled" => Ok(false),
            other => {
                let message = format!("`thinking.type` is `{}`, which is unknown", shortened(other));
                Err(ApiError::invalid("thinking.type", message).hint("expected enabled, adaptive or disabled"))
            }
        }
    }

    fn is_omitted(&self) -> bool {
        self.display.as_deref() == Some("omitted")
    }
}
