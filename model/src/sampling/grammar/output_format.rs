//! Output formats that a reply can be constrained to, and the limits of a format.

use llguidance::{JsonCompileOptions, api::TopLevelGrammar};
use serde_json::Value;

use super::{
    error::GrammarError,
    rewritten_schema::{NotFollowed, rewrite},
    schema_rules,
};
use crate::text::error::PrivateText;

/// Maximum bytes of a schema as compact JSON.
pub(super) const SCHEMA_BYTES_MAX: usize = 64 * 1024;
/// Maximum levels of nested values in a schema.
const SCHEMA_DEPTH_MAX: usize = 64;
/// Maximum bytes of a regular expression.
const REGEX_BYTES_MAX: usize = 16 * 1024;
// Maximum number of choices, and maximum bytes of all choices.
const CHOICES_MAX: usize = 2048;
const CHOICES_BYTES_MAX: usize = 64 * 1024;
/// The largest `multipleOf`. The remainders of larger values overflow in the lexer.
const MULTIPLE_OF_MAX: f64 = 1e8;
/// Maximum number of patterns that one text may have to match at once. llguidance multiplies out
/// the derivatives of these patterns, so each further pattern at least doubles their number.
/// llguidance checks its limits only between such steps. Thirty patterns would take more memory
/// than any machine has.
const PATTERNS_AT_ONCE_MAX: usize = 8;
/// Keywords that add no constraint to the applicators (such as `allOf`) of the same schema.
const ANNOTATIONS: [&str; 12] = [
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
];
/// Whitespace between the parts of a JSON value. Without a limit, a model can write spaces forever.
const JSON_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// The whitespace between the parts of a JSON reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JsonWhitespace {
    /// No whitespace: `{"a":1,"b":2}`. This takes the fewest tokens.
    #[default]
    Compact,
    /// A space after each comma and colon: `{"a": 1, "b": 2}`. Python's `json.dumps` writes JSON in
    /// this way, so it is common in training data.
    Spaced,
    /// Up to 32 spaces and line breaks between two parts, as the model chooses. A small model may
    /// fill its reply with whitespace.
    Free,
}

impl JsonWhitespace {
    fn settings(self) -> JsonCompileOptions {
        let usual = JsonCompileOptions { coerce_one_of: true, ..JsonCompileOptions::default() };
        let compact = JsonCompileOptions { whitespace_flexible: false, ..usual.clone() };
        match self {
            JsonWhitespace::Compact => compact,
            JsonWhitespace::Spaced => {
                JsonCompileOptions { item_separator: ", ".into(), key_separator: ": ".into(), ..compact }
            }
            JsonWhitespace::Free => JsonCompileOptions { whitespace_pattern: Some(JSON_SPACE.into()), ..usual },
        }
    }
}

/// The format of a reply. Tokens that would violate the format cannot be chosen. A reply that
/// reaches `max_tokens` is truncated, so it may be incomplete; its finish reason reports the
/// truncation.
///
/// ```
/// use bursar_model::sampling::OutputFormat;
/// use serde_json::json;
/// let count = OutputFormat::json(json!({
///     "type": "object",
///     "properties": { "count": { "type": "integer", "minimum": 0 } },
///     "required": ["count"],
/// }));
/// let date = OutputFormat::Regex(r"\d{4}-\d{2}-\d{2}".into());
/// let color = OutputFormat::Choice(vec!["red".into(), "green".into()]);
/// assert_eq!(format!("{date:?}"), "Regex(17 bytes)"); // the content is the user's data
/// ```
#[derive(Clone, PartialEq)]
pub enum OutputFormat {
    JsonSchema {
        /// A JSON schema (2020-12 and earlier drafts). `true` or `{}` allows any JSON value.
        schema: Value,
        /// Whitespace between the parts of the JSON value.
        whitespace: JsonWhitespace,
    },
    /// A text that matches this regular expression as a whole, in the syntax of Rust's regex crate.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// Shows the kind and, except for a schema, the size, but not the content, which is the user's
/// data.
impl std::fmt::Debug for OutputFormat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OutputFormat::JsonSchema { .. } => write!(formatter, "JsonSchema(..)"),
            OutputFormat::Regex(pattern) => write!(formatter, "Regex({} bytes)", pattern.len()),
            OutputFormat::Choice(choices) => write!(formatter, "Choice({} texts)", choices.len()),
        }
    }
}

