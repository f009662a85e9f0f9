//! Why a start is refused by plan, and what would make it possible.

use bursar_budgets::Bytes;
use thiserror::Error;

use super::Suggestion;

/// What is missing.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Lack {
    /// Memory: for what the model needs at least, or for a size of keys and values that was fixed.
    #[error(
        "it needs {} ({needed}), of which {} ({available}) can be leased: {} ({short_by}) short",
        needed.exact(),
        available.exact(),
        short_by.exact()
    )]
    Memory {
        /// The plan's total.
        needed: Bytes,
        /// What it could get.
        available: Bytes,
        /// The difference.
        short_by: Bytes,
    },
    /// Keys and values for a single sequence: a size or a share that was fixed is too small, or what is left.
    #[error("keys and values would hold {tokens} tokens, and one sequence may have {context_tokens}")]
    Tokens {
        /// What they would hold.
        tokens: usize,
        /// What a sequence may have.
        context_tokens: usize,
    },
}

/// Why a start will not come to READY: a plan and a start say it in these words.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("the model does not fit: {lack}")]
pub struct Unfit {
    /// What is missing.
    pub lack: Lack,
    /// Each knob with the value that alone would make it fit; those that cannot have none.
    pub suggestions: Vec<Suggestion>,
}

impl Unfit {
    /// How much memory is missing; nothing where it is not memory that is missing.
    pub fn short_by(&self) -> Bytes {
        match self.lack {
            Lack::Memory { short_by, .. } => short_by,
            Lack::Tokens { .. } => Bytes::ZERO,
        }
    }

    /// What to change.
    pub fn hint(&self) -> String {
        Suggestion::advice(&self.suggestions).unwrap_or_else(|| "use a larger device".to_owned())
    }
}
