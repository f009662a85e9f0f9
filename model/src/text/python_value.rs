//! Template values in Python's format: `str()` for printing, `json.dumps` for the `tojson` filter.
//!
//! Templates are written for Jinja2 on Python. minijinja writes `true` and `none` where Jinja2 writes `True` and
//! `None`. It also escapes HTML in `tojson`, which transformers does not (`utils/chat_template_utils.py`, 5.17).

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// The text that `{{ value }}` prints.
pub(crate) fn display(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => repr(value, DEPTH_MAX),
    }
}

/// Maximum levels of nested containers, as deeper ones would exhaust the stack. Printing writes `...` for them.
const DEPTH_MAX: usize = 64;

fn repr(value: &Value, depth: usize) -> String {
    match value.kind() {
        ValueKind::None | ValueKind::Undefined => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value),
        ValueKind::String => quote(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if depth == 0 => "...".into(),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter().into_iter().flatten().map(|item| repr(&item, depth - 1));
            format!("[{}]", items.collect::<Vec<_>>().join(", "))
        }
        ValueKind::Map => {
            let pairs = value.try_iter().into_iter().flatten().map(|key| {
                let entry = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr(&key, depth - 1), repr(&entry, depth - 1))
            });
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
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
            char => quoted.push(char),
        }
    }
    quoted.push(mark);
    quoted
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => python_float(float),
        _ => value.to_string(),
    }
}

/// The shortest digits that parse to the same number, in the layout of CPython's `repr`: scientific below 1e-4 and from
/// 1e16.
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

/// The `tojson` filter with transformers' parameters: `ensure_ascii`, `indent`, `separators`, `sort_keys`.
pub(crate) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get::<Option<usize>>("indent")?;
    let separators: Option<Vec<String>> = options.get::<Option<Vec<String>>>("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators are two texts")),
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let style = JsonStyle {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item,
        key,
    };
    options.assert_all_used()?;
    let mut json = String::new();
    style.write(&mut json, value, 0)?;
    Ok(json)
}

struct JsonStyle {
    ascii: bool,
    sort: bool,
    indent: Option<usize>,
    item: String,
    key: String,
}

impl JsonStyle {
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
                    self.text(json, &keys[at].to_string());
                    json.push_str(&self.key);
                    self.write(json, &value.get_item(&keys[at])?, depth + 1)
                })?;
            }
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "the value is not JSON serializable")),
        }
        Ok(())
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
        if let Some(indent) = self.indent {
            json.push('\n');
            json.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
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
    fn numbers_look_like_pythons() {
        // Written by `print(repr(x))` of CPython 3.11.
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
    fn containers_print_as_python_prints_them() {
        let json = serde_json::json!({"a": [true, null, "it's", "say \"hi\"", 1], "b": {"c": 0.5}});
        let printed = display(&Value::from(minijinja::value::Serde(&json)));
        assert_eq!(r#"{'a': [True, None, "it's", 'say "hi"', 1], 'b': {'c': 0.5}}"#, printed);
    }
}
