//! Messages as turns of a [`Chat`].

use serde_json::{Value, json};

use super::chat_request::{Part, Turn};
use crate::{
    Chat, Content, Role,
    serve::{
        error::ApiError,
        media::{Link, Seen, Sizes},
        models::shortened,
    },
};

/// Whether a picture is wanted in OpenAI's `detail: low`.
pub(in crate::serve) fn has_low(messages: &[Turn]) -> bool {
    messages.iter().flat_map(|message| &message.content).flat_map(|content| &content.0).any(is_low)
}

fn is_low(part: &Part) -> bool {
    part.image_url.as_ref().is_some_and(|image| image.0.detail.as_deref() == Some("low"))
}

/// The links of all messages, in order, for pictures of these sizes: in low detail and as usual.
pub(in crate::serve) fn links(messages: &[Turn], low: Sizes, sizes: Sizes) -> Result<Vec<Link>, ApiError> {
    let mut links = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let parts = message.content.iter().flat_map(|content| &content.0).enumerate();
        for (part_index, part) in parts {
            let place = format!("messages[{index}].content[{part_index}]");
            links.extend(link(part, &place, low, sizes)?);
        }
    }
    Ok(links)
}

fn link(part: &Part, place: &str, low: Sizes, sizes: Sizes) -> Result<Option<Link>, ApiError> {
    let lacks = |field: &str| {
        ApiError::invalid(format!("{place}.{field}"), format!("a part of type `{}` has `{field}`", part.kind))
    };
    let link = match part.kind.as_str() {
        "image_url" => {
            let image = &part.image_url.as_ref().ok_or_else(|| lacks("image_url"))?.0;
            let sizes = if is_low(part) { low } else { sizes };
            Link::picture(format!("{place}.image_url.url"), &image.url, sizes)
        }
        "video_url" => {
            let url = &part.video_url.as_ref().ok_or_else(|| lacks("video_url"))?.0.url;
            Link::video(format!("{place}.video_url.url"), url, part.fps)
        }
        "video" => {
            let frames = &part.video.as_ref().ok_or_else(|| lacks("video"))?.0;
            Link::frames(format!("{place}.video"), frames, part.fps)
        }
        _ => return Ok(None),
    };
    link.map(Some)
}

/// The conversation, with what was found at its [`links`], in order.
pub(in crate::serve) fn chat(messages: Vec<Turn>, seen: Vec<Seen>) -> Result<Chat, ApiError> {
    let mut seen = seen.into_iter();
    let mut turns = Vec::new();
    for (index, message) in messages.into_iter().enumerate() {
        turns.push(turn(message, index, &mut seen)?);
    }
    Ok(joined(turns))
}

/// The conversation of these turns, with results of tools in the order of their calls.
pub(in crate::serve) fn joined(mut turns: Vec<Read>) -> Chat {
    order_results(&mut turns);
    turns.into_iter().fold(Chat::new(), |chat, turn| chat.turn(turn.role, turn.contents))
}

/// A turn whose pictures have been read.
pub(in crate::serve) struct Read {
    pub(in crate::serve) role: Role,
    pub(in crate::serve) contents: Vec<Content>,
    /// The ids of a model's calls.
    pub(in crate::serve) calls: Vec<Option<String>>,
    /// The call that a result is of.
    pub(in crate::serve) result_of: Option<String>,
}

fn turn(message: Turn, index: usize, seen: &mut impl Iterator<Item = Seen>) -> Result<Read, ApiError> {
    let role = match message.role.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" | "function" => Role::Tool,
        other => {
            let told = format!("`{}` is no role", shortened(other));
            let error = ApiError::invalid(format!("messages[{index}].role"), told);
            return Err(error.hint("roles are system, developer, user, assistant and tool"));
        }
    };
    let mut contents = Vec::new();
    let reasoning = message.reasoning_content.or(message.reasoning);
    contents.extend(reasoning.filter(|reasoning| !reasoning.is_empty()).map(Content::Reasoning));
    for (at, part) in message.content.map(|content| content.0).unwrap_or_default().into_iter().enumerate() {
        contents.push(content(part, &format!("messages[{index}].content[{at}]"), seen)?);
    }
    let calls = message.tool_calls.unwrap_or_default();
    if !calls.is_empty() && role != Role::Assistant {
        let error = ApiError::invalid(format!("messages[{index}].tool_calls"), "only the assistant calls tools");
        return Err(error);
    }
    let ids = calls.iter().map(|call| call.id.clone()).collect();
    contents.extend(calls.into_iter().map(|call| {
        let arguments = as_object(call.function.arguments);
        let function = json!({"name": call.function.name, "arguments": arguments});
        Content::ToolCall(json!({"id": call.id, "type": "function", "function": function}))
    }));
    Ok(Read { role, contents, calls: ids, result_of: message.tool_call_id })
}

