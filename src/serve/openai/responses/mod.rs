//! OpenAI's Responses API: replies that are kept for a while, and go on from each other.

mod chat;
pub(in crate::serve) mod create;
mod encoder;
mod items;
pub(in crate::serve) mod kept;
pub(in crate::serve) mod request;
mod run;
pub(in crate::serve) mod store;
mod tools;
