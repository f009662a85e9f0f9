//! A token that a step samples for a sequence, and its log-probabilities, as passed from the
//! lane to the chat.

#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The token's id in the vocabulary.
    pub id: u32,
    /// Number of tokens that the sequence had produced before this token.
    pub position: u64,
    /// Log-probabilities of this token and of the likeliest tokens, if the request asked for them.
    pub log_probabilities: Option<Box<LogProbabilities>>,
}

/// Log-probabilities of a token and of the likeliest tokens at its position. They
/// describe the model's unchanged distribution, before temperature, penalties, grammars
/// and all other sampling parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbabilities {
    /// The sampled token or, in a prompt, the actual next token.
    pub chosen: LogProbability,
    /// The likeliest tokens in descending order, ties by id. Tokens of probability 0 are left out.
    pub top: Vec<LogProbability>,
}

/// The natural logarithm of a token's probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogProbability {
    /// The token's id in the vocabulary.
    pub id: u32,
    /// The logarithm, at most 0; -infinity for a token of probability 0.
    pub log_probability: f32,
}
