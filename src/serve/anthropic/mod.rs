//! Anthropic's API: what its clients send, and what they are answered.

mod answer;
mod events;
pub(super) mod messages;
pub(super) mod request;
mod turns;
