//! Execution of the effects that the core of a runtime returns.

use std::{sync::Arc, time::Duration};

use bursar_budgets::Gate;
use ractor::{ActorProcessingErr, ActorRef};

use super::{
    RuntimeState,
    memory::{release_all_memory, release_memory},
    start::spawn_engine,
};
use crate::{
    engine::{StartError, Status},
    event::Event,
    metric::{self, DeviceLabel},
    runtime::{
        RuntimeMessage,
        core::{Effect, Input},
        message::ActorParts,
    },
    shared::carry_out::CarryOut,
    tree::Role,
};

impl CarryOut for RuntimeState {
    type Message = RuntimeMessage;
    type Input = Input<ActorParts>;
    type Effect = Effect<ActorParts>;

    fn decide(&mut self, input: Input<ActorParts>) -> Vec<Effect<ActorParts>> {
        self.core.step(input, self.born.elapsed())
    }

    async fn carry_out(
        &mut self,
        myself: &ActorRef<RuntimeMessage>,
        effect: Effect<ActorParts>,
    ) -> Result<Option<Input<ActorParts>>, ActorProcessingErr> {
        match effect {
            Effect::Refuse(request) => request.reply.answer(Err(Arc::new(StartError::ShuttingDown))),
            Effect::ForgetDead { name } => {
                self.dead_models.remove(&name).iter().for_each(|dead_models| dead_models.show(false));
            }
            Effect::Begin { name, generation, request } => self.begin(myself, name, generation, *request).await?,
            Effect::RespawnAfter { name, load, death, wait, reason } => {
                let arguments = self.engines[&name].arguments.clone();
                arguments.show(Status::Starting);
                arguments.report_restart(Role::Engine, &reason);
                let myself = myself.clone();
                tokio::spawn(async move {
                    release_memory(&arguments).await;
                    myself.send_after(wait, move || RuntimeMessage::Input(Input::Respawn { name, load, death }));
                });
            }
            Effect::Respawn { name, generation } => {
                let engine = self.engines.get_mut(&name).expect("the core names a known model");
                engine.arguments.generation = generation;
                engine.cell = spawn_engine(myself, &engine.arguments).await?;
            }
            Effect::Close { name, load, within } => self.close(myself, name, load, within),
            Effect::End { name, load, reason } => self.end(myself, name, load, reason),
            Effect::Gone { name, is_forgotten } => self.gone(name, is_forgotten),
            Effect::Answer { waiter, cut_off } => waiter(cut_off),
            Effect::RespawnBudgetAfter { death, wait, reason } => {
                let device = DeviceLabel::of(self.device().as_ref());
                metric::BUDGET_RESTARTS_TOTAL.add(&device, 1);
                metric::BUDGET_UP.set(&device, false);
                self.settings.mailbox().events().record(Event::Restart {
                    model: None,
                    actor: Role::Budget.name(),
                    reason,
                });
                myself.send_after(wait, move || RuntimeMessage::Input(Input::RespawnBudget { death }));
            }
            Effect::SpawnBudget => match self.settings.spawn(myself, &self.device()).await {
                Ok(budget) => self.budget = budget,
                // A budget that dies during its start counts as a death.
                Err(error) => return Ok(Some(Input::BudgetDied { reason: error.to_string() })),
            },
            Effect::LoseDevice { error, models, replace } => self.lose_device(myself, error, &models, replace),
            Effect::TakeDevice(device) => self.take_device(myself, device).await?,
            Effect::Fail { reason } => {
                for engine in self.engines.values() {
                    engine.arguments.show(Status::Stopped { reason: reason.as_str().into() });
                }
                return Err(reason.into());
            }
            Effect::Stop => myself.stop(None),
            Effect::BeginSleep { name, load, level, within, stayed_busy } => {
                let within = within.unwrap_or_else(|| self.time_to_free_memory(&name, stayed_busy));
                self.begin_sleep(myself, name, load, level, within);
            }
            Effect::ReleaseEngine { name, load, level } => self.release_engine(myself, name, load, level),
            Effect::StayAwake { name } => self.stay_awake(&name),
            Effect::ShowAsleep { name, level, reason } => self.show_asleep(&name, level, reason),
            Effect::ShowWaking { name } => self.show_waking(&name),
            Effect::Wake { name, load, generation } => self.wake(myself, name, load, generation).await?,
            Effect::ShowAwake { name, reason, took } => self.show_awake(&name, reason, took),
            Effect::ReportNotWoken { name } => self.report_not_woken(&name),
            Effect::FailStart { name } => self.fail_start(&name),
            Effect::ReportIdle => return Ok(Some(Input::IdleReports(self.seen()))),
            Effect::ReportIdleLater { busy, within } => self.look_later(myself, &busy, within),
            Effect::AnswerSleeper { sleeper, outcome } => sleeper.answer(outcome),
        }
        Ok(None)
    }
}

impl RuntimeState {
    fn close(&self, myself: &ActorRef<RuntimeMessage>, name: String, load: u64, within: Duration) {
        let (myself, requests) = (myself.clone(), self.engines[&name].requests.clone());
        requests.close();
        tokio::spawn(async move {
            // Reaching the deadline is not an error: the remaining requests are cut off.
            let _ = tokio::time::timeout(within, requests.idle()).await;
            drop(myself.send_message(RuntimeMessage::Input(Input::Due { name, load })));
        });
    }

    fn end(&mut self, myself: &ActorRef<RuntimeMessage>, name: String, load: u64, reason: String) {
        let engine = self.engines.get_mut(&name).expect("the core names a known model");
        // The labels may not be stored yet, if the model became READY after the last update of the
        // gauges.
        engine.publish_known();
        let cut_off = engine.requests.taken();
        let (myself, (cell, arguments)) = (myself.clone(), engine.place());
        tokio::spawn(async move {
            let budget = &arguments.budget;
            // From now on, late lease requests are refused. The next model of this name opens the
            // gate again. If the name never had a gate, this call changes nothing.
            drop(budget.move_gate(arguments.label.clone(), Gate::Teardown).await);
            // The engine's child actors die with it.
            drop(cell.kill_and_wait(None).await);
            // If the engine has already given a reason, that reason is kept.
            arguments.show(Status::Stopped { reason: reason.into() });
            release_all_memory(&arguments).await;
            drop(myself.send_message(RuntimeMessage::Input(Input::Ended { name, load, cut_off })));
        });
    }

    fn gone(&mut self, name: String, is_forgotten: bool) {
        let engine = self.engines.remove(&name).expect("the core names a known model");
        metric::forget_model(&engine.arguments.label);
        match engine.known {
            Some(known) if is_forgotten => known.show(false),
            Some(known) => drop(self.dead_models.insert(name, known)),
            None => {}
        }
    }
}
