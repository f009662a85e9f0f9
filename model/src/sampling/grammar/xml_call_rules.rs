//! Lark rules of a tool call in Qwen's XML format. A parameter's schema determines its rule: a
//! string is raw text, and any other value is JSON.

use std::{collections::HashSet, fmt::Write};

use llguidance::regex_to_lark;
use regex_syntax::hir::{Hir, HirKind, Look};
use serde_json::{Map, Value};

use super::{
    error::GrammarError,
    lark_rules::{LarkRules, literal},
    output_format::{JsonWhitespace, OutputFormat, escape, require, schema_bytes},
    rewritten_schema::{NotFollowed, rewrite},
    schema_place::SchemaPlace,
};
use crate::text::{CallableTool, JsonTypes, error::PrivateText};

/// Maximum number of parameters that a tool's schema names.
const PARAMETERS_MAX: usize = 128;
/// Maximum number of parameters in a call that the tool's schema does not name.
const UNNAMED_MAX: usize = 16;
/// Maximum levels of `anyOf` that are followed to find strings.
const BRANCHES_DEPTH_MAX: usize = 4;
/// The largest length of a string that is enforced. Longer texts would take too much lexer fuel,
/// because the lexer needs a separate state for each length and each beginning of an end tag.
const LENGTH_MAX: u64 = 32;
/// The end of each value.
const VALUE_END: &str = "\n</parameter>";
/// A text up to its end tag. It contains neither this tag nor the end of a call, so that the reader
/// of the reply ends the value where the grammar ends it. One complement (`~`) excludes both,
/// because several complements would take several times the lexer fuel.
const TEXT: &str = r"/(?s:.*)\n<\/parameter>/ & ~/(?s:.*<\/parameter>.+|.*<\/function>\s*<\/tool_call>.*)/";
/// Keywords that are not enforced in the schema of the arguments object itself.
const NOT_FOLLOWED: [&str; 6] = ["allOf", "anyOf", "maxProperties", "minProperties", "oneOf", "patternProperties"];

/// The rules of the calls of one tool.
pub(super) struct XmlCallRules<'a> {
    rules: &'a mut LarkRules,
    tool: CallableTool,
}

impl<'a> XmlCallRules<'a> {
    /// Takes a tool whose schema has passed the checks of [`OutputFormat::grammar`].
    pub(super) fn new(rules: &'a mut LarkRules, tool: &CallableTool) -> Self {
        XmlCallRules { rules, tool: rewritten(tool) }
    }

    /// The rule of a call.
    ///
    /// # Errors
    /// [`GrammarError::TooLarge`], [`GrammarError::Schema`], and the errors of
    /// [`OutputFormat::grammar`].
    pub(super) fn call(mut self) -> Result<String, GrammarError> {
        let object = self.tool.object().clone();
        let none = Map::new();
        let named = object.get("properties").and_then(Value::as_object).unwrap_or(&none);
        require("list of parameters", named.len(), "entries", PARAMETERS_MAX)?;
        let required = object.get("required").and_then(Value::as_array).into_iter().flatten();
        let required: HashSet<&str> = required.filter_map(Value::as_str).collect();
        let mut call = literal(&format!("<tool_call>\n<function={}>\n", checked(&self.tool.name)?));
        for (name, schema) in named {
            let mark = if required.contains(name.as_str()) { "" } else { "?" };
            if *schema == Value::Bool(false) {
                if mark.is_empty() {
                    return Err(GrammarError::Schema {
                        reason: PrivateText("a required property allows no value".into()),
                    });
                }
                continue;
            }
            let opening = literal(&format!("<parameter={}>\n", checked(name)?));
            let value = self.value(schema)?;
            let _ = write!(call, " ({opening} ({value}) \"\\n\"){mark}");
        }
        let additional = object.get("additionalProperties").unwrap_or(&Value::Bool(true));
        if *additional != Value::Bool(false) {
            let opening = self.unnamed(named.keys());
            let value = self.value(additional)?;
            let _ = write!(call, " ({opening} ({value}) \"\\n\"){{0,{UNNAMED_MAX}}}");
        }
        Ok(format!("{call} {}", literal("</function>\n</tool_call>")))
    }

