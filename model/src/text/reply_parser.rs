//! The parser that splits a reply, as it arrives, into reasoning, text and tool calls.
//!
//! The parser is a state machine that reads single characters. It therefore takes linear time, and
//! its result does not depend on how the text was split into pieces. It withholds only text that
//! may still become a tag, the head of a call up to the name and the beginning of the arguments,
//! and values that are not strings in formats whose calls are not JSON. If the withheld head of a call turns out not
//! to be a call, it is returned as text.

use std::sync::Arc;

use super::call_head::{Head, HeadSeen};
use super::call_object::{CallObject, Seen};
use super::callable_tool::CallableTool;
use super::converted_call::ConvertedCall;
use super::reply_format::{FUNCTION, ReasoningTags, Thinking, ToolFormat};
use super::tag_search::{Match, Search, Tag, TagMatch};

/// A part of a reply. The concatenated texts of all parts are the reply.
#[derive(Clone, PartialEq, Eq)]
pub enum ReplyPart {
    /// Text of the answer, for the reader.
    Text(String),
    Reasoning(String),
    /// A tool call begins. This part has no text.
    CallBegin {
        /// The index of the call in the reply, from 0.
        index: usize,
        name: String,
    },
    /// The next piece of the arguments of the latest call.
    Arguments {
        /// The next piece of a JSON object. Empty if `written` adds nothing to the object yet.
        json: String,
        /// The text of the reply from which `json` was read. It differs from `json` in
        /// [`ToolFormat::QwenXml`] and [`ToolFormat::Gemma4`].
        written: String,
    },
    /// The call ends. This part has no text.
    CallEnd {
        /// Whether the arguments are complete. If not, the reply ended within them, or contained a
        /// tag where JSON does not allow one.
        is_closed: bool,
    },
    /// Syntax around the other parts: tags, the name of a call, and line breaks next to tags.
    Markup(String),
}

impl ReplyPart {
    /// The text that this part contributes to the reply.
    pub fn text(&self) -> &str {
        match self {
            ReplyPart::Text(text) | ReplyPart::Reasoning(text) => text,
            ReplyPart::Arguments { written: text, .. } | ReplyPart::Markup(text) => text,
            ReplyPart::CallBegin { .. } | ReplyPart::CallEnd { .. } => "",
        }
    }
}

/// Shows kinds and sizes, but not the text, which is the user's data.
impl std::fmt::Debug for ReplyPart {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ReplyPart::Text(text) => write!(formatter, "Text({} bytes)", text.len()),
            ReplyPart::Reasoning(text) => write!(formatter, "Reasoning({} bytes)", text.len()),
            ReplyPart::CallBegin { index, .. } => write!(formatter, "CallBegin({index})"),
            ReplyPart::Arguments { json, .. } => write!(formatter, "Arguments({} bytes)", json.len()),
            ReplyPart::CallEnd { is_closed } => write!(formatter, "CallEnd(closed: {is_closed})"),
            ReplyPart::Markup(text) => write!(formatter, "Markup({} bytes)", text.len()),
        }
    }
}

/// The section of a reply that the text has reached so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyPlace {
    /// Before or after reasoning.
    Answer,
    /// Between the tags of reasoning.
    Reasoning,
    /// Within text that may become the tag that ends reasoning, or may be part of the reasoning.
    MaybeTag,
}

/// Takes a reply's text in pieces and returns its parts.
#[derive(Clone)]
pub struct ReplyParser {
    format: ToolFormat,
    /// A format without tags needs the tools' names to distinguish a call from other JSON. Formats
    /// whose calls are not JSON need the types of their parameters.
    tools: Arc<[CallableTool]>,
    /// Reasoning tags that are recognized anywhere in the reply, because they are special tokens.
    special_tags: Option<ReasoningTags>,
    state: State,
    calls: usize,
    parts: Vec<ReplyPart>,
}

