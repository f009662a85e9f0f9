//! A grammar in use: the tokens that may follow, as a function of those produced.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::toktrie::SimpleVob;

use super::{error::GrammarError, parser::Parser, vocabulary::Vocabulary};

/// A compiled form, for the tokens of one sequence.
///
/// What it allows depends on the tokens produced and on nothing else: a parser is kept where it was last asked, goes on
/// from there if it can, and begins again if it cannot. So a sequence may die and be computed anew. A clone has a parser
/// and caches of its own.
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    state: Mutex<State>,
}

struct State {
    /// A parser that has read nothing.
    fresh: Parser,
    /// A parser that has read `seen`.
    parser: Parser,
    seen: Vec<u32>,
}

/// Tokens that may follow.
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

    /// The tokens that may follow `produced`. End tokens are among them exactly when the form is complete, special
    /// tokens never.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`], [`GrammarError::DeadEnd`], [`GrammarError::NotFollowed`] for tokens that were not
    /// allowed, and [`GrammarError::Broken`]. The grammar can be asked again, about other tokens.
    pub fn allowed(&self, produced: &[u32]) -> Result<AllowedTokens, GrammarError> {
        let mut set = self.state().ask(produced)?;
        set.and(&self.vocabulary.allowed);
        if set.is_zero() {
            return Err(GrammarError::DeadEnd { produced: produced.len() });
        }
        let mut others = set.clone();
        others.sub(&self.vocabulary.ends);
        Ok(AllowedTokens { only_ends: others.is_zero(), set })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The parser catches its own panics; and a state that was left half-way is found out by what it has seen.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn ask(&mut self, produced: &[u32]) -> Result<SimpleVob, GrammarError> {
        let answer = self.advance(produced).and_then(|()| self.parser.mask());
        if answer.is_err() {
            self.begin_again();
        }
        answer
    }

    fn advance(&mut self, produced: &[u32]) -> Result<(), GrammarError> {
        if !produced.starts_with(&self.seen) {
            self.begin_again();
        }
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

/// An independent parser with caches of its own, so that neighbours cannot use up each other's limits.
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

    /// How many may follow.
    pub fn count(&self) -> usize {
        self.set.num_set()
    }

    /// Those that may follow, by id.
    pub fn ids(&self) -> Vec<u32> {
        self.set.to_list()
    }

    /// Whether nothing may follow but an end token.
    pub fn only_ends(&self) -> bool {
        self.only_ends
    }

    /// A bit for each token that may follow, in words of 32.
    pub fn words(&self) -> &[u32] {
        self.set.as_slice()
    }
}

impl std::fmt::Debug for AllowedTokens {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "AllowedTokens({})", self.count())
    }
}
