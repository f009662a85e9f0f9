//! Gauges of a model: running actors, permits, and the duration of the start.

use bursar_budgets::Class;

use super::{
    EngineState,
    children::{CHILDREN, Children},
};
use crate::{
    metric::{self, Permit},
    supervise::runs,
    tree::Role,
};

impl EngineState {
    /// Sets the gauges, and registers counters at 0.
    pub(super) fn show(&self) {
        let model = &self.arguments.label;
        metric::expect_model(model);
        let up = |role: Role, is_up: bool| metric::ACTOR_UP.set(&(model.clone(), role), is_up);
        up(Role::Engine, true);
        up(Role::Profile, self.profile.as_ref().is_some_and(runs));
        let cells = self.children().map(Children::cells).unwrap_or_default();
        for (role, cell) in CHILDREN.into_iter().zip(cells) {
            up(role, cell.as_ref().is_some_and(runs));
        }
        let Some(serving) = self.core.serving() else { return };
        let (profiled, record) = (serving.profiled(), &serving.profiled().record);
        metric::PERMITS.set(&(model.clone(), Permit::Sequences), record.sequences);
        metric::PERMITS.set(&(model.clone(), Permit::Patches), record.launch_patches);
        metric::PROFILE_TARGET_TOKENS.set(model, record.kv_tokens());
        metric::PROFILE_SECONDS.set(model, serving.sized_within());
        // The plan error of a serving model is always 0, because an attempt fails if its measured
        // peak differs from the plan.
        for class in [Class::StepWorkspace, Class::VisionWorkspace] {
            metric::PLAN_ERROR_BYTES.set(&(model.clone(), class), 0);
        }
        let captured = profiled.memory.graphs.as_ref().map_or(0, |inputs| inputs.captured().count());
        metric::GRAPHS_CAPTURED.set(model, captured);
    }
}
