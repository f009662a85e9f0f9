//! Methods of Python's `str`, with the behavior of CPython 3.11.
//!
//! Pure: texts in, values out. The meter checks widths and repetitions before a method runs.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python_call::{bind, flag, given, refused, text, whole};
use super::python_chars::{self, is_line_break, is_space};
use super::python_format;

/// Calls a method of `subject`.
///
/// # Errors
/// The errors of Python, and [`ErrorKind::UnknownMethod`].
pub(super) fn call(subject: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let Some(answer) = python_chars::is(subject, method) {
        bind(arguments, [])?;
        return Ok(Value::from(answer));
    }
    match method {
        "upper" | "lower" | "title" | "capitalize" | "casefold" | "swapcase" => {
            bind(arguments, [])?;
            Ok(Value::from(in_case(subject, method)))
        }
        "strip" | "lstrip" | "rstrip" => stripped(subject, method, arguments),
        "center" | "ljust" | "rjust" | "zfill" => padded(subject, method, arguments),
        "split" | "rsplit" => split(subject, method == "rsplit", arguments),
        "splitlines" => {
            let [keep] = bind(arguments, ["keepends"])?;
            Ok(lines(subject, flag(keep, false)).into_iter().map(Value::from).collect())
        }
        "partition" | "rpartition" => partition(subject, method == "rpartition", arguments),
        "removeprefix" | "removesuffix" => {
            let [part] = required(arguments, ["part"])?;
            let rest = match method {
                "removeprefix" => subject.strip_prefix(text(&part)?),
                _ => subject.strip_suffix(text(&part)?),
            };
            Ok(Value::from(rest.unwrap_or(subject)))
        }
        "find" | "rfind" | "index" | "rindex" | "count" => search(subject, method, arguments),
        "startswith" | "endswith" => begins_or_ends(subject, method, arguments),
        "replace" => replaced(subject, arguments),
        "join" => joined(subject, arguments),
        "expandtabs" => {
            let [size] = bind(arguments, ["tabsize"])?;
            Ok(Value::from(with_tabs(subject, whole(size, 8)?)))
        }
        "format" => python_format::format(subject, arguments).map(Value::from),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// Same as [`bind`], for parameters without defaults.
fn required<const N: usize>(arguments: &[Value], names: [&str; N]) -> Result<[Value; N], Error> {
    let bound = bind(arguments, names)?;
    if bound.iter().all(Option::is_some) {
        Ok(bound.map(Option::unwrap_or_default))
    } else {
        Err(Error::from(ErrorKind::MissingArgument))
    }
}

fn in_case(subject: &str, method: &str) -> String {
    match method {
        "upper" => subject.to_uppercase(),
        "lower" => subject.to_lowercase(),
        "casefold" => subject.to_lowercase().replace('ß', "ss").replace('ς', "σ"),
        "capitalize" => {
            let mut chars = subject.chars();
            chars.next().map_or_else(String::new, |first| {
                first.to_uppercase().collect::<String>() + &chars.as_str().to_lowercase()
            })
        }
        "swapcase" => {
            let swapped = subject.chars().map(|char| {
                if char.is_uppercase() { char.to_lowercase().to_string() } else { char.to_uppercase().to_string() }
            });
            swapped.collect()
        }
        _ => {
            let mut follows_letter = false;
            let titled = subject.chars().map(|char| {
                let cased =
                    if follows_letter { char.to_lowercase().to_string() } else { char.to_uppercase().to_string() };
                follows_letter = python_chars::is_cased(char);
                cased
            });
            titled.collect()
        }
    }
}

/// `text` without white space, or without `chars`, at its ends.
pub(super) fn trimmed<'a>(text: &'a str, chars: Option<&str>, at_start: bool, at_end: bool) -> &'a str {
    let goes = |char: char| chars.map_or_else(|| is_space(char), |chars| chars.contains(char));
    let text = if at_start { text.trim_start_matches(goes) } else { text };
    if at_end { text.trim_end_matches(goes) } else { text }
}

