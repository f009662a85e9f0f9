//! Python's two kinds of string formatting: the operator `%` and `str.format`.
//!
//! minijinja formats the numbers. Other values are formatted here, because minijinja prints them
//! differently from Python and counts widths in bytes. The meter checks widths before formatting.

use minijinja::formatting::{FormatStyle, format as formatted};
use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};

use super::python_call::refused;
use super::python_value::{ascii_repr, display, repr};

/// Maximum digits of a width or a precision.
pub(super) const WIDTH_DIGITS_MAX: usize = 4;
/// Maximum nesting levels of replacement fields (a field within another field's format spec).
const NESTED_MAX: usize = 2;

/// Formats `template % value`. A tuple has one value per conversion specifier, and a map has the
/// values by name.
///
/// # Errors
/// The errors of Python: too few or too many values, or a value of the wrong type.
pub(super) fn percent(template: &str, value: &Value) -> Result<String, Error> {
    let values: Vec<Value> = if value.is_tuple() { value.try_iter()?.collect() } else { vec![value.clone()] };
    let mut values = values.into_iter();
    let mut result = String::with_capacity(template.len());
    let (mut rest, mut has_names) = (template, false);
    while let Some((before, spec)) = rest.split_once('%') {
        result.push_str(before);
        let place = FormatSpec::of_percent(spec, &mut values)?;
        rest = &spec[place.bytes..];
        if place.kind == '%' {
            result.push('%');
            continue;
        }
        let value = match place.name {
            Some(name) if value.kind() == ValueKind::Map => {
                has_names = true;
                Some(value.get_item(&Value::from(name))?).filter(|value| !value.is_undefined())
            }
            Some(_) => return Err(refused("format requires a mapping")),
            None => values.next(),
        };
        result.push_str(&place.percent(&value.ok_or_else(|| refused("not enough arguments for format string"))?)?);
    }
    result.push_str(rest);
    if has_names || values.next().is_none() || value.kind() == ValueKind::Map {
        Ok(result)
    } else {
        Err(refused("not all arguments converted during string formatting"))
    }
}

/// A conversion specifier of `%` formatting.
struct FormatSpec<'a> {
    /// Bytes from after the percent sign to the end of the specifier.
    bytes: usize,
    name: Option<&'a str>,
    flags: &'a str,
    width: usize,
    precision: Option<usize>,
    kind: char,
}

impl<'a> FormatSpec<'a> {
    /// Reads a conversion specifier from after its percent sign. A `*` takes its width
    /// or precision from `values`.
    fn of_percent(spec: &'a str, values: &mut impl Iterator<Item = Value>) -> Result<Self, Error> {
        let wrong = || refused("incomplete format");
        let (name, rest) = match spec.strip_prefix('(') {
            Some(named) => named.split_once(')').map(|(name, rest)| (Some(name), rest)).ok_or_else(wrong)?,
            None => (None, spec),
        };
        let (flags, rest) = rest.split_at(rest.find(|char| !"#0- +".contains(char)).unwrap_or(rest.len()));
        let (width, rest) = number_or_star(rest, values)?;
        let (precision, rest) = match rest.strip_prefix('.') {
            Some(rest) => {
                let (precision, rest) = number_or_star(rest, values)?;
                (Some(precision.unwrap_or(0)), rest)
            }
            None => (None, rest),
        };
        let rest = rest.trim_start_matches(['h', 'l', 'L']);
        let kind = rest.chars().next().ok_or_else(wrong)?;
        let bytes = spec.len() - rest.len() + kind.len_utf8();
        Ok(FormatSpec { bytes, name, flags, width: width.unwrap_or(0), precision, kind })
    }

    fn percent(&self, value: &Value) -> Result<String, Error> {
        let text = match self.kind {
            's' => display(value),
            'r' => repr(value),
            'a' => ascii_repr(value),
            'c' => character(value)?,
            'd' | 'i' | 'u' | 'o' | 'x' | 'X' | 'e' | 'E' | 'f' | 'F' | 'g' | 'G' => return self.number(value),
            _ => return Err(refused("unsupported format character")),
        };
        let text = match self.precision.filter(|_| self.kind != 'c') {
            Some(precision) => text.chars().take(precision).collect(),
            None => text,
        };
        Ok(filled(text, ' ', if self.flags.contains('-') { '<' } else { '>' }, self.width))
    }

