//! Requests and responses of Anthropic's API.

mod answer;
mod events;
pub(super) mod messages;
pub(super) mod request;
mod turns;
