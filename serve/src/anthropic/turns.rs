//! Conversion of Anthropic's messages into messages of a [`Chat`](bursar::Chat).

use bursar::{Content, Role};
use serde_json::{Value, json};

use super::request::{Block, Message, MessagesRequest, Source, Tool};
use crate::{
    error::ApiError,
    media::Link,
    models::shortened,
    request_message::{Piece, RequestMessage},
    tool::{self, LeftOut},
};

/// Converts all messages. Consecutive messages of the same role are joined, as in Anthropic's API.
pub(super) fn request_messages(request: &mut MessagesRequest) -> Result<Vec<RequestMessage>, ApiError> {
    let mut request_messages = Vec::new();
    if let Some(system) = request.system.take() {
        request_messages.push(RequestMessage::new(Role::System, pieces(system.0, "system")?));
    }
    for (index, message) in std::mem::take(&mut request.messages).into_iter().enumerate() {
        turns(message, index, &mut request_messages)?;
    }
    Ok(request_messages)
}

fn turns(message: Message, index: usize, request_messages: &mut Vec<RequestMessage>) -> Result<(), ApiError> {
    let (param, blocks) = (format!("messages[{index}].content"), message.content.0);
    match message.role.as_str() {
        "user" => user(blocks, &param, request_messages),
        "assistant" => {
            let request_message = assistant(blocks, &param)?;
            RequestMessage::join(request_messages, request_message);
            Ok(())
        }
        "system" => {
            RequestMessage::join(request_messages, RequestMessage::new(Role::System, pieces(blocks, &param)?));
            Ok(())
        }
        other => {
            let message = format!("unknown role `{}`", shortened(other));
            Err(ApiError::invalid(format!("messages[{index}].role"), message)
                .hint("expected user, assistant or system"))
        }
    }
}

/// Adds each tool result as a separate message, and then the rest of the user's content.
fn user(blocks: Vec<Block>, param: &str, request_messages: &mut Vec<RequestMessage>) -> Result<(), ApiError> {
    let mut parts = Vec::new();
    for (at, block) in blocks.into_iter().enumerate() {
        let param = format!("{param}[{at}]");
        match block.kind.as_str() {
            "tool_result" => request_messages.push(result(block, &param)?),
            _ => parts.push(piece(block, &param)?),
        }
    }
    if !parts.is_empty() {
        RequestMessage::join(request_messages, RequestMessage::new(Role::User, parts));
    }
    Ok(())
}

/// Prefix for the result of a failed tool.
const FAILED: &str = "Error: ";

fn result(block: Block, param: &str) -> Result<RequestMessage, ApiError> {
    let of = block.tool_use_id.ok_or_else(|| lacks(param, "tool_result", "tool_use_id"))?;
    let mut shown = pieces(block.content.map(|content| content.0).unwrap_or_default(), &format!("{param}.content"))?;
    if block.is_error.unwrap_or_default() {
        // Chat templates have no field for failed results, so the text is marked with a prefix.
        match shown.first_mut() {
            Some(Piece::Content(Content::Text(text))) => text.insert_str(0, FAILED),
            _ => shown.insert(0, Piece::text(FAILED)),
        }
    }
    Ok(RequestMessage::result(of, shown))
}

fn assistant(blocks: Vec<Block>, param: &str) -> Result<RequestMessage, ApiError> {
    let mut request_message = RequestMessage::new(Role::Assistant, Vec::new());
    for (at, block) in blocks.into_iter().enumerate() {
        let param = format!("{param}[{at}]");
        match block.kind.as_str() {
            "tool_use" => {
                request_message.calls.push(block.id.clone());
                request_message.pieces.push(Piece::Content(call(block, &param)?));
            }
            "thinking" => {
                let thinking = block.thinking.ok_or_else(|| lacks(&param, "thinking", "thinking"))?;
                request_message.pieces.push(Piece::Content(Content::Reasoning(thinking)));
            }
            // Only the Anthropic model that wrote this block can read it.
            "redacted_thinking" => {}
            _ => request_message.pieces.push(piece(block, &param)?),
        }
    }
    Ok(request_message)
}

fn call(block: Block, param: &str) -> Result<Content, ApiError> {
    let name = block.name.ok_or_else(|| lacks(param, "tool_use", "name"))?;
    let input = block.input.unwrap_or_else(|| json!({}));
    if !input.is_object() {
        return Err(ApiError::invalid(format!("{param}.input"), format!("`{param}.input` is not an object")));
    }
    Ok(tool::call(block.id, &name, input))
}

fn pieces(blocks: Vec<Block>, param: &str) -> Result<Vec<Piece>, ApiError> {
    blocks.into_iter().enumerate().map(|(at, block)| piece(block, &format!("{param}[{at}]"))).collect()
}