    /// The opening tag of a parameter that has none of the names `named`.
    fn unnamed<'n>(&mut self, named: impl Iterator<Item = &'n String>) -> String {
        let names: Vec<String> = named.map(|name| name.chars().map(escape).collect()).collect();
        let other =
            if names.is_empty() { String::new() } else { format!(" & ~/<parameter=(?:{})>\\n/", names.join("|")) };
        self.rules.token(format!(r"/<parameter=[^<>\s](?:[^<>\n]{{0,62}}[^<>\s])?>\n/{other}"))
    }

    /// The rule of a value and its end.
    fn value(&mut self, schema: &Value) -> Result<String, GrammarError> {
        let mut alternatives = Vec::new();
        self.alternatives(schema, 0, &mut alternatives)?;
        let text = self.rules.token(TEXT.to_owned());
        if alternatives.contains(&text) { Ok(text) } else { Ok(alternatives.join(" | ")) }
    }

    fn alternatives(&mut self, schema: &Value, depth: usize, into: &mut Vec<String>) -> Result<(), GrammarError> {
        let schema = self.tool.resolved(schema).clone();
        let list = |keyword: &str| schema.get(keyword).and_then(Value::as_array).filter(|list| !list.is_empty());
        let branches = match (list("anyOf").or_else(|| list("oneOf")), list("allOf")) {
            (Some(branches), None) => Some(branches),
            (None, Some(all)) if all.len() == 1 => Some(all),
            _ => None,
        };
        if let Some(branches) = branches.filter(|_| schema.get("type").is_none() && depth < BRANCHES_DEPTH_MAX) {
            return branches.iter().try_for_each(|branch| self.alternatives(branch, depth + 1, into));
        }
        if let Some(values) = list("enum").map(Vec::as_slice).or_else(|| schema.get("const").map(std::slice::from_ref))
        {
            into.extend(values.iter().map(|value| match value {
                Value::String(text) => literal(&format!("{text}{VALUE_END}")),
                value => literal(&format!("{value}{VALUE_END}")),
            }));
            return Ok(());
        }
        let types = self.tool.types(&schema);
        let named = schema.get("type");
        // The grammar compiler refuses an unknown type.
        let is_text = types.contains(JsonTypes::STRING) || (types.are_strings() && named.is_none());
        if is_text {
            let text = self.text(&schema);
            into.push(text);
        }
        let others = named.and_then(Value::as_array).map(|named| named.iter().filter(|named| *named != "string"));
        match others.map(|others| others.cloned().collect::<Vec<_>>()).filter(|_| is_text) {
            Some(others) if !others.is_empty() => {
                let mut schema = schema.clone();
                schema["type"] = others.into();
                into.push(self.json(schema)?);
            }
            _ if is_text => {}
            _ => into.push(self.json(schema)?),
        }
        Ok(())
    }

    fn text(&mut self, schema: &Value) -> String {
        let mut token = TEXT.to_owned();
        let length = |keyword: &str| schema.get(keyword).and_then(Value::as_u64).filter(|length| *length <= LENGTH_MAX);
        let (least, most) = (length("minLength"), length("maxLength"));
        if least.is_some() || most.is_some() {
            let most = most.map_or(String::new(), |most| most.to_string());
            let _ = write!(token, r" & /(?s:.{{{},{most}}})\n<\/parameter>/", least.unwrap_or(0));
        }
        if let Some(pattern) = schema.get("pattern").and_then(Value::as_str).and_then(matching_whole) {
            let _ = write!(token, r" & /(?:{pattern})\n<\/parameter>/");
        }
        self.rules.token(token)
    }

    fn json(&mut self, mut schema: Value) -> Result<String, GrammarError> {
        for definitions in ["$defs", "definitions"] {
            if let (Some(all), Value::Object(keywords)) = (self.tool.parameters.get(definitions), &mut schema) {
                keywords.insert(definitions.to_owned(), all.clone());
            }
        }
        let json = self.rules.part(&OutputFormat::JsonSchema { schema, whitespace: JsonWhitespace::Spaced })?;
        Ok(format!("{json} {}", literal(VALUE_END)))
    }
}

