//! One step of the engine state machine: its rules, its time, and the effects so far.

use std::time::Duration;

use super::{Effect, Parts, attempt_log::AttemptLog};
use crate::{
    profile::{AttemptState, FaultPlan, Outcome},
    supervise::Intensity,
};

/// Settings of an engine that never change.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The number of tolerated restarts of serving actors, and the period in which they count.
    pub intensity: Intensity,
    /// The number of kinds of serving actors.
    pub children: usize,
    /// Whether the user fixed the size of the KV cache.
    pub is_pinned: bool,
    /// Refusals of memory to inject on purpose.
    pub faults: FaultPlan,
}

/// The state of one call of [`EngineCore::step`](super::EngineCore::step).
pub struct Step<'s, P: Parts> {
    pub rules: &'s Rules,
    pub log: &'s mut AttemptLog,
    pub now: Duration,
    pub effects: Vec<Effect<P>>,
}

impl<P: Parts> Step<'_, P> {
    pub fn effect(&mut self, effect: Effect<P>) {
        self.effects.push(effect);
    }

    pub fn report(&mut self, passed: &AttemptState, outcome: Outcome) {
        let report = self.log.report(passed, outcome);
        self.effect(Effect::Report(report));
    }
}
