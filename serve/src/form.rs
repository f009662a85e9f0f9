//! Output formats of replies.

use bursar::{Chat, JsonWhitespace, OutputFormat, ToolChoice};
use bursar_model::sampling::close_objects;
use serde_json::{Value, json};

use super::{error::ApiError, models::shortened};

/// Returns the output format for this type, or `None` for plain text. Errors name the
/// field `{field}.type` or `schema_field`.
pub(super) fn form(
    kind: &str,
    schema: Option<Value>,
    field: &str,
    schema_field: &str,
) -> Result<Option<OutputFormat>, ApiError> {
    match (kind, schema) {
        ("text", _) => Ok(None),
        ("json_object", _) => Ok(Some(any_object())),
        ("json_schema", Some(schema)) => Ok(Some(json_of(schema))),
        ("json_schema", None) => Err(ApiError::invalid(schema_field, format!("`{schema_field}` is missing"))),
        (other, _) => {
            let message = format!("`{field}.type` is `{}`, which is unknown", shortened(other));
            Err(ApiError::invalid(format!("{field}.type"), message).hint("expected text, json_object or json_schema"))
        }
    }
}

/// Sets the output format. If a tool call is forced, the format is dropped: clients send a format
/// together with a forced call, and the format is meant for replies without a call.
pub(super) fn with_format(chat: Chat, choice: Option<&ToolChoice>, format: Option<OutputFormat>) -> Chat {
    let is_forced = matches!(choice, Some(ToolChoice::Required | ToolChoice::Named(_)));
    chat.format(format.filter(|_| !is_forced))
}

/// JSON that matches the schema, with the whitespace that models were trained on. Objects have
/// only the members that the schema names, as in vLLM and in OpenAI's strict mode, unless
/// the schema says otherwise.
pub(super) fn json_of(mut schema: Value) -> OutputFormat {
    close_objects(&mut schema);
    OutputFormat::JsonSchema { schema, whitespace: JsonWhitespace::Spaced }
}

pub(super) fn any_object() -> OutputFormat {
    json_of(json!({"type": "object"}))
}
