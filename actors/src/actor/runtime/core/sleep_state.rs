//! Sleep states of a model, and the callers that wait for a change.

use std::time::Duration;

use crate::{
    metric::{SleepReason, WakeReason},
    sleep::SleepLevel,
};

/// Sleep state of a model.
pub enum SleepState<S> {
    /// The model takes requests, or its engine restarts.
    Awake {
        /// Time at which this state began.
        since: Duration,
    },
    /// The model's requests finish, and no new requests are admitted.
    Draining(Draining<S>),
    /// The model's engine ends, and its memory is being released.
    Releasing(Releasing<S>),
    /// The model holds no device memory.
    Asleep(SleepLevel),
    /// The model is in the queue: it waits for its turn to start, or for memory.
    WaitingForMemory(WaitingForMemory<S>),
    /// The model's engine starts.
    Waking(WaitingForMemory<S>),
}

/// Callers that wait for a model to sleep, and the combination of their options.
pub struct SleepWaiters<S> {
    /// The deepest level that any caller asked for.
    pub level: SleepLevel,
    /// The longest time that any caller gives running requests to finish.
    pub within: Duration,
    pub each: Vec<S>,
}

/// A model whose requests finish before it sleeps.
pub struct Draining<S> {
    /// Why the model goes to sleep.
    pub reason: SleepReason,
    pub sleepers: SleepWaiters<S>,
    /// If set, the model wakes up again as soon as it is asleep, for this reason.
    pub wanted: Option<WakeReason>,
}

/// A model whose memory is being released.
pub struct Releasing<S> {
    pub sleepers: SleepWaiters<S>,
    pub next: Next<S>,
    /// If set, the model ends afterward, for this reason.
    pub end: Option<String>,
}

/// Next state of a model whose memory has been released.
pub enum Next<S> {
    /// The model sleeps, for the given [`SleepReason`]. If there is a [`WakeReason`], the model
    /// wakes up again at once, for that reason.
    Sleep(SleepReason, Option<WakeReason>),
    /// The model stays asleep, because it could not wake up.
    StayAsleep,
    /// The model waits for memory.
    WaitForMemory(WaitingForMemory<S>),
}

/// A model that starts, or is going to start.
pub struct WaitingForMemory<S> {
    /// Why the model wakes up. `None` if it is being loaded.
    pub reason: Option<WakeReason>,
    /// Time at which the wake or load was first requested.
    pub since: Duration,
    /// Whether the model tried to start and did not fit, and no memory was released since then.
    pub was_tried: bool,
    /// Callers that wait for the model to sleep again after it is awake.
    pub again: SleepWaiters<S>,
}

impl<S> SleepWaiters<S> {
    pub fn none() -> Self {
        SleepWaiters { level: SleepLevel::Level1, within: Duration::ZERO, each: Vec::new() }
    }

    pub fn one(level: SleepLevel, within: Duration, sleeper: S) -> Self {
        SleepWaiters { level, within, each: vec![sleeper] }
    }

    pub fn join(&mut self, level: SleepLevel, within: Duration, sleeper: S) {
        if level == SleepLevel::Level2 {
            self.level = level;
        }
        self.within = self.within.max(within);
        self.each.push(sleeper);
    }
}

impl<S> SleepState<S> {
    /// Whether the model is in a transition that may change the available memory.
    pub fn is_in_transition(&self) -> bool {
        matches!(self, SleepState::Draining(_) | SleepState::Releasing(_) | SleepState::Waking(_))
    }

    pub fn waiting(&mut self) -> Option<&mut WaitingForMemory<S>> {
        match self {
            SleepState::WaitingForMemory(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// Whether an engine of the model runs or is being restarted.
    pub fn has_engine(&self) -> bool {
        matches!(self, SleepState::Awake { .. } | SleepState::Draining(_) | SleepState::Waking(_))
    }
}

/// Idle state of a model at one moment.
#[derive(Clone, Debug)]
pub struct IdleReport {
    pub name: String,
    /// How long the model has had no request and no waiting caller. `None` if there is a request or
    /// a waiting caller.
    pub idle_for: Option<Duration>,
    /// Whether callers wait for the model to be awake.
    pub is_awaited: bool,
}
