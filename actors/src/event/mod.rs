//! What happens to the memory of a device, as it happens: for embedders and for outside monitors.

mod log;
mod trace;
mod what;

pub use log::{EventLog, Events, Missed, Recorded, latest_of};
pub use what::{Event, Leased};
