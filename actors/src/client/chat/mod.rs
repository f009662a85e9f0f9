//! Chat requests, from the first check to the last event.
//!
//! Each request is driven by a task outside the supervision tree, so an actor that dies takes no
//! request with it. The driver then submits the prompt and the tokens generated so far again, and
//! the caller sees only a pause.

mod answer;
mod blocks;
mod driver;
mod error;
mod event;
mod facts;
mod generation;
mod handle;
mod preparation;
mod prompt_leader;
mod reasoning_count;
mod reply_rules;
mod request;
mod request_pictures;
mod scheduling;
mod stopwatch;
mod stream;
mod timeout;
mod tokens;
mod tool_call;
mod tool_choice;

pub use crate::{
    deadline::{Deadline, Deadlines},
    finish_reason::FinishReason,
};
pub use blocks::{BlockEvents, KvWatch};
pub use bursar_model::text::StopReason;
pub use error::{ChatError, ErrorKind};
pub use event::{ChatEvent, ScoredToken, TokenScore, Usage};
pub use facts::ModelFacts;
pub use handle::ModelHandle;
pub(crate) use handle::SleepHandle;
pub use request::{Chat, Content, Image, Video};
pub use stream::Reply;
pub use tokens::Prompt;
pub use tool_call::{ToolCall, ToolCallEvent};
pub use tool_choice::{ToolChoice, ToolError};
