//! The parser: llguidance's, with its panics and its words kept in.

use std::panic::AssertUnwindSafe;

use llguidance::{TokenParser, api::StopReason, panic_utils::catch_unwind, toktrie::SimpleVob};

use super::error::GrammarError;

/// A parser somewhere in a reply. After an error it answers nothing but errors.
///
/// llguidance's own `Matcher` does nearly the same, but forgets why a parser stopped and keeps a sentence instead, which
/// may quote what was generated.
#[derive(Clone)]
pub(super) struct Parser {
    inner: TokenParser,
    tokens_read: usize,
}

impl Parser {
    /// `inner` has read nothing.
    pub(super) fn new(mut inner: TokenParser) -> Self {
        inner.start_without_prompt();
        Parser { inner, tokens_read: 0 }
    }

    /// A parser with caches of its own: clones share theirs.
    pub(super) fn apart(&self) -> Self {
        Parser { inner: self.inner.deep_clone(), tokens_read: self.tokens_read }
    }

    /// Reads a token that was produced.
    ///
    /// # Errors
    /// [`GrammarError::NotFollowed`] for one that may not follow, else as [`mask`](Self::mask).
    pub(super) fn read(&mut self, token: u32) -> Result<(), GrammarError> {
        let follows = self.guarded(|inner| inner.validate_token(token))?;
        if !follows {
            return Err(GrammarError::NotFollowed { produced: self.tokens_read + 1 });
        }
        self.guarded(|inner| inner.consume_token(token))?;
        self.guarded(TokenParser::check_stop)?;
        self.tokens_read += 1;
        Ok(())
    }

    /// The tokens that may follow; only end tokens after the end.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`], [`GrammarError::DeadEnd`], [`GrammarError::Broken`].
    pub(super) fn mask(&mut self) -> Result<SimpleVob, GrammarError> {
        match self.inner.stop_reason() {
            StopReason::NoExtension | StopReason::EndOfSentence => Ok(self.inner.token_env.tok_trie().eos_token_set()),
            _ => self.guarded(TokenParser::compute_mask),
        }
    }

    fn guarded<T>(&mut self, step: impl FnOnce(&mut TokenParser) -> anyhow::Result<T>) -> Result<T, GrammarError> {
        let inner = &mut self.inner;
        catch_unwind(AssertUnwindSafe(|| step(inner))).map_err(|_| self.failure())
    }

    /// Why the parser stopped, without its words.
    fn failure(&self) -> GrammarError {
        match self.inner.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => GrammarError::TooComplex,
            StopReason::NoExtensionBias => GrammarError::DeadEnd { produced: self.tokens_read },
            _ => GrammarError::Broken { produced: self.tokens_read },
        }
    }
}
