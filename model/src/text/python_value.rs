//! Template values in Python's formats: `str()` for printing, and `json.dumps` for the `tojson`
//! filter.
//!
//! Templates are written for Jinja2 on Python. minijinja writes `true` and `none`
//! where Jinja2 writes `True` and `None`. minijinja also escapes HTML in `tojson`,
//! unlike transformers (`utils/chat_template_utils.py`, 5.17).

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::python_call::{bind, flag, given};
use super::python_chars::is_printable;
use super::python_objects::{Range, View};

/// The text that `{{ value }}` prints.
pub(crate) fn display(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        ValueKind::Undefined => String::new(),
        _ => repr(value),
    }
}

/// The text that Python's `repr` returns.
pub(super) fn repr(value: &Value) -> String {
    printed(value, DEPTH_MAX)
}

/// Same as [`repr`], with escapes for all characters beyond ASCII.
pub(super) fn ascii_repr(value: &Value) -> String {
    ascii_repr_of(&repr(value))
}

/// Maximum levels of nested containers. Deeper containers are printed as `...`, because printing
/// them would exhaust the stack. In JSON, they are an error.
const DEPTH_MAX: usize = 64;

fn printed(value: &Value, depth: usize) -> String {
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Undefined => "Undefined".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value),
        ValueKind::String => quote(value.as_str().unwrap_or_default()),
        ValueKind::Bytes => format!("b{}", ascii_quote(value.as_bytes().unwrap_or_default())),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if depth == 0 => "...".into(),
        ValueKind::Seq | ValueKind::Iterable => sequence(value, depth - 1),
        ValueKind::Map if is_macro(value) => {
            format!("<Macro {}>", printed(&value.get_attr("name").unwrap_or_default(), depth))
        }
        ValueKind::Map => {
            let pairs = value.try_iter().into_iter().flatten().map(|key| {
                let entry = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", printed(&key, depth - 1), printed(&entry, depth - 1))
            });
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

/// Whether a value is a macro. minijinja exposes the type only by name.
pub(super) fn is_macro(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Macro"))
}

fn sequence(value: &Value, depth: usize) -> String {
    if let Some(range) = value.downcast_object_ref::<Range>() {
        return range.to_string();
    }
    let items = value.try_iter().into_iter().flatten().map(|item| printed(&item, depth));
    let items = items.collect::<Vec<_>>();
    let joined = items.join(", ");
    match value.downcast_object_ref::<View>() {
        Some(view) => format!("{}([{joined}])", view.name),
        None if !is_tuple(value) => format!("[{joined}]"),
        None if items.len() == 1 => format!("({joined},)"),
        None => format!("({joined})"),
    }
}

/// Whether the value is a tuple in Python. minijinja exposes the type of `groupby` groups, which
/// are tuples, only by name.
fn is_tuple(value: &Value) -> bool {
    value.is_tuple() || value.as_object().is_some_and(|object| object.type_name().ends_with("::GroupTuple"))
}

fn quote(text: &str) -> String {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut quoted = String::from(mark);
    for char in text.chars() {
        match char {
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\\' => quoted.push_str("\\\\"),
            char if char == mark => quoted.extend(['\\', char]),
            char if is_printable(char) => quoted.push(char),
            char => push_escape(&mut quoted, char),
        }
    }
    quoted.push(mark);
    quoted
}

fn ascii_quote(bytes: &[u8]) -> String {
    // Each byte becomes the character with its code. Characters beyond ASCII then
    // get the short escape.
    let text = quote(&bytes.iter().map(|&byte| char::from(byte)).collect::<String>());
    ascii_repr_of(&text)
}

fn ascii_repr_of(text: &str) -> String {
    let mut ascii = String::new();
    text.chars().for_each(|char| if char.is_ascii() { ascii.push(char) } else { push_escape(&mut ascii, char) });
    ascii
}

fn push_escape(text: &mut String, char: char) {
    let code = u32::from(char);
    let _ = match code {
        0..=0xff => write!(text, "\\x{code:02x}"),
        0x100..=0xffff => write!(text, "\\u{code:04x}"),
        _ => write!(text, "\\U{code:08x}"),
    };
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => python_float(float),
        _ => value.to_string(),
    }
}

/// The shortest digits that parse to the same number, in the format of CPython's `repr`: scientific
/// notation below 1e-4 and from 1e16.
fn python_float(float: f64) -> String {
    if !float.is_finite() {
        return if float.is_nan() {
            "nan"
        } else if float > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .into();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{float}");
        if plain.contains('.') { plain } else { plain + ".0" }
    } else {
        format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
    }
}

