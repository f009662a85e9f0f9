//! Why a start is refused by plan, and what would make it fit.

use bursar_budgets::{Bytes, Hint};
use thiserror::Error;

use super::Suggestion;

/// What is missing.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Lack {
    /// Memory, for the model's minimum or for a fixed size of keys and values.
    #[error(
        "it needs {} ({needed}), but only {} ({available}) can be leased: {} ({short_by}) short",
        needed.exact(),
        available.exact(),
        short_by.exact()
    )]
    Memory {
        /// Bytes of the plan.
        needed: Bytes,
        /// Bytes available.
        available: Bytes,
        /// Bytes missing.
        short_by: Bytes,
    },
    /// Keys and values for one sequence: a fixed size or share, or the room left, is too small.
    #[error("the KV cache would hold {tokens} tokens, but one sequence may have {context_tokens}")]
    Tokens {
        /// Tokens that they would hold.
        tokens: usize,
        /// Tokens that a sequence may have.
        context_tokens: usize,
    },
}

/// Why a start will not become READY. A plan and a start use the same words.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("the model does not fit: {lack}")]
pub struct Unfit {
    /// What is missing.
    pub lack: Lack,
    /// Each knob with the value that alone would make it fit. Knobs that cannot help have no value.
    pub suggestions: Vec<Suggestion>,
}

impl Unfit {
    /// Bytes of memory missing. 0 if something else is missing.
    pub fn short_by(&self) -> Bytes {
        match self.lack {
            Lack::Memory { short_by, .. } => short_by,
            Lack::Tokens { .. } => Bytes::ZERO,
        }
    }
}

impl Hint for Unfit {
    type Text = String;

    fn hint(&self) -> String {
        Suggestion::advice(&self.suggestions).unwrap_or_else(|| "use a larger device".to_owned())
    }
}
