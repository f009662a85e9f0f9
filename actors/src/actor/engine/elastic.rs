//! The KV cache that shrinks and grows after READY on the budget's orders (ADR 3).

mod core;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bursar_budgets::{Bytes, Device, DeviceError, Fence, Label};
use ractor::ActorRef;
use thiserror::Error;

pub use self::core::ResizeOutcome;
pub(super) use self::core::{Change, Input as PoolInput, PoolCore};
use super::WeightStore;
use crate::{
    budget::{self, Budget, LeaseError, Lends, ResizeOrder, SharedKvDemand},
    compute::memory::{EngineMemory, KvMemory},
    metric,
    profile::ProfileError,
    responder::AskError,
    scheduler::SchedulerMessage,
    tree,
};

/// Interval between polls of the fence after the last step.
const FENCE_POLL: Duration = Duration::from_micros(500);

/// A resize that failed halfway, so that it is unknown which blocks are backed. This error ends the
/// engine.
#[derive(Debug, Error)]
pub enum ElasticError {
    /// The device failed to back or unback memory.
    #[error("while resizing keys and values: {0}")]
    Device(#[from] DeviceError),
    /// The budget refused to shrink the lease, or did not answer.
    #[error("while resizing keys and values: {0}")]
    Lease(#[from] LeaseError),
    /// The scheduler did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// The thread that backs or unbacks memory died.
    #[error("the thread that resizes keys and values died: {0}")]
    Died(String),
}

/// The state that a resize needs.
#[derive(Clone)]
pub(super) struct ResizeContext {
    pub(super) label: Label,
    pub(super) memory: Arc<EngineMemory>,
    pub(super) budget: Budget,
    pub(super) device: Arc<dyn Device>,
    pub(super) weight_store: WeightStore,
    pub(super) generation: u64,
    /// `None` if the user fixed the size: the cache then neither lends nor borrows.
    pub(super) demand: Option<Arc<SharedKvDemand>>,
}

impl ResizeContext {
    /// Rounds a number of blocks up until the blocks fill whole pages. Memory is backed in whole
    /// pages, and all blocks of a backed page are used.
    pub(super) fn whole_pages(&self, blocks: usize) -> usize {
        self.blocks_in(self.bytes(blocks))
    }

    /// The largest number of blocks: all reserved blocks, which include borrowed memory, or `most`
    /// if the user fixed the size.
    pub(super) fn limit(&self, most: usize) -> usize {
        self.demand.as_ref().map_or(most, |_| self.memory.kv.reserved_blocks().max(most))
    }

    /// Accepts the budget's orders from now on, within these bounds. `orders` receives them and
    /// must not block.
    pub(super) fn accept_resize_orders(
        &self,
        (floor, most, limit): (usize, usize, usize),
        orders: impl Fn(ResizeOrder) + Send + Sync + 'static,
    ) {
        let limit = self.bytes(limit);
        let elastic = budget::Elastic {
            lends: self.demand.clone().map(|demand| Lends { demand, limit }),
            floor: self.bytes(floor),
            most: self.bytes(most),
            step: self.device.page() * self.memory.kv.shape().layers as u64,
            orders: Arc::new(orders),
        };
        self.budget.accept_resize_orders(self.memory.kv.lease(), elastic);
    }

    /// Converts an order of the budget to blocks.
    pub(super) fn input(&self, order: ResizeOrder) -> PoolInput {
        match order {
            ResizeOrder::GiveUp { to } => PoolInput::GiveUp(self.blocks_in(to)),
            ResizeOrder::MayGrow { to } => PoolInput::MayGrow(self.blocks_in(to)),
        }
    }

    /// Carries out a resize. `scheduler` is `None` while the scheduler is being replaced.
    pub(super) async fn resize(
        self,
        change: Change,
        scheduler: Option<ActorRef<SchedulerMessage>>,
    ) -> Result<ResizeOutcome, ElasticError> {
        match change {
            Change::Shrink { to } => self.shrink(scheduler, to).await,
            Change::Grow { from, to } => self.grow(from, to).await,
        }
    }

    fn bytes(&self, blocks: usize) -> Bytes {
        KvMemory::bytes(self.memory.kv.shape(), blocks, self.device.page())
    }

    fn blocks_in(&self, bytes: Bytes) -> usize {
        KvMemory::blocks_in(self.memory.kv.shape(), bytes, self.device.page())
    }

    /// Shrinks in an order that never leaves more bytes backed than leased. Otherwise the ledger
    /// would count backed bytes as free. First the scheduler stops using the blocks at the end,
    /// then these blocks are unbacked, then the lease shrinks. Without a scheduler, no step uses
    /// these blocks.
    async fn shrink(
        self,
        scheduler: Option<ActorRef<SchedulerMessage>>,
        to: usize,
    ) -> Result<ResizeOutcome, ElasticError> {
        let begun = Instant::now();
        if let Some(scheduler) = scheduler {
            match tree::RESIZE_POOL.ask(&scheduler, |reply| SchedulerMessage::Resize { blocks: to, reply }).await {
                Ok(()) => {}
                Err(AskError::Gone { .. }) => return Ok(ResizeOutcome::Interrupted),
                Err(error) => return Err(error.into()),
            }
        }
        // Steps whose results were returned have ended, and steps that still run use none of the
        // removed blocks. The device may still be busy with earlier work, for example if the lane
        // was replaced. Waiting for the fence takes one step at most.
        let last_use = self.device.fence_here();
        let mut looks = tokio::time::interval(FENCE_POLL);
        while !last_use.is_passed() {
            looks.tick().await;
        }
        let unback = move |kv: &KvMemory| kv.shrink_to(to, &last_use);
        let Some(()) = self.on_a_thread(unback).await? else { return Ok(ResizeOutcome::Interrupted) };
        self.budget.resize(tree::RESIZE_FOR_ENGINE, self.memory.kv.lease(), self.bytes(to)).await?;
        metric::KV_SHRINK_SECONDS.record(&self.label, begun.elapsed());
        Ok(ResizeOutcome::Done)
    }

    /// Grows the lease, then backs more blocks. If either is refused, the size stays as before.
    async fn grow(self, from: usize, to: usize) -> Result<ResizeOutcome, ElasticError> {
        let lease = self.memory.kv.lease();
        match self.budget.resize(tree::RESIZE_FOR_ENGINE, lease, self.bytes(to)).await {
            Ok(()) => {}
            Err(LeaseError::Refused(_)) => return Ok(ResizeOutcome::Refused),
            Err(error) => return Err(error.into()),
        }
        let back = move |kv: &KvMemory| match kv.grow_to(to) {
            Ok(()) => Ok(true),
            // Layers before the refused one may already be backed. No step has used their new
            // blocks.
            Err(error) if error.is_refused() => kv.shrink_to(from, &Fence::passed()).map(|()| false),
            Err(error) => Err(error),
        };
        match self.on_a_thread(back).await? {
            Some(true) => Ok(ResizeOutcome::Done),
            Some(false) => {
                self.budget.resize(tree::RESIZE_FOR_ENGINE, lease, self.bytes(from)).await?;
                Ok(ResizeOutcome::Refused)
            }
            None => Ok(ResizeOutcome::Refused),
        }
    }

    /// Runs `work` on a thread that may block. As with [`WeightStore::on_a_thread`], ending this
    /// engine waits for the thread. Returns `None` if the engine is being ended.
    async fn on_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce(&KvMemory) -> Result<T, DeviceError> + Send + 'static,
    ) -> Result<Option<T>, ElasticError> {
        let memory = self.memory.clone();
        let done = self.weight_store.on_a_thread(self.generation, move || Ok(work(&memory.kv))).await;
        match done {
            Ok(Some(outcome)) => Ok(Some(outcome?)),
            Ok(None) => Ok(None),
            Err(ProfileError::Died { reason }) => Err(ElasticError::Died(reason)),
            Err(error) => Err(ElasticError::Died(error.to_string())),
        }
    }
}
