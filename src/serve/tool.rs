//! Tools and their calls, as chat templates read them.

use serde_json::{Map, Value, json};

use crate::Content;

/// A function that the model may call.
pub(super) fn function(name: &str, description: Option<Value>, parameters: Option<Value>) -> Value {
    let mut function = Map::from_iter([("name".to_owned(), name.into())]);
    function.extend(description.map(|description| ("description".to_owned(), description)));
    function.extend(parameters.map(|parameters| ("parameters".to_owned(), parameters)));
    json!({"type": "function", "function": function})
}

/// A call that the model has made.
pub(super) fn call(id: Option<String>, name: &str, arguments: Value) -> Content {
    let function = json!({"name": name, "arguments": as_object(arguments)});
    Content::ToolCall(json!({"id": id, "type": "function", "function": function}))
}

/// Templates want an object; clients send its text.
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
    fn arguments_are_an_object_where_they_are_one() {
        assert_eq!(as_object(json!("{\"a\": 1}")), json!({"a": 1}));
        assert_eq!(as_object(json!("{\"a\": ")), json!("{\"a\": "));
        assert_eq!(as_object(json!("")), json!({}));
        assert_eq!(as_object(Value::Null), json!({}));
    }
}
