//! The grammar compiler, which turns output formats into grammars over a model's vocabulary.

use std::sync::Arc;

use llguidance::{ParserFactory, api::ParserLimits};

use super::{
    error::{GrammarError, ReplyFormError},
    fault_place::place,
    output_format::OutputFormat,
    parser::Parser,
    reply_form::ReplyForm,
    state::Grammar,
    vocabulary::Vocabulary,
};
use crate::text::{Thinking, Tokenizer, error::PrivateText};

/// Maximum bytes of a reason that is passed on to the caller.
const REASON_BYTES_MAX: usize = 400;

/// Compiles grammars for one model. Creating a compiler reads the whole vocabulary, so each model
/// has a single compiler, created at the first request with a reply form.
pub struct GrammarCompiler {
    factory: ParserFactory,
    vocabulary: Arc<Vocabulary>,
}

impl GrammarCompiler {
    /// A compiler for a model with `vocabulary` logits, whose replies end with `end_tokens`.
    ///
    /// # Errors
    /// [`GrammarError::Spelling`], [`GrammarError::Vocabulary`], [`GrammarError::NoEndToken`].
    pub fn new(tokenizer: &Tokenizer, vocabulary: usize, end_tokens: &[u32]) -> Result<Self, GrammarError> {
        let vocabulary = Arc::new(Vocabulary::new(tokenizer, vocabulary, end_tokens)?);
        // `new_simple` enables slices: sets of tokens that most strings allow as a whole, which
        // make masks cheap inside strings.
        let mut factory = ParserFactory::new_simple(&vocabulary.tokens).map_err(|_| GrammarError::TooComplex)?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(GrammarCompiler { factory, vocabulary })
    }

    /// Compiles an output format. Compilation takes milliseconds, or tens of milliseconds for a
    /// large format, so do not call this function on a thread that other requests wait for.
    ///
    /// # Errors
    /// [`GrammarError`] if the format is too large, malformed, unsupported or too complex.
    pub fn compile(&self, format: &OutputFormat) -> Result<Grammar, GrammarError> {
        let parser = self.parser(format).map_err(|error| self.placed(format, error))?;
        self.tried(parser, |reason| refusal(format, reason))
    }

    /// Compiles the form of a whole reply, which may begin with reasoning. Reasoning is any text up
    /// to its end tag. If the tags are special tokens, reasoning is not allowed: the reply begins with the
    /// form.
    ///
    /// # Errors
    /// Same as [`compile`](Self::compile), with the index of the tool if one tool is at fault, and
    /// [`GrammarError::OpenReasoning`].
    pub fn compile_reply(&self, form: &ReplyForm, thinking: Thinking) -> Result<Grammar, ReplyFormError> {
        let thinking = match thinking {
            Thinking::Begun(tags) if tags.are_special => return Err(GrammarError::OpenReasoning.into()),
            Thinking::Possible(tags) if tags.are_special => Thinking::Off,
            thinking => thinking,
        };
        if let (ReplyForm::Format(format), Thinking::Off) = (form, thinking) {
            return Ok(self.compile(format)?);
        }
        let grammar = form.grammar(thinking).map_err(|error| match form.part(error.tool) {
            Some(part) => ReplyFormError { source: self.placed(&part, error.source), ..error },
            None => error,
        })?;
        let parser = self.factory.create_parser(grammar);
        let parser = parser.map_err(|error| self.explained(form, whole_refusal(&error.to_string())))?;
        Ok(self.tried(Parser::new(parser), whole_refusal)?)
    }

    /// Narrows a schema error of the whole form down to the first part that is also refused when
    /// compiled separately. A form that is too complex is not compiled again: each part may be
    /// accepted, and compiling all parts may take as long as compiling the whole form.
    fn explained(&self, form: &ReplyForm, error: GrammarError) -> ReplyFormError {
        if !matches!(error, GrammarError::Schema { .. }) {
            return error.into();
        }
        // The parts are tried in the grammar's order, so that the parts before the faulty one are
        // known to be within the limits of the whole form.
        let refused = |tool| {
            let part = form.part(tool)?;
            let error = self.parser(&part).err()?;
            Some(ReplyFormError { tool, source: self.placed(&part, error) })
        };
        let mut parts = std::iter::once(None).chain((0..form.tools().len()).map(Some));
        parts.find_map(refused).unwrap_or_else(|| error.into())
    }

