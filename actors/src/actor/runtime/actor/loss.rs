//! Handling of a lost device: all its engines end, and a new device replaces it if one is allowed.

use std::sync::Arc;

use bursar_budgets::{Device, DeviceError, LedgerConfig};
use ractor::{ActorProcessingErr, ActorRef};

use super::{RuntimeState, memory::release_all_memory};
use crate::{
    engine::{EngineArguments, RetainedState, Status, WeightStore},
    event::Event,
    losses::Losses,
    metric::{self, DeviceLabel},
    runtime::{RuntimeMessage, core::Input},
    sleep::{SleepLevel, WakeState},
};

impl RuntimeState {
    /// Returns the device's error if the device is lost. This function calls the driver, because a
    /// kernel fault is reported only by the next driver call.
    pub(super) fn loss(&self) -> Option<DeviceError> {
        self.device().memory().err().filter(DeviceError::is_lost)
    }

    /// Reports the loss to every request and ends the engines of `models`. [`Input::DeviceMade`]
    /// follows.
    pub(super) fn lose_device(
        &self,
        myself: &ActorRef<RuntimeMessage>,
        error: DeviceError,
        models: &[String],
        replace: bool,
    ) {
        metric::DEVICE_LOSSES_TOTAL.add(&DeviceLabel::of(self.device().as_ref()), 1);
        let reason: Arc<str> = error.to_string().into();
        self.settings.mailbox().events().record(Event::DeviceLost { reason: error.to_string() });
        // Publish the loss before the engines end. A request whose actors die must see the loss,
        // and must not report an ordinary death of an actor.
        self.shown.losses.send_modify(|losses| *losses = Losses { count: losses.count + 1, reason });
        let engines: Vec<_> = models.iter().map(|name| self.engines[name].place()).collect();
        // Sleeping models stay asleep.
        let awake =
            engines.iter().filter(|(_, arguments)| !matches!(arguments.wakefulness.state(), WakeState::Asleep(_)));
        awake.for_each(|(_, arguments)| arguments.show(Status::Starting));
        let (myself, again) = (myself.clone(), self.again.clone().filter(|_| replace));
        tokio::spawn(async move {
            for (cell, arguments) in engines {
                drop(cell.kill_and_wait(None).await);
                release_all_memory(&arguments).await;
            }
            let made = match again {
                None => Err(error),
                Some(again) => tokio::task::spawn_blocking(move || again()).await.unwrap_or(Err(error)),
            };
            drop(myself.send_message(RuntimeMessage::Input(Input::DeviceMade(made))));
        });
    }

    /// Publishes a device and starts a new budget for it. Everything that models keep for their
    /// engines was on the lost device and is replaced.
    pub(super) async fn take_device(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        device: Arc<dyn Device>,
    ) -> Result<(), ActorProcessingErr> {
        // Only leases of the user's own code are left on the lost device, and the contents of their
        // memory are lost.
        drop(self.budget.kill_and_wait(None).await);
        self.settings.mailbox().forget_device();
        let LedgerConfig { host_total, waiting_max, .. } = self.settings.ledger;
        self.settings.ledger = LedgerConfig { host_total, waiting_max, ..LedgerConfig::of(device.as_ref()) };
        self.shown.device.send_replace(device.clone());
        for engine in self.engines.values_mut() {
            let (device, weight_store, kept) = (device.clone(), WeightStore::default(), RetainedState::default());
            engine.arguments = EngineArguments { device, weight_store, kept, ..engine.arguments.clone() };
            if let WakeState::Asleep(_) = engine.arguments.wakefulness.state() {
                engine.arguments.wakefulness.set(WakeState::Asleep(SleepLevel::Level2));
            }
        }
        self.budget = self.settings.spawn(myself, &device).await?;
        Ok(())
    }
}
