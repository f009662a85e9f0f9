//! Conversion of the items of a conversation into messages.

use bursar::{Content, Role};

use super::{
    items::{ContentPart, Item},
    tools::{as_arguments, shown_name},
};
use crate::{
    error::ApiError,
    media::{Link, Sizes},
    models::shortened,
    one_or_many::OneOrMany,
    request_message::{Piece, RequestMessage},
    tool,
};

/// Converts items into messages. Consecutive items of the model become one message, and so
/// do consecutive system messages.
pub(super) fn request_messages<'a>(
    instructions: Option<&str>,
    items: impl Iterator<Item = (String, &'a Item)>,
) -> Result<Vec<RequestMessage>, ApiError> {
    let mut request_messages = Vec::new();
    request_messages.extend(instructions.map(|text| RequestMessage::new(Role::System, vec![Piece::text(text)])));
    for (param, item) in items {
        let request_message = request_message(item, &param)?;
        match request_message.role {
            Role::User => request_messages.push(request_message),
            _ => RequestMessage::join(&mut request_messages, request_message),
        }
    }
    Ok(request_messages)
}

fn request_message(item: &Item, param: &str) -> Result<RequestMessage, ApiError> {
    let lacks = |field: &str| lacks(param, item.kind.as_deref().unwrap_or("message"), field);
    match item.kind.as_deref().unwrap_or("message") {
        "message" => {
            let role = role(item.role.as_deref().ok_or_else(|| lacks("role"))?, param)?;
            let content = item.content.as_ref().ok_or_else(|| lacks("content"))?;
            Ok(RequestMessage::new(role, pieces(content, &format!("{param}.content"))?))
        }
        "reasoning" => {
            let parts = item.content.iter().flat_map(|content| &content.0);
            let text: String =
                parts.chain(item.summary.iter().flatten()).filter_map(|part| part.text.as_deref()).collect();
            let thought =
                Some(text).filter(|text| !text.is_empty()).map(|text| Piece::Content(Content::Reasoning(text)));
            Ok(RequestMessage::new(Role::Assistant, thought.into_iter().collect()))
        }
        kind @ ("function_call" | "custom_tool_call") => {
            let name = item.name.as_ref().ok_or_else(|| lacks("name"))?;
            let arguments = match kind {
                "function_call" => item.arguments.clone().into(),
                _ => as_arguments(item.input.as_ref().ok_or_else(|| lacks("input"))?),
            };
            let call = tool::call(item.call_id.clone(), &shown_name(item.namespace.as_deref(), name), arguments);
            let request_message = RequestMessage::new(Role::Assistant, vec![Piece::Content(call)]);
            Ok(RequestMessage { calls: vec![item.call_id.clone()], ..request_message })
        }
        "function_call_output" | "custom_tool_call_output" => {
            let of = item.call_id.clone().ok_or_else(|| lacks("call_id"))?;
            let output = item.output.as_ref().ok_or_else(|| lacks("output"))?;
            Ok(RequestMessage::result(of, pieces(output, &format!("{param}.output"))?))
        }
        other => {
            let message = format!("items of type `{}` are not supported", shortened(other));
            let hint = "expected message, reasoning, function_call, custom_tool_call, or the output of a call";
            Err(ApiError::invalid(format!("{param}.type"), message).hint(hint))
        }
    }
}

fn role(name: &str, param: &str) -> Result<Role, ApiError> {
    match name {
        "user" => Ok(Role::User),
        "assistant" => Ok(Role::Assistant),
        "system" | "developer" => Ok(Role::System),
        other => {
            let message = format!("unknown role `{}`", shortened(other));
            let hint = "expected user, assistant, system or developer";
            Err(ApiError::invalid(format!("{param}.role"), message).hint(hint))
        }
    }
}

fn pieces(parts: &OneOrMany<ContentPart>, param: &str) -> Result<Vec<Piece>, ApiError> {
    parts.0.iter().enumerate().map(|(at, part)| piece(part, &format!("{param}[{at}]"))).collect()
}

