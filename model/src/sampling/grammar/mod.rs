//! Grammars: a reply keeps to its form because tokens that would break it cannot be chosen.
//!
//! llguidance (Microsoft's guidance project) does the parsing: an Earley parser over lexemes, which
//! are regexes matched by derivatives, along a trie of the vocabulary's bytes. This module adds the
//! vocabulary, limits, and a state that depends only on the tokens produced.

mod closed_objects;
mod compiler;
mod error;
mod fault_place;
mod look_ahead;
mod output_format;
mod parser;
mod reply_form;
mod rewritten_schema;
mod schema_rules;
mod state;
mod vocabulary;

pub use closed_objects::close_objects;
pub use compiler::GrammarCompiler;
pub use error::{GrammarError, ReplyFormError};
pub use output_format::{JsonWhitespace, OutputFormat};
pub use reply_form::{CallableTool, ForcedCalls, ReplyForm};
pub use rewritten_schema::NotFollowed;
pub use schema_rules::SchemaPlace;
pub use state::{AllowedTokens, Grammar};
