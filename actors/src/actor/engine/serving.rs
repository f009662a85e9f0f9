//! The serving actors and the data that requests need.

use std::sync::Arc;

use bursar_kernels::Target;
use ractor::ActorRef;
use tokio::sync::watch;

use super::ModelContext;
use crate::{
    kv::{BlockLog, KvUse},
    profile::ProfileRecord,
    scheduler::SchedulerMessage,
    vision::VisionMessage,
};

/// One generation of a model's serving actors. After an actor dies, a new generation replaces this
/// generation.
#[derive(Clone)]
pub struct Serving {
    /// The number of the generation, larger than the number of any earlier generation.
    pub generation: u64,
    /// The number of attempts that were refused memory before this generation, during the start or
    /// while serving. Restarts after such a refusal do not count against the requests of the model.
    pub refusals: u32,
    /// The vision actor. `None` for a model without pictures.
    pub vision: Option<ActorRef<VisionMessage>>,
    pub scheduler: ActorRef<SchedulerMessage>,
    pub context: Arc<ModelContext>,
    /// `true` if the size comes from an earlier start. With a recorded profile, the worst cases ran
    /// once, at the recorded size. After a sleep, they did not run again.
    pub is_warm: bool,
    /// The capacity of the KV cache in tokens when this generation began. The capacity may have
    /// changed since (ADR 3).
    pub kv_tokens: usize,
    /// The permits: exactly the sizes that were stress-tested.
    pub record: Arc<ProfileRecord>,
    /// The target for which passes are planned, and on which they run.
    pub target: Target,
    /// Block usage, updated until these actors end.
    pub(crate) kv_use: watch::Receiver<KvUse>,
    /// The cached blocks that new sequences may begin with.
    pub(crate) block_log: Arc<BlockLog>,
}
