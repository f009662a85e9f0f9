//! Requests of OpenAI's chat completions API in traces: tools, turns with text, pictures, tool
//! calls and their results, and the limit on reply tokens. The bench decides how replies are
//! sampled, so all other fields are ignored.

use std::path::Path;

use base64::{Engine, engine::general_purpose::STANDARD};
use bursar::{Chat, Content, Image, Role};
use serde::Deserialize;
use serde_json::Value;

pub struct Read {
    pub chat: Chat,
    /// The request's limit on reply tokens.
    pub reply: Option<usize>,
    pub pictures: usize,
}

#[derive(Deserialize)]
struct Body {
    messages: Vec<Message>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    #[serde(default)]
    content: Value,
    #[serde(default)]
    tool_calls: Option<Vec<Value>>,
}

/// Parses a request. Picture files are looked up in `folder`.
///
/// # Errors
/// Returns a message that says what is wrong with the request.
pub fn read(body: &Value, folder: &Path) -> Result<Read, String> {
    let body = Body::deserialize(body).map_err(|error| error.to_string())?;
    let mut pictures = 0;
    let mut chat = Chat::new().tools(body.tools.unwrap_or_default());
    for Message { role, content, tool_calls } in body.messages {
        let role = match &*role {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            role => {
                let message = format!("unknown role `{role}`; expected system, developer, user, assistant or tool");
                return Err(message);
            }
        };
        let mut contents = contents(&content, folder)?;
        pictures += contents.iter().filter(|content| matches!(content, Content::Image(_))).count();
        contents.extend(tool_calls.into_iter().flatten().map(|call| Content::ToolCall(with_arguments(call))));
        chat = chat.turn(role, contents);
    }
    Ok(Read { chat, reply: body.max_completion_tokens.or(body.max_tokens), pictures })
}

/// Converts a call's arguments, which OpenAI sends as text, to the object
/// that chat templates expect.
fn with_arguments(mut call: Value) -> Value {
    if let Some(arguments) = call.pointer_mut("/function/arguments")
        && let Some(read) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok())
    {
        *arguments = read;
    }
    call
}

fn contents(content: &Value, folder: &Path) -> Result<Vec<Content>, String> {
    match content {
        Value::Null => Ok(Vec::new()),
        Value::String(text) => Ok(vec![Content::Text(text.clone())]),
        Value::Array(parts) => parts.iter().map(|part| self::part(part, folder)).collect(),
        _ => Err("the content of a message is neither a text nor a list of parts".to_owned()),
    }
}

fn part(part: &Value, folder: &Path) -> Result<Content, String> {
    match part["type"].as_str().unwrap_or_default() {
        "text" => Ok(Content::Text(part["text"].as_str().ok_or("a part of type `text` has no text")?.to_owned())),
        "image_url" => {
            let url = part["image_url"]["url"].as_str().or(part["image_url"].as_str());
            let url = url.ok_or("a part of type `image_url` has no url")?;
            picture(url, folder).map(Content::Image)
        }
        kind => Err(format!("a part of type `{kind}` cannot be replayed")),
    }
}

/// Opens the picture of a `data:` URL or a file. Nothing is fetched from other URLs.
fn picture(url: &str, folder: &Path) -> Result<Image, String> {
    if let Some(data) = url.strip_prefix("data:") {
        let encoded = data.split_once(";base64,").ok_or("a data URL is not in base64")?.1;
        let bytes = STANDARD.decode(encoded).map_err(|error| format!("a data URL cannot be decoded: {error}"))?;
        return Ok(Image::from_bytes(bytes));
    }
    if url.contains("://") && !url.starts_with("file://") {
        return Err("pictures are not fetched from URLs; use a data URL or a file".to_owned());
    }
    let file = folder.join(url.trim_start_matches("file://"));
    Image::open(&file).map_err(|error| format!("picture {}: {error}", file.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refusal(body: &Value) -> String {
        read(body, Path::new("/nowhere")).map(|_| ()).expect_err("the message is wrong")
    }

    #[test]
    fn tool_call_arguments_are_parsed_into_objects() {
        let call = |arguments: Value| json!({ "function": { "name": "look", "arguments": arguments } });
        assert_eq!(with_arguments(call(json!("{\"at\": 3}"))), call(json!({ "at": 3 })));
        assert_eq!(with_arguments(call(json!("not JSON"))), call(json!("not JSON")));
        assert_eq!(with_arguments(call(json!({ "at": 3 }))), call(json!({ "at": 3 })));
    }

    #[test]
    fn a_conversation_with_tools_is_read_completely() {
        let body = json!({
            "tools": [{ "type": "function", "function": { "name": "look" } }],
            "messages": [
                { "role": "system", "content": "Be brief." },
                { "role": "user", "content": [{ "type": "text", "text": "Where?" }] },
                { "role": "assistant", "content": null, "tool_calls": [{ "function": { "name": "look", "arguments": "{}" } }] },
                { "role": "tool", "tool_call_id": "1", "content": "Here." },
            ],
            "max_tokens": 5,
        });
        let Read { chat, reply, pictures } = read(&body, Path::new(".")).expect("the message is valid");
        assert_eq!((reply, pictures), (Some(5), 0));
        let shown = format!("{chat:?}");
        assert!(shown.contains("ToolCall") && shown.contains("Tool,") && shown.contains("tools: 1"), "{shown}");
    }

    #[test]
    fn pictures_are_not_fetched_from_urls() {
        let of = |url: &str| json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": url } }] }] });
        assert!(refusal(&of("https://example.org/cat.jpg")).contains("pictures are not fetched from URLs"));
        assert!(refusal(&of("cat.jpg")).contains("/nowhere/cat.jpg"));
        assert!(refusal(&of("data:image/png,AAAA")).contains("not in base64"));
        assert!(
            refusal(&json!({ "messages": [{ "role": "user", "content": [{ "type": "input_audio" }] }] }))
                .contains("`input_audio` cannot be replayed")
        );
    }
}
