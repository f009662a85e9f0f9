//! What a user can set about a model, by the names of Bursar and of other servers.
//!
//! [`TABLE`] is the one definition: the flags of the command line, the JSON form and `docs/knobs.md` follow from it.

mod error;
mod nested;
mod product;
mod resolve;
mod table;

pub use error::KnobError;
pub use resolve::{Names, Setting};
pub use table::{Alias, Kind, Knob, Knobs, NESTED, Nested, Peer, TABLE};
