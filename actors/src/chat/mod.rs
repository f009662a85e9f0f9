//! Chats: a request from its first check to its last event.
//!
//! A request is driven by a task of its own, outside the supervision tree. Actors that die take no request with them:
//! its driver comes again with the prompt and the tokens so far, and the caller sees a pause.

mod driver;
mod error;
mod event;
mod generation;
mod handle;
mod lead;
mod preparation;
mod request;
mod stopwatch;
mod stream;

pub use crate::finish_reason::FinishReason;
pub use error::{ChatError, ErrorKind};
pub use event::{ChatEvent, ScoredToken, TokenScore, Usage};
pub use handle::ModelHandle;
pub use request::{Chat, Content, Image, Video};
pub use stream::Reply;
