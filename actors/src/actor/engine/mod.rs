//! The engine: the supervisor of one model's actors, from its checkpoint to READY and through later
//! failures.

mod actor;
mod arguments;
mod core;
mod elastic;
mod error;
mod fetch;
mod limits;
mod message;
mod model_context;
mod planning;
mod records;
mod retained;
mod serving;
mod start;
mod status;

pub use crate::knobs::{
    KvCacheType, KvCacheTypeError, Limits, LoadOptions, Precision, PrecisionError, UnknownPrecision,
};
pub(crate) use crate::profile::{LaneResources, Lanes, Records, WeightStore};
pub use crate::profile::{Progress, ProgressSink};
pub(crate) use actor::EngineActor;
pub(crate) use arguments::EngineArguments;
pub use core::WhichLane;
pub use elastic::{ElasticError, ResizeOutcome};
pub use error::StartError;
pub use limits::{EffectiveLimits, ModelBounds};
pub use message::EngineMessage;
pub use model_context::ModelContext;
pub(crate) use planning::advice;
pub use planning::{
    Change, Forecast, MinRanks, NoRanksFit, PlacementQuery, Question, RanksShortfall, RanksTried, Shortfall,
    Suggestion, TOTAL, Unfit,
};
pub(crate) use retained::RetainedState;
pub use serving::Serving;
pub use status::{Status, StatusBoard};
