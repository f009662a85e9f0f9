//! Messages of a conversation: role, text, pictures, videos, reasoning and calls.

use std::borrow::Cow;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The operator of the service.
    System,
    User,
    Assistant,
    /// The result of a function.
    Tool,
}

/// A part of a message.
#[derive(Clone, PartialEq, Eq)]
pub enum ContentPart {
    /// Plain text. Names of special tokens inside this text do not become special tokens.
    Text(String),
    /// The position of a picture. The pictures themselves are passed separately from the messages,
    /// in the order of these positions.
    Image,
    /// The position of a video. Videos are passed in the same way as pictures.
    Video,
    /// Reasoning of the model, before the rest of its message. Templates get it
    /// separately from the content.
    Reasoning(String),
    /// A call of a function, in the form that the template expects: usually
    /// `{"type": "function", "function": {"name": .., "arguments": {..}}}`. Templates get a
    /// message's calls separately from its content.
    ToolCall(serde_json::Value),
    /// The id of the call whose result this message contains. Templates get the id separately, as
    /// `tool_call_id`.
    ResultOf(String),
}

/// Number of characters of call ids in Mistral's templates.
const SHORT_ID: usize = 9;

/// One turn of a conversation.
///
/// A message serializes to the form that Hugging Face's templates read:
/// `{"role": .., "content": ..}`. If the message has only text, the content is a string, because
/// templates of text-only models concatenate it. The string joins the texts without separators,
/// because templates that read lists also write no separators.
/// [`ChatTemplate`](super::ChatTemplate) passes lists to templates that read only lists, and
/// separates the texts by line breaks for templates that read only strings. If the message has
/// pictures or videos, the content is a list of `{"type": "text", "text": ..}`,
/// `{"type": "image"}` and `{"type": "video"}`. Reasoning is in `reasoning_content`, calls of
/// functions are in the list `tool_calls`, and a result has the id of its call in `tool_call_id`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub role: Role,
    pub content: Vec<ContentPart>,
}

impl Message {
    /// A message that consists of one text.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Message { role, content: vec![ContentPart::Text(text.into())] }
    }

    /// Number of pictures in the message.
    pub fn images(&self) -> usize {
        self.content.iter().filter(|part| matches!(part, ContentPart::Image)).count()
    }

    /// Number of videos in the message.
    pub fn videos(&self) -> usize {
        self.content.iter().filter(|part| matches!(part, ContentPart::Video)).count()
    }

    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.content.iter().filter_map(|part| match part {
            ContentPart::Text(text) => Some(text.as_str()),
            ContentPart::Image
            | ContentPart::Video
            | ContentPart::Reasoning(_)
            | ContentPart::ToolCall(_)
            | ContentPart::ResultOf(_) => None,
        })
    }

    /// The message for a template that reads the content as a string. Texts with no
    /// picture or video between them are joined by line breaks, and empty texts are left
    /// out, as in vLLM (`content_format: string`).
    pub(super) fn with_lines(&self) -> Message {
        let mut content: Vec<ContentPart> = Vec::with_capacity(self.content.len());
        let mut last_text = None;
        for part in &self.content {
            match (part, last_text) {
                (ContentPart::Text(text), _) if text.is_empty() => continue,
                (ContentPart::Text(text), Some(at)) => {
                    if let Some(ContentPart::Text(before)) = content.get_mut::<usize>(at) {
                        before.push('\n');
                        before.push_str(text);
                    }
                    continue;
                }
                (ContentPart::Text(_), None) => last_text = Some(content.len()),
                (ContentPart::Image | ContentPart::Video, _) => last_text = None,
                // Templates get these parts separately from the content.
                (ContentPart::Reasoning(_) | ContentPart::ToolCall(_) | ContentPart::ResultOf(_), _) => {}
            }
            content.push(part.clone());
        }
        Message { role: self.role, content }
    }

    pub fn reasoning(&self) -> impl Iterator<Item = &str> {
        self.content.iter().filter_map(|part| match part {
            ContentPart::Reasoning(text) => Some(text.as_str()),
            ContentPart::Text(_)
            | ContentPart::Image
            | ContentPart::Video
            | ContentPart::ToolCall(_)
            | ContentPart::ResultOf(_) => None,
        })
    }

    pub fn tool_calls(&self) -> impl Iterator<Item = &serde_json::Value> {
        self.content.iter().filter_map(|part| match part {
            ContentPart::ToolCall(call) => Some(call),
            ContentPart::Text(_)
            | ContentPart::Image
            | ContentPart::Video
            | ContentPart::Reasoning(_)
            | ContentPart::ResultOf(_) => None,
        })
    }

    /// Whether a call id in the message is longer than [`SHORT_ID`].
    pub(super) fn has_long_ids(&self) -> bool {
        let mut ids = self.tool_calls().filter_map(|call| call["id"].as_str()).chain(self.result_of());
        ids.any(|id| id.chars().nth(SHORT_ID).is_some())
    }

    /// The message with longer ids cut to their last [`SHORT_ID`] characters, as in vLLM.
    pub(super) fn with_short_ids(&self) -> Message {
        let short = |id: &str| match id.char_indices().rev().nth(SHORT_ID - 1) {
            Some((at, _)) => id[at..].to_owned(),
            None => id.to_owned(),
        };
        let content = self.content.iter().map(|part| match part {
            ContentPart::ToolCall(call) => {
                let mut call = call.clone();
                if let Some(id) = call["id"].as_str().map(short) {
                    call["id"] = id.into();
                }
                ContentPart::ToolCall(call)
            }
            ContentPart::ResultOf(id) => ContentPart::ResultOf(short(id)),
            part => part.clone(),
        });
        Message { role: self.role, content: content.collect() }
    }

    /// The id of the call whose result this message contains.
    pub fn result_of(&self) -> Option<&str> {
        self.content.iter().find_map(|part| match part {
            ContentPart::ResultOf(id) => Some(id.as_str()),
            _ => None,
        })
    }
}