/// Converts a block to text or a picture.
fn piece(block: Block, param: &str) -> Result<Piece, ApiError> {
    match (block.kind.as_str(), block.source.map(|source| source.0)) {
        ("search_result", source) => {
            let parts = block.content.iter().flat_map(|content| &content.0).filter_map(|part| part.text.as_deref());
            let source = source.and_then(|source| source.data.or(source.url));
            let head = [block.title, source].into_iter().flatten();
            Ok(Piece::text(head.chain(parts.map(str::to_owned)).collect::<Vec<_>>().join("\n")))
        }
        ("tool_reference", _) => {
            let name = block.tool_name.ok_or_else(|| lacks(param, "tool_reference", "tool_name"))?;
            Ok(Piece::text(format!("Tool: {name}")))
        }
        // Calls and results of tools that Anthropic's servers ran.
        ("server_tool_use", _) => {
            let asked = json!({"name": block.name, "input": block.input});
            Ok(Piece::text(format!("Called {asked}")))
        }
        (kind, _) if kind.ends_with("_tool_result") => {
            let parts = block.content.map(|content| content.0).unwrap_or_default();
            let texts = parts.into_iter().filter_map(|part| part.text.or(part.title));
            Ok(Piece::text(texts.collect::<Vec<_>>().join("\n")))
        }
        ("text", _) => block.text.map(Piece::text).ok_or_else(|| lacks(param, "text", "text")),
        ("image", Some(source)) => picture(&source, param).map(Piece::Shown),
        ("document", Some(Source { kind, data: Some(text), .. })) if kind == "text" => Ok(Piece::text(text)),
        ("document", Some(source)) => {
            let message = format!("documents with a source of type `{}` are not supported", shortened(&source.kind));
            Err(ApiError::invalid(format!("{param}.source"), message).hint("send the text, or pictures of the pages"))
        }
        (kind @ ("image" | "document"), None) => Err(lacks(param, kind, "source")),
        (other, _) => {
            let message = format!("`{param}.type`: blocks of type `{}` are not supported here", shortened(other));
            let hint = "expected text, image, document, search_result, tool_use, tool_result, thinking or \
                        redacted_thinking";
            Err(ApiError::invalid(format!("{param}.type"), message).hint(hint))
        }
    }
}

fn picture(source: &Source, param: &str) -> Result<Link, ApiError> {
    match (source.kind.as_str(), &source.data, &source.url) {
        ("base64", Some(data), _) => Link::base64(format!("{param}.source.data"), data),
        ("url", _, Some(url)) => Link::picture(format!("{param}.source.url"), url),
        ("base64", None, _) => Err(lacks(&format!("{param}.source"), "base64", "data")),
        ("url", _, None) => Err(lacks(&format!("{param}.source"), "url", "url")),
        (other, ..) => {
            let message = format!("`{param}.source.type`: sources of type `{}` are not supported", shortened(other));
            Err(ApiError::invalid(format!("{param}.source.type"), message).hint("send `base64` with its `data`"))
        }
    }
}

fn lacks(param: &str, kind: &str, field: &str) -> ApiError {
    let field = format!("{param}.{field}");
    let message = format!("`{field}` is missing; `{kind}` requires it");
    ApiError::invalid(field, message)
}

/// Type prefixes of Anthropic's client tools. A type ends with a date, as in `bash_20250124`. Only
/// Anthropic's models know the parameters of these tools.
const OF_CLIENTS: [&str; 4] = ["bash_", "text_editor_", "computer_", "memory_"];

