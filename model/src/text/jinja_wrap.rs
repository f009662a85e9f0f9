//! Jinja2's filters that fit a text into a width: `truncate` and `wordwrap`.
//!
//! Pure: values in, values out.

use minijinja::{Error, ErrorKind, Value};

use super::python_call::{bind, flag, given, refused, whole};
use super::python_chars::{is_line_break, is_of_word};
use super::python_strings::lines;
use super::python_value::display;

/// The filter `truncate`: returns the beginning of a text, cut at a blank, with an ending.
pub(super) fn truncated(arguments: &[Value]) -> Result<Value, Error> {
    let [value, length, kill_words, end, leeway] = bind(arguments, ["s", "length", "killwords", "end", "leeway"])?;
    let value = display(&value.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?);
    let end = end.as_ref().map_or_else(|| "...".to_owned(), display);
    let (length, leeway) = (whole(length, 255)?, whole(leeway, 5)?);
    let kept = length.saturating_sub(end.chars().count() as i64);
    if kept < 0 || leeway < 0 {
        return Err(refused("`length` must be at least the length of `end`, and `leeway` at least 0"));
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

pub(super) struct Wrapping {
    text: String,
    width: usize,
    pub between: String,
    break_long: bool,
    break_hyphens: bool,
}

impl Wrapping {
    /// # Errors
    /// For a width below 1, and for arguments that Jinja2 does not know.
    pub fn of(arguments: &[Value]) -> Result<Self, Error> {
        let names = ["s", "width", "break_long_words", "wrapstring", "break_on_hyphens"];
        let [value, width, break_long, between, break_hyphens] = bind(arguments, names)?;
        let text = display(&value.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?);
        let width = usize::try_from(whole(width, 79)?).ok().filter(|width| *width > 0);
        let width = width.ok_or_else(|| refused("the width must be greater than 0"))?;
        let between = given(between).as_ref().map_or_else(|| "\n".to_owned(), display);
        let (break_long, break_hyphens) = (flag(break_long, true), flag(break_hyphens, true));
        Ok(Wrapping { text, width, between, break_long, break_hyphens })
    }

    /// Upper bound on the number of pieces between which a line may end, and thus on
    /// the number of lines.
    pub fn pieces(&self) -> usize {
        let ends = self.text.chars().filter(|char| is_blank(*char) || is_line_break(*char) || *char == '-').count();
        1 + 2 * ends + self.text.chars().count() / self.width
    }

    fn wrap<'a>(&self, line: &'a str, lines: &mut Vec<String>) {
        let before = lines.len();
        // Each chunk, with the number of bytes up to its last visible character.
        let chunks = chunks(line, self.break_hyphens).into_iter().rev();
        let mut rest: Vec<(&'a str, usize)> = chunks.map(|chunk| (chunk, chunk.trim_end().len())).collect();
        while !rest.is_empty() {
            if lines.len() > before {
                rest.pop_if(|(_, visible)| *visible == 0);
            }
            let (mut line, mut used) = (Vec::new(), 0);
            while let Some(chunk) = rest.pop_if(|(chunk, _)| !is_longer(chunk, self.width - used)) {
                used += chunk.0.chars().count();
                line.push(chunk);
            }
            if let Some((chunk, visible)) = rest.pop_if(|(chunk, _)| is_longer(chunk, self.width)) {
                if self.break_long {
                    let at = cut(chunk, (self.width - used).max(usize::from(line.is_empty())), self.break_hyphens);
                    rest.extend(Some((&chunk[at..], visible.saturating_sub(at))).filter(|(left, _)| !left.is_empty()));
                    line.push((&chunk[..at], chunk[..at].trim_end().len()));
                } else if line.is_empty() {
                    line.push((chunk, visible));
                } else {
                    rest.push((chunk, visible));
                }
            }
            line.pop_if(|(_, visible)| *visible == 0);
            lines.extend(Some(line.iter().map(|(chunk, _)| *chunk).collect()).filter(|_| !line.is_empty()));
        }
        // A line without words stays an empty line.
        if lines.len() == before {
            lines.push(String::new());
        }
    }
}

/// The filter `wordwrap`: breaks each line of a text into lines of a maximum width, as Python's
/// `textwrap.wrap` does without replacing white space.
pub(super) fn wrapped(arguments: &[Value]) -> Result<Value, Error> {
    let wrapping = Wrapping::of(arguments)?;
    let mut wrapped = Vec::new();
    lines(&wrapping.text, false).into_iter().for_each(|line| wrapping.wrap(line, &mut wrapped));
    Ok(Value::from(wrapped.join(&wrapping.between)))
}

/// Whether Python's `textwrap` treats the character as a blank.
fn is_blank(char: char) -> bool {
    matches!(char, '\t'..='\r' | ' ')
}

/// Pieces between which a line may end: runs of blanks, words, parts of words with hyphens, and
/// dashes.
fn chunks(line: &str, break_hyphens: bool) -> Vec<&str> {
    let (mut chunks, mut from) = (Vec::new(), 0);
    let (offsets, chars): (Vec<usize>, Vec<char>) = line.char_indices().unzip();
    for at in 1..chars.len() {
        if is_blank(chars[at - 1]) != is_blank(chars[at]) || (break_hyphens && is_at_hyphen(&chars, at)) {
            chunks.push(&line[from..offsets[at]]);
            from = offsets[at];
        }
    }
    chunks.extend(Some(&line[from..]).filter(|last| !last.is_empty()));
    chunks
}

/// Whether `textwrap.TextWrapper.wordsep_re` breaks before the character `at`: after a hyphen with
/// two letters on each side, or before or after a dash of several hyphens between words.
fn is_at_hyphen(chars: &[char], at: usize) -> bool {
    let is = |at: usize, char: char| chars.get(at) == Some(&char);
    let letter = |at: usize| chars.get(at).is_some_and(|char| is_of_word(*char) && !char.is_numeric());
    let ends_word = |at: usize| is_of_word(chars[at]) || "!\"'&.,?".contains(chars[at]);
    let hyphens = |chars: &mut dyn Iterator<Item = &char>| chars.take_while(|char| **char == '-').count();
    if is(at, '-') {
        let dash = hyphens(&mut chars[at..].iter());
        return dash > 1 && ends_word(at - 1) && chars.get(at + dash).is_some_and(|char| is_of_word(*char));
    }
    if !is(at - 1, '-') || !is_of_word(chars[at]) {
        return false;
    }
    let dash = hyphens(&mut chars[..at].iter().rev());
    if dash > 1 {
        return dash < at && ends_word(at - dash - 1);
    }
    let follows = at > 2 && letter(at - 2) && (letter(at - 3) || (at > 3 && is(at - 3, '-') && letter(at - 4)));
    follows && letter(at) && (letter(at + 1) || (is(at + 1, '-') && letter(at + 2)))
}

fn is_longer(text: &str, chars: usize) -> bool {
    text.chars().nth(chars).is_some()
}

/// The number of bytes of a long word that fit into `space` characters: up to the last hyphen,
/// if there is one.
fn cut(chunk: &str, space: usize, break_hyphens: bool) -> usize {
    let fits = first_chars(chunk, space);
    let has_word = |at: &usize| !fits[..*at].chars().all(|char| char == '-');
    let hyphen = fits.rfind('-').filter(|_| break_hyphens && is_longer(chunk, space)).filter(has_word);
    hyphen.map_or(fits.len(), |at| at + 1)
}
