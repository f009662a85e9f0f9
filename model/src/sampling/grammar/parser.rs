//! A wrapper around llguidance's parser that catches panics and hides messages, which may quote
//! generated text.

use std::panic::AssertUnwindSafe;

use llguidance::{TokenParser, api::StopReason, panic_utils::catch_unwind, toktrie::SimpleVob};

use super::error::GrammarError;

/// A parser that has read the first tokens of a reply. After any error except
/// [`GrammarError::NotFollowed`], it returns only errors.
///
/// llguidance's `Matcher` does nearly the same, but replaces the reason of a stop with a sentence
/// that may quote generated text.
#[derive(Clone)]
pub(super) struct Parser {
    inner: TokenParser,
    tokens_read: usize,
}

impl Parser {
    /// Takes a parser that has not read any token.
    pub(super) fn new(mut inner: TokenParser) -> Self {
        inner.start_without_prompt();
        Parser { inner, tokens_read: 0 }
    }

    /// A copy with separate caches. Clones share their caches.
    pub(super) fn apart(&self) -> Self {
        Parser { inner: self.inner.deep_clone(), tokens_read: self.tokens_read }
    }

    /// Advances by one produced token.
    ///
    /// # Errors
    /// [`GrammarError::NotFollowed`] if the token is not allowed; otherwise the errors of
    /// [`mask`](Self::mask).
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

    /// Goes back by the last `tokens` tokens.
    ///
    /// # Errors
    /// [`GrammarError::Broken`] if fewer tokens were read. If the parser has failed before, the
    /// errors of [`mask`](Self::mask).
    pub(super) fn rollback(&mut self, tokens: usize) -> Result<(), GrammarError> {
        self.guarded(|inner| inner.rollback(tokens))?;
        self.tokens_read -= tokens;
        Ok(())
    }

    /// The number of leading tokens of `tokens` that are allowed. The parser does not advance.
    ///
    /// # Errors
    /// The errors of [`mask`](Self::mask).
    pub(super) fn allowed_prefix_len(&mut self, tokens: &[u32]) -> Result<usize, GrammarError> {
        self.guarded(|inner| inner.validate_tokens_raw(tokens))
    }

    /// The tokens that may follow. After the end of the output format, these are only end tokens.
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

    /// The reason why the parser stopped, without its message.
    fn failure(&self) -> GrammarError {
        match self.inner.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => GrammarError::TooComplex,
            StopReason::NoExtensionBias => GrammarError::DeadEnd { produced: self.tokens_read },
            _ => GrammarError::Broken { produced: self.tokens_read },
        }
    }
}
