//! OpenAI's Responses API: replies that are stored for a while, so that later
//! requests can continue them.

mod chat;
pub(in crate::serve) mod create;
mod encoder;
mod items;
pub(in crate::serve) mod kept;
pub(in crate::serve) mod request;
mod run;
pub(in crate::serve) mod store;
mod tools;
