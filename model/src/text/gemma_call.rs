//! A reader for the arguments of a tool call in Gemma 4's format, one character at a time. The reader
//! converts them to JSON text as they arrive.
//!
//! Strings are delimited by [`<|"|>`](GEMMA_QUOTE), without escapes, and are returned as they arrive.
//! Objects and lists are returned item by item. All other values, including strings in `"` or `'`, are
//! withheld until they are complete, because only then it is known whether they are JSON.

use std::sync::Arc;

use serde_json::Value;

use super::call_text::{escaped, json_of, push_escaped};
use super::callable_tool::{CallableTool, JsonTypes};
use super::reply_format::{GEMMA_CALL_END, GEMMA_QUOTE};

/// Maximum nesting depth, below the limits of common JSON parsers (128 in serde_json).
const DEPTH_MAX: usize = 100;

/// The reader of the arguments of a call, after `{`.
#[derive(Clone)]
pub(super) struct GemmaCall {
    tools: Arc<[CallableTool]>,
    /// The index of the called tool, if the request offers it.
    tool: Option<usize>,
    /// The objects and lists around the next character, beginning with the arguments.
    open: Vec<Container>,
    state: CallState,
    /// The part of a quoted key read so far.
    key: String,
    /// The types of the parameter that is read.
    types: JsonTypes,
    /// The JSON text read since the owner of this reader cleared this field.
    pub(super) json: String,
    /// The text that `json` was read from.
    pub(super) written: String,
    /// Text that may be a quote, or a value that is not yet complete. After the end of the call: text
    /// that is not part of the call.
    pub(super) held: String,
}

#[derive(Clone)]
struct Container {
    is_object: bool,
    is_empty: bool,
}

#[derive(Clone, Copy)]
enum CallState {
    /// Before a key of an object, a value of a list, or the end of either.
    Item,
    /// In a key without quotes, or in a key with the quotes of JSON.
    Key,
    /// After a key in `<|"|>`.
    Colon,
    Value,
    /// In a possible `<|"|>`. Before a key, this may also be the tag that ends the call.
    Quote {
        is_key: bool,
    },
    Text {
        is_key: bool,
    },
    /// In a value that is not delimited by `<|"|>`. A model may write a string as in JSON or Python.
    /// `quotes` is the open `"` or `'`, if any.
    Scalar {
        quotes: Option<char>,
        is_escaped: bool,
    },
    AfterValue,
    /// In the tag that ends the call. A model may forget the brackets before it.
    End,
}

impl GemmaCall {
    pub(super) fn new(tools: Arc<[CallableTool]>, name: &str) -> Self {
        let tool = tools.iter().position(|tool| tool.name == name);
        GemmaCall {
            tools,
            tool,
            open: vec![Container { is_object: true, is_empty: true }],
            state: CallState::Item,
            key: String::new(),
            types: JsonTypes::default(),
            json: "{".to_owned(),
            written: String::new(),
            held: String::new(),
        }
    }

    /// Reads a character. At the end of the call, returns whether the call is complete, and leaves
    /// the text after the call in `held`.
    pub(super) fn feed(&mut self, next: char) -> Option<bool> {
        self.held.push(next);
        match self.state {
            CallState::Quote { is_key } => self.quote(is_key),
            CallState::Text { is_key } => self.text(next, is_key),
            CallState::Key => self.key(next),
            CallState::Scalar { .. } => self.scalar(next),
            _ if next.is_whitespace() => self.write_held(),
            CallState::Item => self.item(next),
            CallState::Colon if next == ':' => self.then(CallState::Value),
            CallState::Value => self.value(next),
            CallState::AfterValue => self.after_value(next),
            CallState::End => self.end(),
            CallState::Colon => Some(false),
        }
    }

    /// Ends a call that the end of the reply has cut off.
    pub(super) fn finish(&mut self) {
        if let CallState::Text { is_key: false } = self.state {
            self.json += &escaped(&self.held);
        }
        self.write_held();
    }

    fn item(&mut self, next: char) -> Option<bool> {
        let is_object = self.open.last().is_some_and(|innermost| innermost.is_object);
        match next {
            '}' | ']' => self.close(next),
            _ if !is_object => self.value(next),
            '{' | '[' | ',' | ':' => Some(false),
            '<' => self.withhold(CallState::Quote { is_key: true }),
            _ => self.withhold(CallState::Key),
        }
    }

    fn key(&mut self, next: char) -> Option<bool> {
        match next {
            ':' => {
                let key = self.held.trim_end_matches(':').trim();
                let key = serde_json::from_str(key).unwrap_or_else(|_| key.to_owned());
                self.begin_parameter(&key);
                self.then(CallState::Value)
            }
            '<' | '{' | '}' | '[' | ']' | ',' | '\n' => Some(false),
            _ => None,
        }
    }

    fn begin_parameter(&mut self, key: &str) {
        self.separate();
        self.json += &format!("{}: ", Value::from(key));
        let tool = self.tool.filter(|_| self.open.len() == 1);
        self.types = tool.map(|tool| self.tools[tool].parameter_types(key)).unwrap_or_default();
    }

