//! Pictures: CPU threads decode and resize them, and the lane encodes them into the vision cache.

mod actor;
mod core;
mod known_files;
mod message;

pub use actor::{VisionActor, VisionArguments};
pub use core::{CacheLookup, Effect, EncodeRequest, Input, PicturesTooLarge, Ticket, VisionCore};
pub use message::{EmbedRequest, PinnedRows, PinnedSet, VisionError, VisionMessage};
