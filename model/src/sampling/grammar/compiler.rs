//! The grammar compiler: output formats to grammars over one model's vocabulary.

use std::sync::Arc;

use llguidance::{ParserFactory, api::ParserLimits};

use super::{
    error::GrammarError, fault_place::place, output_format::OutputFormat, parser::Parser, state::Grammar,
    vocabulary::Vocabulary,
};
use crate::text::{Tokenizer, error::PrivateText};

/// Bytes of a reason that is passed on.
const REASON_BYTES_MAX: usize = 400;

/// Makes grammars for one model. Making it walks the whole vocabulary: a model needs one, and only once a request has a
/// form.
pub struct GrammarCompiler {
    factory: ParserFactory,
    vocabulary: Arc<Vocabulary>,
}

impl GrammarCompiler {
    /// For a model with `vocabulary` logits whose replies are ended by `end_tokens`.
    ///
    /// # Errors
    /// [`GrammarError::Spelling`], [`GrammarError::Vocabulary`], [`GrammarError::NoEndToken`].
    pub fn new(tokenizer: &Tokenizer, vocabulary: usize, end_tokens: &[u32]) -> Result<Self, GrammarError> {
        let vocabulary = Arc::new(Vocabulary::new(tokenizer, vocabulary, end_tokens)?);
        // Slices are sets of tokens that most strings allow as a whole; they make masks cheap inside strings.
        let mut factory = ParserFactory::new_simple(&vocabulary.tokens).map_err(|_| GrammarError::TooComplex)?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(GrammarCompiler { factory, vocabulary })
    }

    /// Compiles a form. It takes milliseconds, tens for a large one: not for a thread that others wait for.
    ///
    /// # Errors
    /// [`GrammarError`]: too large, not understood, unsupported, or too complex.
    pub fn compile(&self, format: &OutputFormat) -> Result<Grammar, GrammarError> {
        let parser = self.parser(format).map_err(|error| self.placed(format, error))?;
        // What is too complex for the first token is so for the caller, not for the lane. It also warms the caches up.
        let grammar = Grammar::new(parser, self.vocabulary.clone());
        grammar.allowed(&[]).map_err(|error| match error {
            GrammarError::DeadEnd { .. } => refusal(format, "nothing that the vocabulary can spell has this form"),
            error => error,
        })?;
        Ok(grammar)
    }

    fn parser(&self, format: &OutputFormat) -> Result<Parser, GrammarError> {
        let parser = self.factory.create_parser(format.grammar()?);
        parser.map(Parser::new).map_err(|error| refusal(format, &error.to_string()))
    }

    /// The same refusal, with the place in the schema where it can be found.
    fn placed(&self, format: &OutputFormat, error: GrammarError) -> GrammarError {
        let (OutputFormat::JsonSchema { schema, .. }, GrammarError::Schema { reason }) = (format, &error) else {
            return error;
        };
        let place = place(schema, |part| self.parser(&OutputFormat::json(part)).is_err_and(|other| other == error));
        let Some(place) = place else { return error };
        GrammarError::Schema { reason: PrivateText(format!("{}, at {place}", reason.0)) }
    }
}

/// What one form may take, against those that were made to take much: neighbours wait for each token. Of a token's fuel
/// 1,000 are up to a millisecond; llguidance's default is 200,000. Its 250,000 lexer states are some 400 MB.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1_000,
        step_lexer_fuel: 80_000,
        step_max_items: 20_000,
        max_lexer_states: 32_768,
        max_grammar_size: 200_000,
        // Errors are not to quote what was generated.
        verbose_errors: false,
        // Trades a compile time of seconds for faster masks in very large patterns.
        precompute_large_lexemes: false,
        ..ParserLimits::default()
    }
}

/// The library's refusals are sentences; the limits among them are recognised by theirs.
fn refusal(format: &OutputFormat, error: &str) -> GrammarError {
    const LIMITS: [&str; 8] =
        ["too big", "too large", "too complex", "fuel", "limit", "stack level", "exceeded", "too many"];
    let first_line = error.lines().next().unwrap_or_default();
    if LIMITS.iter().any(|word| first_line.contains(word)) {
        return GrammarError::TooComplex;
    }
    // What made the library panic says nothing to a caller.
    let first_line = if first_line.starts_with("panic") { "the form is not understood" } else { first_line };
    let end = (0..=REASON_BYTES_MAX.min(first_line.len())).rev().find(|&end| first_line.is_char_boundary(end));
    let reason = PrivateText(first_line[..end.unwrap_or(0)].to_owned());
    match format {
        OutputFormat::JsonSchema { .. } => GrammarError::Schema { reason },
        OutputFormat::Regex(_) | OutputFormat::Choice(_) => GrammarError::UnsupportedRegex { reason },
    }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "GrammarCompiler({} tokens)", self.vocabulary.allowed.len())
    }
}
