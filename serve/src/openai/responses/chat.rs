//! Conversion of a Responses request into a [`Chat`].

use std::sync::Arc;

use bursar::{Chat, ModelHandle};

use super::{request::Fields, store::HeldTurn, tools::Tools, turns};
use crate::{
    body::BodyPermit,
    effort::{with_effort, with_variables},
    error::ApiError,
    form::{form, with_format},
    request_message::{self, MediaFields},
    state::Shared,
};

/// Builds the chat. The last entry of `turns` is the input of this request; the entries before it
/// are the conversation that the request continues.
pub(super) async fn chat(
    fields: &Fields,
    tools: &mut Tools,
    turns: &[Arc<HeldTurn>],
    model: &ModelHandle,
    shared: &Shared,
    permit: &mut BodyPermit,
) -> Result<(Chat, MediaFields), ApiError> {
    let (now, before) = turns.split_last().map_or((None, turns), |(now, before)| (Some(now), before));
    let before = before.iter().flat_map(|turn| &turn.items).map(|item| ("previous_response_id".to_owned(), item));
    let now = now.iter().flat_map(|turn| &turn.items).enumerate().map(|(at, item)| (format!("input[{at}]"), item));
    let request_messages = turns::request_messages(fields.instructions.as_deref(), before.chain(now))?;
    let (mut chat, places) = request_message::chat(request_messages, model, shared, permit).await?;
    let choice = fields.tool_choice.as_ref().map(|choice| tools.choice(choice)).transpose()?;
    chat = chat.tools(std::mem::take(&mut tools.functions));
    chat = chat.tool_choice(choice.clone());
    chat = chat.parallel_tool_calls(fields.parallel_tool_calls);
    chat = chat.max_tokens(fields.max_output_tokens);
    chat = chat.temperature(fields.temperature);
    chat = chat.top_p(fields.top_p);
    chat = with_effort(chat, fields.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone()));
    chat = with_variables(chat, fields.chat_template_kwargs.clone());
    let format = fields.text.as_ref().and_then(|text| text.format.as_ref());
    let format = format.map(|format| {
        let kind = format["type"].as_str().unwrap_or_default();
        form(kind, format.get("schema").cloned(), "text.format", "text.format.schema")
    });
    Ok((with_format(chat, choice.as_ref(), format.transpose()?.flatten()), places))
}
