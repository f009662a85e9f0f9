//! Why a token cannot be sampled.

use thiserror::Error;

use super::grammar::GrammarError;

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
    /// A token that the model does not have.
    #[error("token {token} is not one of the model's {vocabulary}")]
    UnknownToken {
        /// The token's id.
        token: u32,
        /// How many tokens there are.
        vocabulary: usize,
    },
    /// More of the likeliest tokens than is reported.
    #[error("{asked} log-probabilities are asked for, of at most {limit}")]
    TooManyLogProbabilities {
        /// How many were asked for.
        asked: usize,
        /// How many may be.
        limit: usize,
    },
    /// A list that goes with each choice is longer than there is room for.
    #[error("`{parameter}` names {asked} tokens, of at most {limit}")]
    TooManyTokens {
        /// The parameter's name.
        parameter: &'static str,
        /// How many were named.
        asked: usize,
        /// How many may be.
        limit: usize,
    },
    /// There is nothing to choose from.
    #[error("the logits are empty")]
    NoLogits,
    /// The device could choose no token.
    #[error("the logits are not numbers")]
    NotNumbers,
    /// The model computed something that is not a number.
    #[error("the logit of token {token} is not a number or is +infinity")]
    BadLogit {
        /// The first such token.
        token: usize,
    },
    /// The row of logits is not of the vocabulary that the sampler was made for.
    #[error("a row has {logits} logits, but the vocabulary {vocabulary} tokens")]
    Width {
        /// How many logits there are.
        logits: usize,
        /// How many there should be.
        vocabulary: usize,
    },
    /// The sampler reads the tokens so far, and was given only their number.
    #[error("the tokens so far are needed to choose the next one, and were not given")]
    PastMissing,
    /// The grammar cannot say what may follow.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
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
    /// As [`GrammarError::reason`].
    pub fn reason(&self) -> Option<&str> {
        match self {
            SamplingError::Grammar(error) => error.reason(),
            _ => None,
        }
    }

    /// What the user could change.
    pub fn hint(&self) -> String {
        match self {
            SamplingError::OutOfRange { parameter, range, .. } => format!("set `{parameter}` to a number {range}"),
            SamplingError::UnknownToken { vocabulary, .. } => format!("use token ids below {vocabulary}"),
            SamplingError::TooManyTokens { parameter, limit, .. } => format!("name at most {limit} in `{parameter}`"),
            SamplingError::TooManyLogProbabilities { limit, .. } => format!("ask for at most {limit}"),
            SamplingError::Width { .. } | SamplingError::PastMissing => {
                "this is a bug in Bursar; please report it".into()
            }
            SamplingError::Grammar(error) => error.hint(),
            SamplingError::NoLogits | SamplingError::NotNumbers | SamplingError::BadLogit { .. } => {
                "the weights may be damaged, or overflow in f16: try the checkpoint in bf16 or f32".into()
            }
            SamplingError::NothingAllowed { .. } => "forbid fewer tokens".into(),
            SamplingError::Defaults { setting } => format!("correct `{setting}` in generation_config.json"),
        }
    }
}
