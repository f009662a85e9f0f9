//! OpenAI's Responses API: replies that are stored in memory, so that later requests can continue
//! them.

mod chat;
pub(crate) mod create;
mod encoder;
mod items;
pub(crate) mod request;
mod run;
pub(crate) mod store;
pub(crate) mod stored;
mod tools;
mod turns;
