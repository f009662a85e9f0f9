//! What vision towers share: pictures packed for a launch, and how pictures stand in a prompt and in the vision cache.

mod packed_pictures;
mod picture_row;
mod picture_tokens;
mod placeholder;
mod tower_input;
pub mod tower_rope;

pub use packed_pictures::{PackedPictures, PatchPlaces, stretches};
pub use picture_row::PictureRow;
pub use picture_tokens::PictureTokens;
pub use placeholder::{Placeholders, VideoPlace, lay_out};
pub use tower_input::TowerInput;