    fn number(&self, value: &Value) -> Result<String, Error> {
        let is_float = value.kind() == ValueKind::Number && !value.is_integer();
        let value = match (self.kind, value.kind()) {
            ('d' | 'i' | 'u', ValueKind::Number) if is_float => {
                Value::from(f64::try_from(value.clone())?.trunc() as i128)
            }
            (_, ValueKind::Bool) => Value::from(i64::from(value.is_true())),
            (_, ValueKind::Number) => value.clone(),
            _ => return Err(refused("a number is required")),
        };
        let kind = if matches!(self.kind, 'i' | 'u') { 'd' } else { self.kind };
        let precision = self.precision.map(|precision| format!(".{precision}")).unwrap_or_default();
        let width = if self.width == 0 { String::new() } else { self.width.to_string() };
        let flags = if self.width == 0 { self.flags.replace('0', "") } else { self.flags.to_owned() };
        formatted(FormatStyle::Printf, &format!("%{flags}{width}{precision}{kind}"), &[value])
    }
}

fn number_or_star<'a>(
    text: &'a str,
    values: &mut impl Iterator<Item = Value>,
) -> Result<(Option<usize>, &'a str), Error> {
    let Some(rest) = text.strip_prefix('*') else { return Ok(number(text)) };
    let width =
        values.next().and_then(|value| value.as_usize()).filter(|width| width.to_string().len() <= WIDTH_DIGITS_MAX);
    width.map(|width| (Some(width), rest)).ok_or_else(|| refused("* needs a whole number of at most four digits"))
}

fn number(text: &str) -> (Option<usize>, &str) {
    let (digits, rest) = text.split_at(text.find(|char: char| !char.is_ascii_digit()).unwrap_or(text.len()));
    (digits.parse().ok(), rest)
}

fn character(value: &Value) -> Result<String, Error> {
    let code = value.is_integer().then(|| u32::try_from(value.clone()).ok().and_then(char::from_u32)).flatten();
    match (code, value.as_str()) {
        (Some(char), _) => Ok(char.to_string()),
        (None, Some(text)) if text.chars().count() == 1 => Ok(text.to_owned()),
        _ => Err(refused("%c requires an integer or a character")),
    }
}

/// `text` padded to `width` characters. `align` is `<`, `>` or `^`.
fn filled(text: String, fill: char, align: char, width: usize) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let left = match align {
        '<' => 0,
        '^' => missing / 2,
        _ => missing,
    };
    let blanks = |count: usize| std::iter::repeat_n(fill, count);
    blanks(left).chain(text.chars()).chain(blanks(missing - left)).collect()
}

/// Formats `template.format(..)`.
///
/// # Errors
/// The errors of Python's `str.format`.
pub(super) fn format(template: &str, arguments: &[Value]) -> Result<String, Error> {
    let (positional, named): (&[Value], Kwargs) = from_args(arguments)?;
    let value_of = |name: &str| match name.parse::<usize>() {
        Ok(at) => positional.get(at).cloned(),
        Err(_) => named.get::<Option<Value>>(name).ok().flatten(),
    };
    fields(template, &value_of, &mut 0, NESTED_MAX)
}

/// Replaces the fields of a template with their values. `next` is the number of the next field
/// without a name, and `depth` is the number of nesting levels left.
fn fields(
    template: &str,
    value_of: &dyn Fn(&str) -> Option<Value>,
    next: &mut usize,
    depth: usize,
) -> Result<String, Error> {
    let mut result = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find(['{', '}']) {
        result.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            result.push_str(brace);
            rest = after;
            continue;
        }
        if brace == "}" || depth == 0 {
            return Err(refused("single '}' encountered in the format string, or fields nested too deeply"));
        }
        let end = closing_brace(rest).ok_or_else(|| refused("expected '}' before the end of the string"))?;
        let field = &rest[..end];
        rest = &rest[end + 1..];
        let (path, spec) = field.split_once(':').unwrap_or((field, ""));
        let (path, conversion) = path.split_once('!').unwrap_or((path, ""));
        let name = &path[..path.find(['.', '[']).unwrap_or(path.len())];
        let numbered = next.to_string();
        let value = value_of(if name.is_empty() { &numbered } else { name });
        *next += usize::from(name.is_empty());
        let value = value.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
        let spec = if spec.contains('{') { fields(spec, value_of, next, depth - 1)? } else { spec.to_owned() };
        if spec.split(|char: char| !char.is_ascii_digit()).any(|digits| digits.len() > WIDTH_DIGITS_MAX) {
            return Err(refused("a width has at most four digits"));
        }
        result.push_str(&with_spec(&looked_up(value, &path[name.len()..])?, conversion, &spec)?);
    }
    result.push_str(rest);
    Ok(result)
}

