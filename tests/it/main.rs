//! Tests of the public API with the embedded demo model on small devices. Each test is a
//! story that waits for conditions or answers, never for a fixed time. A story that hangs
//! fails with a message.

mod abort;
mod advice;
mod bad_input;
mod bench;
mod blocks;
mod chats;
mod checkpoints;
mod command_line;
mod continued;
mod deaths;
mod drains;
mod elastic;
mod generation;
mod hangs;
mod host_tier;
mod hub;
mod knobs;
mod lending;
mod logs;
mod losses;
mod memory;
mod metrics_log;
mod pictures;
mod plan;
mod prometheus;
mod queues;
mod ranks;
mod recorded_chats;
mod refusals;
mod requests;
mod rules;
mod serve;
mod sessions;
mod sleeping;
mod slow_device;
mod stage;
mod starts;
mod tokenizers;
mod tokens;
mod told;
mod tool_calls;
mod top;
mod videos;
mod warm_starts;
