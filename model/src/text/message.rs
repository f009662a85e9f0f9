//! Messages: what was said in a conversation, by whom, with which pictures and videos in between.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The operator.
    System,
    /// The person who asks.
    User,
    /// The model.
    Assistant,
    /// A function's result.
    Tool,
}

/// A piece of a message.
#[derive(Clone, PartialEq, Eq)]
pub enum Part {
    /// Plain text; names of special tokens in it stay text.
    Text(String),
    /// A picture's place. The pictures themselves travel beside the messages, in the order of their places.
    Image,
    /// A video's place; videos travel likewise.
    Video,
    /// A call of a function, as the template expects it: usually `{"type": "function", "function": {"name": ..,
    /// "arguments": {..}}}`. Templates get a message's calls apart from what it says.
    ToolCall(serde_json::Value),
}

/// One turn of a conversation.
///
/// Serialises to what Hugging Face's templates expect: `{"role": .., "content": ..}`, where content is a string when there
/// is only text (templates of text-only models concatenate it), else a list of `{"type": "text", "text": ..}` and
/// `{"type": "image"}` and `{"type": "video"}`; calls of functions are in a list of their own, `tool_calls`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said, in order.
    pub content: Vec<Part>,
}

impl Message {
    /// A message of text alone.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Message { role, content: vec![Part::Text(text.into())] }
    }

    /// How many pictures it has places for.
    pub fn images(&self) -> usize {
        self.content.iter().filter(|part| matches!(part, Part::Image)).count()
    }

    /// How many videos it has places for.
    pub fn videos(&self) -> usize {
        self.content.iter().filter(|part| matches!(part, Part::Video)).count()
    }

    /// All texts.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.content.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            Part::Image | Part::Video | Part::ToolCall(_) => None,
        })
    }

    /// All calls of functions.
    pub fn tool_calls(&self) -> impl Iterator<Item = &serde_json::Value> {
        self.content.iter().filter_map(|part| match part {
            Part::ToolCall(call) => Some(call),
            Part::Text(_) | Part::Image | Part::Video => None,
        })
    }
}

/// Never the text itself: it is the user's.
impl std::fmt::Debug for Part {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Part::Text(text) => write!(formatter, "Text({} bytes)", text.len()),
            Part::Image => formatter.write_str("Image"),
            Part::Video => formatter.write_str("Video"),
            Part::ToolCall(_) => formatter.write_str("ToolCall(..)"),
        }
    }
}

impl Serialize for Part {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self {
            Part::Text(text) => {
                map.serialize_entry("type", "text")?;
                map.serialize_entry("text", text)?;
            }
            Part::Image => map.serialize_entry("type", "image")?,
            Part::Video => map.serialize_entry("type", "video")?,
            Part::ToolCall(_) => map.serialize_entry("type", "tool_call")?,
        }
        map.end()
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("role", &self.role)?;
        if self.images() + self.videos() == 0 {
            map.serialize_entry("content", &self.texts().collect::<String>())?;
        } else {
            let said: Vec<_> = self.content.iter().filter(|part| !matches!(part, Part::ToolCall(_))).collect();
            map.serialize_entry("content", &said)?;
        }
        let calls: Vec<_> = self.tool_calls().collect();
        if !calls.is_empty() {
            map.serialize_entry("tool_calls", &calls)?;
        }
        map.end()
    }
}