fn stripped(subject: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [chars] = bind(arguments, ["chars"])?;
    let chars = given(chars);
    let chars = chars.as_ref().map(text).transpose()?;
    Ok(Value::from(trimmed(subject, chars, method != "rstrip", method != "lstrip")))
}

fn padded(subject: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [width, fill] = bind(arguments, ["width", "fillchar"])?;
    let width = width.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    let width = usize::try_from(whole(Some(width), 0)?).unwrap_or(0);
    let fill = fill.as_ref().map(text).transpose()?.unwrap_or(if method == "zfill" { "0" } else { " " });
    if fill.chars().count() != 1 {
        return Err(refused("the fill character must be exactly one character"));
    }
    let missing = width.saturating_sub(subject.chars().count());
    Ok(Value::from(match method {
        "ljust" => subject.to_owned() + &fill.repeat(missing),
        "rjust" => fill.repeat(missing) + subject,
        "zfill" => {
            let (sign, digits) = subject.split_at(usize::from(subject.starts_with(['+', '-'])));
            format!("{sign}{}{digits}", fill.repeat(missing))
        }
        _ => centered(subject, missing, width, fill),
    }))
}

/// If an odd number of fill characters is missing, CPython puts the extra character on the left
/// only if the width is odd too.
fn centered(subject: &str, missing: usize, width: usize, fill: &str) -> String {
    let left = missing / 2 + (missing & width & 1);
    format!("{}{subject}{}", fill.repeat(left), fill.repeat(missing - left))
}

fn split(subject: &str, from_right: bool, arguments: &[Value]) -> Result<Value, Error> {
    let [separator, limit] = bind(arguments, ["sep", "maxsplit"])?;
    let limit = usize::try_from(whole(limit, -1)?).unwrap_or(usize::MAX);
    let separator = given(separator);
    let pieces = match separator.as_ref().map(text).transpose()? {
        Some("") => return Err(refused("empty separator")),
        Some(separator) => {
            let count = limit.saturating_add(1);
            if from_right {
                subject.rsplitn(count, separator).collect()
            } else {
                subject.splitn(count, separator).collect()
            }
        }
        None => words(subject, from_right, limit),
    };
    let in_order: Vec<Value> = if from_right {
        pieces.into_iter().rev().map(Value::from).collect()
    } else {
        pieces.into_iter().map(Value::from).collect()
    };
    Ok(Value::from(in_order))
}

/// Splits a text at white space into words, in reverse order if `from_right`. After `limit` words,
/// the last element is the rest of the text.
fn words(subject: &str, from_right: bool, limit: usize) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = trimmed(subject, None, !from_right, from_right);
    while !rest.is_empty() && words.len() < limit {
        let (word, left) = if from_right {
            let at = rest.char_indices().rev().find(|(_, char)| is_space(*char));
            let at = at.map_or(0, |(at, char)| at + char.len_utf8());
            (&rest[at..], &rest[..at])
        } else {
            rest.split_at(rest.find(is_space).unwrap_or(rest.len()))
        };
        words.push(word);
        rest = trimmed(left, None, !from_right, from_right);
    }
    words.extend(Some(rest).filter(|rest| !rest.is_empty()));
    words
}

/// The lines of a text, with their line ends if `keep_ends`.
pub(super) fn lines(subject: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = subject;
    while !rest.is_empty() {
        let end = rest.find(is_line_break).unwrap_or(rest.len());
        let break_bytes = match rest[end..].chars().next() {
            Some('\r') if rest[end + 1..].starts_with('\n') => 2,
            char => char.map_or(0, char::len_utf8),
        };
        lines.push(&rest[..if keep_ends { end + break_bytes } else { end }]);
        rest = &rest[end + break_bytes..];
    }
    lines
}