impl OutputFormat {
    /// A JSON value that matches this schema, without whitespace.
    pub fn json(schema: Value) -> Self {
        OutputFormat::JsonSchema { schema, whitespace: JsonWhitespace::default() }
    }

    /// Keywords of the schema that a reply may violate, because no grammar can enforce them.
    pub fn not_followed(&self) -> Vec<NotFollowed> {
        match self {
            // A schema that is too large will be refused, so it is not rewritten here.
            OutputFormat::JsonSchema { schema, .. } if schema_bytes(schema).is_ok() => rewrite(&mut schema.clone()),
            _ => Vec::new(),
        }
    }

    /// Checks the limits and returns the grammar for llguidance.
    ///
    /// # Errors
    /// [`GrammarError::TooLarge`], [`GrammarError::NoChoice`], [`GrammarError::Regex`],
    /// [`GrammarError::Schema`], [`GrammarError::Keyword`], [`GrammarError::Number`],
    /// [`GrammarError::TooComplex`].
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar, GrammarError> {
        match self {
            OutputFormat::JsonSchema { schema, whitespace } => {
                Ok(TopLevelGrammar::from_json_schema(json_schema(schema, *whitespace)?))
            }
            OutputFormat::Regex(pattern) => {
                require("regular expression", pattern.len(), "bytes", REGEX_BYTES_MAX)?;
                regex(pattern)
            }
            OutputFormat::Choice(choices) => regex(&pattern_of(choices)?),
        }
    }
}

/// The rewritten and checked schema, with Bursar's compile settings in place of any
/// settings in the schema.
fn json_schema(schema: &Value, whitespace: JsonWhitespace) -> Result<Value, GrammarError> {
    schema_bytes(schema)?;
    let mut schema = schema.clone();
    rewrite(&mut schema);
    schema_rules::check(&schema)?;
    if has_large_multiple(&schema) {
        return Err(GrammarError::Schema { reason: PrivateText(format!("`multipleOf` is above {MULTIPLE_OF_MAX}")) });
    }
    let Patterns { count, meetings } = Patterns::of(&schema);
    if count.min(meetings + 1) > PATTERNS_AT_ONCE_MAX {
        return Err(GrammarError::TooComplex);
    }
    let mut schema = match schema {
        Value::Bool(true) => Value::Object(serde_json::Map::new()),
        Value::Object(_) => schema,
        // The grammar compiler refuses `false`, which allows nothing, and values
        // that are not schemas.
        other => return Ok(other),
    };
    whitespace.settings().apply_to(&mut schema);
    Ok(schema)
}

/// The size of a schema in bytes, or an error if the schema is too deep or too large.
pub(super) fn schema_bytes(schema: &Value) -> Result<usize, GrammarError> {
    // The depth is checked first, because serializing a value recurses.
    require("schema", depth(schema), "levels", SCHEMA_DEPTH_MAX)?;
    let bytes = schema.to_string().len();
    require("schema", bytes, "bytes", SCHEMA_BYTES_MAX)?;
    Ok(bytes)
}

/// The number of nested levels in a value. The function counts iteratively and stops just above the
/// limit, so a very deep value does not overflow the stack.
fn depth(value: &Value) -> usize {
    let mut level = vec![value];
    for depth in 0..=SCHEMA_DEPTH_MAX {
        if level.is_empty() {
            return depth;
        }
        level = level.into_iter().flat_map(inner).collect();
    }
    SCHEMA_DEPTH_MAX + 1
}

