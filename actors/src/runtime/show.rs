//! What the runtime shows: who of its own runs, and what is over of models that have ended.

use bursar_budgets::Label;

use super::actor::RuntimeState;
use crate::{
    metric::{self, DeviceLabel},
    supervise::runs,
    tree::Role,
};

/// The model's label of what belongs to none.
pub(super) fn no_model() -> Label {
    Label::from("")
}

impl RuntimeState {
    /// Sets the gauges; what is counted stands at 0 until it is counted.
    pub(super) fn show(&self) {
        let up = |role: Role, is_up: bool| metric::ACTOR_UP.set(&(no_model(), role), is_up);
        up(Role::Runtime, true);
        up(Role::Budget, runs(&self.budget));
        metric::RESTARTS_TOTAL.add(&(no_model(), Role::Budget), 0);
        metric::DEVICE_LOSSES_TOTAL.add(&DeviceLabel::of(self.shown.device.borrow().as_ref()), 0);
        for engine in self.engines.values() {
            if !runs(&engine.cell) {
                // Its actors died with it.
                metric::forget_model(&engine.arguments.label);
            }
            engine.requests.show();
        }
    }
}

impl Drop for RuntimeState {
    /// However it ended, nothing of it runs any more.
    fn drop(&mut self) {
        for role in [Role::Runtime, Role::Budget] {
            metric::ACTOR_UP.set(&(no_model(), role), false);
        }
        self.engines.values().for_each(|engine| metric::forget_model(&engine.arguments.label));
        self.desk.0.forget_shown(&DeviceLabel::of(self.shown.device.borrow().as_ref()));
    }
}
