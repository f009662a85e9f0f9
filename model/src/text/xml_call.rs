//! A reader for a tool call in Qwen's XML format, one character at a time. The reader converts the
//! parameters to the JSON text of the arguments as they arrive.
//!
//! A string is returned while it arrives. A value that may be a string or null is withheld only as
//! long as it may be null. Any other value is withheld until its end, because only the whole value
//! shows whether it is JSON of a type that the tool's schema allows.

use std::sync::Arc;

use serde_json::Value;

use super::call_text::{escaped, json_of, push_escaped};
use super::callable_tool::{CallableTool, JsonTypes};
use super::reply_format::{FUNCTION_END, PARAMETER, PARAMETER_END, TOOL_CALL_END};

/// Maximum bytes of whitespace between the tag that ends a value and the next tag.
const BLANKS_MAX: usize = 8;
/// The tags that end a value, each with the tags that may follow it. If none of these tags follows,
/// the text belongs to the value.
const VALUE_ENDS: [(&str, &[&str]); 2] = [
    (PARAMETER_END, &[PARAMETER, FUNCTION_END, TOOL_CALL_END]),
    // A model may forget to close the last parameter.
    (FUNCTION_END, &[TOOL_CALL_END]),
];

/// The reader of the parameters of a call, up to its end.
#[derive(Clone)]
pub(super) struct XmlCall {
    tools: Arc<[CallableTool]>,
    /// The index of the called tool, if the request offers it.
    tool: Option<usize>,
    state: CallState,
    parameters: usize,
    /// The JSON text read since the owner of this reader cleared this field.
    pub(super) json: String,
    /// The text that `json` was read from.
    pub(super) written: String,
    /// Text that may be a tag. After the end of the call: text that is not part of the call.
    pub(super) held: String,
}

#[derive(Clone)]
enum CallState {
    /// Before a parameter or the end of the function.
    Between,
    /// In the tag that opens a parameter.
    Name,
    /// At the start of a value. A line break here is not part of the value.
    ValueStart(JsonTypes),
    /// In a string that is returned as it arrives.
    Text,
    Withheld(JsonTypes, String),
}

impl XmlCall {
    pub(super) fn new(tools: Arc<[CallableTool]>, name: &str) -> Self {
        let tool = tools.iter().position(|tool| tool.name == name);
        let (json, written, held) = (String::new(), String::new(), String::new());
        XmlCall { tools, tool, state: CallState::Between, parameters: 0, json, written, held }
    }

    /// Reads a character. At the end of the call, returns whether the call is complete, and leaves
    /// the text after the call in `held`.
    pub(super) fn feed(&mut self, next: char) -> Option<bool> {
        self.held.push(next);
        match self.state {
            CallState::Between => self.between(next),
            CallState::Name => self.name(next),
            CallState::ValueStart(types) => {
                self.state = if types.are_strings() {
                    self.json.push('"');
                    CallState::Text
                } else {
                    CallState::Withheld(types, String::new())
                };
                if next != '\n' {
                    return self.value();
                }
                self.write_held();
                None
            }
            CallState::Text | CallState::Withheld(..) => self.value(),
        }
    }

    /// Ends a call that the end of the reply has cut off.
    pub(super) fn finish(&mut self) {
        let ends_value = self.held.trim_start_matches('\n').starts_with(PARAMETER_END);
        match self.state {
            CallState::Text | CallState::Withheld(..) if ends_value => self.end_value(),
            CallState::Text => self.json += &escaped(&self.held),
            _ => {}
        }
        self.write_held();
    }

    fn between(&mut self, next: char) -> Option<bool> {
        if self.held.len() == next.len_utf8() && next.is_whitespace() {
            self.write_held();
            return None;
        }
        let tags = [PARAMETER, FUNCTION_END, TOOL_CALL_END];
        match tags.into_iter().find(|tag| tag.starts_with(&self.held)) {
            None => Some(false),
            Some(tag) if tag != self.held => None,
            Some(PARAMETER) => {
                self.state = CallState::Name;
                None
            }
            Some(tag) => {
                self.json += if self.parameters == 0 { "{}" } else { "}" };
                // A model may forget the function's end.
                if tag == FUNCTION_END {
                    self.write_held();
                }
                Some(true)
            }
        }
    }

    fn name(&mut self, next: char) -> Option<bool> {
        match next {
            '>' => {
                let name = self.held[PARAMETER.len()..].trim_end_matches('>').trim();
                if name.is_empty() {
                    return Some(false);
                }
                let types = self.tool.map(|tool| self.tools[tool].parameter_types(name)).unwrap_or_default();
                self.json += if self.parameters == 0 { "{" } else { ", " };
                self.json += &format!("{}: ", Value::from(name));
                self.parameters += 1;
                self.state = CallState::ValueStart(types);
                self.write_held();
                None
            }
            '<' | '\n' => Some(false),
            _ => None,
        }
    }

    fn value(&mut self) -> Option<bool> {
        while !self.held.is_empty() {
            match value_end(&self.held) {
                ValueEnd::Possible => break,
                ValueEnd::Not => {
                    let next = self.held.remove(0);
                    self.written.push(next);
                    self.add_to_value(next);
                }
                ValueEnd::At(at) => {
                    self.end_value();
                    let tags = self.held.split_off(at);
                    self.write_held();
                    let end = tags.char_indices().find_map(|(at, next)| Some((self.feed(next)?, at + next.len_utf8())));
                    let (is_closed, at) = end?;
                    self.held += &tags[at..];
                    return Some(is_closed);
                }
            }
        }
        None
    }

    fn add_to_value(&mut self, next: char) {
        match &mut self.state {
            CallState::Withheld(types, value) => {
                value.push(next);
                if types.are_strings_or_null() && !may_be_null(value) {
                    self.json += &format!("\"{}", escaped(value));
                    self.state = CallState::Text;
                }
            }
            _ => push_escaped(&mut self.json, next),
        }
    }

    fn end_value(&mut self) {
        match std::mem::replace(&mut self.state, CallState::Between) {
            CallState::Withheld(types, value) => self.json += &json_of(&value, types),
            _ => self.json.push('"'),
        }
    }

    fn write_held(&mut self) {
        self.written += &std::mem::take(&mut self.held);
    }
}

/// Whether text within a value is the end of the value.
enum ValueEnd {
    Possible,
    /// The next tag begins at this byte offset.
    At(usize),
    Not,
}

fn value_end(held: &str) -> ValueEnd {
    let text = held.strip_prefix('\n').unwrap_or(held);
    for (end, following) in VALUE_ENDS {
        if end.starts_with(text) {
            return ValueEnd::Possible;
        }
        let Some(after) = text.strip_prefix(end) else { continue };
        let tag = after.trim_start();
        if following.contains(&tag) {
            // `FUNCTION_END` both ends this value and ends the function, so the next tag to read
            // is `FUNCTION_END` itself.
            return ValueEnd::At(held.len() - if end == FUNCTION_END { text.len() } else { tag.len() });
        }
        let may_follow = following.iter().any(|following| following.starts_with(tag));
        return if may_follow && after.len() - tag.len() <= BLANKS_MAX { ValueEnd::Possible } else { ValueEnd::Not };
    }
    ValueEnd::Not
}

fn may_be_null(value: &str) -> bool {
    ["null", "None"].iter().any(|null| null.starts_with(value))
}
