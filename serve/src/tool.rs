//! Tools and tool calls in the format of chat templates.

use bursar::{Content, ToolChoice};
use serde_json::{Map, Value, json};

use super::{error::ApiError, models::shortened};

/// Describes a function that the model may call.
pub(super) fn function(name: &str, description: Option<Value>, parameters: Option<Value>) -> Value {
    let mut function = Map::from_iter([("name".to_owned(), name.into())]);
    function.extend(description.map(|description| ("description".to_owned(), description)));
    function.extend(parameters.map(|parameters| ("parameters".to_owned(), parameters)));
    json!({"type": "function", "function": function})
}

/// Converts a call that the model has made.
pub(super) fn call(id: Option<String>, name: &str, arguments: Value) -> Content {
    let function = json!({"name": name, "arguments": as_object(arguments)});
    Content::ToolCall(json!({"id": id, "type": "function", "function": function}))
}

/// Hosted tools, which only the servers of OpenAI or Anthropic run. Coding agents offer them to
/// every server. The model does not see them, so it never calls them.
#[derive(Default)]
pub(super) struct LeftOut(Vec<String>);

impl LeftOut {
    pub(super) fn add(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    /// Rejects a choice that forces a call of a hosted tool. `functions` are the tools
    /// that the model sees.
    pub(super) fn check(&self, choice: &ToolChoice, functions: &[Value]) -> Result<(), ApiError> {
        let is_shown = |name: &str| functions.iter().any(|function| function["function"]["name"] == name);
        let forced = match choice {
            ToolChoice::Named(name) => Some(name).filter(|name| self.0.contains(name) && !is_shown(name)),
            ToolChoice::Required => self.0.first().filter(|_| functions.is_empty()),
            ToolChoice::Auto | ToolChoice::None => None,
        };
        let Some(name) = forced else { return Ok(()) };
        let message =
            format!("`tool_choice` forces a call of `{}`, but this server does not call tools itself", shortened(name));
        Err(ApiError::invalid("tool_choice", message).hint("force a function that the client calls"))
    }
}

/// Converts arguments from JSON text, which clients send, to an object, which templates expect.
/// Other text is returned unchanged, except that empty text becomes an empty object.
fn as_object(arguments: Value) -> Value {
    match arguments {
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(Value::Object(object)) => Value::Object(object),
            _ if text.is_empty() => json!({}),
            _ => Value::String(text),
        },
        Value::Null => json!({}),
        object => object,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_arguments_become_an_object_if_they_parse() {
        assert_eq!(as_object(json!("{\"a\": 1}")), json!({"a": 1}));
        assert_eq!(as_object(json!("{\"a\": ")), json!("{\"a\": "));
        assert_eq!(as_object(json!("")), json!({}));
        assert_eq!(as_object(Value::Null), json!({}));
    }
}
