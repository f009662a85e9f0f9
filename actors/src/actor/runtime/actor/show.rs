//! Gauges of a runtime's actors, its models, and the models that have ended.

use super::{Engine, Known, RuntimeState};
use crate::{
    engine::Status,
    metric::{self, Architecture, DeviceLabel, Dtype, KvCacheDtype, Quantization},
    sleep::WakeState,
    supervise::runs,
};

impl Engine {
    /// Stores the labels of the info gauge once the model has been READY. A model that stopped by
    /// itself was READY before.
    pub(super) fn publish_known(&mut self) {
        let weight_store = &self.arguments.weight_store;
        let was_ready = matches!(*self.arguments.status.borrow(), Status::Ready(_) | Status::Stopped { .. });
        let is_due = was_ready && self.known.is_none();
        if let (true, Some(model), Some(executor)) = (is_due, weight_store.model(), weight_store.executor()) {
            let (label, architecture) = (self.arguments.label.clone(), Architecture(model.config().architecture()));
            let dtype = Dtype(executor.target().activation().name());
            let quantization = Quantization(model.quantization().unwrap_or("none"));
            let kv_cache_dtype = KvCacheDtype(model.cache().type_name(&executor.target()));
            self.known = Some(Known(label, architecture, dtype, quantization, kv_cache_dtype));
        }
    }
}

impl RuntimeState {
    /// Sets the gauges, and makes the counters start at 0.
    pub(super) fn show(&mut self) {
        metric::show_build();
        let device = DeviceLabel::of(self.device().as_ref());
        metric::RUNTIME_UP.set(&device, true);
        metric::BUDGET_UP.set(&device, runs(&self.budget));
        metric::expect_device(&device);
        for engine in self.engines.values_mut() {
            if !runs(&engine.cell) {
                // The engine's child actors died with it.
                metric::forget_model(&engine.arguments.label);
            }
            engine.publish_known();
            engine.known.iter().for_each(|known| known.show(true));
            engine.requests.show();
            let is_asleep = matches!(engine.arguments.wakefulness.state(), WakeState::Asleep(_));
            metric::ASLEEP.set(&engine.arguments.label, is_asleep);
        }
        self.dead_models.values().for_each(Known::show_dead);
    }
}

impl Drop for RuntimeState {
    /// Resets the gauges, because no actor of the runtime runs any more, however the runtime ended.
    fn drop(&mut self) {
        self.engines.values().for_each(|engine| metric::forget_model(&engine.arguments.label));
        let known = self.engines.values().filter_map(|engine| engine.known.as_ref());
        known.chain(self.dead_models.values()).for_each(|known| known.show(false));
        self.settings.mailbox().forget_shown(self.device().as_ref());
    }
}