    fn value(&mut self, next: char) -> Option<bool> {
        match next {
            '<' => self.withhold(CallState::Quote { is_key: false }),
            '{' | '[' if self.open.len() == DEPTH_MAX => Some(false),
            '{' | '[' => {
                self.begin_value();
                self.json.push(next);
                self.open.push(Container { is_object: next == '{', is_empty: true });
                self.then(CallState::Item)
            }
            '}' | ']' | ',' | ':' => Some(false),
            _ => {
                let quotes = Some(next).filter(|next| matches!(next, '"' | '\''));
                self.withhold(CallState::Scalar { quotes, is_escaped: false })
            }
        }
    }

    fn quote(&mut self, is_key: bool) -> Option<bool> {
        if self.held != GEMMA_QUOTE {
            return match GEMMA_QUOTE.starts_with(&self.held) {
                true => None,
                false if is_key => self.end(),
                false => Some(false),
            };
        }
        if !is_key {
            self.begin_value();
            self.json.push('"');
        }
        self.then(CallState::Text { is_key })
    }

    fn text(&mut self, next: char, is_key: bool) -> Option<bool> {
        if self.held == GEMMA_CALL_END {
            return Some(false);
        }
        if self.held == GEMMA_QUOTE {
            if is_key {
                let key = std::mem::take(&mut self.key);
                self.begin_parameter(&key);
                return self.then(CallState::Colon);
            }
            self.json.push('"');
            return self.then(CallState::AfterValue);
        }
        if [GEMMA_QUOTE, GEMMA_CALL_END].iter().any(|tag| tag.starts_with(&self.held)) {
            return None;
        }
        // The last character may begin a tag again.
        let begins_tag = next == '<' && self.held.pop().is_some();
        if is_key {
            self.key += &self.held;
        } else {
            self.held.chars().for_each(|next| push_escaped(&mut self.json, next));
        }
        self.written += &self.held;
        self.held.clear();
        if begins_tag {
            self.held.push(next);
        }
        None
    }

    fn scalar(&mut self, next: char) -> Option<bool> {
        let CallState::Scalar { quotes, is_escaped } = &mut self.state else {
            unreachable!("the caller matched the state")
        };
        match *quotes {
            Some(_) if next == '>' && self.held.ends_with(GEMMA_CALL_END) => {
                let tag = self.held.split_off(self.held.len() - GEMMA_CALL_END.len());
                self.end_scalar(&tag);
                return Some(false);
            }
            Some(quote) => {
                if next == quote && !*is_escaped && self.held.len() > 1 {
                    *quotes = None;
                }
                *is_escaped = next == '\\' && !*is_escaped;
                return None;
            }
            None if !matches!(next, ',' | '}' | ']' | '<') => return None,
            None => {}
        }
        self.held.pop();
        self.end_scalar(next.encode_utf8(&mut [0; 4]));
        self.after_value(next)
    }

    /// Writes the withheld value as JSON, and then withholds `after`.
    fn end_scalar(&mut self, after: &str) {
        self.begin_value();
        let text = self.held.trim();
        let quoted = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
        let types = if self.open.len() == 1 { self.types } else { JsonTypes::default() };
        self.json += &match quoted('"').or_else(|| quoted('\'')) {
            Some(inner) if serde_json::from_str::<Value>(text).is_err() => Value::from(inner).to_string(),
            Some(_) => text.to_owned(),
            // A string has quotes, so this is null even where the schema names only strings.
            None if matches!(text, "null" | "None") => "null".to_owned(),
            None => json_of(text, types),
        };
        self.write_held();
        self.held.push_str(after);
    }

    fn after_value(&mut self, next: char) -> Option<bool> {
        match next {
            ',' => self.then(CallState::Item),
            '}' | ']' => self.close(next),
            '<' => self.withhold(CallState::End),
            _ => Some(false),
        }
    }

    /// Closes all objects and lists if the tag that ends the call is whole.
    fn end(&mut self) -> Option<bool> {
        self.state = CallState::End;
        if self.held != GEMMA_CALL_END {
            return if GEMMA_CALL_END.starts_with(&self.held) { None } else { Some(false) };
        }
        self.json.extend(self.open.drain(..).rev().map(|container| if container.is_object { '}' } else { ']' }));
        Some(true)
    }

    fn close(&mut self, next: char) -> Option<bool> {
        self.open.pop_if(|innermost| innermost.is_object == (next == '}')).map_or(Some(false), |_| {
            self.json.push(next);
            self.then(CallState::AfterValue);
            self.open.is_empty().then_some(true)
        })
    }

    /// Begins a value. A value in a list has no key, so it begins the item.
    fn begin_value(&mut self) {
        if self.open.last().is_some_and(|innermost| !innermost.is_object) {
            self.separate();
        }
    }

    /// Separates an item from the item before it.
    fn separate(&mut self) {
        if let Some(innermost) = self.open.last_mut()
            && !std::mem::take(&mut innermost.is_empty)
        {
            self.json += ", ";
        }
    }

    fn then(&mut self, state: CallState) -> Option<bool> {
        self.state = state;
        self.write_held()
    }

    fn withhold(&mut self, state: CallState) -> Option<bool> {
        self.state = state;
        None
    }

    fn write_held(&mut self) -> Option<bool> {
        self.written += &std::mem::take(&mut self.held);
        None
    }
}
