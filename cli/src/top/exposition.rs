//! A parser for Prometheus' text format.
//!
//! The text comes from any program that listens on the port, so the parser trusts nothing
//! in it. A malformed line is an error with its line number, and characters that a
//! terminal interprets are replaced.

use super::samples::{Samples, Series};

/// A line that is not a sample.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} is not in Prometheus' text format: {why}")]
pub struct Malformed {
    /// Line number, from 1.
    pub line: usize,
    pub why: &'static str,
}

/// Parses the samples of all metrics whose names begin with `prefix`. All other lines
/// must be well-formed too.
///
/// # Errors
/// Returns [`Malformed`] with the number of the first line that is neither empty nor a
/// comment nor a sample.
pub fn read(text: &str, prefix: &str) -> Result<Samples, Malformed> {
    let mut samples = Samples::default();
    let mut series = 0;
    for (number, line) in text.lines().enumerate() {
        let malformed = |why| Malformed { line: number + 1, why };
        if let Some((name, sample)) = Cursor(line.trim_matches(BLANKS)).sample().map_err(malformed)?
            && name.starts_with(prefix)
        {
            series += 1;
            if series > SERIES_MAX {
                return Err(malformed("there are too many series"));
            }
            samples.push(name, sample);
        }
    }
    Ok(samples)
}

