//! Filters of Jinja2 3.1 that minijinja lacks, or whose parameters or results differ in minijinja.
//!
//! Pure: values in, values out. The value that a filter is applied to is its first argument. The
//! template meter checks counts and widths before a filter runs, and measures the size of the
//! filter's result.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::jinja_wrap::{truncated, wrapped};
use super::python_call::{bind, flag, given, refused, text, whole};
use super::python_chars::is_of_word;
use super::python_format::percent;
use super::python_strings::{lines, replaced, trimmed};
use super::python_value::{display, repr};

pub(super) type Filter = fn(&[Value]) -> Result<Value, Error>;

/// Filters that return a number or an existing value, so that the meter need not measure the size
/// of their results.
pub(super) const READERS: [(&str, Filter); 9] = [
    ("attr", attribute),
    ("count", length),
    ("d", default),
    ("default", default),
    ("first", first),
    ("float", float),
    ("int", int),
    ("last", last),
    ("length", length),
];

/// Filters that create texts and lists.
pub(super) const MAKERS: [(&str, Filter); 23] = [
    ("capitalize", capitalize),
    ("center", center),
    ("e", escape),
    ("escape", escape),
    ("filesizeformat", file_size),
    ("forceescape", force_escape),
    ("format", format),
    ("indent", indent),
    ("items", items),
    ("join", join),
    ("list", list),
    ("lower", lower),
    ("pprint", pprint),
    ("replace", replace),
    ("string", string),
    ("striptags", strip_tags),
    ("title", title),
    ("trim", trim),
    ("truncate", truncated),
    ("upper", upper),
    ("urlencode", url_encode),
    ("wordcount", word_count),
    ("wordwrap", wrapped),
];

/// The parameters of a filter that minijinja implements, and the number of leading parameters that
/// minijinja takes only by position. minijinja takes the remaining parameters only by name.
pub(super) fn minijinja_parameters(filter: &str) -> Option<(&'static [&'static str], usize)> {
    Some(match filter {
        "dictsort" => (&["value", "case_sensitive", "by", "reverse"], 1),
        "sort" => (&["value", "reverse", "case_sensitive", "attribute"], 1),
        "unique" => (&["value", "case_sensitive", "attribute"], 1),
        "min" | "max" => (&["value", "case_sensitive", "attribute"], 1),
        "groupby" => (&["value", "attribute", "default", "case_sensitive"], 2),
        "batch" => (&["value", "linecount", "fill_with"], 3),
        "slice" => (&["value", "slices", "fill_with"], 3),
        "sum" => (&["value", "attribute", "start"], 1),
        "round" => (&["value", "precision", "method"], 3),
        _ => return None,
    })
}

fn missing() -> Error {
    Error::from(ErrorKind::MissingArgument)
}

/// The text that a filter is applied to. Other values are converted to text, as in Jinja2.
fn subject(value: Option<Value>) -> Result<String, Error> {
    value.as_ref().map(display).ok_or_else(missing)
}

fn one_text(arguments: &[Value]) -> Result<String, Error> {
    let [value] = bind(arguments, ["s"])?;
    subject(value)
}

fn string(arguments: &[Value]) -> Result<Value, Error> {
    one_text(arguments).map(Value::from)
}

fn pprint(arguments: &[Value]) -> Result<Value, Error> {
    let [value] = bind(arguments, ["value"])?;
    value.as_ref().map(repr).map(Value::from).ok_or_else(missing)
}

fn lower(arguments: &[Value]) -> Result<Value, Error> {
    Ok(Value::from(one_text(arguments)?.to_lowercase()))
}

fn upper(arguments: &[Value]) -> Result<Value, Error> {
    Ok(Value::from(one_text(arguments)?.to_uppercase()))
}

fn capitalize(arguments: &[Value]) -> Result<Value, Error> {
    Ok(Value::from(capitalized(&one_text(arguments)?)))
}

fn capitalized(word: &str) -> String {
    let mut chars = word.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().to_string() + &chars.as_str().to_lowercase())
}

