//! Errors of tokenizers, chat templates and stop strings.

use bursar_budgets::Hint;
use thiserror::Error;

use super::final_turn::ContinueError;

/// A text that could not be tokenized, decoded or rendered, or stop strings that were refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TextError {
    /// `tokenizer.json`, or a file that replaces it, does not parse.
    #[error("the tokenizer could not be read: {reason}")]
    Tokenizer {
        /// The cause. For `tokenizer.json`, it is the message of the tokenizers library.
        reason: String,
    },
    /// The tokens of this kind of tokenizer decoder cannot be read as bytes.
    #[error("the tokens of this kind of tokenizer decoder cannot be read as bytes")]
    Spelling,
    /// The tokenizers library failed on a text, which this error does not quote.
    #[error("the tokenizer failed on a text of {bytes} bytes")]
    Encode {
        /// The text's length in bytes.
        bytes: usize,
    },
    /// The tokenizers library failed on token ids.
    #[error("the tokenizer failed to decode {tokens} tokens")]
    Decode { tokens: usize },
    /// The template's source does not parse.
    #[error("the chat template does not compile, line {line}: {kind}")]
    TemplateSource {
        /// Line, from 1, or 0 if unknown.
        line: usize,
        kind: String,
    },
    /// The checkpoint has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The checkpoint has no template with this name.
    #[error("there is no chat template named {name}; expected one of {known}")]
    UnknownTemplate {
        name: String,
        /// The names of the checkpoint's templates, separated by commas.
        known: String,
    },
    /// A chat template file has the wrong format.
    #[error("the chat template in {file} is neither a string nor a list of named strings")]
    TemplateShape { file: &'static str },
    /// The template failed while rendering.
    #[error("the chat template failed in line {line}: {kind}")]
    Template {
        /// Line, from 1, or 0 if unknown.
        line: usize,
        kind: String,
        /// The template engine's message, which may quote a chat message: show it to the
        /// caller, never log it.
        reason: PrivateText,
    },
    /// The template refuses these messages with `raise_exception`.
    #[error("the chat template rejects these messages (`raise_exception` in line {line})")]
    TemplateRefused {
        /// Line, from 1, or 0 if unknown.
        line: usize,
        /// The template's message, which may quote a chat message: show it to the
        /// caller, never log it.
        reason: PrivateText,
    },
    /// The template took more steps than [`TemplateLimits`](crate::text::TemplateLimits) allow.
    #[error("the chat template did not finish within {steps_max} steps")]
    TemplateSteps { steps_max: u64 },
    /// The rendered prompt is too long.
    #[error("the chat template wrote more than {bytes_max} bytes")]
    TemplateBytes { bytes_max: usize },
    /// The templates' sources are too long.
    #[error("the chat template has {bytes} bytes; the limit is {bytes_max}")]
    TemplateSourceBytes {
        /// Bytes of all templates of the checkpoint.
        bytes: usize,
        bytes_max: usize,
    },
    /// One value in the template, or all its values together, became too large.
    #[error("the chat template made values of more than {bytes_max} bytes in line {line}")]
    TemplateMemory {
        /// Line, from 1, or 0 if unknown.
        line: usize,
        /// The exceeded limit, for one value or for all values.
        bytes_max: u64,
    },
    /// The last turn cannot be continued.
    #[error(transparent)]
    Continue(#[from] ContinueError),
    /// The text has too many tokens. The rest of the text was not tokenized.
    #[error("the text has more than {limit} tokens")]
    TooManyTokens { limit: usize },
    /// A text to be tokenized is too long.
    #[error("the text has {bytes} bytes; the limit is {bytes_max}")]
    TooLong {
        /// The text's length in bytes.
        bytes: usize,
        bytes_max: usize,
    },
    /// There are too many stop strings, or one is empty or too long.
    #[error(
        "there are {count} stop strings, {empty} of them empty; expected at most {count_max}, each of 1 to {bytes_max} \
         bytes"
    )]
    StopStrings {
        count: usize,
        count_max: usize,
        empty: usize,
        /// Maximum bytes of one stop string.
        bytes_max: usize,
    },
}

impl TextError {
    /// Converts an error about a part of a text to an error about the whole text, whose
    /// limit is `tokens_max` tokens.
    pub(super) fn up_to(self, tokens_max: usize) -> Self {
        match self {
            TextError::TooManyTokens { .. } => TextError::TooManyTokens { limit: tokens_max },
            error => error,
        }
    }

    /// The template's message, which the error text omits because the message may quote a chat
    /// message. Show it to the author of the messages, never log it.
    pub fn reason(&self) -> Option<&str> {
        match self {
            TextError::Template { reason, .. } | TextError::TemplateRefused { reason, .. } => {
                Some(&*reason.0).filter(|reason| !reason.is_empty())
            }
            _ => None,
        }
    }
}

impl Hint for TextError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            TextError::Tokenizer { .. } => "download tokenizer.json again".into(),
            TextError::Spelling => {
                "use a model with a byte-level, byte-fallback or metaspace tokenizer: only these can follow a grammar"
                    .into()
            }
            TextError::Encode { .. } | TextError::Decode { .. } => {
                "report this with the tokenizer.json; leave the text out if another text fails too".into()
            }
            TextError::TemplateSource { .. } | TextError::TemplateShape { .. } => {
                "check the chat template of the checkpoint against its source".into()
            }
            TextError::NoTemplate => "use the release that was tuned for chats, add a `chat_template.jinja` to the \
                 checkpoint (servers: `--chat-template`), or give the whole prompt as text or tokens"
                .into(),
            TextError::UnknownTemplate { known, .. } => format!("choose one of {known}"),
            TextError::Template { .. } => "check the messages: the template may expect other roles or fields".into(),
            TextError::TemplateRefused { .. } => {
                "let the roles alternate between user and assistant, with at most one system message first".into()
            }
            TextError::TemplateSourceBytes { .. } => {
                "check it against the checkpoint's source; no chat template is this large".into()
            }
            TextError::TemplateSteps { .. } | TextError::TemplateBytes { .. } | TextError::TemplateMemory { .. } => {
                "shorten the conversation, or raise the template's limits if you trust the template".into()
            }
            TextError::Continue(error) => error.hint(),
            TextError::TooLong { .. } | TextError::TooManyTokens { .. } => "tokenize it in parts".into(),
            TextError::StopStrings { count_max, bytes_max, .. } => {
                format!("give at most {count_max} stop strings of 1 to {bytes_max} bytes each")
            }
        }
    }
}

/// Text that may quote a user. The caller can read it; `Debug` shows only its length.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateText(pub String);

impl std::fmt::Debug for PrivateText {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "PrivateText({} bytes)", self.0.len())
    }
}