fn piece(part: &ContentPart, param: &str) -> Result<Piece, ApiError> {
    let text = |text: &Option<String>, field: &str| {
        text.clone().map(Piece::text).ok_or_else(|| lacks(param, &part.kind, field))
    };
    match part.kind.as_str() {
        "input_text" | "output_text" | "text" => text(&part.text, "text"),
        "refusal" => text(&part.refusal, "refusal"),
        "input_image" => {
            let url = part.image_url.as_ref().ok_or_else(|| {
                lacks(param, "input_image", "image_url")
                    .hint("this server stores no files, so `file_id` cannot be used")
            })?;
            let link = Link::picture(format!("{param}.image_url"), url)?;
            Ok(Piece::Shown(link.sized(Sizes::default(), part.detail.as_deref())))
        }
        other => {
            let message = format!("parts of type `{}` are not supported", shortened(other));
            let hint = "expected input_text, output_text, refusal or input_image";
            Err(ApiError::invalid(format!("{param}.type"), message).hint(hint))
        }
    }
}

fn lacks(param: &str, kind: &str, field: &str) -> ApiError {
    let field = format!("{param}.{field}");
    let message = format!("`{field}` is missing; `{}` requires it", shortened(kind));
    ApiError::invalid(field, message)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::error::Shape;

    fn read(items: &Value) -> Result<Vec<RequestMessage>, ApiError> {
        let OneOrMany(items): OneOrMany<Item> = serde_json::from_value(items.clone()).expect("items");
        let items = items.iter().enumerate().map(|(at, item)| (format!("input[{at}]"), item));
        request_messages(Some("be kind"), items)
    }

    #[test]
    fn consecutive_items_of_the_model_form_one_turn() {
        let items = json!([
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "input_text", "text": "look"},
                {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AAAA"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\"x\": 1}"},
            {"type": "function_call_output", "call_id": "a", "output": "two"},
            {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** x"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
        ]);
        let request_messages = read(&items).map_err(|error| error.body(Shape::OpenAi)).expect("the request is valid");
        let turns: Vec<_> = request_messages
            .iter()
            .map(|request_message| (request_message.role, request_message.pieces.len()))
            .collect();
        let Piece::Content(Content::Text(text)) = &request_messages[0].pieces[0] else {
            panic!("the first piece is not a text")
        };
        assert!(text.ends_with("\n\nbe brief"), "instructions are joined into one text: {text}");
        let wanted = [(Role::System, 1), (Role::User, 2), (Role::Assistant, 3), (Role::Tool, 1)];
        let calls = [(Role::Assistant, 1), (Role::Tool, 1)];
        assert_eq!(turns, [&wanted[..], &calls].concat());
        assert_eq!(request_messages[2].calls, [Some("a".to_owned())]);
        assert_eq!(request_messages[3].result_of.as_deref(), Some("a"));
        let Piece::Content(Content::ToolCall(call)) = &request_messages[4].pieces[0] else {
            panic!("the first piece is not a tool call")
        };
        assert_eq!(call["function"], json!({"name": "patch", "arguments": {"input": "*** x"}}));
    }

    #[test]
    fn a_wrong_input_item_is_named() {
        for (item, param) in [
            (json!({"type": "item_reference", "id": "a"}), "input[0].type"),
            (json!({"content": "a"}), "input[0].role"),
            (json!({"role": "tool", "content": "a"}), "input[0].role"),
            (json!({"type": "function_call_output", "output": "a"}), "input[0].call_id"),
            (json!({"type": "custom_tool_call", "name": "a"}), "input[0].input"),
            (json!({"role": "user", "content": [{"type": "input_file"}]}), "input[0].content[0].type"),
            (
                json!({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}),
                "input[0].content[0].image_url",
            ),
        ] {
            let error = read(&json!([item])).map(|_| ()).expect_err("the item is wrong");
            assert_eq!(error.body(Shape::OpenAi)["error"]["param"], param, "{item}");
        }
    }
}
