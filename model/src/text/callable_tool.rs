//! Tools that a model may call, and the JSON types of their parameters.

use std::collections::HashSet;

use serde_json::Value;

/// Maximum number of references that are followed from one schema to the next.
const REFERENCES_MAX: usize = 8;

/// A tool that a reply may call.
#[derive(Clone, PartialEq)]
pub struct CallableTool {
    pub name: String,
    /// A JSON schema of the arguments, which are one JSON object.
    pub parameters: Value,
}

/// Omits name and schema, which are the user's data.
impl std::fmt::Debug for CallableTool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("CallableTool(..)")
    }
}

impl CallableTool {
    /// The schema that names the parameters.
    pub(crate) fn object(&self) -> &Value {
        self.resolved(&self.parameters)
    }

    /// The schema that a chain of up to [`REFERENCES_MAX`] `$ref` leads to. A reference to another
    /// document is returned as it is. For a cycle or a longer chain, the result is the reference
    /// after the last step.
    pub(crate) fn resolved<'a>(&'a self, mut schema: &'a Value) -> &'a Value {
        for _ in 0..REFERENCES_MAX {
            schema = self.referred(schema).unwrap_or(schema);
        }
        schema
    }

    fn referred(&self, schema: &Value) -> Option<&Value> {
        self.parameters.pointer(schema.get("$ref")?.as_str()?.strip_prefix('#')?)
    }

    /// The types of the values of the parameter `name`.
    pub(super) fn parameter_types(&self, name: &str) -> JsonTypes {
        let object = self.object();
        let named = object.get("properties").and_then(|named| named.get(name));
        named.or_else(|| object.get("additionalProperties")).map_or(JsonTypes::default(), |schema| self.types(schema))
    }

    /// The types that a schema names, in any of its branches. A schema whose `type` is a string
    /// names only that type.
    pub(crate) fn types(&self, schema: &Value) -> JsonTypes {
        // The schema may be hostile, so each referenced schema is visited once, without recursion.
        let (mut types, mut open, mut seen) = (JsonTypes::default(), vec![schema], HashSet::new());
        while let Some(schema) = open.pop() {
            let list = |keyword: &str| schema.get(keyword).and_then(Value::as_array).into_iter().flatten();
            if let Some(named) = schema.get("type").filter(|named| named.is_string()) {
                types.0 |= JsonTypes::named(named).0;
                continue;
            }
            list("type").for_each(|named| types.0 |= JsonTypes::named(named).0);
            list("enum").chain(schema.get("const")).for_each(|value| types.0 |= JsonTypes::of(value).0);
            types.0 |= schema.get("properties").map_or(0, |_| JsonTypes::OBJECT.0);
            types.0 |= schema.get("items").map_or(0, |_| JsonTypes::ARRAY.0);
            open.extend(list("anyOf").chain(list("oneOf")).chain(list("allOf")));
            open.extend(self.referred(schema).filter(|referred| seen.insert(std::ptr::from_ref(*referred))));
        }
        types
    }
}

/// A set of types of JSON values. The empty set means that a schema names no type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct JsonTypes(u8);

impl JsonTypes {
    pub(crate) const STRING: Self = JsonTypes(1);
    pub(crate) const NULL: Self = JsonTypes(2);
    pub(crate) const BOOLEAN: Self = JsonTypes(4);
    /// Integers and other numbers.
    pub(crate) const NUMBER: Self = JsonTypes(8);
    pub(crate) const ARRAY: Self = JsonTypes(16);
    pub(crate) const OBJECT: Self = JsonTypes(32);

    pub(crate) fn contains(self, types: Self) -> bool {
        self.0 & types.0 == types.0
    }

    /// Whether every value is a string. Values without a known type are strings, as in vLLM.
    pub(crate) fn are_strings(self) -> bool {
        self == Self::STRING || self == Self::default()
    }

    /// Whether the types are exactly string and null.
    pub(crate) fn are_strings_or_null(self) -> bool {
        self == JsonTypes(Self::STRING.0 | Self::NULL.0)
    }

    /// The type of a value.
    pub(crate) fn of(value: &Value) -> Self {
        match value {
            Value::String(_) => Self::STRING,
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// The type that a schema calls `name`. Tools that were generated from Python code may use
    /// Python's names.
    fn named(name: &Value) -> Self {
        match name.as_str().unwrap_or_default() {
            "string" | "str" => Self::STRING,
            "null" => Self::NULL,
            "boolean" | "bool" => Self::BOOLEAN,
            "integer" | "int" | "number" | "float" => Self::NUMBER,
            "array" | "list" => Self::ARRAY,
            "object" | "dict" => Self::OBJECT,
            _ => Self::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parameter_types_come_from_types_values_branches_and_references() {
        let parameters = json!({
            "$ref": "#/$defs/Arguments",
            "$defs": {
                "Arguments": {"properties": {
                    "text": {"type": "string"}, "python": {"type": "int"}, "list": {"type": ["string", "null"]},
                    "values": {"enum": [1, "a"]}, "fixed": {"const": true}, "either": {"anyOf": [{"items": {}}, {"type": "null"}]},
                    "named": {"allOf": [{"$ref": "#/$defs/Loop"}]}, "any": {}, "unknown": {"type": "zebra"},
                }, "additionalProperties": {"type": "number"}},
                "Loop": {"oneOf": [{"$ref": "#/$defs/Loop"}, {"properties": {}}]},
            },
        });
        let tool = CallableTool { name: "f".into(), parameters };
        let types = |all: &[JsonTypes]| JsonTypes(all.iter().fold(0, |sum, one| sum | one.0));
        use JsonTypes as T;
        for (name, expected) in [
            ("text", types(&[T::STRING])),
            ("python", types(&[T::NUMBER])),
            ("list", types(&[T::STRING, T::NULL])),
            ("values", types(&[T::NUMBER, T::STRING])),
            ("fixed", types(&[T::BOOLEAN])),
            ("either", types(&[T::ARRAY, T::NULL])),
            ("named", types(&[T::OBJECT])),
            ("any", types(&[])),
            ("unknown", types(&[])),
            ("another", types(&[T::NUMBER])),
        ] {
            assert_eq!(tool.parameter_types(name), expected, "{name}");
        }
        let closed = CallableTool { name: "g".into(), parameters: json!({"additionalProperties": false}) };
        assert!(closed.parameter_types("another").are_strings());
    }
}
