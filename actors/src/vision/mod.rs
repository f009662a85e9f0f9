//! Pictures: decoded and resized on CPU threads, encoded on the lane into the vision cache.

mod actor;
mod core;
mod known;
mod message;
mod pins;

pub use actor::{VisionActor, VisionArguments};
pub use core::{Effect, Input, PictureKey, PictureRequest, Ticket, VisionCore};
pub use message::{VisionError, VisionMessage};
pub use pins::{PinnedPicture, PinnedPictures};
