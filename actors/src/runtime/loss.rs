//! What the runtime does when the device is lost. Every request is told and everything on the device ends. Then another
//! device takes its place, or the runtime ends with the reason.

use std::sync::Arc;

use bursar_budgets::{Device, DeviceError, LedgerConfig};
use ractor::{ActorProcessingErr, ActorRef};
use tokio::sync::watch;

use super::{
    RuntimeMessage,
    actor::{RuntimeState, bring_all_home, spawn_budget},
};
use crate::{
    engine::{EngineArguments, Status, WeightStore},
    event::Event,
    losses::Losses,
    metric::{self, DeviceLabel},
    supervise::Decision,
};

/// What a runtime publishes about its device.
#[derive(Clone)]
pub struct Shown {
    /// The current device.
    pub device: Arc<watch::Sender<Arc<dyn Device>>>,
    /// The losses so far.
    pub losses: Arc<watch::Sender<Losses>>,
}

impl Shown {
    pub(super) fn new(device: Arc<dyn Device>) -> Self {
        Shown { device: Arc::new(watch::Sender::new(device)), losses: Arc::default() }
    }
}

impl RuntimeState {
    /// The device's error, if it is lost. This asks the driver, because a kernel's fault is reported only on the next
    /// call.
    pub(super) fn loss(&self) -> Option<DeviceError> {
        self.shown.device.borrow().memory().err().filter(DeviceError::is_lost)
    }

    /// Tells every request and ends what was on the device. A [`RuntimeMessage::DeviceMade`] follows.
    pub(super) fn device_lost(&mut self, myself: &ActorRef<RuntimeMessage>, error: DeviceError) {
        if std::mem::replace(&mut self.is_lost, true) {
            return;
        }
        metric::DEVICE_LOSSES_TOTAL.add(&DeviceLabel::of(self.shown.device.borrow().as_ref()), 1);
        let reason: Arc<str> = error.to_string().into();
        self.mailbox.0.events().tell(Event::DeviceLost { reason: error.to_string() });
        // Before anything else: a request that hears of its actors' end must not take it for an ordinary death.
        self.shown.losses.send_modify(|losses| *losses = Losses { count: losses.count + 1, reason });
        let again = match self.device_losses.died(0, self.born.elapsed()) {
            Decision::Restart { .. } if self.shutting_down.is_empty() => self.again.clone(),
            _ => None,
        };
        let mut engines = Vec::new();
        for engine in self.engines.values().filter(|engine| engine.ending.is_none()) {
            engine.arguments.show(Status::Starting);
            engines.push((engine.cell.clone(), engine.arguments.clone()));
        }
        let myself = myself.clone();
        tokio::spawn(async move {
            for (cell, arguments) in engines {
                drop(cell.kill_and_wait(None).await);
                bring_all_home(&arguments).await;
            }
            let made = match again {
                None => Err(error),
                Some(again) => tokio::task::spawn_blocking(move || again()).await.unwrap_or(Err(error)),
            };
            drop(myself.send_message(RuntimeMessage::DeviceMade(made)));
        });
    }

    /// Starts again on the new device, or ends.
    pub(super) async fn device_made(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        made: Result<Arc<dyn Device>, DeviceError>,
    ) -> Result<(), ActorProcessingErr> {
        let device = match made {
            Ok(device) => device,
            // The runtime is shutting down: the models end as they would have.
            Err(_) if !self.shutting_down.is_empty() => return Ok(()),
            Err(error) => {
                let reason: Arc<str> = error.to_string().into();
                for engine in self.engines.values() {
                    engine.arguments.show(Status::Stopped { reason: reason.clone() });
                }
                return Err(error.into());
            }
        };
        // Only users' leases are left of the lost device, and they are worthless.
        drop(self.budget.kill_and_wait(None).await);
        self.mailbox.0.forget_device();
        let LedgerConfig { host_total, waiting_max, .. } = self.ledger;
        self.ledger = LedgerConfig { host_total, waiting_max, ..LedgerConfig::of(device.as_ref()) };
        self.shown.device.send_replace(device.clone());
        self.is_lost = false;
        self.budget = spawn_budget(myself, &device, &self.ledger, self.canary, self.watch, &self.mailbox.0).await?;
        let goes_on = |engine: &&super::actor::Engine| engine.ending.is_none();
        let engines: Vec<_> = self
            .engines
            .iter()
            .filter(|(_, engine)| goes_on(engine))
            .map(|(name, engine)| {
                let arguments = EngineArguments {
                    device: device.clone(),
                    weight_store: WeightStore::default(),
                    ..engine.arguments.clone()
                };
                (name.clone(), engine.load, engine.requests.clone(), arguments)
            })
            .collect();
        for (name, load, requests, arguments) in engines {
            self.spawn_engine(myself, name, load, requests, arguments).await?;
        }
        Ok(())
    }
}
