//! Why text cannot be turned into tokens, or back.

use thiserror::Error;

/// Why text could not be turned into tokens, or back.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TextError {
    /// `tokenizer.json`, or a file that stands for it, does not parse.
    #[error("the tokenizer could not be read: {reason}")]
    Tokenizer {
        /// What is wrong; the tokenizers library's words about `tokenizer.json`.
        reason: String,
    },
    /// Tokens spell text in a way that is not known here.
    #[error("the tokenizer's decoder is of a kind whose tokens cannot be read as bytes")]
    Spelling,
    /// The library failed on a text; the text is not repeated here.
    #[error("the tokenizer failed on a text of {bytes} bytes")]
    Encode {
        /// The text's length.
        bytes: usize,
    },
    /// The library failed on token ids.
    #[error("the tokenizer failed to decode {tokens} tokens")]
    Decode {
        /// How many.
        tokens: usize,
    },
    /// The template's source does not parse.
    #[error("the chat template does not compile, line {line}: {kind}")]
    TemplateSource {
        /// Line, from 1, or 0 when unknown.
        line: usize,
        /// The kind of fault.
        kind: String,
    },
    /// The checkpoint has templates, but none of this name.
    #[error("there is no chat template named {name}, known are {known}")]
    UnknownTemplate {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A chat template file that is not what it should be.
    #[error("the chat template in {file} is neither a text nor a list of named texts")]
    TemplateShape {
        /// The file.
        file: &'static str,
    },
    /// The template failed while rendering.
    #[error("the chat template failed in line {line}: {kind}")]
    Template {
        /// Line, from 1, or 0 when unknown.
        line: usize,
        /// The kind of fault.
        kind: String,
        /// The template engine's own words. They may quote a message: they are for the caller, never for a log.
        reason: PrivateText,
    },
    /// The template itself refuses these messages by `raise_exception`.
    #[error("the chat template refuses these messages (`raise_exception` in line {line})")]
    TemplateRefused {
        /// Line, from 1, or 0 when unknown.
        line: usize,
        /// What the template says. It may quote a message: it is for the caller, never for a log.
        reason: PrivateText,
    },
    /// The template took too many steps.
    #[error("the chat template did not end within {steps_max} steps")]
    TemplateSteps {
        /// The limit.
        steps_max: u64,
    },
    /// The template wrote too much.
    #[error("the chat template wrote more than {bytes_max} bytes")]
    TemplateBytes {
        /// The limit.
        bytes_max: usize,
    },
    /// The template's source is longer than any template's.
    #[error("the chat template has {bytes} bytes, the limit is {bytes_max}")]
    TemplateSourceBytes {
        /// Of all templates of the checkpoint.
        bytes: usize,
        /// The limit.
        bytes_max: usize,
    },
    /// A value in the template, or all of them together, became too large.
    #[error("the chat template made values of more than {bytes_max} bytes, line {line}")]
    TemplateMemory {
        /// Line, from 1, or 0 when unknown.
        line: usize,
        /// The limit that it met: one value's, or that of all.
        bytes_max: u64,
    },
    /// A stop string that would stop at once, or too many of them.
    #[error(
        "stop strings: {count} of at most {bytes_max} bytes are given, with {empty} empty; the limit is {count_max}"
    )]
    StopStrings {
        /// How many were given.
        count: usize,
        /// How many may be given.
        count_max: usize,
        /// How many of them are empty.
        empty: usize,
        /// Bytes one may have.
        bytes_max: usize,
    },
}

impl TextError {
    /// What the template says itself, as far as no error may show it: it may quote a message. For whoever wrote the
    /// messages, never for a log.
    pub fn reason(&self) -> Option<&str> {
        match self {
            TextError::Template { reason, .. } | TextError::TemplateRefused { reason, .. } => {
                Some(&*reason.0).filter(|reason| !reason.is_empty())
            }
            _ => None,
        }
    }

    /// What the user could change.
    pub fn hint(&self) -> String {
        match self {
            TextError::Tokenizer { .. } => "download tokenizer.json again".into(),
            TextError::Spelling => {
                "only byte-level, byte-fallback and metaspace tokenizers can follow a grammar".into()
            }
            TextError::Encode { .. } | TextError::Decode { .. } => {
                "report this with the tokenizer.json; the text is not needed if another one fails too".into()
            }
            TextError::TemplateSource { .. } | TextError::TemplateShape { .. } => {
                "check the chat template of the checkpoint against its source".into()
            }
            TextError::UnknownTemplate { known, .. } => format!("choose one of {known}"),
            TextError::Template { .. } => "the template may want other roles or fields than these messages have".into(),
            TextError::TemplateRefused { .. } => {
                "usually roles must alternate between user and assistant, with at most one system message first".into()
            }
            TextError::TemplateSourceBytes { .. } => {
                "this is no chat template; check it against the checkpoint's source".into()
            }
            TextError::TemplateSteps { .. } | TextError::TemplateBytes { .. } | TextError::TemplateMemory { .. } => {
                "shorten the conversation, or raise `TemplateLimits` if the template is to be trusted".into()
            }
            TextError::StopStrings { count_max, bytes_max, .. } => {
                format!("give at most {count_max} stop strings, none empty, none over {bytes_max} bytes")
            }
        }
    }
}

/// Text that may quote a user: readable by the caller, blank in `Debug` and in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateText(pub String);

impl std::fmt::Debug for PrivateText {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "PrivateText({} bytes)", self.0.len())
    }
}
