//! Why a reply cannot be held to a form.

use thiserror::Error;

use super::schema_rules::SchemaPlace;
use crate::text::error::PrivateText;

/// Why a reply could not be held to a form. No variant shows text that was generated; what quotes the schema or the
/// pattern is private.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum GrammarError {
    /// More than is looked at.
    #[error("the {part} has {value} {unit}, of at most {limit}")]
    TooLarge {
        /// Schema, pattern, choices.
        part: &'static str,
        /// Its size.
        value: usize,
        /// What the size counts.
        unit: &'static str,
        /// The largest size.
        limit: usize,
    },
    /// A list of choices without any.
    #[error("there is no choice to choose from")]
    NoChoice,
    /// The schema cannot be followed: it is no schema, contradicts itself, or uses a keyword that is not supported.
    #[error("the JSON schema cannot be followed")]
    Schema {
        /// Where and why. It may quote the schema: it is for the caller, never for a log.
        reason: PrivateText,
    },
    /// A keyword of the schema that is not supported.
    #[error("the JSON schema has `{keyword}` at {place}, which is not supported")]
    Keyword {
        /// The keyword.
        keyword: &'static str,
        /// The schema that it stands in.
        place: SchemaPlace,
    },
    /// A number of the schema that would be rounded.
    #[error("the JSON schema has a number in `{keyword}` at {place} that is beyond 2^53 and would be rounded")]
    Number {
        /// The keyword whose value it is or is in.
        keyword: &'static str,
        /// The schema that it stands in.
        place: SchemaPlace,
    },
    /// The pattern is not a regular expression.
    #[error("the regular expression is wrong at byte {at}: {kind}")]
    Regex {
        /// Where in the pattern.
        at: usize,
        /// The kind of fault.
        kind: String,
    },
    /// The pattern uses what cannot be followed token by token.
    #[error("the regular expression cannot be followed")]
    UnsupportedRegex {
        /// Why. It may quote the pattern: it is for the caller, never for a log.
        reason: PrivateText,
    },
    /// It would take too much time or memory, at once or for one token.
    #[error("the form takes more work than is allowed for it")]
    TooComplex,
    /// The tokens produced so far do not follow the grammar.
    #[error("of {produced} tokens produced, one does not follow the grammar")]
    NotFollowed {
        /// How many tokens were produced.
        produced: usize,
    },
    /// No token of the vocabulary spells what must come next.
    #[error("after {produced} tokens the vocabulary has none that the form allows")]
    DeadEnd {
        /// How many tokens were produced.
        produced: usize,
    },
    /// The parser broke.
    #[error("the grammar's parser failed after {produced} tokens")]
    Broken {
        /// How many tokens were produced.
        produced: usize,
    },
    /// Tokens spell text in a way that is not known here.
    #[error("the tokenizer's decoder is of a kind whose tokens cannot be read as bytes")]
    Spelling,
    /// The vocabulary is larger than the parser's trie can hold.
    #[error("the vocabulary has {tokens} tokens of {bytes} bytes together, of at most {bytes_max}")]
    Vocabulary {
        /// How many tokens.
        tokens: usize,
        /// Their bytes.
        bytes: usize,
        /// The limit.
        bytes_max: usize,
    },
    /// Nothing would end a reply.
    #[error("the checkpoint names no end token, so a form could not end")]
    NoEndToken,
}

impl GrammarError {
    /// Where and why, as far as no error may show it: it may quote the schema or the pattern. For whoever wrote them, never
    /// for a log.
    pub fn reason(&self) -> Option<&str> {
        match self {
            GrammarError::Schema { reason } | GrammarError::UnsupportedRegex { reason } => Some(&reason.0),
            _ => None,
        }
    }

    /// What the user could change.
    pub fn hint(&self) -> String {
        match self {
            GrammarError::TooLarge { part, limit, unit, .. } => format!("shorten the {part} to {limit} {unit}"),
            GrammarError::NoChoice => "give at least one choice".into(),
            GrammarError::Schema { .. } => {
                "the reason says what; remote `$ref` and overlapping `oneOf` are among what is not supported (use `anyOf`)"
                    .into()
            }
            GrammarError::Keyword { .. } => "leave the keyword out, or say the same with `anyOf`".into(),
            GrammarError::Number { .. } => "ask for such a number as a string, with a `pattern`".into(),
            GrammarError::Regex { .. } => "correct the regular expression; its syntax is that of Rust's regex".into(),
            GrammarError::UnsupportedRegex { .. } => {
                "the whole reply must match already: leave out look-around, word boundaries and inner anchors".into()
            }
            GrammarError::TooComplex => {
                "lower counts of repetition and numbers of properties, alternatives or patterns for one text, or set a bound where there is none".into()
            }
            GrammarError::DeadEnd { .. } => "ask for a form in characters that the model's tokenizer knows".into(),
            GrammarError::NotFollowed { .. } | GrammarError::Broken { .. } => {
                "this is a bug in Bursar; please report it with the schema or pattern, if it is not private".into()
            }
            GrammarError::Spelling => {
                "only byte-level, byte-fallback and metaspace tokenizers can follow a grammar".into()
            }
            GrammarError::Vocabulary { .. } => "this model cannot follow grammars".into(),
            GrammarError::NoEndToken => "add `eos_token_id` to generation_config.json".into(),
        }
    }
}
