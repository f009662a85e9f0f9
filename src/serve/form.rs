//! The form that a reply shall have.

use bursar_model::sampling::close_objects;
use serde_json::{Value, json};

use super::{error::ApiError, models::shortened};
use crate::{Chat, JsonWhitespace, OutputFormat, ToolChoice};

/// The form of this type, none for plain text. The request names the type at `field`.type, the schema at `schema_field`.
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
            let told = format!("`{field}.type` is `{}`, which is unknown", shortened(other));
            Err(ApiError::invalid(format!("{field}.type"), told).hint("expected text, json_object or json_schema"))
        }
    }
}

/// The chat with this form. The form is dropped if a tool call is forced: clients send both, and mean
/// the form for replies that are not calls.
pub(super) fn with_format(chat: Chat, choice: Option<&ToolChoice>, format: Option<OutputFormat>) -> Chat {
    let is_forced = matches!(choice, Some(ToolChoice::Required | ToolChoice::Named(_)));
    chat.format(format.filter(|_| !is_forced))
}

/// JSON of this schema, with the spaces that models have learnt. Objects have only the members that it names, as with vLLM
/// and in OpenAI's strict mode, unless it says otherwise.
pub(super) fn json_of(mut schema: Value) -> OutputFormat {
    close_objects(&mut schema);
    OutputFormat::JsonSchema { schema, whitespace: JsonWhitespace::Spaced }
}

/// Any JSON object.
pub(super) fn any_object() -> OutputFormat {
    json_of(json!({"type": "object"}))
}
