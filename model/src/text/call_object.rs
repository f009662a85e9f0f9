//! A reader for the JSON object of a tool call, one character at a time. The reader finds the name,
//! and the positions at which the arguments begin and end.

/// A reader of one object. The reader stores only the name and the current key, and takes the same
/// time for every character.
///
/// The reader parses only the JSON syntax needed to find the ends of values: strings, nesting and
/// commas. The arguments must be an object, whose content is not checked.
#[derive(Clone, Debug)]
pub(super) struct CallObject {
    state: ReadState,
    /// The text of the key or name being read, with its quotes.
    string: String,
    is_escaped: bool,
    key: Key,
    name: Option<String>,
    has_arguments: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ReadState {
    Start,
    BeforeKey,
    InKey,
    BeforeColon,
    BeforeValue,
    InString,
    InNested { depth: usize, in_string: bool },
    InScalar,
    AfterValue,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Key {
    Name,
    Arguments,
    Other,
}

/// The role of one character in the object.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Seen {
    /// A character that requires no action from the caller.
    More,
    /// The last character of the name.
    Name,
    /// The first character of the arguments.
    Arguments,
    /// The last character of the arguments.
    ArgumentsEnd,
    /// The last character of the object.
    End,
    /// A character that cannot be part of a call.
    Broken,
}

impl CallObject {
    pub(super) fn new() -> Self {
        CallObject {
            state: ReadState::Start,
            string: String::new(),
            is_escaped: false,
            key: Key::Other,
            name: None,
            has_arguments: false,
        }
    }

    /// The tool's name, once it has been read.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Reads the next character. Must not be called again after it has returned `End` or `Broken`.
    pub(super) fn feed(&mut self, next: char) -> Seen {
        match self.state {
            ReadState::InKey => self.in_key(next),
            ReadState::InString => self.in_string(next),
            ReadState::InNested { depth, in_string } => self.in_nested(next, depth, in_string),
            ReadState::InScalar if !matches!(next, ',' | '}' | ' ' | '\n' | '\r' | '\t') => match next {
                '<' | '"' | '{' | '[' | ']' => Seen::Broken,
                _ => Seen::More,
            },
            _ if matches!(next, ' ' | '\n' | '\r' | '\t') => {
                if self.state == ReadState::InScalar {
                    self.state = ReadState::AfterValue;
                }
                Seen::More
            }
            state => self.between(state, next),
        }
    }

    /// Handles a character that separates, begins or ends keys, values or the object.
    fn between(&mut self, state: ReadState, next: char) -> Seen {
        self.state = match (state, next) {
            (ReadState::Start, '{') | (ReadState::InScalar | ReadState::AfterValue, ',') => ReadState::BeforeKey,
            (ReadState::BeforeKey | ReadState::InScalar | ReadState::AfterValue, '}') => return Seen::End,
            (ReadState::BeforeKey, '"') => {
                self.string = "\"".to_owned();
                ReadState::InKey
            }
            (ReadState::BeforeColon, ':') => ReadState::BeforeValue,
            (ReadState::BeforeValue, _) => return self.value(next),
            _ => return Seen::Broken,
        };
        Seen::More
    }

    /// Handles the first character of a value.
    fn value(&mut self, first: char) -> Seen {
        self.state = match (self.key, first) {
            (Key::Name | Key::Other, '"') => {
                self.string = "\"".to_owned();
                ReadState::InString
            }
            (Key::Arguments, '{') => {
                self.has_arguments = true;
                self.state = ReadState::InNested { depth: 1, in_string: false };
                return Seen::Arguments;
            }
            (Key::Other, '{' | '[') => ReadState::InNested { depth: 1, in_string: false },
            (Key::Other, 'a'..='z' | '0'..='9' | '-') => ReadState::InScalar,
            _ => return Seen::Broken,
        };
        Seen::More
    }

    fn in_key(&mut self, next: char) -> Seen {
        self.string.push(next);
        if !self.ends_string(next) {
            return Seen::More;
        }
        self.key = match self.string.as_str() {
            "\"name\"" if self.name.is_none() => Key::Name,
            "\"arguments\"" | "\"parameters\"" if !self.has_arguments => Key::Arguments,
            _ => Key::Other,
        };
        self.state = ReadState::BeforeColon;
        Seen::More
    }

    fn in_string(&mut self, next: char) -> Seen {
        if self.key == Key::Name {
            self.string.push(next);
        }
        if !self.ends_string(next) {
            return Seen::More;
        }
        self.state = ReadState::AfterValue;
        if self.key != Key::Name {
            return Seen::More;
        }
        match serde_json::from_str::<String>(&self.string) {
            Ok(name) if !name.is_empty() => {
                self.name = Some(name);
                Seen::Name
            }
            _ => Seen::Broken,
        }
    }

    fn in_nested(&mut self, next: char, depth: usize, in_string: bool) -> Seen {
        let (depth, in_string) = match (in_string, next) {
            (true, _) => (depth, !self.ends_string(next)),
            (false, '"') => (depth, true),
            (false, '{' | '[') => (depth + 1, false),
            (false, '}' | ']') => (depth - 1, false),
            // JSON never has `<` outside of strings, and every tag, such as `</tool_call>`, begins
            // with `<`.
            (false, '<') => return Seen::Broken,
            (false, _) => (depth, false),
        };
        self.state = ReadState::InNested { depth, in_string };
        if depth > 0 {
            return Seen::More;
        }
        self.state = ReadState::AfterValue;
        if self.key == Key::Arguments { Seen::ArgumentsEnd } else { Seen::More }
    }

    /// Whether a character inside a string is its closing quote.
    fn ends_string(&mut self, next: char) -> bool {
        let was_escaped = std::mem::take(&mut self.is_escaped);
        self.is_escaped = next == '\\' && !was_escaped;
        next == '"' && !was_escaped
    }
}
