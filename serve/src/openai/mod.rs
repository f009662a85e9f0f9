//! Requests and responses of OpenAI's API.

pub(super) mod chat;
pub(super) mod chat_chunks;
pub(super) mod chat_request;
pub(super) mod chat_whole;
pub(super) mod chunks;
pub(super) mod completion_choice;
pub(super) mod completion_request;
pub(super) mod completions;
pub(super) mod head;
pub(super) mod list;
pub(super) mod log_probabilities;
pub(super) mod responses;
pub(super) mod sampling;
pub(super) mod stop_reason;
pub(super) mod turns;
pub(super) mod usage;
