//! Why a token cannot be sampled.

use thiserror::Error;

/// Why a token could not be sampled.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SamplingError {
    /// A parameter outside its range.
    #[error("`{parameter}` is {value}, which must be {range}")]
    OutOfRange {
        /// The parameter's name.
        parameter: &'static str,
        /// What was given.
        value: f64,
        /// What may be given.
        range: &'static str,
    },
    /// There is nothing to choose from.
    #[error("the logits are empty")]
    NoLogits,
    /// The model computed something that is not a number.
    #[error("the logit of token {token} is not a number or is +infinity")]
    BadLogit {
        /// The first such token.
        token: usize,
    },
    /// Every token is forbidden.
    #[error("all {logits} logits are -infinity")]
    NothingAllowed {
        /// How many logits there are.
        logits: usize,
    },
    /// `generation_config.json` does not parse.
    #[error("`{setting}` in generation_config.json is not understood")]
    Defaults {
        /// The setting, or the whole file.
        setting: &'static str,
    },
}

impl SamplingError {
    /// What the user could change.
    pub fn hint(&self) -> String {
        match self {
            SamplingError::OutOfRange { parameter, range, .. } => format!("set `{parameter}` to a number {range}"),
            SamplingError::NoLogits | SamplingError::BadLogit { .. } => {
                "the weights may be damaged, or overflow in f16: try the checkpoint in bf16 or f32".into()
            }
            SamplingError::NothingAllowed { .. } => "forbid fewer tokens".into(),
            SamplingError::Defaults { setting } => format!("correct `{setting}` in generation_config.json"),
        }
    }
}
