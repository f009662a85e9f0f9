//! Jinja2's filters that fit a text into a width: `truncate` and `wordwrap`.
//!
//! Pure: values in, values out.

use minijinja::{Error, ErrorKind, Value};

use super::python_call::{bind, flag, given, refused, soft_text, whole};
use super::python_chars::is_of_word;
use super::python_strings::lines;

/// `truncate`: the beginning of a text, cut at a blank, with an ending.
pub(super) fn truncated(arguments: &[Value]) -> Result<Value, Error> {
    let [value, length, kill_words, end, leeway] = bind(arguments, ["s", "length", "killwords", "end", "leeway"])?;
    let value = soft_text(&value.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?);
    let end = end.as_ref().map_or_else(|| "...".to_owned(), soft_text);
    let (length, leeway) = (whole(length, 255)?, whole(leeway, 5)?);
    let kept = length - end.chars().count() as i64;
    if kept < 0 || leeway < 0 {
        return Err(refused("the length must be at least that of the end, and the leeway at least 0"));
    }
    if value.chars().count() as i64 <= length.saturating_add(leeway) {
        return Ok(Value::from(value));
    }
    let beginning = first_chars(&value, kept as usize);
    let whole_words = beginning.rsplit_once(' ').map_or(beginning, |(words, _)| words);
    Ok(Value::from(if flag(kill_words, false) { beginning } else { whole_words }.to_owned() + &end))
}

fn first_chars(text: &str, count: usize) -> &str {
    text.char_indices().nth(count).map_or(text, |(at, _)| &text[..at])
}

/// `wordwrap`: each line of a text in lines of a width, as Python's `textwrap.wrap` breaks them without replacing white
/// space.
pub(super) fn wrapped(arguments: &[Value]) -> Result<Value, Error> {
    let names = ["s", "width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let [value, width, break_long, between, break_hyphens] = bind(arguments, names)?;
    let value = soft_text(&value.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?);
    let width = usize::try_from(whole(width, 79)?).ok().filter(|width| *width > 0);
    let width = width.ok_or_else(|| refused("the width must be greater than 0"))?;
    let between = given(between).as_ref().map_or_else(|| "\n".to_owned(), soft_text);
    let (break_long, break_hyphens) = (flag(break_long, true), flag(break_hyphens, true));
    let wrap = |line: &str| wrap(&chunks(line, break_hyphens), width, break_long, break_hyphens).join(&between);
    Ok(Value::from(lines(&value, false).into_iter().map(wrap).collect::<Vec<_>>().join(&between)))
}

/// What `textwrap` takes for a blank.
fn is_blank(char: char) -> bool {
    matches!(char, '\t'..='\r' | ' ')
}

/// Pieces between which a line may end: runs of blanks, and words, cut after hyphens between letters.
fn chunks(line: &str, break_hyphens: bool) -> Vec<String> {
    let mut chunks: Vec<String> = Vec::new();
    let chars: Vec<char> = line.chars().collect();
    let letter = |at: usize| chars.get(at).is_some_and(|char| is_of_word(*char) && !char.is_ascii_digit());
    for (at, &char) in chars.iter().enumerate() {
        let before = at.checked_sub(1).map(|before| chars[before]);
        // As `textwrap.TextWrapper.wordsep_re` has it: at least one letter before the hyphen, two after it.
        let follows_hyphen = break_hyphens
            && before == Some('-')
            && at >= 2
            && letter(at - 2)
            && is_of_word(char)
            && (letter(at + 1)
                || (is_of_word(char)
                    && chars[at..]
                        .iter()
                        .take_while(|char| is_of_word(**char))
                        .skip(1)
                        .any(|char| !char.is_ascii_digit())));
        match before {
            Some(before) if is_blank(before) == is_blank(char) && !follows_hyphen => {
                if let Some(last) = chunks.last_mut() {
                    last.push(char);
                }
            }
            _ => chunks.push(char.to_string()),
        }
    }
    chunks
}

fn length(text: &str) -> usize {
    text.chars().count()
}

fn wrap(chunks: &[String], width: usize, break_long: bool, break_hyphens: bool) -> Vec<String> {
    let mut rest: Vec<String> = chunks.iter().rev().cloned().collect();
    let mut lines: Vec<String> = Vec::new();
    while !rest.is_empty() {
        if rest.last().is_some_and(|chunk| chunk.trim().is_empty()) && !lines.is_empty() {
            rest.pop();
        }
        let (mut line, mut used): (Vec<String>, usize) = (Vec::new(), 0);
        while let Some(chunk) = rest.pop_if(|chunk| used + length(chunk) <= width) {
            used += length(&chunk);
            line.push(chunk);
        }
        if rest.last().is_some_and(|chunk| length(chunk) > width) {
            let chunk = rest.pop().unwrap_or_default();
            if break_long {
                let (fits, left) = cut(&chunk, (width - used).max(usize::from(line.is_empty())), break_hyphens);
                rest.extend(Some(left.to_owned()).filter(|left| !left.is_empty()));
                line.push(fits.to_owned());
            } else if line.is_empty() {
                line.push(chunk);
            } else {
                rest.push(chunk);
            }
        }
        line.pop_if(|chunk| chunk.trim().is_empty());
        lines.extend(Some(line.concat()).filter(|_| !line.is_empty()));
    }
    lines
}

/// The part of a long word that fits, up to its last hyphen if it has one, and the rest.
fn cut(chunk: &str, space: usize, break_hyphens: bool) -> (&str, &str) {
    let fits = first_chars(chunk, space);
    let hyphen = fits
        .rfind('-')
        .filter(|&at| break_hyphens && length(chunk) > space && !fits[..at].chars().all(|char| char == '-'));
    chunk.split_at(hyphen.map_or(fits.len(), |at| at + 1))
}
