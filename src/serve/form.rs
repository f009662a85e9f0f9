//! The form that a reply shall have.

use serde_json::{Value, json};

use super::{error::ApiError, models::shortened};
use crate::{JsonWhitespace, OutputFormat};

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

/// JSON of this schema, with the spaces that models have learnt.
pub(super) fn json_of(schema: Value) -> OutputFormat {
    OutputFormat::JsonSchema { schema, whitespace: JsonWhitespace::Spaced }
}

/// Any JSON object.
pub(super) fn any_object() -> OutputFormat {
    json_of(json!({"type": "object"}))
}