#[derive(Clone)]
enum State {
    Plain,
    /// Before the tag that opens reasoning, which may be missing. With `is_begun`, the prompt already
    /// opened the reasoning, so any other text is reasoning too.
    BeforeThoughts {
        tag: Tag,
        end: &'static str,
        is_begun: bool,
    },
    /// Line breaks that follow the opening tag. Holds the closing tag.
    ThoughtsBegin(&'static str),
    Thoughts(Search),
    /// Line breaks that follow the closing tag.
    ThoughtsEnd,
    /// White space before the JSON object of a call, in a format without call tags. `is_open` is
    /// set after `<|python_tag|>` or a separator.
    BeforeObject {
        held: String,
        is_open: bool,
    },
    Text {
        search: Search,
        follows_call: bool,
    },
    Call(Call),
    /// The beginning of a call that is not JSON, up to the name.
    Head(Head),
    ConvertedCall(Box<ConvertedCall>),
    /// White space, then the tag that closes a call. Models sometimes omit this tag.
    CallEnd(Tag),
}

#[derive(Clone)]
struct Call {
    object: CallObject,
    phase: Phase,
}

#[derive(Clone)]
enum Phase {
    /// The text may still turn out not to be a call, so all of it is withheld in `text`. `begin`
    /// and `end` are the byte offsets at which the arguments begin and end, or 0 if not yet known.
    Held { text: String, begin: usize, end: usize },
    /// The arguments are returned as they arrive.
    Arguments,
    /// After the arguments of a call.
    Tail,
}

impl ReplyParser {
    pub fn new(thinking: Thinking, format: ToolFormat, tools: impl Into<Arc<[CallableTool]>>) -> Self {
        let special_tags = match thinking {
            Thinking::Possible(tags) | Thinking::Begun(tags) => Some(tags).filter(|tags| tags.are_special),
            Thinking::Off => None,
        };
        let (tools, state, parts) = (tools.into(), State::Plain, Vec::new());
        let mut parser = ReplyParser { format, tools, special_tags, state, calls: 0, parts };
        parser.state = match thinking {
            Thinking::Off => parser.content(),
            Thinking::Possible(ReasoningTags { begin, end, .. }) => {
                State::BeforeThoughts { tag: Tag::new(begin), end, is_begun: false }
            }
            Thinking::Begun(ReasoningTags { begin, end, .. }) => {
                State::BeforeThoughts { tag: Tag::new(begin), end, is_begun: true }
            }
        };
        parser
    }

    /// The parts that `piece` adds. The text of the last part may continue in the next piece.
    pub fn feed(&mut self, piece: &str) -> Vec<ReplyPart> {
        match self.state {
            State::Plain if piece.is_empty() => {}
            State::Plain => self.parts.push(ReplyPart::Text(piece.to_owned())),
            _ => piece.chars().for_each(|next| self.take(next)),
        }
        std::mem::take(&mut self.parts)
    }

