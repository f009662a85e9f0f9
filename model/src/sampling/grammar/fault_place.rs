//! Search for the part of a schema that causes an error. llguidance reports the error, but usually
//! not the faulty part.

use serde_json::Value;

/// Maximum number of parts to try. Each try compiles one part.
const TRIED_MAX: usize = 256;

/// Returns a JSON pointer to the innermost part of `schema` that is still refused as a separate
/// schema with the definitions of the whole schema. Returns `None` if only the whole schema is
/// refused. After [`TRIED_MAX`] tries, the result is the innermost part found so far.
pub(super) fn place(schema: &Value, is_refused: impl Fn(Value) -> bool) -> Option<String> {
    let (mut place, mut part, mut tried) = (String::new(), schema, 0);
    loop {
        let inner = parts(schema, part, &place).into_iter().find(|(_, inner)| {
            tried += 1;
            tried <= TRIED_MAX && is_refused(with_definitions(inner, schema))
        });
        match inner {
            Some(inner) => (place, part) = inner,
            None => return Some(place).filter(|place| !place.is_empty()),
        }
    }
}

/// The schemas inside `part` and the schema that its `$ref` refers to, each with its JSON pointer.
fn parts<'s>(schema: &'s Value, part: &'s Value, place: &str) -> Vec<(String, &'s Value)> {
    let Value::Object(keywords) = part else { return Vec::new() };
    let mut parts = Vec::new();
    for (keyword, value) in keywords {
        let place = format!("{place}/{keyword}");
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties" | "dependentSchemas", Value::Object(named)) => {
                let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
                parts.extend(named.iter().map(|(name, inner)| (format!("{place}/{}", escaped(name)), inner)));
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(listed)) => {
                parts.extend(listed.iter().enumerate().map(|(index, inner)| (format!("{place}/{index}"), inner)));
            }
            ("items" | "additionalProperties" | "contains" | "not" | "if" | "then" | "else" | "propertyNames", _) => {
                parts.push((place, value));
            }
            ("$ref", Value::String(reference)) => {
                let inner = reference.strip_prefix('#').and_then(|pointer| Some((pointer, schema.pointer(pointer)?)));
                parts.extend(inner.map(|(pointer, inner)| (pointer.to_owned(), inner)));
            }
            _ => {}
        }
    }
    parts
}

fn with_definitions(part: &Value, schema: &Value) -> Value {
    let mut part = part.clone();
    if let Value::Object(keywords) = &mut part {
        for definitions in ["$defs", "definitions"] {
            if let Some(defined) = schema.get(definitions) {
                keywords.entry(definitions).or_insert_with(|| defined.clone());
            }
        }
    }
    part
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_fault_is_located_in_the_innermost_refused_schema() {
        let refused = |part: Value| part.to_string().contains("zebra");
        let at = |schema: &Value| place(schema, refused);
        assert_eq!(at(&json!({"type": "zebra"})), None, "only the whole schema is at fault");
        let nested =
            json!({"properties": {"a": {"type": "string"}, "b/c": {"items": {"anyOf": [{}, {"type": "zebra"}]}}}});
        assert_eq!(at(&nested).as_deref(), Some("/properties/b~1c/items/anyOf/1"));
        assert_eq!(at(&json!({"properties": {"a": {}}})), None);
        // The search also ends for a circular reference.
        let circle = json!({"$defs": {"a": {"$ref": "#/$defs/a"}, "b": {"type": "zebra"}}, "$ref": "#/$defs/a"});
        assert!(at(&circle).is_some());
    }
}
