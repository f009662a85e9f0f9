//! Tool calls in the replies of a model.

use serde_json::{Map, Value, json};

#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// A unique id of this call, to be passed with its [result](crate::chat::Chat::tool_result).
    pub id: String,
    /// The tool's name. A model may call a tool that it was not offered.
    pub name: String,
    /// The arguments: the JSON text of an object, if the call is complete.
    pub arguments: String,
    /// `true` if the call is complete: its arguments are the JSON text of an object. A call is
    /// incomplete if the reply was cut off within the arguments, or if the model wrote arguments
    /// that are not a JSON object. Complete arguments may still violate the tool's schema, unless
    /// the call was [forced](crate::chat::ToolChoice).
    pub is_whole: bool,
}

impl ToolCall {
    /// Returns the parsed arguments. `None` if they are not a JSON object.
    pub fn parsed(&self) -> Option<Map<String, Value>> {
        serde_json::from_str(&self.arguments).ok()
    }
}

/// The call as chat templates expect it, for [`Chat::tool_call`](crate::chat::Chat::tool_call): in
/// OpenAI's format, except that arguments which form an object are stored as an object instead of
/// text.
impl From<ToolCall> for Value {
    fn from(call: ToolCall) -> Value {
        let arguments = call.parsed().map_or(Value::String(call.arguments), Value::Object);
        json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    }
}

/// An event of a tool call. A call begins, its arguments arrive in pieces, and it ends before the
/// next call begins. There may be text between calls.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolCallEvent {
    Begin {
        /// The index of the call in the reply, from 0.
        index: usize,
        id: String,
        name: String,
    },
    Arguments {
        index: usize,
        /// The next piece of the arguments.
        json: String,
    },
    End {
        index: usize,
        is_whole: bool,
    },
}
