//! Execution of the effects of the engine state machine.

use std::sync::Arc;

use bursar_budgets::Gate;
use bursar_kernels::BLOCK_TOKENS;
use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::{ActorParts, EngineState};
use crate::{
    compute::lane::LaneError,
    engine::{
        EngineMessage, Progress, Question, Records, Status, advice,
        core::{Advise, Effect, Input, Size},
        start::{Loaded, StartPlan},
    },
    event::Event,
    metric::{self, AttemptEnd},
    profile::{
        Attempt, AttemptProgress, AttemptReport, Evidence, MemoryState, Outcome, Phase, ProfileActor, ProfileArguments,
        ProfileError, Profiled, ReportAttempt, StressLevel,
    },
    responder::Responder,
    scheduler::SchedulerMessage,
    shared::carry_out::CarryOut,
    sleep::WakeState,
    supervise::BackgroundTask,
};

impl CarryOut for EngineState {
    type Message = EngineMessage;
    type Input = Input<ActorParts>;
    type Effect = Effect<ActorParts>;

    fn decide(&mut self, input: Input<ActorParts>) -> Vec<Effect<ActorParts>> {
        self.core.step(input, self.born.elapsed())
    }

    async fn carry_out(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        effect: Effect<ActorParts>,
    ) -> Result<Option<Input<ActorParts>>, ActorProcessingErr> {
        match effect {
            Effect::Load { attempt } => self.load(myself, attempt),
            Effect::DropWarm { plan, reason } => {
                if let Some(mut records) = plan.records {
                    records.discard_profile(&reason);
                }
            }
            Effect::Size(size) => self.size(myself, size).await?,
            Effect::EndProfile => self.profile.take().into_iter().for_each(|profile| profile.stop(None)),
            Effect::CheckDevice => self.check_device()?,
            Effect::TakeBack { attempt, error } => return self.release_attempt(attempt, error).await.map(Some),
            Effect::Report(report) => self.report_attempt(report),
            Effect::ReportRestart { actor, reason } => self.arguments.report_restart(actor, &reason),
            Effect::AttemptAfter { attempt, wait } => {
                myself.send_after(wait, move || EngineMessage::Input(Input::Attempt { attempt }));
            }
            Effect::Advise(question) => self.advise(myself, question),
            Effect::Fail(error) => {
                let error = Arc::new(error);
                self.arguments.show(match self.arguments.wakefulness.state() {
                    WakeState::Waking => Status::NotWoken(error),
                    _ => Status::Failed(error),
                });
                myself.stop(None);
            }
            Effect::GiveUp { reason } => {
                self.arguments.show(Status::Stopped { reason: reason.as_str().into() });
                myself.stop(Some(reason));
            }
            Effect::AcceptResizeOrders { sized, floor, most, limit } => {
                let engine = myself.clone();
                // If the engine has ended, its lease has ended too.
                let orders = move |order| drop(engine.send_message(EngineMessage::Ordered(order)));
                self.resize_context(sized).accept_resize_orders((floor, most, limit), orders);
            }
            Effect::Freeze => {
                self.arguments.budget.move_gate(self.arguments.label.clone(), Gate::Frozen).await??;
            }
            Effect::Start(start) => return self.start_children(myself, start).await.map(Some),
            Effect::ReportReady => (self.arguments.progress)(Progress::Ready),
            Effect::AdmitWaiting(serving) => {
                // Waiting requests continue as soon as `Ready` is published, so everything else is
                // published first.
                self.show();
                self.arguments.kept.keep_record(&serving.record, serving.refusals > 0);
                self.arguments.show(Status::Ready(serving));
            }
            Effect::ShowStarting => self.arguments.show(Status::Starting),
            Effect::Stop(children) => {
                for child in children {
                    // A child that is already dead answers at once. Each child ends before any
                    // successor starts.
                    drop(child.kill_and_wait(None).await);
                }
            }
            Effect::Assess { profiled, error } => return Ok(Some(self.assess(&profiled, error).await)),
            Effect::RestartAfter { restart, wait } => {
                myself.send_after(wait, move || EngineMessage::Input(Input::Restart { restart }));
            }
            Effect::ReportResize { from, to } => self.report_resize(from, to),
            Effect::Change { sized, change } => {
                let resize = self.resize_context(sized).resize(change, self.scheduler().cloned());
                self.change = Some(BackgroundTask::begin(myself, resize, EngineMessage::PoolChanged));
            }
            Effect::Enlarge { blocks } => {
                if let Some(scheduler) = self.scheduler() {
                    // If the scheduler has died, its successor starts with this size.
                    let (reply, _) = Responder::new();
                    drop(scheduler.send_message(SchedulerMessage::Resize { blocks, reply }));
                }
            }
        }
        Ok(None)
    }
}

impl EngineState {
    fn load(&mut self, myself: &ActorRef<EngineMessage>, attempt: u32) {
        self.attempt_progress = AttemptProgress::default();
        let load = self.arguments.clone().plan_and_load(attempt);
        self.task = Some(BackgroundTask::begin(myself, load, EngineMessage::Loaded));
    }

