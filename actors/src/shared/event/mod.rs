//! Events about the memory of a device, reported as they happen, for embedders
//! and for outside monitors.

mod kind;
mod log;
mod trace;

pub use kind::{Event, Leased};
pub use log::{EventLog, Events, Missed, Recorded, latest_of};
