//! Errors of output formats and grammars.

use bursar_budgets::Hint;
use thiserror::Error;

use super::schema_place::SchemaPlace;
use crate::text::error::PrivateText;

/// An output format that was refused, or a grammar that failed. No variant shows generated text.
/// Quotes of the schema or the pattern are in `PrivateText`.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum GrammarError {
    /// A part of the output format exceeds its limit.
    #[error("the {part} has {value} {unit}; the limit is {limit}")]
    TooLarge {
        /// The part that is too large, such as the schema, the regular expression or
        /// the list of choices.
        part: &'static str,
        value: usize,
        unit: &'static str,
        limit: usize,
    },
    /// The list of choices is empty.
    #[error("the list of choices is empty")]
    NoChoice,
    /// The prompt ends inside reasoning whose closing tag is a special token, which no grammar can
    /// contain.
    #[error("the prompt ends inside reasoning, and this model's reasoning cannot precede an output format")]
    OpenReasoning,
    /// No grammar can contain calls in this format.
    #[error("tool calls in this format cannot be forced")]
    CallFormat,
    /// The schema cannot be used: it is not a valid schema, contradicts itself, or has a keyword
    /// that is not supported.
    #[error("the JSON schema cannot be used")]
    Schema {
        /// The place in the schema and the reason. The text may quote the schema: show it to the
        /// caller, and never log it.
        reason: PrivateText,
    },
    /// The schema uses a keyword that is not supported.
    #[error("the JSON schema has the keyword `{keyword}` at {place}, which is not supported")]
    Keyword { keyword: &'static str, place: SchemaPlace },
    /// The schema has a number that would be rounded.
    #[error("the JSON schema has a number in `{keyword}` at {place} that is beyond 2^53 and would be rounded")]
    Number {
        /// The keyword whose value is or contains the number.
        keyword: &'static str,
        place: SchemaPlace,
    },
    /// The pattern is not a regular expression.
    #[error("the regular expression is not valid at byte {at}: {kind}")]
    Regex {
        /// Byte offset in the pattern.
        at: usize,
        /// The kind of error, without quoting the pattern.
        kind: String,
    },
    /// The pattern uses a feature that no grammar can enforce token by token.
    #[error("the regular expression cannot be used")]
    UnsupportedRegex {
        /// The reason, which may quote the pattern: show it to the caller, never log it.
        reason: PrivateText,
    },
    /// The output format would take too much time or memory, in total or for one token.
    #[error("the format takes more work than is allowed")]
    TooComplex,
    /// The tokens produced so far do not follow the grammar.
    #[error("one of {produced} produced tokens does not follow the grammar")]
    NotFollowed {
        /// Number of tokens produced so far.
        produced: usize,
    },
    /// No token of the vocabulary spells the text that the output format requires next.
    #[error("after {produced} tokens the vocabulary has no token that the format allows")]
    DeadEnd {
        /// Number of tokens produced so far.
        produced: usize,
    },
    /// The parser failed because of a bug.
    #[error("the grammar's parser failed after {produced} tokens")]
    Broken {
        /// Number of tokens produced so far.
        produced: usize,
    },
    /// The tokens of this kind of tokenizer decoder cannot be read as bytes.
    #[error("the tokens of this kind of tokenizer decoder cannot be read as bytes")]
    Spelling,
    /// The vocabulary is larger than the parser's trie can hold.
    #[error("the vocabulary has {tokens} tokens of {bytes} bytes together; the limit is {bytes_max}")]
    Vocabulary { tokens: usize, bytes: usize, bytes_max: usize },
    /// The checkpoint has no end token, so a reply could not end.
    #[error("the checkpoint names no end token, so a reply with a format could not end")]
    NoEndToken,
}

impl GrammarError {
    /// A reason that the error message omits because the reason may quote the schema or the
    /// pattern. Show it to the author of the request, and never log it.
    pub fn reason(&self) -> Option<&str> {
        match self {
            GrammarError::Schema { reason } | GrammarError::UnsupportedRegex { reason } => Some(&reason.0),
            _ => None,
        }
    }
}

impl GrammarError {
    /// The faulty part of the schema, if the error message gives it (without names
    /// that the caller chose).
    pub fn place(&self) -> Option<&SchemaPlace> {
        match self {
            GrammarError::Keyword { place, .. } | GrammarError::Number { place, .. } => Some(place),
            _ => None,
        }
    }
}

impl Hint for GrammarError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            GrammarError::TooLarge { part, limit, unit, .. } => format!("shorten the {part} to {limit} {unit}"),
            GrammarError::NoChoice => "give at least one choice".into(),
            GrammarError::CallFormat => "leave the tool choice to the model".into(),
            GrammarError::OpenReasoning => "set `reasoning_effort` to `none`, or remove the format".into(),
            GrammarError::Schema { .. } => {
                "see the reason; among others, remote `$ref` and most look-around in patterns are not supported".into()
            }
            GrammarError::Keyword { .. } => "leave the keyword out, or express it with `anyOf`".into(),
            GrammarError::Number { .. } => "ask for such a number as a string, with a `pattern`".into(),
            GrammarError::Regex { .. } => "correct the regular expression; its syntax is that of Rust's regex".into(),
            GrammarError::UnsupportedRegex { .. } => {
                "the expression always applies to the whole reply: leave out look-around, word boundaries and inner \
                 anchors"
                    .into()
            }
            GrammarError::TooComplex => {
                "lower repetition counts and the number of properties, alternatives or patterns for one text, or set a bound where the schema has no bound"
                    .into()
            }
            GrammarError::DeadEnd { .. } => "ask for a format in characters that the model's tokenizer knows".into(),
            GrammarError::NotFollowed { .. } | GrammarError::Broken { .. } => {
                "this is a bug in Bursar; please report it with the schema or pattern, if it is not private".into()
            }
            GrammarError::Spelling => {
                "use a model with a byte-level, byte-fallback or metaspace tokenizer: only these can follow a \
                 grammar"
                    .into()
            }
            GrammarError::Vocabulary { .. } => "use another model: this one cannot follow grammars".into(),
            GrammarError::NoEndToken => "add `eos_token_id` to generation_config.json".into(),
        }
    }
}

/// A form of a whole reply that was refused.
#[derive(Debug, Error, PartialEq)]
#[error("{source}")]
pub struct ReplyFormError {
    /// The index of the tool at fault, from 0. `None` if the caller's form or the whole reply
    /// form is at fault.
    pub tool: Option<usize>,
    pub source: GrammarError,
}

impl ReplyFormError {
    /// Returns a function that adds the index of the tool at fault to an error.
    pub(super) fn of(tool: usize) -> impl Fn(GrammarError) -> Self {
        move |source| ReplyFormError { tool: Some(tool), source }
    }
}

impl From<GrammarError> for ReplyFormError {
    fn from(source: GrammarError) -> Self {
        ReplyFormError { tool: None, source }
    }
}