fn partition(subject: &str, from_right: bool, arguments: &[Value]) -> Result<Value, Error> {
    let [separator] = required(arguments, ["sep"])?;
    let separator = text(&separator)?;
    if separator.is_empty() {
        return Err(refused("empty separator"));
    }
    let cut = if from_right { subject.rsplit_once(separator) } else { subject.split_once(separator) };
    let parts = match cut {
        Some((before, after)) => [before, separator, after],
        None if from_right => ["", "", subject],
        None => [subject, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

/// The part of a text between two character positions, as in `text[start:end]`, and the first
/// position.
fn between(subject: &str, start: Option<Value>, end: Option<Value>) -> Result<Option<(&str, usize)>, Error> {
    let length = subject.chars().count() as i64;
    let position = |argument: Option<Value>, default: i64| -> Result<i64, Error> {
        let at = whole(argument, default)?;
        Ok(if at < 0 { (at + length).max(0) } else { at })
    };
    let (start, end) = (position(start, 0)?, position(end, length)?.min(length));
    if start > end {
        return Ok(None);
    }
    let byte = |at: i64| subject.char_indices().nth(at as usize).map_or(subject.len(), |(byte, _)| byte);
    Ok(Some((&subject[byte(start)..byte(end)], start as usize)))
}

fn search(subject: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [part, start, end] = bind(arguments, ["sub", "start", "end"])?;
    let part = part.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    let part = text(&part)?;
    let within = between(subject, start, end)?;
    if method == "count" {
        return Ok(Value::from(within.map_or(0, |(within, _)| within.matches(part).count())));
    }
    let found = within.and_then(|(within, from)| {
        let at = if method.starts_with('r') { within.rfind(part) } else { within.find(part) };
        at.map(|at| from + within[..at].chars().count())
    });
    match found {
        Some(at) => Ok(Value::from(at)),
        None if method.ends_with("index") => Err(refused("substring not found")),
        None => Ok(Value::from(-1)),
    }
}

fn begins_or_ends(subject: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [parts, start, end] = bind(arguments, ["part", "start", "end"])?;
    let parts = parts.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    let Some((within, _)) = between(subject, start, end)? else { return Ok(Value::from(false)) };
    let parts: Vec<Value> = match parts.kind() {
        ValueKind::String => vec![parts],
        ValueKind::Seq if parts.is_tuple() => parts.try_iter()?.collect(),
        _ => return Err(refused("the first argument must be a string or a tuple of strings")),
    };
    for part in &parts {
        let part = text(part)?;
        if if method == "startswith" { within.starts_with(part) } else { within.ends_with(part) } {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

/// Implements `replace` as a method and as a filter. The arguments are the old text, the new text
/// and the maximum number of replacements.
pub(super) fn replaced(subject: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [old, new, count] = bind(arguments, ["old", "new", "count"])?;
    let (Some(old), Some(new)) = (old, new) else { return Err(Error::from(ErrorKind::MissingArgument)) };
    let count = usize::try_from(whole(count, -1)?).unwrap_or(usize::MAX);
    Ok(Value::from(subject.replacen(text(&old)?, text(&new)?, count)))
}

fn joined(subject: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [items] = required(arguments, ["iterable"])?;
    let items: Vec<Value> = items.try_iter()?.collect();
    let texts = items.iter().map(text).collect::<Result<Vec<_>, _>>()?;
    Ok(Value::from(texts.join(subject)))
}

fn with_tabs(subject: &str, size: i64) -> String {
    let size = usize::try_from(size).unwrap_or(0);
    let (mut expanded, mut column) = (String::with_capacity(subject.len()), 0);
    for char in subject.chars() {
        match char {
            '\t' => {
                let blanks = if size == 0 { 0 } else { size - column % size };
                expanded.extend(std::iter::repeat_n(' ', blanks));
                column += blanks;
            }
            char => {
                expanded.push(char);
                column = if matches!(char, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    expanded
}