fn has_large_multiple(value: &Value) -> bool {
    value["multipleOf"].as_f64().is_some_and(|multiple| multiple > MULTIPLE_OF_MAX)
        || inner(value).into_iter().any(has_large_multiple)
}

/// An upper bound on the number of patterns that one text may have to match. The bound is loose,
/// because the patterns of different texts are counted together.
struct Patterns {
    count: usize,
    /// Number of places where two schemas of one value are combined. One text has to match at most
    /// `meetings + 1` patterns.
    meetings: usize,
}

impl Patterns {
    fn of(value: &Value) -> Self {
        let Value::Object(object) = value else { return Patterns::inside(value) };
        let Patterns { mut count, mut meetings } = Patterns::inside(value);
        let has = |keyword: &str| usize::from(object.contains_key(keyword));
        let length = |keyword: &str| object.get(keyword).and_then(Value::as_array).map_or(0, Vec::len);
        count += has("pattern") + has("format");
        // Each entry of `allOf` counts once, each other applicator counts once, and all narrowing
        // keywords together count once.
        let applied = length("allOf") + has("anyOf") + has("oneOf") + has("$ref");
        let is_narrowing =
            |keyword: &str| !ANNOTATIONS.contains(&keyword) && !["allOf", "anyOf", "oneOf", "$ref"].contains(&keyword);
        let beside = usize::from(object.keys().any(|keyword| is_narrowing(keyword)));
        meetings += (applied + beside).saturating_sub(1);
        meetings += has("pattern") * has("format") + has("properties") * has("patternProperties");
        Patterns { count, meetings }
    }

    fn inside(value: &Value) -> Self {
        inner(value).into_iter().map(Patterns::of).fold(Patterns { count: 0, meetings: 0 }, |sum, each| Patterns {
            count: sum.count + each.count,
            meetings: sum.meetings + each.meetings,
        })
    }
}

fn inner(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(values) => values.iter().collect(),
        Value::Object(values) => values.values().collect(),
        _ => Vec::new(),
    }
}

fn regex(pattern: &str) -> Result<TopLevelGrammar, GrammarError> {
    use regex_syntax::Error;
    if let Err(error) = regex_syntax::parse(pattern) {
        // The message of the regex library quotes the pattern; the error's kind does not.
        let (at, kind) = match &error {
            Error::Parse(error) => (error.span().start.offset, error.kind().to_string()),
            Error::Translate(error) => (error.span().start.offset, error.kind().to_string()),
            _ => (0, "not valid".to_owned()),
        };
        return Err(GrammarError::Regex { at, kind });
    }
    // Lark does not allow an empty pattern between its slashes.
    Ok(TopLevelGrammar::from_regex(if pattern.is_empty() { "(?:)" } else { pattern }))
}

/// The choices as one regular expression, so that any number of choices is one lexeme.
fn pattern_of(choices: &[String]) -> Result<String, GrammarError> {
    if choices.is_empty() {
        return Err(GrammarError::NoChoice);
    }
    require("list of choices", choices.len(), "entries", CHOICES_MAX)?;
    require("list of choices", choices.iter().map(String::len).sum(), "bytes", CHOICES_BYTES_MAX)?;
    let escaped = choices.iter().map(|choice| choice.chars().map(escape).collect::<String>());
    Ok(format!("(?:{})", escaped.collect::<Vec<_>>().join("|")))
}

/// Escapes every character that is not alphanumeric by its code point, because the text passes
/// through two notations that have special characters.
pub(super) fn escape(character: char) -> String {
    if character.is_alphanumeric() { character.to_string() } else { format!("\\x{{{:x}}}", u32::from(character)) }
}

pub(super) fn require(part: &'static str, value: usize, unit: &'static str, limit: usize) -> Result<(), GrammarError> {
    if value > limit { Err(GrammarError::TooLarge { part, value, unit, limit }) } else { Ok(()) }
}