    /// Computes the tokens that may begin a reply, so that a format that is too complex for its
    /// first token fails here, in the caller, and not in the lane. The computation also fills the
    /// caches.
    fn tried(&self, parser: Parser, refused: impl Fn(&str) -> GrammarError) -> Result<Grammar, GrammarError> {
        let grammar = Grammar::new(parser, self.vocabulary.clone());
        match grammar.allowed(&[]) {
            Ok(_) => Ok(grammar),
            Err(GrammarError::DeadEnd { .. }) => Err(refused("the vocabulary cannot spell any text of this format")),
            Err(error) => Err(error),
        }
    }

    fn parser(&self, format: &OutputFormat) -> Result<Parser, GrammarError> {
        let parser = self.factory.create_parser(format.grammar()?);
        parser.map(Parser::new).map_err(|error| refusal(format, &error.to_string()))
    }

    /// Adds a JSON pointer to the faulty part of the schema to an error, if that part can be found.
    fn placed(&self, format: &OutputFormat, error: GrammarError) -> GrammarError {
        let (OutputFormat::JsonSchema { schema, .. }, GrammarError::Schema { reason }) = (format, &error) else {
            return error;
        };
        let place = place(schema, |part| self.parser(&OutputFormat::json(part)).is_err_and(|other| other == error));
        let Some(place) = place else { return error };
        GrammarError::Schema { reason: PrivateText(format!("{}, at #{place}", reason.0)) }
    }
}

/// Limits against hostile output formats. The limits are low because the other sequences of a step
/// wait while a grammar computes the tokens that may follow. 1,000 units of lexer fuel take up to a
/// millisecond; llguidance's default per token is 200,000 units. llguidance's default of 250,000
/// lexer states takes about 400 MB.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1_000,
        step_lexer_fuel: 80_000,
        step_max_items: 20_000,
        max_lexer_states: 32_768,
        max_grammar_size: 200_000,
        // Errors must not quote generated text.
        verbose_errors: false,
        // Precomputing would speed up masks of very large patterns, but compiling would take
        // seconds.
        precompute_large_lexemes: false,
        ..ParserLimits::default()
    }
}

/// Same as [`whole_refusal`], but errors in a regular expression or a list of choices become
/// [`GrammarError::UnsupportedRegex`].
fn refusal(format: &OutputFormat, error: &str) -> GrammarError {
    match (format, whole_refusal(error)) {
        (OutputFormat::Regex(_) | OutputFormat::Choice(_), GrammarError::Schema { reason }) => {
            GrammarError::UnsupportedRegex { reason }
        }
        (_, refusal) => refusal,
    }
}

/// Converts an error of llguidance. llguidance reports sentences, so exceeded limits are recognized
/// by words in the first line.
fn whole_refusal(error: &str) -> GrammarError {
    const LIMITS: [&str; 8] =
        ["too big", "too large", "too complex", "fuel", "limit", "stack level", "exceeded", "too many"];
    let first_line = error.lines().next().unwrap_or_default();
    if LIMITS.iter().any(|word| first_line.contains(word)) {
        return GrammarError::TooComplex;
    }
    // The message of a panic in llguidance would not help the caller.
    let first_line = if first_line.starts_with("panic") { "the format is not valid" } else { first_line };
    let end = (0..=REASON_BYTES_MAX.min(first_line.len())).rev().find(|&end| first_line.is_char_boundary(end));
    GrammarError::Schema { reason: PrivateText(first_line[..end.unwrap_or(0)].to_owned()) }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "GrammarCompiler({} tokens)", self.vocabulary.allowed.len())
    }
}
