//! Checks of a JSON schema: keywords that the grammar compiler supports, and numbers that
//! it does not round.

use std::collections::BTreeSet;

use serde_json::{Map, Number, Value};

use super::{error::GrammarError, schema_place::SchemaPlace};

/// Keywords that narrow the valid values and that the grammar compiler does not
/// support. The compiler would refuse them without naming their position or, in a schema of
/// an older draft, ignore them.
const UNSUPPORTED: [&str; 17] = [
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];
/// Keywords whose numbers limit a value or are allowed values.
const NUMBERS: [&str; 7] =
    ["const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"];
// Keywords that hold one schema or a list of schemas, and keywords that hold schemas under names
// that the caller chose.
const SCHEMAS: [&str; 7] =
    ["additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"];
const NAMED_SCHEMAS: [&str; 2] = ["patternProperties", "properties"];

/// The largest number that the grammar compiler keeps exact. The compiler uses f64, in which
/// adjacent integers beyond this limit can be equal.
const EXACT_MAX: u64 = 1 << 53;

/// Refuses keywords that the grammar compiler does not support, and numbers that it would round.
///
/// # Errors
/// [`GrammarError::Keyword`], [`GrammarError::Number`].
pub(super) fn check(schema: &Value) -> Result<(), GrammarError> {
    let (mut walk, mut seen) = (Walk { references: vec!["#"] }, BTreeSet::new());
    while let Some(reference) = walk.references.pop() {
        // The grammar compiler refuses references to other documents.
        let Some(pointer) = reference.strip_prefix('#').filter(|_| seen.insert(reference)) else { continue };
        let Some(meant) = schema.pointer(pointer) else { continue };
        walk.schema(meant, &SchemaPlace::of(pointer))?;
    }
    Ok(())
}

/// A walk through a schema and all definitions that it refers to. Definitions without a
/// reference are not checked.
struct Walk<'s> {
    references: Vec<&'s str>,
}

impl<'s> Walk<'s> {
    fn schema(&mut self, schema: &'s Value, place: &SchemaPlace) -> Result<(), GrammarError> {
        let Value::Object(keywords) = schema else { return Ok(()) };
        keywords.iter().try_for_each(|(keyword, value)| self.keyword(keyword, value, place))
    }

    fn keyword(&mut self, keyword: &'s str, value: &'s Value, place: &SchemaPlace) -> Result<(), GrammarError> {
        if let Some(keyword) = UNSUPPORTED.into_iter().find(|unsupported| *unsupported == keyword) {
            return Err(GrammarError::Keyword { keyword, place: place.clone() });
        }
        if let Some(keyword) = NUMBERS.into_iter().find(|known| *known == keyword) {
            return if is_exact(value) { Ok(()) } else { Err(GrammarError::Number { keyword, place: place.clone() }) };
        }
        if SCHEMAS.contains(&keyword) {
            let place = place.at(keyword);
            return match value {
                Value::Array(schemas) => {
                    schemas.iter().enumerate().try_for_each(|(index, schema)| self.schema(schema, &place.at(index)))
                }
                schema => self.schema(schema, &place),
            };
        }
        match value {
            Value::Object(schemas) if NAMED_SCHEMAS.contains(&keyword) => self.named(schemas, &place.at(keyword)),
            Value::String(reference) if keyword == "$ref" => {
                self.references.push(reference);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn named(&mut self, schemas: &'s Map<String, Value>, place: &SchemaPlace) -> Result<(), GrammarError> {
        schemas.iter().try_for_each(|(name, schema)| self.schema(schema, &place.named(name)))
    }
}

/// Whether the grammar compiler keeps every number in a value exact.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(number) => is_exact_number(number),
        Value::Array(values) => values.iter().all(is_exact),
        Value::Object(fields) => fields.values().all(is_exact),
        _ => true,
    }
}

/// Whether the grammar compiler keeps a number exact. A float beyond the limit is refused, because
/// it may have been an integer with more digits before it was parsed.
fn is_exact_number(number: &Number) -> bool {
    let integer = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
    match integer {
        Some(integer) => integer <= EXACT_MAX,
        None => number.as_f64().is_some_and(|float| float.abs() < EXACT_MAX as f64),
    }
}
