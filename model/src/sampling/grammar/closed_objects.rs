//! Closing of object schemas: an object may have only the members that its schema names, as in
//! OpenAI's strict mode.

use serde_json::{Map, Value, json};

/// Sets `additionalProperties` to false in each object schema that names its members and has no
/// other keyword about members, such as `additionalProperties`, `oneOf` or `$ref`. Otherwise small
/// models add members until the reply reaches its token limit.
///
/// The schemas in an `allOf` with several entries stay open, because each of them names only some
/// members of the same object. If the schema has such an `allOf` anywhere, all definitions stay
/// open as well, because the `allOf` may refer to them. Object schemas that name no members
/// also stay open, because they describe maps.
pub fn close_objects(schema: &mut Value) {
    let has_joined = has_joined(schema);
    close(schema, has_joined);
}

fn close(schema: &mut Value, has_joined: bool) {
    let Value::Object(map) = schema else { return };
    for (key, value) in map.iter_mut() {
        match (key.as_str(), value) {
            ("$defs" | "definitions", _) if has_joined => {}
            ("properties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.values_mut().for_each(|schema| close(schema, has_joined));
            }
            ("anyOf" | "oneOf" | "prefixItems", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(|schema| close(schema, has_joined));
            }
            ("allOf", Value::Array(schemas)) if schemas.len() == 1 => close(&mut schemas[0], has_joined),
            ("items" | "additionalProperties", schema) => close(schema, has_joined),
            _ => {}
        }
    }
    if map.get("properties").is_some_and(Value::is_object) && !says_more(map) {
        map.insert("additionalProperties".to_owned(), json!(false));
    }
}

/// Whether a keyword other than `properties` also describes the object's members.
fn says_more(map: &Map<String, Value>) -> bool {
    const OTHERS: [&str; 9] = [
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "if",
        "dependentSchemas",
        "$ref",
    ];
    OTHERS.iter().any(|key| map.contains_key(*key))
}

fn has_joined(value: &Value) -> bool {
    match value {
        Value::Object(map) => map.iter().any(|(key, value)| match value {
            Value::Array(schemas) if key == "allOf" && schemas.len() > 1 => true,
            value => has_joined(value),
        }),
        Value::Array(values) => values.iter().any(has_joined),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed(mut schema: Value) -> Value {
        close_objects(&mut schema);
        schema
    }

    #[test]
    fn objects_with_named_members_are_closed_at_every_depth() {
        let open = |inner: Value| json!({"type": "object", "properties": {"a": inner}});
        let schema = closed(json!({
            "type": "object",
            "properties": {
                "list": {"type": "array", "items": open(json!({}))},
                "either": {"anyOf": [open(json!({})), {"type": "null"}]},
                "map": {"type": "object", "additionalProperties": open(json!({}))},
                "free": {"type": "object"},
                "said": {"type": "object", "properties": {}, "additionalProperties": true},
                "ref": {"allOf": [{"$ref": "#/$defs/Part"}]},
            },
            "$defs": {"Part": open(json!({}))},
        }));
        for place in [
            "",
            "/properties/list/items",
            "/properties/either/anyOf/0",
            "/properties/map/additionalProperties",
            "/$defs/Part",
        ] {
            assert_eq!(schema.pointer(&format!("{place}/additionalProperties")), Some(&json!(false)), "{place}");
        }
        assert_eq!(schema["properties"]["free"], json!({"type": "object"}));
        assert_eq!(schema["properties"]["said"]["additionalProperties"], true);
    }

    #[test]
    fn object_schemas_that_are_combined_stay_open() {
        let joined = json!({
            "allOf": [{"$ref": "#/$defs/A"}, {"type": "object", "properties": {"b": {}}}],
            "$defs": {"A": {"type": "object", "properties": {"a": {}}}},
        });
        assert_eq!(closed(joined.clone()), joined);
        let beside = json!({"type": "object", "properties": {"a": {}}, "oneOf": [{"required": ["a"]}]});
        assert_eq!(closed(beside.clone()), beside);
    }
}
