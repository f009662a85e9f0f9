//! Rewriting of JSON schemas from Pydantic and Zod to the keywords that the grammar compiler
//! supports. Keywords that no grammar can enforce are left to the model and reported.

use std::{collections::HashSet, fmt, slice};

use serde_json::{Map, Value, json};

use super::{look_ahead::without_look_ahead, schema_place::SchemaPlace};

/// The `format`s of strings that the grammar compiler enforces. Other formats are annotations (JSON
/// Schema 2020-12, Validation, 7.2.1).
const FORMATS: [&str; 11] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"];
// Keywords that hold a schema, a list of schemas, or schemas under names that the caller chose.
const SCHEMAS: [&str; 4] = ["additionalItems", "additionalProperties", "items", "not"];
const LISTS: [&str; 5] = ["allOf", "anyOf", "items", "oneOf", "prefixItems"];
const NAMED: [&str; 5] = ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"];

/// A keyword that a reply may violate, because no grammar can enforce it.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFollowed {
    pub keyword: &'static str,
    pub place: SchemaPlace,
}

/// Shows the keyword and its position in the schema, but does not quote the schema.
impl fmt::Display for NotFollowed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "`{}` at {}", self.keyword, self.place)
    }
}

/// Rewrites a schema in place, and returns the keywords that are left to the model.
pub(super) fn rewrite(schema: &mut Value) -> Vec<NotFollowed> {
    let mut left = Vec::new();
    rewrite_at(schema, &SchemaPlace::of(""), &mut left);
    left
}

fn rewrite_at(schema: &mut Value, place: &SchemaPlace, left: &mut Vec<NotFollowed>) {
    let Value::Object(keywords) = schema else { return };
    for (keyword, value) in keywords.iter_mut() {
        let place = place.at(keyword);
        match value {
            Value::Object(named) if NAMED.contains(&keyword.as_str()) => {
                named.iter_mut().for_each(|(name, schema)| rewrite_at(schema, &place.named(name), left));
            }
            Value::Array(listed) if LISTS.contains(&keyword.as_str()) => {
                let listed = listed.iter_mut().enumerate();
                listed.for_each(|(index, schema)| rewrite_at(schema, &place.at(index), left));
            }
            Value::Object(_) if SCHEMAS.contains(&keyword.as_str()) => rewrite_at(value, &place, left),
            _ => {}
        }
    }
    if is_never(keywords) {
        *schema = Value::Bool(false);
        return;
    }
    let mut leave = |keyword| left.push(NotFollowed { keyword, place: place.clone() });
    if keywords.contains_key("properties") {
        imply_object(keywords);
    }
    if !follow_format(keywords) {
        leave("format");
    }
    // `shift_remove` keeps the order of the other keywords.
    if keywords.shift_remove("uniqueItems") == Some(Value::Bool(true)) {
        leave("uniqueItems");
    }
    if keywords.get("oneOf").and_then(Value::as_array).is_some_and(|options| !are_apart(options)) {
        leave("oneOf");
    }
    follow_names(keywords);
    follow_pattern(keywords);
}

/// Adds the type `object`, unless another keyword determines which types or values are allowed.
fn imply_object(keywords: &mut Map<String, Value>) {
    if !names_types(keywords) {
        keywords.insert("type".to_owned(), "object".into());
    }
}

/// Whether the schema, or a branch of it, determines which types or values are allowed.
fn names_types(keywords: &Map<String, Value>) -> bool {
    let has = |keyword: &str| keywords.contains_key(keyword);
    let branches = ["allOf", "anyOf", "oneOf"].iter().filter_map(|keyword| keywords.get(*keyword)?.as_array());
    ["$ref", "const", "enum", "type"].into_iter().any(has)
        || branches.flatten().any(|branch| branch.as_object().is_none_or(names_types))
}

/// Whether the schema is Zod's `never`, which matches no value.
fn is_never(keywords: &Map<String, Value>) -> bool {
    keywords.get("not").is_some_and(|not| *not == json!({}) || *not == Value::Bool(true))
}

/// Renames a `format` such as `url` to the name that the grammar compiler knows, and removes an
/// unknown `format`. Returns `false` if the removed `format` applies to strings, because then the
/// grammar does not enforce it.
fn follow_format(keywords: &mut Map<String, Value>) -> bool {
    let Some(Value::String(format)) = keywords.get_mut("format") else { return true };
    if FORMATS.contains(&format.as_str()) {
        return true;
    }
    let known = match format.as_str() {
        "url" => Some("uri"),
        numbered if numbered.strip_prefix("uuid").is_some_and(|number| number.parse::<u8>().is_ok()) => Some("uuid"),
        _ => None,
    };
    if let Some(known) = known {
        *format = known.to_owned();
        return true;
    }
    keywords.shift_remove("format");
    // The `format` of a number only describes how the number is stored.
    !takes_text(keywords)
}

