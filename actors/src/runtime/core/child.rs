//! What a runtime supervises, over all its restarts.

use std::time::Duration;

use crate::supervise::{Decision, Intensity, Policy, RestartLog};

/// An actor or a device that is replaced when it dies.
pub struct Child {
    restarts: RestartLog,
    deaths: u64,
    /// A successor is due.
    is_dead: bool,
}

/// What a death leads to.
pub enum Verdict {
    /// A successor, after a wait.
    Again {
        /// The number of the death.
        death: u64,
        /// The wait.
        wait: Duration,
    },
    /// It has died too often.
    CrashLoop {
        /// Restarts within the window.
        restarts: usize,
    },
}

impl Child {
    /// One that runs, with the tolerated restarts.
    pub fn new(intensity: Intensity) -> Self {
        Child { restarts: RestartLog::new(Policy::OneForOne, intensity, 1), deaths: 0, is_dead: false }
    }

    /// Takes note of a death at `now`.
    pub fn died(&mut self, now: Duration) -> Verdict {
        self.deaths += 1;
        self.is_dead = true;
        match self.restarts.died(0, now) {
            Decision::Restart { after: wait, .. } => Verdict::Again { death: self.deaths, wait },
            Decision::GiveUp { restarts, .. } => Verdict::CrashLoop { restarts },
        }
    }

    /// Starts the successor after `death`. False if none is due: it was replaced otherwise.
    pub fn restart(&mut self, death: u64) -> bool {
        death == self.deaths && std::mem::take(&mut self.is_dead)
    }

    /// It has a successor that waited for nothing.
    pub fn replaced(&mut self) {
        self.is_dead = false;
    }
}
