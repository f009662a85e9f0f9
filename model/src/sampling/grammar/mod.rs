//! Grammars for structured output: tokens that would violate the output format are masked.
//!
//! The parser is llguidance, from Microsoft's guidance project: an Earley parser over lexemes that
//! runs along a trie of the vocabulary's bytes. Lexemes are regexes matched by derivatives. This
//! module adds the vocabulary, limits, and a state that depends only on the tokens produced.

mod closed_objects;
mod compiler;
mod error;
mod fault_place;
mod lark_rules;
mod look_ahead;
mod output_format;
mod parser;
mod reply_form;
mod rewritten_schema;
mod schema_place;
mod schema_rules;
mod state;
mod vocabulary;
mod xml_call_rules;

pub use closed_objects::close_objects;
pub use compiler::GrammarCompiler;
pub use error::{GrammarError, ReplyFormError};
pub use output_format::{JsonWhitespace, OutputFormat};
pub use reply_form::{ForcedCalls, ReplyForm};
pub use rewritten_schema::NotFollowed;
pub use schema_place::SchemaPlace;
pub use state::{AllowedTokens, Grammar};
