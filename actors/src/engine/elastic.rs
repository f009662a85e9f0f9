//! Keys and values that shrink and grow after READY: how the engine obeys the budget's orders (ADR 19).

mod core;

use std::{
    cmp::Ordering,
    sync::Arc,
    time::{Duration, Instant},
};

use bursar_budgets::{Bytes, Device, DeviceError, Fence, Label};
use bursar_kernels::BLOCK_TOKENS;
use bursar_model::Envelope;
use ractor::ActorRef;
use thiserror::Error;

pub use self::core::Outcome;
use self::core::{Change, Input, PoolCore};
use super::{EngineMessage, WeightStore};
use crate::{
    budget::{self, Budget, LeaseError, Order},
    compute::memory::{EngineMemory, KvMemory},
    event::Event,
    metric,
    profile::ProfileError,
    responder::AskError,
    scheduler::SchedulerMessage,
    supervise::BackgroundTask,
    tree,
};

/// How often the fence after the last step is polled.
const FENCE_POLL: Duration = Duration::from_micros(500);

/// A change that failed halfway, so that it is unknown what is backed. The engine dies of it.
#[derive(Debug, Error)]
pub enum ElasticError {
    /// The device failed to unback memory.
    #[error("while resizing keys and values: {0}")]
    Device(#[from] DeviceError),
    /// The budget refused a smaller lease, or did not answer.
    #[error("while resizing keys and values: {0}")]
    Lease(#[from] LeaseError),
    /// The scheduler did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// The thread that asks the device died.
    #[error("the thread that resizes keys and values died: {0}")]
    Died(String),
}

/// What a change works with.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) label: Label,
    pub(super) memory: Arc<EngineMemory>,
    pub(super) budget: Budget,
    pub(super) device: Arc<dyn Device>,
    pub(super) weight_store: WeightStore,
    pub(super) generation: u64,
}

/// The cache size of one engine, from READY on.
pub(super) struct Elastic {
    core: PoolCore,
    place: Place,
    /// The change in progress. It ends with the engine.
    task: Option<BackgroundTask>,
}

impl Elastic {
    /// Starts with all blocks of `place`. The floor holds one sequence of the full context, or a whole step, so that
    /// every request can still finish, one at a time if need be.
    pub(super) fn new(place: Place, envelope: &Envelope) -> Self {
        let tokens = envelope.context_tokens.max(envelope.step_tokens);
        // Whole pages are backed, and all of their blocks are used.
        let floor = place.blocks_in(place.bytes(tokens.div_ceil(BLOCK_TOKENS)));
        Elastic { core: PoolCore::new(floor, place.memory.kv.blocks()), place, task: None }
    }

    /// Blocks that the serving actors may use.
    pub(super) fn blocks(&self) -> usize {
        self.core.blocks()
    }

    /// Obeys the budget from now on. Orders arrive as messages to `engine`.
    pub(super) fn obey(&self, engine: &ActorRef<EngineMessage>) {
        let (place, engine) = (&self.place, engine.clone());
        let lease = place.memory.kv.lease();
        let elastic = budget::Elastic {
            floor: place.bytes(self.core.floor()),
            most: place.bytes(self.core.most()),
            step: place.device.page() * place.memory.kv.shape().layers as u64,
            // An engine that is gone has no lease any more.
            orders: Arc::new(move |order| drop(engine.send_message(EngineMessage::Ordered(order)))),
        };
        place.budget.obey(lease, elastic);
    }

    /// Handles an order of the budget.
    pub(super) fn ordered(&mut self, order: Order, engine: &ActorRef<EngineMessage>, scheduler: Scheduler<'_>) {
        let input = match order {
            Order::GiveUp { to } => Input::GiveUp(self.place.blocks_in(to)),
            Order::MayGrow { to } => Input::MayGrow(self.place.blocks_in(to)),
        };
        self.step(input, engine, scheduler);
    }

    /// The serving actors have started, or are being replaced.
    pub(super) fn serving(&mut self, engine: &ActorRef<EngineMessage>, scheduler: Scheduler<'_>) {
        self.step(Input::Serving(scheduler.is_some()), engine, scheduler);
    }

    /// Serving was refused memory: from now on there are at most `most` blocks. Until the pool is no longer
    /// [quiet](Self::is_quiet), no actor serves and the lanes have no work.
    pub(super) fn cap(&mut self, most: usize, engine: &ActorRef<EngineMessage>) {
        self.step(Input::Cap(most), engine, None);
    }

    /// As [`cap`](Self::cap), but the size stays and only orders already given are carried out.
    pub(super) fn pause(&mut self, engine: &ActorRef<EngineMessage>) {
        self.step(Input::Pause, engine, None);
    }

    /// The most blocks there may be.
    pub(super) fn most(&self) -> usize {
        self.core.most()
    }

    /// Whether serving must still wait.
    pub(super) fn is_quiet(&self) -> bool {
        self.core.is_quiet()
    }

