//! Grammars: replies that have a form by construction, because tokens that would break it cannot be chosen.
//!
//! The parsing is llguidance's (Microsoft's guidance project): an Earley parser over lexemes that are regexes by
//! derivatives, walked along a trie of the vocabulary's bytes. What is here: the vocabulary, limits, and a state that is
//! a function of the tokens produced.

mod compiler;
mod error;
mod fault_place;
mod output_format;
mod parser;
mod schema_rules;
mod state;
mod vocabulary;

pub use compiler::GrammarCompiler;
pub use error::GrammarError;
pub use output_format::{JsonWhitespace, OutputFormat};
pub use schema_rules::SchemaPlace;
pub use state::{AllowedTokens, Grammar};