/// Converts a tool for chat templates. Returns `None` if only Anthropic's servers run the tool.
pub(super) fn offered(offered: Tool, index: usize, left_out: &mut LeftOut) -> Result<Option<Value>, ApiError> {
    if let Some(function) = offered.function {
        let name = function.name.ok_or_else(|| lacks(&format!("tools[{index}].function"), "a tool", "name"))?;
        return Ok(Some(tool::function(&name, function.description.map(Value::from), function.parameters)));
    }
    let own = offered.kind.filter(|kind| kind != "custom" && kind != "function");
    if let Some(own) = own {
        if OF_CLIENTS.iter().any(|beginning| own.starts_with(beginning)) {
            let message = format!("`tools[{index}].type`: only Anthropic's models know the tool `{}`", shortened(&own));
            let hint = "describe the tool with an `input_schema` instead";
            return Err(ApiError::invalid(format!("tools[{index}].type"), message).hint(hint));
        }
        left_out.add(offered.name.as_deref().unwrap_or(&own));
        return Ok(None);
    }
    let missing = |field: &str| lacks(&format!("tools[{index}]"), "a tool", field);
    let name = offered.name.ok_or_else(|| missing("name"))?;
    let parameters = offered.input_schema.or(offered.parameters).ok_or_else(|| missing("input_schema"))?;
    Ok(Some(tool::function(&name, offered.description.map(Value::from), Some(parameters))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{body::FromJson, error::Shape};
    use bursar::ToolChoice;

    fn request_messages_of(body: &Value) -> Result<Vec<RequestMessage>, Value> {
        let error = |error: ApiError| error.body(Shape::OpenAi)["error"].clone();
        request_messages(&mut MessagesRequest::from_json(body.to_string().as_bytes()).map_err(error)?).map_err(error)
    }

    /// Roles, with the content of each piece as text.
    fn shown(body: &Value) -> Vec<(Role, Vec<String>)> {
        let piece = |piece: &Piece| match piece {
            Piece::Content(Content::Text(text) | Content::Reasoning(text)) => text.clone(),
            Piece::Content(Content::ToolCall(call)) => call["function"].to_string(),
            Piece::Content(other) => format!("{other:?}"),
            Piece::Shown(_) => "picture".to_owned(),
        };
        let request_messages = request_messages_of(body).expect("the request is valid");
        request_messages
            .iter()
            .map(|request_message| (request_message.role, request_message.pieces.iter().map(piece).collect()))
            .collect()
    }

    #[test]
    fn a_conversation_with_tools_becomes_turns_in_order() {
        let body = json!({"system": "be kind", "messages": [
            {"role": "user", "content": "look"},
            {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I ask"}, {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "is_error": true, "content": [{"type": "text", "text": "no"}]},
                {"type": "text", "text": "so?"},
            ]},
        ]});
        let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            shown(&body),
            vec![
                (Role::System, texts(&["be kind"])),
                (Role::User, texts(&["look", "picture"])),
                (Role::Assistant, texts(&["hm", "I ask", r#"{"name":"f","arguments":{"x":1}}"#])),
                (Role::Tool, texts(&["Error: no"])),
                (Role::User, texts(&["so?"])),
            ]
        );
        let request_messages = request_messages_of(&body).expect("the request is valid");
        assert_eq!(
            (&request_messages[2].calls, &request_messages[3].result_of),
            (&vec![Some("a".to_owned())], &Some("a".to_owned()))
        );
    }

    #[test]
    fn unsupported_content_is_refused_with_its_path() {
        let request = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
        for (body, param) in [
            (json!({"messages": [{"role": "boss", "content": "a"}]}), "messages[0].role"),
            (request(json!({"type": "text"})), "messages[0].content[0].text"),
            (request(json!({"type": "tool_reference"})), "messages[0].content[0].tool_name"),
            (request(json!({"type": "mystery"})), "messages[0].content[0].type"),
            (request(json!({"type": "tool_use", "name": "f"})), "messages[0].content[0].type"),
            (request(json!({"type": "image"})), "messages[0].content[0].source"),
            (
                request(json!({"type": "image", "source": {"type": "file", "file_id": "f"}})),
                "messages[0].content[0].source.type",
            ),
            (
                request(json!({"type": "image", "source": {"type": "base64", "data": "?"}})),
                "messages[0].content[0].source.data",
            ),
            (
                request(json!({"type": "document", "source": {"type": "base64", "data": "?"}})),
                "messages[0].content[0].source",
            ),
            (request(json!({"type": "tool_result", "content": "a"})), "messages[0].content[0].tool_use_id"),
        ] {
            assert_eq!(
                request_messages_of(&body).map(|_| ()).expect_err("the request is invalid")["param"],
                param,
                "{body}"
            );
        }
    }

    #[test]
    fn anthropic_hosted_tools_are_left_out_and_other_tools_converted() {
        let mut left_out = LeftOut::default();
        let mut read = |value: Value| offered(serde_json::from_value(value).expect("a tool"), 3, &mut left_out);
        let own = read(json!({"type": "bash_20250124", "name": "bash"})).expect_err("bash is an unknown tool");
        assert!(own.body(Shape::Anthropic).to_string().contains("bash_20250124"));
        let hosted = read(json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 8}));
        assert_eq!(hosted.map_err(|_| ()), Ok(None));
        let custom =
            read(json!({"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}));
        let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
        let shown = json!({"type": "function", "function": function});
        assert_eq!(custom.map_err(|_| ()), Ok(Some(shown.clone())));
        let forced = |choice| left_out.check(&choice, std::slice::from_ref(&shown)).is_err();
        assert!(forced(ToolChoice::Named("web_search".to_owned())));
        assert!(!forced(ToolChoice::Required), "another tool can be called");
        assert!(left_out.check(&ToolChoice::Required, &[]).is_err());
        assert!(!forced(ToolChoice::Auto));
    }
}