    async fn size(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        size: Size<ActorParts>,
    ) -> Result<(), ActorProcessingErr> {
        self.attempt_progress = AttemptProgress::default();
        let Loaded { model, executor, .. } = size.loaded;
        let StartPlan { inputs, records, woken, .. } = size.plan;
        let woken = woken.filter(|_| size.is_warm);
        let envelope = inputs.envelope.clone();
        // The cache must hold the larger of one sequence with the full context and one whole step,
        // so that requests can finish one at a time if necessary.
        let of_step = envelope.step_tokens.div_ceil(BLOCK_TOKENS) * size.needs.cache_groups.count();
        let (number, least_blocks) = (size.attempt, size.needs.context_blocks.max(of_step));
        let options = &self.arguments.options;
        let attempt = Attempt {
            budget: self.arguments.budget.clone(),
            device: self.arguments.device.clone(),
            owner: self.arguments.owner(number),
            label: self.arguments.label.clone(),
            model,
            needs: size.needs,
            envelope,
            kv: options.kv(),
            number,
            shrinks: size.shrinks,
            first: size.measured,
            had: self.arguments.kept.record().map(|record| record.kv_blocks),
            faults: options.faults.clone(),
            stress_level: StressLevel::of(options.full_stress, self.arguments.device.is_host_memory()),
            attempt_progress: self.attempt_progress.clone(),
            warm: records.as_ref().and_then(Records::warm).filter(|_| size.is_warm && woken.is_none()),
            woken,
            records: records.filter(|_| options.faults.is_empty()),
            executor,
            progress: self.arguments.progress.clone(),
            weight_store: self.arguments.weight_store.clone(),
            card: self.arguments.card.clone(),
        };
        let engine = myself.clone();
        let report: ReportAttempt = Box::new(move |outcome| {
            Ok(engine.send_message(EngineMessage::Profiled { attempt: number, least_blocks, outcome })?)
        });
        let arguments = ProfileArguments { attempt, report };
        let (profile, _) = ProfileActor::spawn_linked(None, ProfileActor, arguments, myself.get_cell()).await?;
        self.profile = Some(profile.get_cell());
        Ok(())
    }

    async fn release_attempt(
        &mut self,
        attempt: u32,
        error: ProfileError,
    ) -> Result<Input<ActorParts>, ActorProcessingErr> {
        let owner = self.arguments.owner(attempt);
        self.arguments.weight_store.shut_down(owner.generation).await;
        self.arguments.budget.clear(owner).await?;
        Ok(Input::TakenBack { error, passed: self.attempt_progress.passed() })
    }

    fn report_attempt(&self, report: AttemptReport) {
        let model = self.arguments.label.clone();
        let end = match &report.outcome {
            Outcome::Ready => AttemptEnd::Ready,
            Outcome::Refused { evidence } => {
                let phase = evidence.phase;
                self.arguments.budget.record(Event::Oom { model: model.clone(), phase: phase.name() });
                metric::OOM_TOTAL.add(&(model.clone(), phase), 1);
                AttemptEnd::Memory
            }
            Outcome::Died { .. } => AttemptEnd::Died,
            Outcome::Failed { .. } => AttemptEnd::Error,
        };
        // An attempt that became READY and was later refused memory while it served is counted only
        // once.
        if report.phase != Phase::Serve || report.outcome == Outcome::Ready {
            metric::PROFILE_ATTEMPTS_TOTAL.add(&(model, end), 1);
        }
        (self.arguments.progress)(Progress::Attempt(report));
    }

    fn report_resize(&self, from_blocks: usize, to_blocks: usize) {
        let model = self.arguments.label.clone();
        let event = if to_blocks < from_blocks {
            metric::KV_SHRINKS_TOTAL.add(&model, 1);
            let card = self.arguments.budget.fullest_gpu();
            Event::Shrink { model, from_blocks, to_blocks, card }
        } else {
            metric::KV_GROWTHS_TOTAL.add(&model, 1);
            Event::Growth { model, from_blocks, to_blocks }
        };
        self.arguments.budget.record(event);
    }

    fn advise(&mut self, myself: &ActorRef<EngineMessage>, question: Advise<ActorParts>) {
        let Advise { plan: StartPlan { unloaded, pictures, target, .. }, target_tokens, missing } = question;
        let page = self.arguments.device.page();
        let (options, is_host) = (self.arguments.options.clone(), self.arguments.device.is_host_memory());
        let (budget, model) = (self.arguments.budget.clone(), self.arguments.label.clone());
        let knobs = async move {
            let capacity = budget.measure_after_refusal().await.ok().map(|ledger| ledger.capacity_of(&model));
            let work = move || {
                let place = MemoryState { is_host, ..MemoryState::of_available(capacity.unwrap_or_default(), page) };
                let (model, pictures, options) = (&*unloaded, pictures.as_deref(), &options);
                let question = Question { model, pictures, checkpoint: None, target, options, place };
                advice(&question, target_tokens, missing, capacity)
            };
            tokio::task::spawn_blocking(work).await.expect("a plan that succeeded before succeeds again")
        };
        self.task = Some(BackgroundTask::begin(myself, knobs, EngineMessage::Advised));
    }

    async fn assess(&self, profiled: &Profiled, error: LaneError) -> Input<ActorParts> {
        profiled.lanes.idle().await;
        let error = ProfileError::Stress { worst_case: "a request", source: error };
        let ledger = self.arguments.budget.measure_after_refusal().await.ok();
        let evidence = Evidence::of(&error, Phase::Serve, ledger.as_ref()).expect("the device refused memory");
        Input::Assessed { error, evidence }
    }
}
