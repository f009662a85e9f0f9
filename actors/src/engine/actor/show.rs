//! What an engine shows of its model: running actors, permits, and how long the start took.

use bursar_budgets::Class;

use super::EngineState;
use crate::{
    metric::{self, Permit},
    supervise::runs,
    tree::Role,
};

impl EngineState {
    /// Sets the gauges. Counters start at 0.
    pub(super) fn show(&self) {
        let model = &self.arguments.label;
        metric::expect_model(model);
        let up = |role: Role, is_up: bool| metric::ACTOR_UP.set(&(model.clone(), role), is_up);
        up(Role::Engine, true);
        up(Role::Profile, self.profile.as_ref().is_some_and(runs));
        for (role, cell) in super::CHILDREN.into_iter().zip(self.children.cells()) {
            up(role, cell.as_ref().is_some_and(runs));
        }
        let Some(profiled) = &self.profiled else { return };
        let record = &profiled.record;
        metric::PERMITS.set(&(model.clone(), Permit::Sequences), record.sequences);
        metric::PERMITS.set(&(model.clone(), Permit::Patches), record.launch_patches);
        metric::PROFILE_TARGET_TOKENS.set(model, record.kv_tokens());
        self.sized_within.into_iter().for_each(|within| metric::PROFILE_SECONDS.set(model, within));
        // Always 0 here: a peak that differs from the plan ends an attempt.
        for class in [Class::StepWorkspace, Class::VisionWorkspace] {
            metric::PLAN_ERROR_BYTES.set(&(model.clone(), class), 0);
        }
        let captured = profiled.memory.graphs.as_ref().map_or(0, |inputs| inputs.captured().count());
        metric::GRAPHS_CAPTURED.set(model, captured);
    }
}