/// Templates want an object; OpenAI's clients send its text.
fn as_object(arguments: Value) -> Value {
    match arguments {
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(Value::Object(object)) => Value::Object(object),
            _ => Value::String(text),
        },
        Value::Null => json!({}),
        object => object,
    }
}

fn content(part: Part, place: &str, seen: &mut impl Iterator<Item = Seen>) -> Result<Content, ApiError> {
    let text = |text: Option<String>, field: &str| {
        text.ok_or_else(|| ApiError::invalid(format!("{place}.{field}"), format!("the part has no `{field}`")))
    };
    match part.kind.as_str() {
        "text" | "input_text" | "output_text" => text(part.text, "text").map(Content::Text),
        "refusal" => text(part.refusal, "refusal").map(Content::Text),
        "thinking" => text(part.thinking, "thinking").map(Content::Reasoning),
        "image_url" | "video_url" | "video" => match seen.next() {
            Some(Seen::Picture(picture)) => Ok(Content::Image(picture)),
            Some(Seen::Film(film)) => Ok(Content::Video(film)),
            None => Err(ApiError::invalid(place, "the picture was not read")),
        },
        "input_audio" | "audio_url" => {
            let error = ApiError::invalid(format!("{place}.type"), "audio is not served");
            Err(error.hint("send text, pictures or video frames"))
        }
        other => {
            let told = format!("`{}` is no type of a part", shortened(other));
            let hint = "types are text, image_url, video_url and video";
            Err(ApiError::invalid(format!("{place}.type"), told).hint(hint))
        }
    }
}

/// Brings results of tools into the order of their calls: the model has no ids to match them by.
fn order_results(turns: &mut [Read]) {
    let mut rest = turns;
    while let Some(called) = rest.iter().position(|turn| !turn.calls.is_empty()) {
        let (before, results) = rest.split_at_mut(called + 1);
        let calls = &before[called].calls;
        let count = results.iter().take_while(|turn| turn.role == Role::Tool).count();
        let place = |result: &Read| {
            let of = result.result_of.as_deref();
            calls.iter().position(|id| id.is_some() && id.as_deref() == of).unwrap_or(usize::MAX)
        };
        // Stable: results of unknown calls stay in their order, behind the others.
        results[..count].sort_by_key(place);
        rest = &mut results[count..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::{error::Shape, listed::Listed};

    fn said(role: &str, text: &str) -> Turn {
        let content = Some(Listed(vec![Part::from(text.to_owned())]));
        Turn { role: role.to_owned(), content, ..Turn::default() }
    }

    fn shown(messages: Vec<Turn>) -> String {
        format!("{:?}", chat(messages, Vec::new()).map_err(|error| error.body(Shape::OpenAi)).expect("a chat"))
    }

    #[test]
    fn results_come_in_the_order_of_their_calls() {
        let calls = serde_json::from_value(json!({"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
            {"id": "b", "function": {"name": "g", "arguments": ""}},
        ]}));
        let result = |id: &str, text: &str| Turn { tool_call_id: Some(id.to_owned()), ..said("tool", text) };
        let turns = vec![calls.expect("a turn"), result("b", "four"), result("a", "two"), said("user", "so?")];
        // Debug shows lengths only: "two" has three bytes, "four" four.
        let told = shown(turns);
        assert!(told.find("Text(3 bytes)") < told.find("Text(4 bytes)"), "{told}");
    }

    #[test]
    fn a_role_or_part_that_is_none_is_named() {
        let error = |message| chat(vec![message], Vec::new()).map(drop).expect_err("wrong").body(Shape::OpenAi);
        assert_eq!(error(said("boss", "a"))["error"]["param"], "messages[0].role");
        let heard = Part { kind: "input_audio".to_owned(), ..Part::default() };
        let message = Turn { content: Some(Listed(vec![heard])), ..said("user", "a") };
        assert_eq!(error(message)["error"]["param"], "messages[0].content[0].type");
    }

    #[test]
    fn arguments_are_an_object_where_they_are_one() {
        assert_eq!(as_object(json!("{\"a\": 1}")), json!({"a": 1}));
        assert_eq!(as_object(json!("{\"a\": ")), json!("{\"a\": "));
        assert_eq!(as_object(Value::Null), json!({}));
    }
}
