//! Token: what one sampled step of a sequence yields, on its way from the lane to the chat.

/// A token that was sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The vocabulary's id.
    pub id: u32,
    /// How many tokens its sequence had produced before it.
    pub position: u64,
    /// How likely the model held it and others, if that was asked for.
    pub log_probabilities: Option<Box<LogProbabilities>>,
}

/// How likely a model holds a token and its rivals, by its own distribution: nothing that chooses among tokens
/// (temperature, penalties, grammars and so on) has changed it.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbabilities {
    /// The token that was chosen, or that really followed.
    pub chosen: LogProbability,
    /// The likeliest tokens, likeliest first, equal ones by id. Impossible ones are left out.
    pub top: Vec<LogProbability>,
}

/// A token's natural logarithm of a probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogProbability {
    /// The vocabulary's id.
    pub id: u32,
    /// At most 0; -infinity for an impossible token.
    pub log_probability: f32,
}
