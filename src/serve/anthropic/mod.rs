//! Anthropic's API: what its clients send, and what they are answered.

mod answer;
mod events;
pub(super) mod messages;
mod request;
mod turns;
