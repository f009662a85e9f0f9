//! A worker of NVIDIA Dynamo that serves a Bursar model: tokens in, tokens out, using
//! only Bursar's public API.
//!
//! Dynamo's frontend handles HTTP, the chat template and tokenization. Its router selects a worker
//! for each request, and this worker answers. The worker reports to the router which KV blocks it
//! has and how many are free, whenever these change.

mod ask;
mod fault;
mod feed;
mod options;
mod reply_stream;
mod worker;

pub use feed::stored_event;
pub use options::Options;
pub use worker::BursarWorker;