/// Shows the length of the text, but not the text, which is the user's data.
impl std::fmt::Debug for ContentPart {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ContentPart::Text(text) => write!(formatter, "Text({} bytes)", text.len()),
            ContentPart::Image => formatter.write_str("Image"),
            ContentPart::Video => formatter.write_str("Video"),
            ContentPart::Reasoning(text) => write!(formatter, "Reasoning({} bytes)", text.len()),
            ContentPart::ToolCall(_) => formatter.write_str("ToolCall(..)"),
            ContentPart::ResultOf(_) => formatter.write_str("ResultOf(..)"),
        }
    }
}

impl Serialize for ContentPart {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self {
            ContentPart::Text(text) => {
                map.serialize_entry("type", "text")?;
                map.serialize_entry("text", text)?;
            }
            ContentPart::Image => map.serialize_entry("type", "image")?,
            ContentPart::Video => map.serialize_entry("type", "video")?,
            ContentPart::Reasoning(_) => map.serialize_entry("type", "reasoning")?,
            ContentPart::ToolCall(_) => map.serialize_entry("type", "tool_call")?,
            ContentPart::ResultOf(_) => map.serialize_entry("type", "tool_call_id")?,
        }
        map.end()
    }
}

impl Message {
    fn write<S: Serializer>(&self, serializer: S, in_parts: bool) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("role", &self.role)?;
        if in_parts || self.images() + self.videos() > 0 {
            let is_said = |part: &&ContentPart| {
                !matches!(part, ContentPart::ToolCall(_) | ContentPart::Reasoning(_) | ContentPart::ResultOf(_))
            };
            let mut parts: Vec<_> = self.content.iter().filter(is_said).collect();
            // The list is never empty, because templates read the first part's type.
            let empty = ContentPart::Text(String::new());
            if parts.is_empty() {
                parts.push(&empty);
            }
            map.serialize_entry("content", &parts)?;
        } else {
            map.serialize_entry("content", &self.texts().collect::<String>())?;
        }
        if self.reasoning().next().is_some() {
            map.serialize_entry("reasoning_content", &self.reasoning().collect::<String>())?;
        }
        let calls: Vec<_> = self.tool_calls().collect();
        if !calls.is_empty() {
            map.serialize_entry("tool_calls", &calls)?;
        }
        if let Some(id) = self.result_of() {
            map.serialize_entry("tool_call_id", id)?;
        }
        map.end()
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.write(serializer, false)
    }
}

/// The form in which a template reads the contents of a role's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentForm {
    /// Only strings: a list makes the template fail, is left out or is printed.
    String,
    /// Strings and lists of parts.
    Either,
    /// Only lists of parts: the text of a string is lost.
    Parts,
}

/// A message in the form that a template reads.
pub(super) struct Formed<'a> {
    message: Cow<'a, Message>,
    in_parts: bool,
}

impl<'a> Formed<'a> {
    pub fn new(message: &'a Message, form: ContentForm) -> Self {
        let takes_lines = form == ContentForm::String && message.texts().nth(1).is_some();
        let message = if takes_lines { Cow::Owned(message.with_lines()) } else { Cow::Borrowed(message) };
        Formed { message, in_parts: form == ContentForm::Parts }
    }
}

impl Serialize for Formed<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.message.write(serializer, self.in_parts)
    }
}