    /// The remaining parts at the end of the reply: the withheld text, and the end of a call
    /// that was cut off.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        match std::mem::replace(&mut self.state, State::Plain) {
            State::Plain | State::ThoughtsBegin(_) | State::ThoughtsEnd => {}
            State::BeforeThoughts { tag, is_begun: true, .. } => self.reasoning(&tag.held),
            State::BeforeThoughts { tag, is_begun: false, .. } => self.text(&tag.held),
            State::Thoughts(mut search) => self.reasoning(&search.release()),
            State::BeforeObject { held, is_open: true } if self.calls == 0 => self.text(&held),
            State::BeforeObject { held, .. } => self.blank(&held, self.calls > 0),
            State::Text { mut search, follows_call } => self.blank(&search.release(), follows_call),
            State::CallEnd(tag) => self.markup(&tag.held),
            State::Call(call) => match call.phase {
                Phase::Held { text, .. } => self.text(&text),
                Phase::Arguments => self.parts.push(ReplyPart::CallEnd { is_closed: false }),
                Phase::Tail => self.parts.push(ReplyPart::CallEnd { is_closed: true }),
            },
            State::Head(head) => self.text(&head.into_texts().concat()),
            State::ConvertedCall(mut call) => {
                call.finish();
                self.add_arguments(&mut call);
                self.parts.push(ReplyPart::CallEnd { is_closed: false });
            }
        }
        std::mem::take(&mut self.parts)
    }

    /// The section of the reply that all text fed so far has reached.
    pub fn place(&self) -> ReplyPlace {
        match &self.state {
            State::BeforeThoughts { is_begun: true, .. } | State::ThoughtsBegin(_) => ReplyPlace::Reasoning,
            State::Thoughts(search) if search.matched == 0 => ReplyPlace::Reasoning,
            State::Thoughts(_) => ReplyPlace::MaybeTag,
            _ => ReplyPlace::Answer,
        }
    }

    /// The state at the beginning of the answer, after any reasoning.
    fn content(&self) -> State {
        match self.format {
            ToolFormat::None | ToolFormat::Hermes | ToolFormat::QwenXml | ToolFormat::Gemma4 => self.in_text(false),
            ToolFormat::Llama3Json => State::BeforeObject { held: String::new(), is_open: false },
        }
    }

    fn in_text(&self, follows_call: bool) -> State {
        let mut tags: Vec<_> = self.format.opening().into_iter().collect();
        if self.format == ToolFormat::Gemma4 {
            // A special token after a call that broke off is not text.
            tags.extend(self.format.closing());
        }
        tags.extend(self.special_tags.into_iter().flat_map(|tags| [tags.begin, tags.end]));
        if tags.is_empty() { State::Plain } else { State::Text { search: Search::new(tags), follows_call } }
    }

    /// Reasoning up to the tag `end`. A special token that opens a call ends it too.
    fn in_thoughts(&self, end: &'static str) -> State {
        let call = self.format.opening().filter(|_| self.format == ToolFormat::Gemma4);
        State::Thoughts(Search::new([end].into_iter().chain(call).collect()))
    }

    /// Passes a character to one state after another until a state consumes it. A state that does
    /// not consume the character is replaced by a later state.
    fn take(&mut self, next: char) {
        while !self.step(next) {}
    }

    fn step(&mut self, next: char) -> bool {
        match std::mem::replace(&mut self.state, State::Plain) {
            State::Plain => self.text(next.encode_utf8(&mut [0; 4])),
            State::BeforeThoughts { tag, end, is_begun } => return self.before_thoughts(tag, end, is_begun, next),
            State::ThoughtsBegin(end) => {
                let thoughts = self.in_thoughts(end);
                return self.line_breaks(next, State::ThoughtsBegin(end), thoughts);
            }
            State::Thoughts(search) => return self.thoughts(search, next),
            State::ThoughtsEnd => {
                let content = self.content();
                return self.line_breaks(next, State::ThoughtsEnd, content);
            }
            State::BeforeObject { held, is_open } => return self.before_object(held, is_open, next),
            State::Text { search, follows_call } => return self.in_text_at(search, follows_call, next),
            State::Call(call) => return self.call(call, next),
            State::Head(head) => return self.head(head, next),
            State::ConvertedCall(call) => self.converted_call(call, next),
            State::CallEnd(tag) => return self.call_end(tag, next),
        }
        true
    }

    fn before_thoughts(&mut self, mut tag: Tag, end: &'static str, is_begun: bool, next: char) -> bool {
        match tag.feed(next) {
            Match::Partial => self.state = State::BeforeThoughts { tag, end, is_begun },
            Match::Whole => {
                self.markup(&tag.held);
                self.state = State::ThoughtsBegin(end);
            }
            Match::None => {
                self.state = if is_begun { State::ThoughtsBegin(end) } else { self.content() };
                self.again(&tag.held);
                return false;
            }
        }
        true
    }

    /// Reads the line breaks that belong to the tag before them.
    fn line_breaks(&mut self, next: char, same: State, then: State) -> bool {
        let is_break = next == '\n';
        self.state = if is_break { same } else { then };
        if is_break {
            self.markup("\n");
        }
        is_break
    }

    fn thoughts(&mut self, mut search: Search, next: char) -> bool {
        let found = search.feed(next);
        if found == TagMatch::Nothing || found == TagMatch::Failed {
            self.reasoning(&search.release());
        }
        match found {
            TagMatch::Nothing => self.reasoning(next.encode_utf8(&mut [0; 4])),
            TagMatch::Tag if Some(search.tag) == self.format.opening() => {
                self.call_opened(search.release());
                return true;
            }
            TagMatch::Tag => {
                self.markup(&search.release());
                self.state = State::ThoughtsEnd;
                return true;
            }
            TagMatch::Partial | TagMatch::Failed => {}
        }
        self.state = State::Thoughts(search);
        found != TagMatch::Failed
    }

    fn in_text_at(&mut self, mut search: Search, mut follows_call: bool, next: char) -> bool {
        let found = search.feed(next);
        if found == TagMatch::Nothing || found == TagMatch::Failed {
            self.text(&search.release());
            follows_call = false;
        }
        match found {
            TagMatch::Nothing => self.text(next.encode_utf8(&mut [0; 4])),
            TagMatch::Tag if Some(search.tag) == self.format.opening() => {
                self.call_opened(search.release());
                return true;
            }
            TagMatch::Tag => {
                let reasoning = self.special_tags.filter(|tags| tags.begin == search.tag);
                self.markup(&search.release());
                if let Some(tags) = reasoning {
                    self.state = State::ThoughtsBegin(tags.end);
                    return true;
                }
            }
            TagMatch::Partial | TagMatch::Failed => {}
        }
        self.state = State::Text { search, follows_call };
        found != TagMatch::Failed
    }

    fn call_opened(&mut self, held: String) {
        self.state = match self.format {
            ToolFormat::Llama3Json => State::BeforeObject { held, is_open: true },
            ToolFormat::QwenXml => State::Head(Head::new(held, FUNCTION, '>')),
            ToolFormat::Gemma4 => State::Head(Head::new(held, "call:", '{')),
            ToolFormat::Hermes | ToolFormat::None => State::Call(Call::new(held)),
        };
    }

    fn before_object(&mut self, mut held: String, is_open: bool, next: char) -> bool {
        // The first call needs no tag before it. Each further call must follow a semicolon.
        let may_begin = is_open || self.calls == 0;
        match next {
            '{' if may_begin => self.state = State::Call(Call::new(held)),
            ';' if !may_begin => {
                held.push(next);
                self.state = State::BeforeObject { held, is_open: true };
                return true;
            }
            _ if next.is_whitespace() => {
                held.push(next);
                self.state = State::BeforeObject { held, is_open };
                return true;
            }
            _ if is_open => {
                self.text(&held);
                self.state = self.in_text(false);
            }
            _ => {
                self.state = self.in_text(self.calls > 0);
                self.again(&held);
            }
        }
        false
    }

    fn call(&mut self, mut call: Call, next: char) -> bool {
        let mut seen = call.object.feed(next);
        if seen == Seen::Name && !self.is_known(&call.object) {
            seen = Seen::Broken;
        }
        if seen == Seen::Broken {
            self.broken(call.phase);
            return false;
        }
        match &mut call.phase {
            Phase::Held { text, begin, end } => {
                let at = text.len();
                match seen {
                    Seen::Arguments => *begin = at,
                    Seen::ArgumentsEnd => *end = at + 1, // after the closing brace, one byte
                    _ => {}
                }
                text.push(next);
            }
            Phase::Arguments => {
                let mut bytes = [0; 4];
                let next = &*next.encode_utf8(&mut bytes);
                self.arguments(next, next);
            }
            Phase::Tail => self.markup(next.encode_utf8(&mut [0; 4])),
        }
        if seen == Seen::ArgumentsEnd && matches!(call.phase, Phase::Arguments) {
            call.phase = Phase::Tail;
        }
        self.begin(&mut call, seen);
        self.state = match (seen, &call.phase) {
            (Seen::End, Phase::Held { text, .. }) => {
                self.text(text);
                self.in_text(false)
            }
            (Seen::End, Phase::Arguments | Phase::Tail) => self.ended(true),
            _ => State::Call(call),
        };
        true
    }

    /// Returns the beginning of a withheld call as soon as the call's name is known and either its
    /// arguments begin or the object ends.
    fn begin(&mut self, call: &mut Call, seen: Seen) {
        let Phase::Held { text, begin, end } = &call.phase else { return };
        let Some(name) = call.object.name() else { return };
        let (begin, end) = match (*begin, *end, seen) {
            // Hermes' tag shows that this is a call, although it has no arguments.
            (0, _, Seen::End) if self.format == ToolFormat::Hermes => (text.len(), text.len()),
            (0, _, _) => return,
            (begin, 0, _) => (begin, text.len()),
            (begin, end, _) => (begin, end),
        };
        let phase = if seen == Seen::Arguments { Phase::Arguments } else { Phase::Tail };
        let name = name.to_owned();
        let Phase::Held { text, .. } = std::mem::replace(&mut call.phase, phase) else {
            unreachable!("the phase was matched above")
        };
        self.markup(&text[..begin]);
        self.parts.push(ReplyPart::CallBegin { index: self.calls, name });
        self.calls += 1;
        self.arguments(&text[begin..end], &text[begin..end]);
        self.markup(&text[end..]);
    }

    /// Whether an object with this name can be a call. In a format without call tags, only the
    /// names of the request's tools count.
    fn is_known(&self, object: &CallObject) -> bool {
        self.format != ToolFormat::Llama3Json || self.tools.iter().any(|tool| Some(&*tool.name) == object.name())
    }

    /// Ends a call before a character that cannot be part of the call.
    fn broken(&mut self, phase: Phase) {
        self.state = match phase {
            Phase::Held { text, .. } => {
                self.text(&text);
                self.in_text(false)
            }
            Phase::Arguments => self.ended(false),
            Phase::Tail => self.ended(true),
        };
    }

    /// Reads the beginning of a call that is not JSON.
    fn head(&mut self, mut head: Head, next: char) -> bool {
        match head.feed(next) {
            HeadSeen::More => self.state = State::Head(head),
            HeadSeen::Name(name) => {
                self.markup(&head.into_texts().concat());
                self.state = State::ConvertedCall(Box::new(ConvertedCall::new(self.format, self.tools.clone(), &name)));
                self.parts.push(ReplyPart::CallBegin { index: self.calls, name });
                self.calls += 1;
            }
            HeadSeen::Broken => {
                let [opening, rest] = head.into_texts();
                self.text(&opening);
                self.state = self.in_text(false);
                self.again(&rest);
                return false;
            }
        }
        true
    }

    fn converted_call(&mut self, mut call: Box<ConvertedCall>, next: char) {
        let end = call.feed(next);
        self.add_arguments(&mut call);
        match end {
            None => self.state = State::ConvertedCall(call),
            Some(is_closed) => {
                self.state = self.ended(is_closed);
                self.again(&call.into_held());
            }
        }
    }

    /// Adds the arguments that a call has read since the last time.
    fn add_arguments(&mut self, call: &mut ConvertedCall) {
        let (json, written) = call.text();
        self.arguments(json, written);
        json.clear();
        written.clear();
    }

    /// Ends a call. Returns the state after the call.
    fn ended(&mut self, is_closed: bool) -> State {
        self.parts.push(ReplyPart::CallEnd { is_closed });
        match self.format.closing() {
            Some(tag) => State::CallEnd(Tag::new(tag)),
            None => State::BeforeObject { held: String::new(), is_open: false },
        }
    }

    fn call_end(&mut self, mut tag: Tag, next: char) -> bool {
        match tag.feed(next) {
            Match::Partial => self.state = State::CallEnd(tag),
            Match::Whole => {
                self.markup(&tag.held);
                self.state = self.in_text(true);
            }
            Match::None => {
                self.state = self.in_text(true);
                self.again(&tag.held);
                return false;
            }
        }
        true
    }

    /// Passes text that an earlier state withheld to the current state. Each character is withheld
    /// only once, because only a new call leads back to a state that withholds text.
    fn again(&mut self, held: &str) {
        held.chars().for_each(|next| self.take(next));
    }

    fn text(&mut self, text: &str) {
        self.add(ReplyPart::Text(String::new()), text);
    }

    /// Adds withheld text at the end of the reply. White space after a call is markup, not text.
    fn blank(&mut self, text: &str, follows_call: bool) {
        if follows_call && text.trim().is_empty() { self.markup(text) } else { self.text(text) }
    }

    fn reasoning(&mut self, text: &str) {
        self.add(ReplyPart::Reasoning(String::new()), text);
    }

    fn arguments(&mut self, json: &str, written: &str) {
        if json.is_empty() && written.is_empty() {
            return;
        }
        if !matches!(self.parts.last(), Some(ReplyPart::Arguments { .. })) {
            self.parts.push(ReplyPart::Arguments { json: String::new(), written: String::new() });
        }
        if let Some(ReplyPart::Arguments { json: whole, written: text }) = self.parts.last_mut() {
            whole.push_str(json);
            text.push_str(written);
        }
    }

    fn markup(&mut self, text: &str) {
        self.add(ReplyPart::Markup(String::new()), text);
    }

    /// Adds text to the last part if that part is of this kind, and otherwise to a new part.
    fn add(&mut self, kind: ReplyPart, text: &str) {
        if text.is_empty() {
            return;
        }
        let is_same =
            self.parts.last().is_some_and(|last| std::mem::discriminant(last) == std::mem::discriminant(&kind));
        if !is_same {
            self.parts.push(kind);
        }
        match self.parts.last_mut() {
            Some(ReplyPart::Text(whole) | ReplyPart::Reasoning(whole) | ReplyPart::Markup(whole)) => {
                whole.push_str(text);
            }
            _ => unreachable!("a part with text was added"),
        }
    }
}

/// Omits the text, which is the user's data.
impl std::fmt::Debug for ReplyParser {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "ReplyParser({:?}, {} calls)", self.format, self.calls)
    }
}

impl Call {
    /// A call that begins after `held`, the text that opened it.
    fn new(held: String) -> Self {
        Call { object: CallObject::new(), phase: Phase::Held { text: held, begin: 0, end: 0 } }
    }
}
