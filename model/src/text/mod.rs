//! Text: messages -> prompt -> token ids, and token ids -> text -> the parts of a reply.

pub(crate) mod byte_level;
mod call_object;
pub mod chat_template;
pub mod detokenizer;
pub(crate) mod error;
mod final_turn;
pub mod message;
mod placeholder_texts;
pub mod prompt;
pub(crate) mod python_value;
pub mod reply_format;
pub mod reply_parser;
pub mod special_guard;
pub mod spelling;
pub mod stop_rules;
pub(crate) mod strftime;
mod template_meter;
mod template_metering;
pub mod template_source;
pub(crate) mod token_lists;
pub mod tokenizer;
pub(crate) mod vocabulary_files;

pub use chat_template::{ChatTemplate, TemplateInputs, TemplateLimits};
pub use detokenizer::Detokenizer;
pub use final_turn::ContinueError;
pub use message::{Message, Part, Role};
pub use placeholder_texts::PlaceholderTexts;
pub use prompt::PromptEncoder;
pub use reply_format::{ReasoningFormat, ReplyFormat, Thinking, ToolFormat};
pub use reply_parser::{ReplyParser, ReplyPart, ReplyPlace};
pub use spelling::Spelling;
pub use stop_rules::{StopFilter, StopReason, StopRules};
pub use template_source::TemplateSources;
pub(crate) use token_lists::{CONTROL, SPLITTERS, TokenLists};
pub use tokenizer::Tokenizer;
pub(crate) use vocabulary_files::VocabularyFiles;