/// Whether the schema allows strings.
fn takes_text(keywords: &Map<String, Value>) -> bool {
    match keywords.get("type") {
        None => true,
        Some(Value::Array(types)) => types.iter().any(|kind| kind == "string"),
        Some(kind) => kind == "string",
    }
}

/// Removes `propertyNames` if it allows every string. In an object without `properties` and
/// `patternProperties`, rewrites a list of names to `properties`, and a pattern or a length to
/// `patternProperties`. TypeScript's `Record<Key, Value>` needs this.
fn follow_names(keywords: &mut Map<String, Value>) {
    let says_nothing = |names: &Value| {
        let Some(names) = names.as_object() else { return *names == Value::Bool(true) };
        names.iter().all(|(keyword, value)| keyword == "type" && value == "string")
    };
    let Some(names) = keywords.get("propertyNames") else { return };
    if says_nothing(names) {
        keywords.shift_remove("propertyNames");
        return;
    }
    if keywords.contains_key("properties") || keywords.contains_key("patternProperties") {
        return;
    }
    let value = keywords.get("additionalProperties").cloned().unwrap_or(Value::Bool(true));
    let only = |known: &[&str]| {
        let names = names.as_object()?;
        names.keys().all(|keyword| keyword == "type" || known.contains(&keyword.as_str())).then_some(names)
    };
    let listed = only(&["enum", "const"]).and_then(|names| match (names.get("enum"), names.get("const")) {
        (Some(Value::Array(names)), None) => names.iter().map(Value::as_str).collect::<Option<Vec<_>>>(),
        (None, Some(name)) => Some(vec![name.as_str()?]),
        _ => None,
    });
    let pattern = only(&["pattern", "minLength", "maxLength"]).and_then(|names| {
        let length = |keyword: &str| names.get(keyword).map(|length| length.as_u64());
        match (names.get("pattern"), length("minLength"), length("maxLength")) {
            (Some(pattern), None, None) => pattern.as_str().map(str::to_owned),
            (None, least, most) => {
                let (least, most) = (least.unwrap_or(Some(0))?, most.map(|most| most.ok_or(())).transpose().ok()?);
                Some(format!("^(?s:.){{{least},{}}}$", most.map_or(String::new(), |most| most.to_string())))
            }
            _ => None,
        }
    });
    let (keyword, members) = match (listed, pattern) {
        (Some(names), _) => ("properties", names.into_iter().map(|name| (name.to_owned(), value.clone())).collect()),
        (None, Some(pattern)) => ("patternProperties", Map::from_iter([(pattern, value)])),
        (None, None) => return,
    };
    keywords.shift_remove("propertyNames");
    keywords.insert(keyword.to_owned(), Value::Object(members));
    keywords.insert("additionalProperties".to_owned(), Value::Bool(false));
    imply_object(keywords);
}

/// Replaces a `pattern` with look-ahead by several patterns in `allOf`, which apply to the
/// same types of value.
fn follow_pattern(keywords: &mut Map<String, Value>) {
    let Some(patterns) = keywords.get("pattern").and_then(Value::as_str).and_then(without_look_ahead) else { return };
    let kind = keywords.get("type").cloned();
    if let Value::Array(all) = keywords.entry("allOf").or_insert_with(|| json!([])) {
        all.extend(patterns.into_iter().map(|pattern| match &kind {
            Some(kind) => json!({"type": kind, "pattern": pattern}),
            None => json!({"pattern": pattern}),
        }));
        keywords.shift_remove("pattern");
    }
}

/// Whether types or constant members prove that no value matches two of these schemas.
fn are_apart(options: &[Value]) -> bool {
    /// Maximum number of options. Every pair of options is compared, so the time grows with the
    /// square of their number.
    const OPTIONS_MAX: usize = 64;
    if options.len() > OPTIONS_MAX {
        return false;
    }
    let mut pairs =
        options.iter().enumerate().flat_map(|(at, one)| options[at + 1..].iter().map(move |two| (one, two)));
    pairs.all(|(one, two)| have_other_types(one, two) || have_other_values(one, two))
}

fn have_other_types(one: &Value, two: &Value) -> bool {
    fn types(schema: &Value) -> Option<Vec<&str>> {
        let kinds = match &schema["type"] {
            Value::String(kind) => vec![kind.as_str()],
            Value::Array(kinds) => kinds.iter().map(Value::as_str).collect::<Option<_>>()?,
            _ => return None,
        };
        // Each integer is a number.
        Some(kinds.into_iter().map(|kind| if kind == "integer" { "number" } else { kind }).collect())
    }
    types(one).zip(types(two)).is_some_and(|(one, two)| one.iter().all(|kind| !two.contains(kind)))
}

