//! Python's character classes, where Rust's classes differ or have other names.
//!
//! Pure: characters and texts in, results out.

use std::sync::LazyLock;

use regex::Regex;

static DECIMAL: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\A\d\z").expect("a valid pattern"));

/// White space as defined by `str.isspace` and `str.strip`. Unlike Unicode's property, it
/// includes U+001C to U+001F.
pub(super) fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&char)
}

/// Whether `str.splitlines` ends a line at this character. A `\r\n` is a single line end.
pub(super) fn is_line_break(char: char) -> bool {
    matches!(char, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

pub(super) fn is_cased(char: char) -> bool {
    char.is_lowercase() || char.is_uppercase() || char.to_lowercase().next() != Some(char)
}

/// Whether a character belongs to a word, as defined by `\w` of Python's `re`.
pub(super) fn is_of_word(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

/// Whether `repr` writes the character unchanged. Unlike in Python, private-use characters are also
/// written unchanged: the `SpecialGuard` marks names of special tokens in users' texts with a
/// private-use character, and the mark must be found again in the prompt.
pub(super) fn is_printable(char: char) -> bool {
    let is_format = matches!(
        char,
        '\u{ad}'
            | '\u{600}'..='\u{605}'
            | '\u{61c}'
            | '\u{6dd}'
            | '\u{70f}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0001}'..='\u{e007f}'
    );
    !char.is_control() && (char == ' ' || !char.is_whitespace()) && !is_format
}

/// The result of a method such as `isalpha` or `isdigit`. `None` if there is no such method.
pub(super) fn is(text: &str, method: &str) -> Option<bool> {
    let all = |class: fn(char) -> bool| !text.is_empty() && text.chars().all(class);
    Some(match method {
        "isascii" => text.is_ascii(),
        "isspace" => all(is_space),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isnumeric" => all(char::is_numeric),
        "isdecimal" => all(is_decimal),
        "isdigit" => {
            all(|char| is_decimal(char) || matches!(char, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉' | '①'..='⑨'))
        }
        "isprintable" => text.chars().all(is_printable),
        "isidentifier" => all(is_of_word) && !text.starts_with(char::is_numeric),
        "islower" => text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase),
        "isupper" => text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase),
        "istitle" => is_title(text),
        _ => return None,
    })
}

fn is_decimal(char: char) -> bool {
    char.is_ascii_digit() || (char.is_numeric() && DECIMAL.is_match(char.encode_utf8(&mut [0; 4])))
}

/// Whether each word begins with an upper-case letter and has only lower-case letters after it.
fn is_title(text: &str) -> bool {
    let (mut follows_letter, mut has_letters) = (false, false);
    for char in text.chars() {
        if (char.is_uppercase() && follows_letter) || (char.is_lowercase() && !follows_letter) {
            return false;
        }
        follows_letter = is_cased(char);
        has_letters |= follows_letter;
    }
    has_letters
}
