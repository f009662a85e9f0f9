//! The serving actors, as requests see them.

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

/// One generation of a model's actors. After a death there is a new one.
#[derive(Clone)]
pub struct Serving {
    /// Larger than that of any earlier generation.
    pub generation: u64,
    /// How often, before this generation, the device refused memory to a step or launch. Requests are not blamed for
    /// that.
    pub refusals: u32,
    /// The vision actor. None for a model without pictures.
    pub vision: Option<ActorRef<VisionMessage>>,
    /// The scheduler.
    pub scheduler: ActorRef<SchedulerMessage>,
    /// The model's host side.
    pub context: Arc<ModelContext>,
    /// Whether an earlier start recorded the size. Then the worst cases ran once, at that size, instead of twice.
    pub is_warm: bool,
    /// Tokens that keys and values had room for when this generation began. The size may have changed since (ADR 3).
    pub kv_tokens: usize,
    /// The permits: what was stressed, and nothing more.
    pub record: Arc<ProfileRecord>,
    /// What passes are planned for and run on.
    pub target: Target,
    /// How blocks are used, until these actors end.
    pub(crate) kv_use: watch::Receiver<KvUse>,
    /// The blocks that sequences may begin with.
    pub(crate) block_log: Arc<BlockLog>,
}
