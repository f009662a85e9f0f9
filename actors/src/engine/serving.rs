//! The actors that serve, as requests see them.

use std::sync::Arc;

use bursar_kernels::Target;
use ractor::ActorRef;

use super::ModelContext;
use crate::{kv::KvMessage, profile::ProfileRecord, scheduler::SchedulerMessage, vision::VisionMessage};

/// One generation of a model's actors. After a death there is another.
#[derive(Clone)]
pub struct Serving {
    /// Larger than that of any that served before.
    pub generation: u64,
    /// How often before it the device refused memory to a step or a launch: no request is to blame for that.
    pub refusals: u32,
    /// Pictures; none for a model that takes none.
    pub vision: Option<ActorRef<VisionMessage>>,
    /// Blocks.
    pub kv: ActorRef<KvMessage>,
    /// Steps.
    pub scheduler: ActorRef<SchedulerMessage>,
    /// The model's host side.
    pub context: Arc<ModelContext>,
    /// Whether its size was found by an earlier start that wrote it down: then its worst cases were run once, at that size,
    /// and not twice.
    pub is_warm: bool,
    /// Tokens whose keys and values there was room for when these began; there may be fewer and more since (ADR 19).
    pub kv_tokens: usize,
    /// What may be done at once.
    pub record: Arc<ProfileRecord>,
    /// What passes are planned for and run on.
    pub target: Target,
}
