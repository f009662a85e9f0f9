//! Ends what is on a lost device, and takes its successor.

use std::sync::Arc;

use bursar_budgets::{Device, DeviceError, LedgerConfig};
use ractor::{ActorProcessingErr, ActorRef};

use super::{RuntimeState, memory::release_all_memory};
use crate::{
    engine::{EngineArguments, RetainedState, Status, WeightStore},
    event::Event,
    losses::Losses,
    metric::{self, DeviceLabel},
    runtime::RuntimeMessage,
    sleep::{Rest, SleepLevel},
};

impl RuntimeState {
    /// The device's error, if it is lost. This asks the driver, because a kernel's fault is reported only on the next
    /// call.
    pub(super) fn loss(&self) -> Option<DeviceError> {
        self.device().memory().err().filter(DeviceError::is_lost)
    }

    /// Tells every request and ends the engines of `models`. A [`RuntimeMessage::DeviceMade`] follows.
    pub(super) fn lose_device(
        &self,
        myself: &ActorRef<RuntimeMessage>,
        error: DeviceError,
        models: &[String],
        replace: bool,
    ) {
        metric::DEVICE_LOSSES_TOTAL.add(&DeviceLabel::of(self.device().as_ref()), 1);
        let reason: Arc<str> = error.to_string().into();
        self.settings.mailbox().events().tell(Event::DeviceLost { reason: error.to_string() });
        // Before anything else: a request that hears of its actors' end must not take it for an ordinary death.
        self.shown.losses.send_modify(|losses| *losses = Losses { count: losses.count + 1, reason });
        let engines: Vec<_> = models.iter().map(|name| self.engines[name].place()).collect();
        // Those that sleep go on sleeping.
        let awake = engines.iter().filter(|(_, arguments)| !matches!(arguments.wakefulness.rest(), Rest::Asleep(_)));
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
            drop(myself.send_message(RuntimeMessage::DeviceMade(made)));
        });
    }

    /// Publishes a device, with a budget of its own. What models keep for their engines was on the lost one.
    pub(super) async fn take_device(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        device: Arc<dyn Device>,
    ) -> Result<(), ActorProcessingErr> {
        // Only users' leases are left of the lost device, and they are worthless.
        drop(self.budget.kill_and_wait(None).await);
        self.settings.mailbox().forget_device();
        let LedgerConfig { host_total, waiting_max, .. } = self.settings.ledger;
        self.settings.ledger = LedgerConfig { host_total, waiting_max, ..LedgerConfig::of(device.as_ref()) };
        self.shown.device.send_replace(device.clone());
        for engine in self.engines.values_mut() {
            let (device, weight_store, kept) = (device.clone(), WeightStore::default(), RetainedState::default());
            engine.arguments = EngineArguments { device, weight_store, kept, ..engine.arguments.clone() };
            if let Rest::Asleep(_) = engine.arguments.wakefulness.rest() {
                engine.arguments.wakefulness.set(Rest::Asleep(SleepLevel::Level2));
            }
        }
        self.budget = self.settings.spawn(myself, &device).await?;
        Ok(())
    }
}
