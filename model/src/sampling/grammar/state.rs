//! A compiled grammar and the state of its parser. The grammar computes which tokens may follow the
//! tokens produced so far.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::toktrie::SimpleVob;

use super::{error::GrammarError, parser::Parser, vocabulary::Vocabulary};

/// A compiled output format, for one sequence.
///
/// The allowed tokens depend only on the tokens produced, so a sequence may be preempted and
/// recomputed. The grammar keeps a parser that has read the tokens of the last call. The next call
/// continues after the leading tokens that it shares with the last call. A clone has a separate
/// parser and separate caches.
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    state: Mutex<State>,
}

struct State {
    /// A parser that has read no token.
    fresh: Parser,
    /// A parser that has read `seen`.
    parser: Parser,
    seen: Vec<u32>,
}

/// The set of tokens that may follow.
#[derive(Clone)]
pub struct AllowedTokens {
    set: SimpleVob, // [logits]
    only_ends: bool,
}

impl Grammar {
    pub(super) fn new(fresh: Parser, vocabulary: Arc<Vocabulary>) -> Self {
        let state = State { parser: fresh.clone(), fresh, seen: Vec::new() };
        Grammar { vocabulary, state: Mutex::new(state) }
    }

    /// The tokens that may follow `produced`. The result includes end tokens exactly when the
    /// output format is complete, and never includes other special tokens.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`]; [`GrammarError::DeadEnd`]; [`GrammarError::NotFollowed`] if
    /// `produced` has a token that was not allowed; [`GrammarError::Broken`]. The grammar can be
    /// used again after an error.
    pub fn allowed(&self, produced: &[u32]) -> Result<AllowedTokens, GrammarError> {
        let mut set = self.state().ask(produced, Parser::mask)?;
        set.and(&self.vocabulary.allowed);
        if set.is_zero() {
            return Err(GrammarError::DeadEnd { produced: produced.len() });
        }
        let mut others = set.clone();
        others.sub(&self.vocabulary.ends);
        Ok(AllowedTokens { only_ends: others.is_zero(), set })
    }

    /// The number of leading tokens of `next` that the grammar allows after `produced`.
    ///
    /// # Errors
    /// The errors of [`allowed`](Self::allowed).
    pub fn allowed_prefix_len(&self, produced: &[u32], next: &[u32]) -> Result<usize, GrammarError> {
        let vocabulary = &self.vocabulary.allowed;
        let is_plain = |token: &&u32| (**token as usize) < vocabulary.len() && vocabulary.is_allowed(**token);
        let plain = next.iter().take_while(is_plain).count();
        self.state().ask(produced, |parser| parser.allowed_prefix_len(&next[..plain]))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Poisoning is harmless: `Parser` catches panics, and `advance` compares `seen`
        // with the tokens produced.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Asks the parser once it has read `produced`.
    fn ask<T>(
        &mut self,
        produced: &[u32],
        question: impl FnOnce(&mut Parser) -> Result<T, GrammarError>,
    ) -> Result<T, GrammarError> {
        let answer = self.advance(produced).and_then(|()| question(&mut self.parser));
        if answer.is_err() {
            self.begin_again();
        }
        answer
    }

    fn advance(&mut self, produced: &[u32]) -> Result<(), GrammarError> {
        let common = produced.iter().zip(&self.seen).take_while(|(produced, seen)| produced == seen).count();
        // Drafts that were rejected are the last tokens that the parser has read.
        if self.seen.len() > common && self.parser.rollback(self.seen.len() - common).is_err() {
            self.begin_again();
        }
        self.seen.truncate(common);
        for &token in &produced[self.seen.len()..] {
            self.parser.read(token)?;
            self.seen.push(token);
        }
        Ok(())
    }

    fn begin_again(&mut self) {
        self.parser = self.fresh.clone();
        self.seen.clear();
    }
}

/// Gives the clone a separate parser and separate caches, so that sequences cannot use
/// up each other's limits.
impl Clone for Grammar {
    fn clone(&self) -> Self {
        let fresh = self.state().fresh.apart();
        Grammar::new(fresh, self.vocabulary.clone())
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Grammar({} tokens read)", self.state().seen.len())
    }
}

impl AllowedTokens {
    /// Whether a token may follow.
    pub fn contains(&self, token: u32) -> bool {
        (token as usize) < self.set.len() && self.set.is_allowed(token)
    }

    /// Number of tokens that may follow.
    pub fn count(&self) -> usize {
        self.set.num_set()
    }

    /// The ids of the tokens that may follow, ascending.
    pub fn ids(&self) -> Vec<u32> {
        self.set.to_list()
    }

    /// Whether only end tokens may follow.
    pub fn only_ends(&self) -> bool {
        self.only_ends
    }

    /// One bit per token of the vocabulary, in words of 32 bits. A bit is set if its token may
    /// follow.
    pub fn words(&self) -> &[u32] {
        self.set.as_slice()
    }
}

impl std::fmt::Debug for AllowedTokens {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "AllowedTokens({})", self.count())
    }
}
