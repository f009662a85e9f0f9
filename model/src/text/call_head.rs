//! A reader for the beginning of a tool call, one character at a time, in formats whose calls are not
//! JSON objects.

use super::tag_search::{Match, Tag};

/// Reads the start of a call: the text between the opening tag and the end of the function's name.
#[derive(Clone)]
pub(super) struct Head {
    opening: String,
    /// The text before the name.
    tag: Tag,
    /// The character after the name.
    end: char,
    name: Option<String>,
}

pub(super) enum HeadSeen {
    More,
    Name(String),
    /// The character cannot be part of a call, and was not read.
    Broken,
}

impl Head {
    /// A head that begins with `opening`, has `before` before the name, and ends with `end`.
    pub(super) fn new(opening: String, before: &'static str, end: char) -> Self {
        Head { opening, tag: Tag::new(before), end, name: None }
    }

    pub(super) fn feed(&mut self, next: char) -> HeadSeen {
        let Some(name) = &mut self.name else {
            return match self.tag.feed(next) {
                Match::None => HeadSeen::Broken,
                Match::Partial => HeadSeen::More,
                Match::Whole => {
                    self.name = Some(String::new());
                    HeadSeen::More
                }
            };
        };
        match next {
            _ if next == self.end && !name.trim().is_empty() => {
                let read = name.trim().to_owned();
                name.push(next);
                HeadSeen::Name(read)
            }
            '<' | '>' | '\n' => HeadSeen::Broken,
            _ if next == self.end => HeadSeen::Broken,
            _ => {
                name.push(next);
                HeadSeen::More
            }
        }
    }

    /// The opening text, and the text read after it.
    pub(super) fn into_texts(self) -> [String; 2] {
        [self.opening, self.tag.held + &self.name.unwrap_or_default()]
    }
}
