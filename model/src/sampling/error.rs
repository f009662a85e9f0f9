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
    OutOfRange { parameter: &'static str, value: f64, range: &'static str },
    /// The model's vocabulary does not have the token.
    #[error("token {token} of `{parameter}` is not in the model's vocabulary of {vocabulary} tokens")]
    UnknownToken {
        /// The parameter that names the token: `logit_bias`, `stop_token_ids`, `prompt` or
        /// `tokens`.
        parameter: &'static str,
        token: u32,
        vocabulary: usize,
    },
    /// The request asks for the log-probabilities of too many tokens.
    #[error("{asked} log-probabilities were requested; the limit is {limit}")]
    TooManyLogProbabilities { asked: usize, limit: usize },
    /// A list of the request (biases or end tokens) is too long.
    #[error("`{parameter}` names {asked} tokens; the limit is {limit}")]
    TooManyTokens { parameter: &'static str, asked: usize, limit: usize },
    /// A row of logits is empty.
    #[error("the logits are empty")]
    NoLogits,
    /// The device found a logit that is NaN or +infinity.
    #[error("a logit is NaN or +infinity")]
    NonFiniteLogits,
    /// A logit is NaN or +infinity.
    #[error("the logit of token {token} is not a number or is +infinity")]
    BadLogit {
        /// The first token with such a logit.
        token: usize,
    },
    /// The row of logits has a different length from the sampler's vocabulary.
    #[error("a row has {logits} logits, but the vocabulary has {vocabulary} tokens")]
    Width { logits: usize, vocabulary: usize },
    /// The sampler needs the tokens produced so far, but was given only their number.
    #[error("the sampler needs the tokens produced so far to choose the next token, but did not receive them")]
    PastMissing,
    /// The grammar failed to compute the tokens that may follow.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// Every token is forbidden.
    #[error("all {logits} logits are -infinity")]
    NothingAllowed { logits: usize },
    /// `generation_config.json` does not parse.
    #[error("`{setting}` in generation_config.json is not valid")]
    Defaults {
        /// The setting, or the whole file.
        setting: &'static str,
    },
}

impl SamplingError {
    /// Same as [`GrammarError::reason`].
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
            SamplingError::TooManyTokens { parameter, limit, .. } => {
                format!("list at most {limit} tokens in `{parameter}`")
            }
            SamplingError::TooManyLogProbabilities { limit, .. } => {
                format!("ask for at most {limit} log-probabilities")
            }
            SamplingError::Width { .. } | SamplingError::PastMissing => {
                "this is a bug in Bursar; please report it".into()
            }
            SamplingError::Grammar(error) => error.hint(),
            SamplingError::NoLogits | SamplingError::NonFiniteLogits | SamplingError::BadLogit { .. } => {
                "the weights may be damaged, or overflow in f16: try the checkpoint in bf16 or f32".into()
            }
            SamplingError::NothingAllowed { .. } => "forbid fewer tokens".into(),
            SamplingError::Defaults { setting } => format!("correct `{setting}` in generation_config.json"),
        }
    }
}
