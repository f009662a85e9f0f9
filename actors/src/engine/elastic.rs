//! Keys and values that become fewer and more after READY: what the engine does about the budget's orders (ADR 19).

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

/// How often the fence behind the last step is looked at.
const FENCE_POLL: Duration = Duration::from_micros(500);

/// A change that could not be brought to an end, so that nobody knows what is backed: the engine dies of it.
#[derive(Debug, Error)]
pub enum ElasticError {
    /// The device said no to taking memory back.
    #[error("while resizing keys and values: {0}")]
    Device(#[from] DeviceError),
    /// The budget said no to a smaller lease, or nothing.
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

/// The pool of one engine, from READY on.
pub(super) struct Elastic {
    core: PoolCore,
    place: Place,
    /// The change under way. It ends with the engine.
    task: Option<BackgroundTask>,
}

impl Elastic {
    /// All of `place`, of which one sequence of the full context always stays, and a whole step: with that every request
    /// comes to its end, one after the other if need be.
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

    /// Obeys the budget from now on: what it orders is a message to `engine`.
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

    /// The budget has an order.
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

    /// What more would take was refused while it was served: from now on there are `most` blocks at most. Nobody serves and
    /// the lanes have no work, and so it stays until this is no longer [quiet](Self::is_quiet).
    pub(super) fn cap(&mut self, most: usize, engine: &ActorRef<EngineMessage>) {
        self.step(Input::Cap(most), engine, None);
    }

    /// As [`cap`](Self::cap), for a size that stays: until what was ordered is done.
    pub(super) fn pause(&mut self, engine: &ActorRef<EngineMessage>) {
        self.step(Input::Pause, engine, None);
    }

    /// Blocks that there are at most.
    pub(super) fn most(&self) -> usize {
        self.core.most()
    }

    /// Whether nobody may serve yet.
    pub(super) fn is_quiet(&self) -> bool {
        self.core.is_quiet()
    }

    /// A change has ended.
    pub(super) fn ended(&mut self, outcome: Outcome, engine: &ActorRef<EngineMessage>, scheduler: Scheduler<'_>) {
        self.task = None;
        let before = self.core.blocks();
        self.step(Input::Ended(outcome), engine, scheduler);
        let blocks = self.core.blocks();
        if blocks > before
            && let Some(scheduler) = scheduler
        {
            // One that has died has a successor that begins with as many.
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

/// The scheduler that serves now, if one does.
pub(super) type Scheduler<'s> = Option<&'s ActorRef<SchedulerMessage>>;

impl Place {
    fn bytes(&self, blocks: usize) -> Bytes {
        KvMemory::bytes(self.memory.kv.shape(), blocks, self.device.page())
    }

    fn blocks_in(&self, bytes: Bytes) -> usize {
        KvMemory::blocks_in(self.memory.kv.shape(), bytes, self.device.page())
    }

    /// First nobody names the tail, then it is unbacked, and then the lease is smaller: at no moment is more backed than
    /// leased, and the ledger calls nothing free that is not.
    ///
    /// Without a scheduler nobody names anything.
    async fn shrink(self, scheduler: Option<ActorRef<SchedulerMessage>>, to: usize) -> Result<Outcome, ElasticError> {
        let begun = Instant::now();
        if let Some(scheduler) = scheduler {
            match tree::RESIZE_POOL.ask(&scheduler, |reply| SchedulerMessage::Resize { blocks: to, reply }).await {
                Ok(()) => {}
                Err(AskError::Gone { .. }) => return Ok(Outcome::Interrupted),
                Err(error) => return Err(error.into()),
            }
        }
        // Steps that were answered are over; those that run now name nothing of the tail, but the device may not be past
        // them when the lane is replaced, say. It costs a step at most.
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

    /// First the lease is larger, then more is backed. Either may be refused: then it is as before.
    async fn grow(self, from: usize, to: usize) -> Result<Outcome, ElasticError> {
        let lease = self.memory.kv.lease();
        match self.budget.resize(tree::RESIZE_FOR_ENGINE, lease, self.bytes(to)).await {
            Ok(()) => {}
            Err(LeaseError::Refused(_)) => return Ok(Outcome::Refused),
            Err(error) => return Err(error.into()),
        }
        let back = move |kv: &KvMemory| match kv.grow_to(to) {
            Ok(()) => Ok(true),
            // Layers may have been backed before the one that was refused. No step has named a block of theirs.
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

    /// As [`WeightStore::on_a_thread`]: whoever ends this engine waits for the thread. None if an end has been put to it.
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
