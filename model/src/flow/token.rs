//! The token that one step samples for a sequence, on its way from the lane to the chat.

/// A token that was sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The token's id in the vocabulary.
    pub id: u32,
    /// How many tokens its sequence had produced before it.
    pub position: u64,
    /// Its log-probability and those of others, if the request asked for them.
    pub log_probabilities: Option<Box<LogProbabilities>>,
}

/// Log-probabilities of a token and its rivals, by the model's own distribution: before
/// temperature, penalties, grammars and whatever else takes part in sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbabilities {
    /// The token that was chosen or, in a prompt, that followed.
    pub chosen: LogProbability,
    /// The likeliest tokens, likeliest first, ties by id. Impossible ones are left out.
    pub top: Vec<LogProbability>,
}

/// The natural logarithm of a token's probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogProbability {
    /// The token's id in the vocabulary.
    pub id: u32,
    /// At most 0; -infinity for an impossible token.
    pub log_probability: f32,
}
