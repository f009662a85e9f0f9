//! A supervised actor or device, over all its restarts.

use std::time::Duration;

use crate::supervise::{Decision, Intensity, Policy, RestartLog};

/// An actor or a device that is replaced when it dies.
pub struct Child {
    restarts: RestartLog,
    deaths: u64,
    /// Whether a successor is due.
    is_dead: bool,
}

/// Decision after a death.
pub enum Verdict {
    /// A successor starts after a wait.
    Again {
        /// The number of the death.
        death: u64,
        wait: Duration,
    },
    /// The child has died too often.
    CrashLoop {
        /// Number of restarts within the window.
        restarts: usize,
    },
}

impl Child {
    /// Returns a running child with a limit on its restarts.
    pub fn new(intensity: Intensity) -> Self {
        Child { restarts: RestartLog::new(Policy::OneForOne, intensity, 1), deaths: 0, is_dead: false }
    }

    /// Records a death at `now`.
    pub fn died(&mut self, now: Duration) -> Verdict {
        self.deaths += 1;
        self.is_dead = true;
        match self.restarts.died(0, now) {
            Decision::Restart { after: wait, .. } => Verdict::Again { death: self.deaths, wait },
            Decision::GiveUp { restarts, .. } => Verdict::CrashLoop { restarts },
        }
    }

    /// Records that the successor after death number `death` starts. Returns `false` if the child
    /// was already replaced, so that no successor is due.
    pub fn restart(&mut self, death: u64) -> bool {
        death == self.deaths && std::mem::take(&mut self.is_dead)
    }

    /// Records that the child has a successor that started without a wait.
    pub fn replaced(&mut self) {
        self.is_dead = false;
    }
}
