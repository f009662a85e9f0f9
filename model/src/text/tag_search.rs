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

/// The search for one of several tags in text, including the line breaks before the tag. All tags
/// begin with one character, which occurs in each tag only once, so a failed match cannot hide the
/// beginning of another match. No tag begins with another tag.
#[derive(Clone)]
pub(super) struct Search {
    tags: Vec<&'static str>,
    /// The tag that the withheld text is, or may become.
    pub(super) tag: &'static str,
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
    pub(super) fn new(tags: Vec<&'static str>) -> Self {
        Search { tags, tag: "", line_breaks: 0, matched: 0 }
    }

    pub(super) fn feed(&mut self, next: char) -> TagMatch {
        let matched = &self.tag[..self.matched];
        let goes_on = |tag: &&&str| tag.strip_prefix(matched).is_some_and(|rest| rest.starts_with(next));
        if let Some(tag) = self.tags.iter().find(goes_on) {
            self.tag = tag;
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
