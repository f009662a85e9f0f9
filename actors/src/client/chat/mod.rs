//! Chat requests, from the first check to the last event.
//!
//! | module | contents |
//! |---|---|
//! | `request` | the chat that a user builds: turns, pictures, tools and settings |
//! | `preparation` | the checked prompt, its pictures, and rules for parsing the reply |
//! | `reply` | the driver of a request, and the events that it sends |
//! | `handle`, `acceptance` | a model's handle, and how it accepts a chat |
//! | `stopwatch`, `timeout` | metrics and deadlines of a request, from its arrival to its end |
//! | `facts`, `blocks` | facts about a model, and subscriptions to its KV blocks |
//!
//! Each request is driven by a task outside the supervision tree, so a request survives up to two
//! deaths of actors. After a death, this driver submits the prompt and the tokens generated so far
//! again, and the caller sees only a pause. A third death ends the request with an error.

mod acceptance;
mod blocks;
mod error;
mod facts;
mod handle;
mod preparation;
mod reply;
mod request;
mod stopwatch;
mod timeout;

pub use crate::{
    deadline::{Deadline, Deadlines},
    finish_reason::FinishReason,
};
pub use blocks::{BlockEvents, KvWatch};
pub use bursar_model::text::StopReason;
pub use error::{ChatError, ErrorKind, ToolError};
pub use facts::ModelFacts;
pub use handle::ModelHandle;
pub(crate) use handle::SleepHandle;
pub use preparation::Prompt;
pub use reply::{ChatEvent, Reply, ScoredToken, TokenScore, ToolCall, ToolCallEvent, Usage};
pub use request::{Chat, Content, Image, ToolChoice, Video};
