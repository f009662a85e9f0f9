//! Calls of tools as a model writes them into a reply.

use serde_json::{Map, Value, json};

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// An id for this call, unlike that of any other, with which its [result](super::Chat::tool_result) is given.
    pub id: String,
    /// The tool's name. A model may call one that it was not offered.
    pub name: String,
    /// The arguments: JSON text of an object, if the call is whole.
    pub arguments: String,
    /// Whether the arguments are the JSON of an object. They are not if the reply was cut off in them, or if the model
    /// wrote something else. They may break the tool's schema, unless the call was [forced](super::ToolChoice).
    pub is_whole: bool,
}

impl ToolCall {
    /// The arguments, if the call is whole.
    pub fn parsed(&self) -> Option<Map<String, Value>> {
        serde_json::from_str(&self.arguments).ok()
    }
}

/// The call as chat templates take it, for [`Chat::tool_call`](super::Chat::tool_call): OpenAI's form, but with the
/// arguments as an object where they are one.
impl From<ToolCall> for Value {
    fn from(call: ToolCall) -> Value {
        let arguments = call.parsed().map_or(Value::String(call.arguments), Value::Object);
        json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    }
}

/// A call as it arrives: it begins, its arguments come in pieces, it ends. Calls come one after another, also with text
/// between them.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolCallEvent {
    /// The model calls a tool.
    Begin {
        /// The number of the call in the reply, from 0.
        index: usize,
        /// [`ToolCall::id`].
        id: String,
        /// [`ToolCall::name`].
        name: String,
    },
    /// More of the arguments.
    Arguments {
        /// The number of the call.
        index: usize,
        /// Their next piece.
        json: String,
    },
    /// The call has ended.
    End {
        /// The number of the call.
        index: usize,
        /// [`ToolCall::is_whole`].
        is_whole: bool,
    },
}
