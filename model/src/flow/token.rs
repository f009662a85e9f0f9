//! Token: what one sampled step of a sequence yields, on its way from the lane to the chat.

/// A token that was sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    /// The vocabulary's id.
    pub id: u32,
    /// Where it stands in its sequence, prompt included, from 0.
    pub position: u64,
    /// Natural logarithm of its probability among what the sampler kept; 0 when there was no choice.
    pub log_probability: f32,
}