/// Unlike in `str.title`, words begin only after white space, hyphens and opening brackets.
fn title(arguments: &[Value]) -> Result<Value, Error> {
    let value = one_text(arguments)?;
    let words = value.split_inclusive(|char: char| char.is_whitespace() || "-({[<".contains(char));
    Ok(Value::from(words.map(capitalized).collect::<String>()))
}

fn center(arguments: &[Value]) -> Result<Value, Error> {
    let [value, width] = bind(arguments, ["value", "width"])?;
    let width = Value::from(whole(width, 80)?);
    super::python_strings::call(&subject(value)?, "center", &[width])
}

fn trim(arguments: &[Value]) -> Result<Value, Error> {
    let [value, chars] = bind(arguments, ["value", "chars"])?;
    let chars = given(chars);
    let chars = chars.as_ref().map(text).transpose()?;
    Ok(Value::from(trimmed(&subject(value)?, chars, true, true)))
}

fn replace(arguments: &[Value]) -> Result<Value, Error> {
    let [value, old, new, count] = bind(arguments, ["s", "old", "new", "count"])?;
    let (Some(old), Some(new)) = (old, new) else { return Err(missing()) };
    let texts = [Value::from(display(&old)), Value::from(display(&new)), Value::from(whole(count, -1)?)];
    replaced(&subject(value)?, &texts)
}

fn format(arguments: &[Value]) -> Result<Value, Error> {
    let (template, values) = arguments.split_first().ok_or_else(missing)?;
    let values = match values {
        [named] if named.is_kwargs() => named.clone(),
        values if values.iter().any(Value::is_kwargs) => {
            return Err(refused("format takes values either by position or by name"));
        }
        values => Value::from(Tuple::from(values)),
    };
    percent(&display(template), &values).map(Value::from)
}

fn indent(arguments: &[Value]) -> Result<Value, Error> {
    let [value, width, first, blank] = bind(arguments, ["s", "width", "first", "blank"])?;
    let margin = match given(width) {
        Some(width) if width.kind() == ValueKind::String => display(&width),
        width => " ".repeat(usize::try_from(whole(width, 4)?).unwrap_or(0)),
    };
    let blank = flag(blank, false);
    let source = subject(value)? + "\n";
    let mut indented = String::from(if flag(first, false) { margin.as_str() } else { "" });
    for (number, line) in lines(&source, false).into_iter().enumerate() {
        if number > 0 {
            indented.push('\n');
        }
        if number > 0 && (blank || !line.is_empty()) {
            indented.push_str(&margin);
        }
        indented.push_str(line);
    }
    Ok(Value::from(indented))
}

fn escape(arguments: &[Value]) -> Result<Value, Error> {
    let [value] = bind(arguments, ["s"])?;
    match value.filter(Value::is_safe) {
        Some(safe) => Ok(safe),
        None => force_escape(arguments),
    }
}

fn force_escape(arguments: &[Value]) -> Result<Value, Error> {
    Ok(Value::from_safe_string(escaped(&one_text(arguments)?)))
}

fn escaped(plain: &str) -> String {
    let mut escaped = String::with_capacity(plain.len());
    for char in plain.chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&#39;"),
            '"' => escaped.push_str("&#34;"),
            char => escaped.push(char),
        }
    }
    escaped
}

fn strip_tags(arguments: &[Value]) -> Result<Value, Error> {
    let stripped = minijinja_contrib::filters::striptags(one_text(arguments)?);
    Ok(Value::from(stripped.split_whitespace().collect::<Vec<_>>().join(" ")))
}

fn url_encode(arguments: &[Value]) -> Result<Value, Error> {
    let [value] = bind(arguments, ["value"])?;
    let value = value.ok_or_else(missing)?;
    let pair = |key: &Value, value: &Value| format!("{}={}", quoted(key, true), quoted(value, true));
    let pairs: Vec<String> = match value.kind() {
        ValueKind::Map => {
            let keys = value.try_iter()?;
            keys.map(|key| Ok(pair(&key, &value.get_item(&key)?))).collect::<Result<_, Error>>()?
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?;
            let two = |item: Value| Ok(pair(&item.get_item_by_index(0)?, &item.get_item_by_index(1)?));
            items.map(two).collect::<Result<_, Error>>()?
        }
        _ => return Ok(Value::from(quoted(&value, false))),
    };
    Ok(Value::from(pairs.join("&")))
}

