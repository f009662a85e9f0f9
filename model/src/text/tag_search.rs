//! Searches for the tags in a reply, one character at a time.

/// The search for a tag that may come next, after optional white space.
#[derive(Clone)]
pub(super) struct Tag {
    tag: &'static str,
    matched: usize,
    pub(super) held: String,
}

pub(super) enum Match {
    Partial,
    Whole,
    None,
}

impl Tag {
    pub(super) fn new(tag: &'static str) -> Self {
        Tag { tag, matched: 0, held: String::new() }
    }

    pub(super) fn feed(&mut self, next: char) -> Match {
        if self.tag[self.matched..].starts_with(next) {
            self.matched += next.len_utf8();
        } else if self.matched > 0 || !next.is_whitespace() {
            return Match::None;
        }
        self.held.push(next);
        if self.matched == self.tag.len() { Match::Whole } else { Match::Partial }
    }
}

/// The search for a tag in text, including the line breaks before the tag. The first
/// character of each tag occurs in that tag only once, so a failed match cannot hide the
/// beginning of another match.
#[derive(Clone)]
pub(super) struct Search {
    tag: &'static str,
    line_breaks: usize,
    pub(super) matched: usize,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum TagMatch {
    /// The character is withheld.
    Partial,
    /// The withheld text is the tag.
    Tag,
    /// The withheld text was not a tag. The character must be read again.
    Failed,
    /// Neither the character nor the withheld text belongs to a tag.
    Nothing,
}

impl Search {
    pub(super) fn new(tag: &'static str) -> Self {
        Search { tag, line_breaks: 0, matched: 0 }
    }

    pub(super) fn feed(&mut self, next: char) -> TagMatch {
        if self.tag[self.matched..].starts_with(next) {
            self.matched += next.len_utf8();
            return if self.matched == self.tag.len() { TagMatch::Tag } else { TagMatch::Partial };
        }
        match (self.matched, next) {
            (0, '\n') => {
                self.line_breaks += 1;
                TagMatch::Partial
            }
            (0, _) => TagMatch::Nothing,
            (_, _) => TagMatch::Failed,
        }
    }

    /// Returns the withheld text and clears it.
    pub(super) fn release(&mut self) -> String {
        let held = "\n".repeat(self.line_breaks) + &self.tag[..self.matched];
        (self.line_breaks, self.matched) = (0, 0);
        held
    }
}