/// The `tojson` filter with transformers' parameters. Calls `check` with the bytes of the text
/// after each value that is written.
///
/// # Errors
/// For wrong arguments, for values that JSON cannot represent, and the errors of `check`.
pub(crate) fn tojson(arguments: &[Value], check: &dyn Fn(usize) -> Result<(), Error>) -> Result<String, Error> {
    let names = ["x", "ensure_ascii", "indent", "separators", "sort_keys"];
    let [value, ascii, indent, separators, sort] = bind(arguments, names)?;
    let wrong = |what| Error::new(ErrorKind::InvalidOperation, what);
    let indent = match given(indent) {
        Some(indent) if indent.kind() == ValueKind::String => indent.as_str().map(str::to_owned),
        Some(indent) => {
            let blanks = i64::try_from(indent).map_err(|_| wrong("an indent is a number or a string"))?;
            Some(" ".repeat(blanks.clamp(0, 16) as usize))
        }
        None => None,
    };
    let separators = given(separators).map(|separators| separators.try_iter()).transpose()?;
    let (item, key) = match separators.map(|separators| separators.collect::<Vec<_>>()).as_deref() {
        Some([item, key]) => (display(item), display(key)),
        Some(_) => return Err(wrong("separators are two texts")),
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    if indent.iter().chain([&item, &key]).any(|text| text.len() > 16) {
        return Err(wrong("indents and separators have at most 16 bytes"));
    }
    let style = JsonStyle { ascii: flag(ascii, false), sort: flag(sort, false), indent, item, key, check };
    let mut json = String::new();
    style.write(&mut json, &value.unwrap_or_default(), 0)?;
    Ok(json)
}

struct JsonStyle<'a> {
    ascii: bool,
    sort: bool,
    indent: Option<String>,
    item: String,
    key: String,
    check: &'a dyn Fn(usize) -> Result<(), Error>,
}

impl JsonStyle<'_> {
    fn write(&self, json: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "the value is nested too deeply for JSON"));
        }
        match value.kind() {
            ValueKind::None => json.push_str("null"),
            ValueKind::Bool => json.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => json.push_str(&match number(value).as_str() {
                "nan" => "NaN".to_owned(),
                "inf" => "Infinity".to_owned(),
                "-inf" => "-Infinity".to_owned(),
                number => number.to_owned(),
            }),
            ValueKind::String => self.text(json, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.bracket(json, ['[', ']'], items.len(), depth, |json, at| self.write(json, &items[at], depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.bracket(json, ['{', '}'], keys.len(), depth, |json, at| {
                    self.text(json, &self.key_text(&keys[at])?);
                    json.push_str(&self.key);
                    self.write(json, &value.get_item(&keys[at])?, depth + 1)
                })?;
            }
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "the value is not JSON serializable")),
        }
        (self.check)(json.len())
    }

    fn key_text(&self, key: &Value) -> Result<String, Error> {
        Ok(match key.kind() {
            ValueKind::String => display(key),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                let mut text = String::new();
                self.write(&mut text, key, 0)?;
                text
            }
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "a key is not a string or a number")),
        })
    }

    fn bracket(
        &self,
        json: &mut String,
        [open, close]: [char; 2],
        count: usize,
        depth: usize,
        mut entry: impl FnMut(&mut String, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        json.push(open);
        for at in 0..count {
            if at > 0 {
                json.push_str(&self.item);
            }
            self.new_line(json, depth + 1);
            entry(json, at)?;
        }
        if count > 0 {
            self.new_line(json, depth);
        }
        json.push(close);
        Ok(())
    }

    fn new_line(&self, json: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            json.push('\n');
            json.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn text(&self, json: &mut String, text: &str) {
        json.push('"');
        for char in text.chars() {
            match char {
                '"' => json.push_str("\\\""),
                '\\' => json.push_str("\\\\"),
                '\n' => json.push_str("\\n"),
                '\r' => json.push_str("\\r"),
                '\t' => json.push_str("\\t"),
                '\u{8}' => json.push_str("\\b"),
                '\u{c}' => json.push_str("\\f"),
                char if char < ' ' || (self.ascii && !char.is_ascii()) || (self.ascii && char == '\u{7f}') => {
                    for unit in char.encode_utf16(&mut [0; 2]) {
                        let _ = write!(json, "\\u{unit:04x}");
                    }
                }
                char => json.push(char),
            }
        }
        json.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_print_as_in_python() {
        // The expected texts are the output of `print(repr(x))` in CPython 3.11.
        let expected = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123456789012345.0, "123456789012345.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (-2.5e300, "-2.5e+300"),
            (f64::INFINITY, "inf"),
        ];
        for (float, text) in expected {
            assert_eq!(text, display(&Value::from(float)));
        }
        assert_eq!("7", display(&Value::from(7)));
    }

    #[test]
    fn containers_print_as_in_python() {
        let json = serde_json::json!({"a": [true, null, "it's", "say \"hi\"", 1], "b": {"c": 0.5}});
        let printed = display(&Value::from(minijinja::value::Serde(&json)));
        assert_eq!(r#"{'a': [True, None, "it's", 'say "hi"', 1], 'b': {'c': 0.5}}"#, printed);
    }
}