/// Percent encoding for a path, or for a part of a query.
fn quoted(value: &Value, is_of_query: bool) -> String {
    let mut quoted = String::new();
    for byte in display(value).bytes() {
        match byte {
            b' ' if is_of_query => quoted.push('+'),
            b'/' if !is_of_query => quoted.push('/'),
            b'_' | b'.' | b'-' | b'~' => quoted.push(char::from(byte)),
            byte if byte.is_ascii_alphanumeric() => quoted.push(char::from(byte)),
            byte => quoted.push_str(&format!("%{byte:02X}")),
        }
    }
    quoted
}

fn word_count(arguments: &[Value]) -> Result<Value, Error> {
    let value = one_text(arguments)?;
    Ok(Value::from(value.split(|char| !is_of_word(char)).filter(|word| !word.is_empty()).count()))
}

fn default(arguments: &[Value]) -> Result<Value, Error> {
    let [value, default, boolean] = bind(arguments, ["value", "default_value", "boolean"])?;
    let value = value.ok_or_else(missing)?;
    if value.is_undefined() || (flag(boolean, false) && !value.is_true()) {
        Ok(default.unwrap_or_else(|| Value::from("")))
    } else {
        Ok(value)
    }
}

/// Jinja2's `attr` reads only attributes, so entries of maps are undefined.
fn attribute(arguments: &[Value]) -> Result<Value, Error> {
    let [object, name] = bind(arguments, ["obj", "name"])?;
    let (Some(object), Some(name)) = (object, name) else { return Err(missing()) };
    match object.kind() {
        ValueKind::Plain => object.get_item(&name),
        _ => Ok(Value::UNDEFINED),
    }
}

/// Parses a float in Python's syntax.
fn parsed_float(text: &str) -> Option<f64> {
    let text = trimmed(text, None, true, true);
    let has_stray = text.starts_with('_') || text.ends_with('_') || text.contains("__");
    text.replace('_', "").parse().ok().filter(|_| !has_stray)
}

fn float(arguments: &[Value]) -> Result<Value, Error> {
    let [value, default] = bind(arguments, ["value", "default"])?;
    let value = value.ok_or_else(missing)?;
    let float = match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value).ok(),
        ValueKind::String => parsed_float(value.as_str().unwrap_or_default()),
        _ => None,
    };
    Ok(float.map(Value::from).or(default).unwrap_or_else(|| Value::from(0.0)))
}

fn int(arguments: &[Value]) -> Result<Value, Error> {
    let [value, default, base] = bind(arguments, ["value", "default", "base"])?;
    let value = value.ok_or_else(missing)?;
    let of_float = |float: f64| float.is_finite().then(|| Value::from(float.trunc() as i128));
    let whole = match value.kind() {
        ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => Some(value),
        ValueKind::Number => f64::try_from(value).ok().and_then(of_float),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let parsed = parsed_int(text, whole(base, 10)?);
            parsed.map(Value::from).or_else(|| parsed_float(text).and_then(of_float))
        }
        _ => None,
    };
    Ok(whole.or(default).unwrap_or_else(|| Value::from(0)))
}

/// Python's `int(text, base)`, which allows a sign, the prefix of the base, and
/// single underscores between digits.
fn parsed_int(text: &str, base: i64) -> Option<i128> {
    let text = trimmed(text, None, true, true);
    let (is_negative, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) => (text.starts_with('-'), digits),
        None => (false, text),
    };
    let prefixed = [(16, "0x"), (8, "0o"), (2, "0b")].into_iter().find_map(|(radix, prefix)| {
        let is_meant =
            (base == radix || base == 0) && digits.get(..2).is_some_and(|two| two.eq_ignore_ascii_case(prefix));
        is_meant.then(|| (radix, digits[2..].strip_prefix('_').unwrap_or(&digits[2..])))
    });
    let (radix, digits) = prefixed.unwrap_or((if base == 0 { 10 } else { base }, digits));
    let has_stray = digits.starts_with(['_', '+', '-']) || digits.ends_with('_') || digits.contains("__");
    let radix = u32::try_from(radix).ok().filter(|radix| (2..=36).contains(radix) && !has_stray)?;
    let whole = i128::from_str_radix(&digits.replace('_', ""), radix).ok()?;
    Some(if is_negative { -whole } else { whole })
}

