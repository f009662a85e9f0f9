//! A worker of NVIDIA Dynamo that serves a model of Bursar: tokens in, tokens out, on Bursar's public API alone.
//!
//! Dynamo's frontend speaks HTTP, applies the chat template and makes tokens; its router places each request; this
//! worker answers. It tells the router which blocks of keys and values it has and how many are left, as they change.

mod ask;
mod fault;
mod feed;
mod options;
mod tell;
mod worker;

pub use feed::stored_event;
pub use options::Options;
pub use worker::BursarWorker;
