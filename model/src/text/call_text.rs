//! JSON text of the values in a tool call, in formats whose calls are not JSON objects.

use serde_json::Value;

use super::callable_tool::JsonTypes;

/// The JSON text of a value. Text that is not JSON is a string. If the schema also allows strings,
/// JSON of a type that the schema does not name is a string too.
pub(super) fn json_of(text: &str, types: JsonTypes) -> String {
    // Chat templates print these three values of earlier calls as Python does.
    let plain = match text.trim() {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        plain => plain,
    };
    match serde_json::from_str::<Value>(plain) {
        // Return the model's text, because `value` may round numbers with more digits than `f64`.
        Ok(value) if types.contains(JsonTypes::of(&value)) || !types.contains(JsonTypes::STRING) => plain.to_owned(),
        _ => Value::from(text).to_string(),
    }
}

/// Adds a character to a JSON string.
pub(super) fn push_escaped(json: &mut String, next: char) {
    match next {
        '"' | '\\' | '\0'..='\x1f' => *json += &escaped(next.encode_utf8(&mut [0; 4])),
        _ => json.push(next),
    }
}

/// The text as part of a JSON string.
pub(super) fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