/// Replaces characters that a terminal interprets: control characters, and characters that change
/// the direction of text.
pub fn harmless(text: &str) -> String {
    let is_obeyed = |letter: char| {
        letter.is_control()
            || matches!(letter, '\u{61c}' | '\u{e0000}'..='\u{e007f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
    };
    text.chars().map(|letter| if is_obeyed(letter) { char::REPLACEMENT_CHARACTER } else { letter }).collect()
}

/// Maximum number of series that are read. A process with many models has a few hundred. The limit
/// keeps a program that sends endless series from blocking the view.
const SERIES_MAX: usize = 20_000;

/// Maximum number of labels of a series. Bursar's series have at most five.
const LABELS_MAX: usize = 32;

const BLANKS: [char; 3] = [' ', '\t', '\r'];

struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    /// Parses a whole line. Returns `None` if it is empty or a comment.
    fn sample(mut self) -> Result<Option<(&'a str, Series)>, &'static str> {
        if self.0.is_empty() || self.0.starts_with('#') {
            return Ok(None);
        }
        let name = self.word(|letter| letter == ':').ok_or("a metric's name is missing")?;
        self.skip_blanks();
        let labels = if self.take('{') { self.labels()? } else { Vec::new() };
        self.skip_blanks();
        let value = self.token().ok_or("the value is missing")?;
        // Rust parses all numbers that Go writes: decimals, exponents, NaN and Inf in any case.
        let value = value.parse().map_err(|_| "the value is not a number")?;
        self.skip_blanks();
        if let Some(timestamp) = self.token() {
            timestamp.parse::<i64>().map_err(|_| "the timestamp is not a whole number")?;
        }
        self.skip_blanks();
        if !self.0.is_empty() {
            return Err("text follows the timestamp");
        }
        Ok(Some((name, Series { labels, value })))
    }

    /// Parses all labels and the closing brace.
    fn labels(&mut self) -> Result<Vec<(String, String)>, &'static str> {
        let mut labels: Vec<(String, String)> = Vec::new();
        loop {
            self.skip_blanks();
            if self.take('}') {
                return Ok(labels);
            }
            let name = self.word(|_| false).ok_or("a label's name is missing")?;
            if labels.len() == LABELS_MAX {
                return Err("a series has too many labels");
            }
            if labels.iter().any(|(known, _)| known == name) {
                return Err("a label is given twice");
            }
            self.skip_blanks();
            self.expect('=', "a label has no equals sign")?;
            self.skip_blanks();
            self.expect('"', "a label's value is not quoted")?;
            labels.push((name.to_owned(), harmless(&self.quoted()?)));
            self.skip_blanks();
            if !self.take(',') && !self.0.starts_with('}') {
                return Err("labels do not end in a brace");
            }
        }
    }

    /// Parses the text before the closing quotation mark.
    fn quoted(&mut self) -> Result<String, &'static str> {
        let mut text = String::new();
        let mut letters = self.0.chars();
        loop {
            match letters.next().ok_or("a label's value does not end")? {
                '"' => break,
                '\\' => text.push(match letters.next() {
                    Some('n') => '\n',
                    Some(letter @ ('\\' | '"')) => letter,
                    _ => return Err("a label's value has an escape that does not exist"),
                }),
                letter => text.push(letter),
            }
        }
        self.0 = letters.as_str();
        Ok(text)
    }

    /// Parses letters, digits, underscores and characters that `more` allows. The first character
    /// must not be a digit.
    fn word(&mut self, more: impl Fn(char) -> bool) -> Option<&'a str> {
        let is_of_it = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || more(letter);
        let end = self.0.find(|letter| !is_of_it(letter)).unwrap_or(self.0.len());
        let word = self.split(end);
        (!word.is_empty() && !word.starts_with(|first: char| first.is_ascii_digit())).then_some(word)
    }

    /// Parses the text before the next blank.
    fn token(&mut self) -> Option<&'a str> {
        let end = self.0.find(BLANKS).unwrap_or(self.0.len());
        Some(self.split(end)).filter(|token| !token.is_empty())
    }

    fn split(&mut self, end: usize) -> &'a str {
        let (front, rest) = self.0.split_at(end);
        self.0 = rest;
        front
    }

    fn skip_blanks(&mut self) {
        self.0 = self.0.trim_start_matches(BLANKS);
    }

    fn take(&mut self, letter: char) -> bool {
        self.0.strip_prefix(letter).map(|rest| self.0 = rest).is_some()
    }

    fn expect(&mut self, letter: char, why: &'static str) -> Result<(), &'static str> {
        if self.take(letter) { Ok(()) } else { Err(why) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_sample_has_a_name_labels_and_a_value() {
        let text = "# HELP bursar_a What it is.\n# TYPE bursar_a gauge\nbursar_a{model=\"demo\",class=\"kv\"} 12\n\n\
                    bursar_a { model = \"a\\\\b\\\"c\\nd\" , } +Inf 1700000000\r\nbursar_b 1.5e3\nother_total 7\n\
                    bursar_c NaN\nbursar_d_bucket{le=\"+Inf\"} -0\n# EOF";
        let samples = read(text, "bursar_").expect("the text is well-formed");
        assert_eq!(samples.value("bursar_a", &[("model", "demo"), ("class", "kv")]), Some(12.0));
        assert_eq!(samples.value("bursar_a", &[("model", "a\\b\"c\u{fffd}d")]), Some(f64::INFINITY));
        assert_eq!(samples.value("bursar_b", &[]), Some(1500.0));
        assert_eq!(samples.value("other_total", &[]), None, "metrics without the prefix are left out");
        assert_eq!(samples.value("bursar_c", &[]), None, "a value that is not a number is left out");
        assert_eq!(samples.value("bursar_d_bucket", &[("le", "+Inf")]), Some(0.0));
    }

    #[test]
    fn a_malformed_line_is_reported_by_number_without_its_content() {
        let lines = [
            ("<html>secret</html>", "a metric's name is missing"),
            ("7up 1", "a metric's name is missing"),
            ("a", "the value is missing"),
            ("a{", "a label's name is missing"),
            ("a{b", "a label has no equals sign"),
            ("a{b=c} 1", "a label's value is not quoted"),
            ("a{b=\"c", "a label's value does not end"),
            ("a{b=\"c\\t\"} 1", "a label's value has an escape that does not exist"),
            ("a{b=\"c\" d=\"e\"} 1", "labels do not end in a brace"),
            ("a{b=\"c\",b=\"d\"} 1", "a label is given twice"),
            ("a secret", "the value is not a number"),
            ("a 1 noon", "the timestamp is not a whole number"),
            ("a 1 2 # {} 1", "text follows the timestamp"),
        ];
        for (line, why) in lines {
            let malformed = read(&format!("ok 1\n\n{line}\nbad"), "").expect_err(line);
            assert_eq!(malformed, Malformed { line: 3, why }, "{line}");
            assert!(!malformed.to_string().contains("secret"));
        }
    }

    #[test]
    fn terminal_control_characters_are_replaced() {
        assert_eq!(harmless("a\u{1b}[2Jb\u{7}\u{202e}c"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c");
        assert_eq!(harmless("Qwen/Qwen2.5-VL ü 模型"), "Qwen/Qwen2.5-VL ü 模型");
    }

    /// Escapes a label's value like Prometheus' own library.
    fn escaped(value: &str) -> String {
        value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
    }

    proptest! {
        #[test]
        fn no_input_panics(text in "(?s).{0,200}", shaped in "[a{}=\", \\\\\n#1]{0,40}") {
            let _ = read(&text, "");
            let _ = read(&shaped, "");
        }

        #[test]
        fn written_samples_read_back_equal(
            values in prop::collection::vec(("(?s).{0,12}", prop::num::f64::NORMAL | prop::num::f64::ZERO), 0..8)
        ) {
            let lines: String = values
                .iter()
                .enumerate()
                .map(|(at, (label, value))| format!("m{{at=\"{at}\",label=\"{}\"}} {value}\n", escaped(label)))
                .collect();
            // A carriage return does not end a line here. It is replaced,
            // like other control characters.
            let samples = read(&lines, "m").expect("the text is well-formed");
            for (at, (label, value)) in values.iter().enumerate() {
                let (at, label) = (at.to_string(), harmless(label));
                prop_assert_eq!(samples.value("m", &[("at", &at), ("label", &label)]), Some(*value));
            }
        }
    }
}
