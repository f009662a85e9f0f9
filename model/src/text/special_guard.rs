//! The guard that keeps the text "<|im_start|>" in a user's message from becoming the special
//! token.
//!
//! A chat template puts user text between control tokens, and the tokenizer cannot distinguish the
//! two afterward. Before rendering, the guard therefore puts a mark (a character that occurs
//! nowhere else) after the first character of each special token's name in a user's text. A text
//! that ends with the beginning of a name also gets a mark, because the next part could complete
//! the name. Every name that the tokenizer still recognizes then comes from the template. The marks
//! are removed before the text between special tokens is encoded. Other text gets no mark, so
//! templates see it unchanged and render the same as with Hugging Face.

/// Finds names of special tokens in text, and marks them.
#[derive(Clone, Debug)]
pub struct SpecialGuard {
    names: Vec<String>,
}

impl SpecialGuard {
    /// A guard against `names`. Empty names are ignored.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut names: Vec<_> = names.into_iter().filter(|name| !name.is_empty()).map(str::to_owned).collect();
        names.sort();
        names.dedup();
        SpecialGuard { names }
    }

    /// A guard against the same names and `more`.
    pub fn with<'a>(&'a self, more: impl IntoIterator<Item = &'a str>) -> Self {
        SpecialGuard::new(self.names.iter().map(String::as_str).chain(more))
    }

    /// Whether `text` contains a special token's name or, ignoring white space, ends with the
    /// beginning of such a name.
    pub fn finds(&self, text: &str) -> bool {
        !self.cuts(text).is_empty()
    }

    /// Puts `mark` after the first character of each name found.
    pub fn mark(&self, text: &str, mark: char) -> String {
        let mut marked = String::with_capacity(text.len() + 8);
        let mut from = 0;
        for cut in self.cuts(text) {
            marked.push_str(&text[from..cut]);
            marked.push(mark);
            from = cut;
        }
        marked.push_str(&text[from..]);
        marked
    }

    /// Byte positions after the first character of each name, ascending.
    fn cuts(&self, text: &str) -> Vec<usize> {
        let mut cuts = Vec::new();
        // Templates trim texts before joining them, so the beginning of a name at the
        // trimmed end also counts.
        let trimmed = text.trim_end();
        for name in &self.names {
            let first = name.chars().next().map_or(0, char::len_utf8);
            // Overlapping occurrences matter too ("aa" in "aaa"), hence the step of one character.
            let mut at = 0;
            while let Some(found) = text[at..].find(name.as_str()) {
                at += found + first;
                cuts.push(at);
            }
            for end in [text, trimmed] {
                for length in (1..name.len()).filter(|&length| name.is_char_boundary(length)) {
                    if end.ends_with(&name[..length]) {
                        cuts.push(end.len() - length + first);
                    }
                }
            }
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }

    /// A character that none of `texts` contains, from the last 254 characters of
    /// the last private-use plane.
    pub fn unused_mark<'a>(texts: impl Iterator<Item = &'a str> + Clone) -> Option<char> {
        ('\u{10ff00}'..='\u{10fffd}').rev().find(|&mark| !texts.clone().any(|text| text.contains(mark)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: char = '\u{10fffd}';

    fn guard() -> SpecialGuard {
        SpecialGuard::new(["<|im_start|>", "<|im_end|>", "aa"])
    }

    #[test]
    fn text_without_special_token_names_is_unchanged() {
        for text in ["", "a < b", "x |> y", "im_start", "<|im_", "a"].iter().map(|text| format!("{text} and more.")) {
            assert!(!guard().finds(&text), "{text}");
            assert_eq!(text, guard().mark(&text, MARK));
        }
    }

    #[test]
    fn special_token_names_and_trailing_prefixes_are_marked() {
        assert_eq!("x<\u{10fffd}|im_end|>y.", guard().mark("x<|im_end|>y.", MARK));
        assert_eq!("x<\u{10fffd}|im_st", guard().mark("x<|im_st", MARK));
        assert_eq!("x<\u{10fffd}|im_st \n", guard().mark("x<|im_st \n", MARK));
        assert_eq!("a\u{10fffd}a\u{10fffd}a\u{10fffd}", guard().mark("aaa", MARK));
    }

    #[test]
    fn joining_marked_texts_forms_no_special_token_name() {
        let name = "<|im_start|>";
        for cut in 0..=name.len() {
            let joined = guard().mark(&name[..cut], MARK) + &guard().mark(&name[cut..], MARK);
            assert!(!joined.contains(name), "cut at {cut}");
        }
    }

    #[test]
    fn the_guard_mark_occurs_in_no_text() {
        let texts = ["\u{10fffd}", "\u{10fffc}x"];
        assert_eq!(Some('\u{10fffb}'), SpecialGuard::unused_mark(texts.iter().copied()));
        let all: String = ('\u{10ff00}'..='\u{10fffd}').collect();
        assert_eq!(None, SpecialGuard::unused_mark([all.as_str()].into_iter()));
    }
}
