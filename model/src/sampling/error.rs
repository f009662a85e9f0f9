//! Errors of sampling.

use bursar_budgets::Hint;
use thiserror::Error;

use super::grammar::GrammarError;

/// A token that could not be sampled, or parameters that were refused.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SamplingError {
    /// A parameter is outside its range.
    #[error("`{parameter}` is {value}; expected {range}")]
    OutOfRange {
        /// The parameter's name.
        parameter: &'static str,
        /// The value that was given.
        value: f64,
        /// The values that are allowed.
        range: &'static str,
    },
    /// The model's vocabulary does not have the token.
    #[error("token {token} of `{parameter}` is not in the model's vocabulary of {vocabulary} tokens")]
    UnknownToken {
        /// What the token was given in: `logit_bias`, `stop_token_ids`, `prompt` or `tokens`.
        parameter: &'static str,
        /// The token's id.
        token: u32,
        /// Number of tokens in the vocabulary.
        vocabulary: usize,
    },
    /// The request asks for the log-probabilities of too many tokens.
    #[error("{asked} log-probabilities were requested; the limit is {limit}")]
    TooManyLogProbabilities {
        /// The requested number.
        asked: usize,
        /// The greatest number.
        limit: usize,
    },
    /// A list of the request is too long: biases or end tokens.
    #[error("`{parameter}` names {asked} tokens; the limit is {limit}")]
    TooManyTokens {
        /// The parameter's name.
        parameter: &'static str,
        /// The number of tokens in the list.
        asked: usize,
        /// The greatest number.
        limit: usize,
    },
    /// A row of logits is empty.
    #[error("the logits are empty")]
    NoLogits,
    /// The device found a logit that is NaN or +infinity.
    #[error("the logits are not numbers")]
    NotNumbers,
    /// A logit is NaN or +infinity.
    #[error("the logit of token {token} is not a number or is +infinity")]
    BadLogit {
        /// The first token with such a logit.
        token: usize,
    },
    /// The row of logits is not as long as the sampler's vocabulary.
    #[error("a row has {logits} logits, but the vocabulary has {vocabulary} tokens")]
    Width {
        /// Number of logits in the row.
        logits: usize,
        /// Number of tokens in the sampler's vocabulary.
        vocabulary: usize,
    },
    /// The sampler reads the tokens so far, but was given only their number.
    #[error("the tokens so far are needed to choose the next one, but were not given")]
    PastMissing,
    /// The grammar failed to compute the tokens that may follow.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// Every token is forbidden.
    #[error("all {logits} logits are -infinity")]
    NothingAllowed {
        /// Number of logits in the row.
        logits: usize,
    },
    /// `generation_config.json` does not parse.
    #[error("`{setting}` in generation_config.json is not valid")]
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
}

impl Hint for SamplingError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            SamplingError::OutOfRange { parameter, range, .. } => format!("set `{parameter}` to a number {range}"),
            SamplingError::UnknownToken { vocabulary, .. } => format!("use token ids below {vocabulary}"),
            SamplingError::TooManyTokens { parameter, limit, .. } => format!("name at most {limit} in `{parameter}`"),
            SamplingError::TooManyLogProbabilities { limit, .. } => {
                format!("ask for at most {limit} log-probabilities")
            }
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