/// The byte offset at which the replacement field at the beginning of `text` ends.
fn closing_brace(text: &str) -> Option<usize> {
    let mut open = 0;
    text.char_indices().find_map(|(at, char)| match char {
        '}' if open == 0 => Some(at),
        '{' | '}' => {
            open = if char == '{' { open + 1 } else { open - 1 };
            None
        }
        _ => None,
    })
}

/// The value at a path like `[0][name]`. Attributes (`.name`) also read the entries of maps,
/// as in Jinja2's sandbox.
fn looked_up(mut value: Value, path: &str) -> Result<Value, Error> {
    let mut rest = path;
    while !rest.is_empty() {
        let (key, after) = match rest.strip_prefix('[') {
            Some(inside) => inside.split_once(']').ok_or_else(|| refused("expected ']'"))?,
            None => {
                let name = rest.strip_prefix('.').ok_or_else(|| refused("expected '.' or '['"))?;
                name.split_at(name.find(['.', '[']).unwrap_or(name.len()))
            }
        };
        let key = key.parse::<usize>().map_or_else(|_| Value::from(key), Value::from);
        value = Some(value.get_item(&key)?)
            .filter(|value| !value.is_undefined())
            .ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
        rest = after;
    }
    Ok(value)
}

fn with_spec(value: &Value, conversion: &str, spec: &str) -> Result<String, Error> {
    let converted = match conversion {
        "" => value.clone(),
        "s" => Value::from(display(value)),
        "r" => Value::from(repr(value)),
        "a" => Value::from(ascii_repr(value)),
        _ => return Err(refused("unknown conversion specifier")),
    };
    match converted.kind() {
        _ if spec.is_empty() => Ok(display(&converted)),
        ValueKind::Number if spec.ends_with('%') => {
            let per_cent = Value::from(f64::try_from(converted)? * 100.0);
            let spec = format!("{}f", &spec[..spec.len() - 1]);
            formatted(FormatStyle::StrFormat, &format!("{{:{spec}}}"), &[per_cent]).map(|text| text + "%")
        }
        ValueKind::Number => formatted(FormatStyle::StrFormat, &format!("{{:{spec}}}"), &[converted]),
        ValueKind::Bool => {
            let number = Value::from(i64::from(converted.is_true()));
            formatted(FormatStyle::StrFormat, &format!("{{:{spec}}}"), &[number])
        }
        ValueKind::String => text_with_spec(&display(&converted), spec),
        _ => Err(refused("unsupported format string for this value")),
    }
}

/// Formats a text by a spec of the form `[[fill]align][0][width][.precision][s]`.
fn text_with_spec(text: &str, spec: &str) -> Result<String, Error> {
    let mut chars = spec.chars();
    let (first, second) = (chars.next(), chars.next());
    let is_align = |char: Option<char>| char.filter(|char| "<>^".contains(*char));
    let (fill, align, rest) = match (first, is_align(first), is_align(second)) {
        (Some(fill), _, Some(align)) => (fill, align, &spec[fill.len_utf8() + 1..]),
        (_, Some(align), None) => (' ', align, &spec[1..]),
        _ => (' ', '<', spec),
    };
    let fill = if fill == ' ' && rest.starts_with('0') { '0' } else { fill };
    let (width, rest) = number(rest);
    let (precision, rest) = match rest.strip_prefix('.') {
        Some(rest) => number(rest),
        None => (None, rest),
    };
    if !matches!(rest, "" | "s") {
        return Err(refused("invalid format specifier for a string"));
    }
    let text = text.chars().take(precision.unwrap_or(usize::MAX)).collect();
    Ok(filled(text, fill, align, width.unwrap_or(0)))
}
