//! The form that a reply shall have.

use bursar_model::sampling::close_objects;
use serde_json::{Value, json};

use super::{error::ApiError, models::shortened};
use crate::{Chat, JsonWhitespace, OutputFormat, ToolChoice};

/// The form of this type, none for plain text. The request names the type at `field`.type, the schema at `schema_field`.
/// In strict mode, as OpenAI defines it, objects have only the members that their schema names.
pub(super) fn form(
    kind: &str,
    (schema, is_strict): (Option<Value>, bool),
    field: &str,
    schema_field: &str,
) -> Result<Option<OutputFormat>, ApiError> {
    match (kind, schema) {
        ("text", _) => Ok(None),
        ("json_object", _) => Ok(Some(any_object())),
        ("json_schema", Some(mut schema)) => {
            if is_strict {
                close_objects(&mut schema);
            }
            Ok(Some(json_of(schema)))
        }
        ("json_schema", None) => Err(ApiError::invalid(schema_field, format!("`{schema_field}` is missing"))),
        (other, _) => {
            let told = format!("`{field}.type` is `{}`, which is unknown", shortened(other));
            Err(ApiError::invalid(format!("{field}.type"), told).hint("expected text, json_object or json_schema"))
        }
    }
}

/// The chat with this form. Where a call is forced, the reply is a call, so the form is left out: clients send both, and
/// mean messages by it.
pub(super) fn with_format(chat: Chat, choice: Option<&ToolChoice>, format: Option<OutputFormat>) -> Chat {
    let is_forced = matches!(choice, Some(ToolChoice::Required | ToolChoice::Named(_)));
    format.filter(|_| !is_forced).into_iter().fold(chat, Chat::format)
}

/// JSON of this schema, with the spaces that models have learnt.
pub(super) fn json_of(schema: Value) -> OutputFormat {
    OutputFormat::JsonSchema { schema, whitespace: JsonWhitespace::Spaced }
}

/// Any JSON object.
pub(super) fn any_object() -> OutputFormat {
    json_of(json!({"type": "object"}))
}
