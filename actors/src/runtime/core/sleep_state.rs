//! Whether a model of a runtime is awake, and what waits for that to change.

use std::time::Duration;

use crate::{
    metric::{SleepReason, WakeReason},
    sleep::SleepLevel,
};

/// Where a model is between two times of being awake.
pub enum SleepState<S> {
    /// It takes requests, or starts for the first time and waits for no room.
    Awake {
        /// Since when, or since it was loaded.
        since: Duration,
    },
    /// Its requests end.
    Draining(Draining<S>),
    /// Its engine ends, and what it held is taken back.
    Releasing(Releasing<S>),
    /// It holds no device memory.
    Asleep(SleepLevel),
    /// It waits for its turn, or for room.
    WaitingForMemory(WaitingForMemory<S>),
    /// Its engine starts.
    Waking(WaitingForMemory<S>),
}

/// Who waits for a model to sleep, and what they asked for.
pub struct Sleepers<S> {
    /// The deepest level that one asked for.
    pub level: SleepLevel,
    /// The longest that running requests may take by one of them.
    pub within: Duration,
    /// Each.
    pub each: Vec<S>,
}

/// A model whose requests end.
pub struct Draining<S> {
    /// Why it is to sleep.
    pub reason: SleepReason,
    /// Who waits for that.
    pub sleepers: Sleepers<S>,
    /// It is to wake up at once.
    pub wanted: Option<WakeReason>,
}

/// A model whose memory is taken back.
pub struct Releasing<S> {
    /// Who waits for it to sleep.
    pub sleepers: Sleepers<S>,
    /// What follows.
    pub next: Next<S>,
    /// It is to end then, for this reason.
    pub end: Option<String>,
}

/// What a model does once its memory is back.
pub enum Next<S> {
    /// It sleeps, for this reason. Perhaps it is to wake up at once.
    Sleep(SleepReason, Option<WakeReason>),
    /// It sleeps on, because it could not wake up.
    StayAsleep,
    /// It waits for room.
    WaitForMemory(WaitingForMemory<S>),
}

/// A model that starts, or is to.
pub struct WaitingForMemory<S> {
    /// Why it wakes up. None if it is loaded.
    pub reason: Option<WakeReason>,
    /// When it was first asked to.
    pub since: Duration,
    /// It has not fitted, and nothing has left since.
    pub was_tried: bool,
    /// Who waits for it to sleep again once it is awake.
    pub again: Sleepers<S>,
}

impl<S> Sleepers<S> {
    /// None yet.
    pub fn none() -> Self {
        Sleepers { level: SleepLevel::Level1, within: Duration::ZERO, each: Vec::new() }
    }

    /// The first.
    pub fn one(level: SleepLevel, within: Duration, sleeper: S) -> Self {
        Sleepers { level, within, each: vec![sleeper] }
    }

    /// One more waits.
    pub fn join(&mut self, level: SleepLevel, within: Duration, sleeper: S) {
        if level == SleepLevel::Level2 {
            self.level = level;
        }
        self.within = self.within.max(within);
        self.each.push(sleeper);
    }
}

impl<S> SleepState<S> {
    /// Whether it is on its way somewhere, after which there may be more room, or less.
    pub fn is_moving(&self) -> bool {
        matches!(self, SleepState::Draining(_) | SleepState::Releasing(_) | SleepState::Waking(_))
    }

    /// What waits for room, if it does.
    pub fn waiting(&mut self) -> Option<&mut WaitingForMemory<S>> {
        match self {
            SleepState::WaitingForMemory(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// Whether an engine of it runs, or is to.
    pub fn has_engine(&self) -> bool {
        matches!(self, SleepState::Awake { .. } | SleepState::Draining(_) | SleepState::Waking(_))
    }
}

/// What a look saw of a model.
#[derive(Clone, Debug)]
pub struct IdleReport {
    /// Its name.
    pub name: String,
    /// How long it has had no request and no caller that waits. None if it has one.
    pub idle_for: Option<Duration>,
    /// Whether callers wait for it to be awake.
    pub is_awaited: bool,
}