    /// Handles the end of a change.
    pub(super) fn ended(&mut self, outcome: Outcome, engine: &ActorRef<EngineMessage>, scheduler: Scheduler<'_>) {
        self.task = None;
        let before = self.core.blocks();
        self.step(Input::Ended(outcome), engine, scheduler);
        let blocks = self.core.blocks();
        if blocks > before
            && let Some(scheduler) = scheduler
        {
            // If the scheduler has died, its successor starts with this size.
            let (reply, _) = crate::responder::Responder::new();
            drop(scheduler.send_message(SchedulerMessage::Resize { blocks, reply }));
        }
    }

    fn step(&mut self, input: Input, engine: &ActorRef<EngineMessage>, scheduler: Scheduler<'_>) {
        let place = self.place.clone();
        let report = EngineMessage::PoolChanged;
        let from_blocks = self.core.blocks();
        let change = self.core.step(input);
        let (model, to_blocks) = (place.label.clone(), self.core.blocks());
        match to_blocks.cmp(&from_blocks) {
            Ordering::Less => {
                metric::KV_SHRINKS_TOTAL.add(&model, 1);
                place.budget.tell(Event::Shrink { model, from_blocks, to_blocks });
            }
            Ordering::Equal => {}
            Ordering::Greater => {
                metric::KV_GROWTHS_TOTAL.add(&model, 1);
                place.budget.tell(Event::Growth { model, from_blocks, to_blocks });
            }
        }
        match (change, scheduler) {
            (Some(Change::Shrink { to }), scheduler) => {
                self.task = Some(BackgroundTask::begin(engine, place.shrink(scheduler.cloned(), to), report));
            }
            (Some(Change::Grow { from, to }), _) => {
                self.task = Some(BackgroundTask::begin(engine, place.grow(from, to), report));
            }
            (None, _) => {}
        }
    }
}

/// The scheduler that serves now, if any.
pub(super) type Scheduler<'s> = Option<&'s ActorRef<SchedulerMessage>>;

impl Place {
    fn bytes(&self, blocks: usize) -> Bytes {
        KvMemory::bytes(self.memory.kv.shape(), blocks, self.device.page())
    }

    fn blocks_in(&self, bytes: Bytes) -> usize {
        KvMemory::blocks_in(self.memory.kv.shape(), bytes, self.device.page())
    }

    /// Shrinks in an order in which more is never backed than leased, so that the ledger calls no backed byte free.
    /// First the scheduler stops using the tail, then the tail is unbacked, then the lease shrinks. Without a
    /// scheduler, no step uses the tail.
    async fn shrink(self, scheduler: Option<ActorRef<SchedulerMessage>>, to: usize) -> Result<Outcome, ElasticError> {
        let begun = Instant::now();
        if let Some(scheduler) = scheduler {
            match tree::RESIZE_POOL.ask(&scheduler, |reply| SchedulerMessage::Resize { blocks: to, reply }).await {
                Ok(()) => {}
                Err(AskError::Gone { .. }) => return Ok(Outcome::Interrupted),
                Err(error) => return Err(error.into()),
            }
        }
        // Answered steps are over, and running ones use no block of the tail. The device may still be busy with earlier
        // work, for instance when the lane was replaced. Waiting costs one step at most.
        let last_use = self.device.fence_here();
        let mut looks = tokio::time::interval(FENCE_POLL);
        while !last_use.is_passed() {
            looks.tick().await;
        }
        let unback = move |kv: &KvMemory| kv.shrink_to(to, &last_use);
        let Some(()) = self.on_a_thread(unback).await? else { return Ok(Outcome::Interrupted) };
        self.budget.resize(tree::RESIZE_FOR_ENGINE, self.memory.kv.lease(), self.bytes(to)).await?;
        metric::KV_SHRINK_SECONDS.record(&self.label, begun.elapsed());
        Ok(Outcome::Done)
    }

    /// Grows the lease, then backs more. If either is refused, the size stays as before.
    async fn grow(self, from: usize, to: usize) -> Result<Outcome, ElasticError> {
        let lease = self.memory.kv.lease();
        match self.budget.resize(tree::RESIZE_FOR_ENGINE, lease, self.bytes(to)).await {
            Ok(()) => {}
            Err(LeaseError::Refused(_)) => return Ok(Outcome::Refused),
            Err(error) => return Err(error.into()),
        }
        let back = move |kv: &KvMemory| match kv.grow_to(to) {
            Ok(()) => Ok(true),
            // Layers before the refused one may be backed already. No step has used their new blocks.
            Err(error) if error.is_refused() => kv.shrink_to(from, &Fence::passed()).map(|()| false),
            Err(error) => Err(error),
        };
        match self.on_a_thread(back).await? {
            Some(true) => Ok(Outcome::Done),
            Some(false) => {
                self.budget.resize(tree::RESIZE_FOR_ENGINE, lease, self.bytes(from)).await?;
                Ok(Outcome::Refused)
            }
            None => Ok(Outcome::Refused),
        }
    }

    /// As [`WeightStore::on_a_thread`]: ending this engine waits for the thread. Returns none if the engine is being
    /// ended.
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
