//! Refusal of a start by plan, and the changes that would make it fit.

use bursar_budgets::{Bytes, Hint};
use thiserror::Error;

use super::Suggestion;

#[derive(Clone, Debug, PartialEq, Error)]
pub enum Lack {
    /// Memory is missing for the model's minimum, or for a fixed size of the KV cache.
    #[error(
        "it needs {} ({needed}), but only {} ({available}) can be leased: {} ({short_by}) short",
        needed.exact(),
        available.exact(),
        short_by.exact()
    )]
    Memory { needed: Bytes, available: Bytes, short_by: Bytes },
    /// The KV cache is too small for one sequence, because of a fixed size, a fraction, or
    /// too little free memory.
    #[error("the KV cache would hold {tokens} tokens, but one sequence may have {context_tokens}")]
    Tokens {
        /// Tokens that the cache would hold.
        tokens: usize,
        /// Tokens that a sequence may have.
        context_tokens: usize,
    },
}

/// Why a start will not become READY. A plan and a start report this error with the same text.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("the model does not fit: {lack}")]
pub struct Unfit {
    pub lack: Lack,
    /// Each knob with a value that makes the model fit if no other knob is changed. Knobs that
    /// cannot help have no value.
    pub suggestions: Vec<Suggestion>,
}

impl Unfit {
    /// Missing bytes of memory. 0 if something else is missing.
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