fn have_other_values(one: &Value, two: &Value) -> bool {
    fn values(schema: &Value) -> &[Value] {
        match (&schema["const"], &schema["enum"]) {
            (Value::Null, Value::Array(values)) => values,
            (Value::Null, _) => &[],
            (value, _) => slice::from_ref(value),
        }
    }
    fn required(schema: &Value) -> HashSet<&str> {
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
    }
    let (these, those) = (values(one), values(two));
    if !these.is_empty() && !those.is_empty() {
        let these: HashSet<&Value> = these.iter().collect();
        return !those.iter().any(|value| these.contains(value));
    }
    let (needed, also_needed) = (required(one), required(two));
    let mut in_both = needed.intersection(&also_needed);
    in_both.any(|name| have_other_values(&one["properties"][name], &two["properties"][name]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(schema: Value) -> (Value, Vec<String>) {
        let mut schema = schema;
        let left = rewrite(&mut schema);
        (schema, left.iter().map(NotFollowed::to_string).collect())
    }

    #[test]
    fn equivalent_schema_rewrites_are_not_reported() {
        let text = json!({"type": "string"});
        for (schema, expected) in [
            (json!({"properties": {"a": {}}}), json!({"properties": {"a": {}}, "type": "object"})),
            (json!({"type": "object", "propertyNames": text}), json!({"type": "object"})),
            (json!({"uniqueItems": false, "type": "array"}), json!({"type": "array"})),
            (json!({"type": "integer", "format": "int64"}), json!({"type": "integer"})),
            (json!({"type": "string", "format": "uuid4"}), json!({"type": "string", "format": "uuid"})),
            (json!({"items": {"not": {}}}), json!({"items": false})),
            (
                json!({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": text}),
                json!({"type": "object", "properties": {"a": text, "b": text}, "additionalProperties": false}),
            ),
            (
                json!({"propertyNames": {"type": "string", "maxLength": 3}, "additionalProperties": {}}),
                json!({"patternProperties": {"^(?s:.){0,3}$": {}}, "additionalProperties": false, "type": "object"}),
            ),
            (json!({"properties": {}, "enum": [null, {}]}), json!({"properties": {}, "enum": [null, {}]})),
            (
                json!({"properties": {}, "anyOf": [{"required": ["a"]}]}),
                json!({"properties": {}, "anyOf": [{"required": ["a"]}], "type": "object"}),
            ),
            (
                json!({"properties": {}, "anyOf": [{"type": "null"}, {}]}),
                json!({"properties": {}, "anyOf": [{"type": "null"}, {}]}),
            ),
            (
                json!({"type": ["string", "null"], "pattern": "^(?=a)b"}),
                json!({"type": ["string", "null"], "allOf": [
                    {"type": ["string", "null"], "pattern": "^(?:a)"},
                    {"type": ["string", "null"], "pattern": "^b"},
                ]}),
            ),
            (json!({"pattern": "^(?=a)b"}), json!({"allOf": [{"pattern": "^(?:a)"}, {"pattern": "^b"}]})),
        ] {
            assert_eq!(rewritten(schema.clone()), (expected, vec![]), "{schema}");
        }
    }

    #[test]
    fn keywords_that_are_not_enforced_are_reported_without_property_names() {
        let one_of = json!({"oneOf": [{"type": "integer"}, {"type": "number"}]});
        for (schema, left) in [
            (json!({"properties": {"set": {"uniqueItems": true}}}), vec!["`uniqueItems` at #/properties/*"]),
            (json!({"items": [{"type": "string", "format": "path"}]}), vec!["`format` at #/items/0"]),
            (json!({"$defs": {"a": one_of}}), vec!["`oneOf` at #/$defs/*"]),
            (json!({"oneOf": [{"type": "string"}, {"type": ["null", "integer"]}]}), vec![]),
            (json!({"oneOf": [{"enum": ["a", "b"]}, {"const": "c"}]}), vec![]),
        ] {
            assert_eq!(rewritten(schema.clone()).1, left, "{schema}");
        }
        let kind =
            |kind: &str| json!({"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]});
        assert_eq!(rewritten(json!({"oneOf": [kind("a"), kind("b")]})).1, Vec::<String>::new());
        assert_eq!(rewritten(json!({"oneOf": [kind("a"), kind("a")]})).1, ["`oneOf` at #"]);
    }

    #[test]
    fn rewriting_keeps_the_order_of_properties() {
        let names = ["z", "a", "m"];
        let members: Map<_, _> = names.iter().map(|name| (name.to_string(), json!({"format": "x"}))).collect();
        let (schema, _) = rewritten(json!({"uniqueItems": true, "properties": members}));
        let kept: Vec<_> = schema["properties"].as_object().expect("the schema has properties").keys().collect();
        assert_eq!(kept, names);
    }
}
