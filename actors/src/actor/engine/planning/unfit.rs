//! Errors for a start that its memory plan refuses: the resource that is missing on a device, or
//! on each number of devices, and the changes that would make the model fit.

use std::fmt;

use bursar_budgets::{Bytes, Hint};
use serde::{Serialize, Serializer};
use thiserror::Error;

use super::Suggestion;

#[derive(Clone, Debug, PartialEq, Error)]
pub enum Shortfall {
    /// There is too little memory for the model's minimum, or for a KV cache of fixed size.
    #[error(
        "it needs {} ({needed}), but only {} ({available}) can be leased: {} ({short_by}) short",
        needed.exact(),
        available.exact(),
        short_by.exact()
    )]
    Memory { needed: Bytes, available: Bytes, short_by: Bytes },
    /// The KV cache is too small for one sequence, because of a fixed size, a fraction, or too
    /// little free memory.
    #[error("the KV cache would hold {tokens} tokens, but one sequence may have {context_tokens}")]
    Tokens {
        /// Tokens that the cache would hold.
        tokens: usize,
        /// Tokens that a sequence may have.
        context_tokens: usize,
    },
}

/// Reason why a start cannot reach READY. A plan and a start report this error with the same text.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("the model does not fit: {shortfall}")]
pub struct Unfit {
    pub shortfall: Shortfall,
    /// Each knob with a value that makes the model fit if no other knob is changed. Knobs that
    /// cannot help have no value.
    pub suggestions: Vec<Suggestion>,
}

impl Unfit {
    /// Missing bytes of memory. 0 if something else is missing.
    pub fn short_by(&self) -> Bytes {
        match self.shortfall {
            Shortfall::Memory { short_by, .. } => short_by,
            Shortfall::Tokens { .. } => Bytes::ZERO,
        }
    }
}

impl Hint for Unfit {
    type Text = String;

    fn hint(&self) -> String {
        Suggestion::advice(&self.suggestions).unwrap_or_else(|| "use a larger device".to_owned())
    }
}

/// The reason why a model does not fit on one particular number of devices.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum RanksShortfall {
    /// The model cannot be divided among this many ranks, because its heads, columns, experts or
    /// scale blocks are not divisible.
    #[error("{0}")]
    Indivisible(String),
    /// The resource that each device lacks.
    #[error(transparent)]
    OnEach(#[from] Shortfall),
}

impl Serialize for RanksShortfall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A number of devices that a model does not fit on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RanksTried {
    pub ranks: usize,
    #[serde(rename = "lack")]
    pub shortfall: RanksShortfall,
}

impl fmt::Display for RanksTried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.shortfall {
            RanksShortfall::OnEach(Shortfall::Memory { short_by, .. }) => {
                let on_each = if self.ranks > 1 { " on each" } else { "" };
                write!(f, "{}: {} ({short_by}) short{on_each}", self.ranks, short_by.exact())
            }
            shortfall => write!(f, "{}: {shortfall}", self.ranks),
        }
    }
}

/// The model does not fit on any number of the devices that were found.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{model} does not fit on any number of these devices ({})", listed(tried))]
pub struct NoRanksFit {
    pub model: String,
    /// Every number of devices that was tried, starting at one.
    pub tried: Vec<RanksTried>,
}

impl Hint for NoRanksFit {
    type Text = String;

    fn hint(&self) -> String {
        "run `bursar plan` with a number of devices to see which knobs would make it fit".to_owned()
    }
}

pub(super) fn listed(tried: &[RanksTried]) -> String {
    tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