fn file_size(arguments: &[Value]) -> Result<Value, Error> {
    let [value, binary] = bind(arguments, ["value", "binary"])?;
    let value = value.ok_or_else(missing)?;
    let bytes = match value.kind() {
        ValueKind::String => parsed_float(value.as_str().unwrap_or_default()),
        _ => f64::try_from(value).ok(),
    };
    let bytes = bytes.ok_or_else(|| refused("filesizeformat needs a number"))?;
    let is_binary = flag(binary, false);
    let bytes = if bytes < if is_binary { 1024.0 } else { 1000.0 } { bytes.trunc() } else { bytes };
    Ok(Value::from(minijinja_contrib::filters::filesizeformat(bytes, Some(is_binary))))
}

fn length(arguments: &[Value]) -> Result<Value, Error> {
    let [value] = bind(arguments, ["obj"])?;
    let value = value.ok_or_else(missing)?;
    match value.len() {
        _ if value.is_undefined() => Ok(Value::from(0)),
        Some(length) => Ok(Value::from(length)),
        None => Err(refused("this value has no length")),
    }
}

/// The entries of a list, the characters of a text or the keys of a map. Jinja2's undefined has no
/// entries, and `None` is an error.
fn entries(value: Option<Value>) -> Result<impl Iterator<Item = Value>, Error> {
    let value = value.ok_or_else(missing)?;
    if value.is_none() { Err(refused("None is not iterable")) } else { value.try_iter() }
}

fn list(arguments: &[Value]) -> Result<Value, Error> {
    let [value] = bind(arguments, ["value"])?;
    Ok(Value::from(entries(value)?.collect::<Vec<_>>()))
}

fn first(arguments: &[Value]) -> Result<Value, Error> {
    let [value] = bind(arguments, ["seq"])?;
    Ok(entries(value)?.next().unwrap_or_default())
}

fn last(arguments: &[Value]) -> Result<Value, Error> {
    let [value] = bind(arguments, ["seq"])?;
    Ok(entries(value)?.last().unwrap_or_default())
}

fn items(arguments: &[Value]) -> Result<Value, Error> {
    let [map] = bind(arguments, ["value"])?;
    let map = map.ok_or_else(missing)?;
    if !matches!(map.kind(), ValueKind::Map | ValueKind::Undefined) {
        return Err(refused("can only get item pairs from a mapping"));
    }
    let pair = |key: Value| Ok(Value::from(Tuple::from([key.clone(), map.get_item(&key)?])));
    map.try_iter()?.map(pair).collect::<Result<Vec<_>, Error>>().map(Value::from)
}

fn join(arguments: &[Value]) -> Result<Value, Error> {
    let [value, joiner, attribute] = bind(arguments, ["value", "d", "attribute"])?;
    let joiner = joiner.as_ref().map(display).unwrap_or_default();
    let attribute = given(attribute);
    let mut joined = String::new();
    for (number, item) in entries(value)?.enumerate() {
        if number > 0 {
            joined.push_str(&joiner);
        }
        let item = attribute.iter().try_fold(item, at_path)?;
        joined.push_str(&display(&item));
    }
    Ok(Value::from(joined))
}

/// The value at a path of names and indices that are separated by dots.
fn at_path(value: Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else { return value.get_item(path) };
    path.split('.').try_fold(value, |value, name| match name.parse::<usize>() {
        Ok(index) => value.get_item_by_index(index),
        Err(_) => value.get_attr(name),
    })
}