/// Keywords of a tool's schema that a call in XML may violate, although the same call in JSON could
/// not.
pub(super) fn not_followed(tool: &CallableTool) -> Vec<NotFollowed> {
    if schema_bytes(&tool.parameters).is_err() {
        return Vec::new();
    }
    let tool = rewritten(tool);
    let (object, root) = (tool.object(), SchemaPlace::of(""));
    let whole = NOT_FOLLOWED.into_iter().filter(|keyword| object.get(keyword).is_some());
    let mut left: Vec<_> = whole.map(|keyword| NotFollowed { keyword, place: root.clone() }).collect();
    for (name, schema) in object.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let schema = tool.resolved(schema);
        let place = root.at("properties").named(name);
        if schema.get("format").is_some() {
            left.push(NotFollowed { keyword: "format", place: place.clone() });
        }
        let is_long = |length: &Value| length.as_u64().is_some_and(|length| length > LENGTH_MAX);
        let lengths = ["maxLength", "minLength"].into_iter().filter(|keyword| schema.get(keyword).is_some_and(is_long));
        left.extend(lengths.map(|keyword| NotFollowed { keyword, place: place.clone() }));
        // `rewrite` splits a pattern with look-ahead into several patterns in `allOf`.
        let parts = schema.get("allOf").and_then(Value::as_array).into_iter().flatten();
        let pattern = schema.get("pattern").and_then(Value::as_str);
        if parts.map(|part| part.get("pattern")).any(|pattern| pattern.is_some())
            || pattern.is_some_and(|pattern| matching_whole(pattern).is_none())
        {
            left.push(NotFollowed { keyword: "pattern", place });
        }
    }
    left
}

fn rewritten(tool: &CallableTool) -> CallableTool {
    let mut tool = tool.clone();
    rewrite(&mut tool.parameters);
    tool
}

/// Returns `name` if it can be written into an opening tag, and otherwise an error.
fn checked(name: &str) -> Result<&str, GrammarError> {
    if name.is_empty() || name.trim() != name || name.contains(['<', '>', '\n']) {
        let reason = "the model's call format does not allow `<`, `>`, line breaks or outer spaces in a name";
        return Err(GrammarError::Schema { reason: PrivateText(reason.to_owned()) });
    }
    Ok(name)
}

/// A regular expression that matches exactly the texts in which `pattern` is found. `None` if the
/// pattern cannot be read, does not begin with an anchor, or has anchors or word boundaries other
/// than the anchors at its ends. A pattern that may match at any position would take too much lexer
/// fuel.
fn matching_whole(pattern: &str) -> Option<String> {
    let pattern = regex_syntax::parse(&regex_to_lark(pattern, "dw")).ok()?;
    let mut parts = match pattern.kind() {
        HirKind::Concat(parts) => parts.clone(),
        _ => vec![pattern],
    };
    if parts.first().is_none_or(|part| *part.kind() != HirKind::Look(Look::Start)) {
        return None;
    }
    parts.remove(0);
    let ends = parts.last().is_some_and(|part| *part.kind() == HirKind::Look(Look::End));
    parts.truncate(parts.len() - usize::from(ends));
    let body = Hir::concat(parts);
    let body = body.properties().look_set().is_empty().then(|| regex_to_lark(&body.to_string(), ""))?;
    Some(format!("(?:{body}){}", if ends { "" } else { "(?s:.*)" }))
}
