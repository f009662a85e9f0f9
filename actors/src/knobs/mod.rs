//! Settings of a model, by the names of Bursar and of other servers.
//!
//! [`TABLE`] is the single definition. The flags of the command line, the JSON form and
//! `docs/knobs.md` are derived from it.

mod cache_type;
mod error;
mod names;
mod nested;
mod options;
mod precision;
mod product;
mod resolve;
mod state_type;
mod table;

pub use cache_type::{KvCacheType, KvCacheTypeError};
pub use error::KnobError;
pub use names::{Names, Setting};
pub use options::{Limits, LoadOptions, SamplingDefaults};
pub use precision::{Precision, PrecisionError, UnknownPrecision};
pub use state_type::StateType;
pub use table::{Alias, DraftMethod, DraftQuantization, Kind, Knob, Knobs, NESTED, Nested, Peer, TABLE};
