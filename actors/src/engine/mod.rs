//! The engine: the supervisor of one model's actors, from its checkpoint to READY and through deaths.

mod actor;
mod elastic;
mod error;
mod fetch;
mod lanes;
mod limits;
mod message;
mod model_context;
mod options;
mod precision;
mod records;
mod serving;
mod start;
mod status;
mod weight_store;

pub use actor::{EngineActor, EngineArguments};
pub use elastic::{ElasticError, Outcome};
pub use error::StartError;
pub use lanes::{Lanes, LanesPlace};
pub use limits::{Limits, Lowered, Own};
pub use message::{EngineMessage, WhichLane};
pub use model_context::ModelContext;
pub use options::LoadOptions;
pub use precision::{Precision, PrecisionError, UnknownPrecision};
pub use records::Records;
pub use serving::Serving;
pub use status::{Progress, ProgressSink, Status};
pub use weight_store::WeightStore;
