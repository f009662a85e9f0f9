//! The attempts of an engine. Each asks for less than one that was refused memory, including while it served.

use std::{sync::Arc, time::Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::EngineState;
use crate::{
    compute::lane::{Job, Lane, LaneError, RefusalSink},
    engine::{
        EngineMessage, Progress, Question, Records, StartError, Status, Suggestion, WhichLane, advice,
        start::{LoadError, LoadFailed, Planned, StartPlan},
    },
    event::Event,
    metric::{self, AttemptEnd},
    profile::{
        Attempt, AttemptReport, Course, Evidence, FaultPlan, Outcome, Passed, Phase, Place, ProfileActor,
        ProfileArguments, ProfileError, ProfileRecord, Profiled, ReportAttempt, Rigour,
    },
    supervise::BackgroundTask,
    tree::Role,
};

impl EngineState {
    /// Starts the next attempt as late in the sequence as possible: loaded weights stay.
    pub(super) async fn next_attempt(&mut self, myself: &ActorRef<EngineMessage>) -> Result<(), ActorProcessingErr> {
        self.course = Course::default();
        self.attempted = Instant::now();
        if self.planned.is_some() {
            return self.start_attempt(myself).await;
        }
        let start = self.arguments.clone().plan_and_load(self.attempts.number());
        self.task = Some(BackgroundTask::begin(myself, start, EngineMessage::Loaded));
        Ok(())
    }

    pub(super) async fn loaded(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        outcome: Result<(StartPlan, Planned), LoadFailed>,
    ) -> Result<(), ActorProcessingErr> {
        let (plan, error) = match outcome {
            Ok((plan, planned)) => {
                self.see(plan);
                self.planned = Some(planned);
                return self.start_attempt(myself).await;
            }
            Err(LoadFailed { plan, error }) => (plan, error),
        };
        plan.into_iter().for_each(|plan| self.see(plan));
        match error {
            LoadError::Refused(error) => {
                let ledger = self.arguments.budget.evidence().await.ok();
                let evidence = Evidence::of(&error, Phase::Load, ledger.as_ref());
                self.course.end_in(Phase::Load, evidence);
                self.attempt_failed(myself, error).await
            }
            LoadError::Start(error) => {
                self.check_device()?;
                self.fail(myself, error);
                Ok(())
            }
        }
    }

    fn see(&mut self, plan: StartPlan) {
        self.attempts.plan(plan.expected_blocks);
        self.plan = Some(plan);
    }

    async fn start_attempt(&mut self, myself: &ActorRef<EngineMessage>) -> Result<(), ActorProcessingErr> {
        let Planned { model, processor, .. } = self.planned.clone().expect("the weights come before an attempt");
        let plan = self.plan.as_mut().expect("the plan comes before an attempt");
        if self.attempts.shrinks() > 0 {
            plan.drop_warm("memory was refused to an earlier attempt of this start");
        }
        let StartPlan { inputs, needs, records, .. } = plan.clone();
        let options = &self.arguments.options;
        let attempt = Attempt {
            budget: self.arguments.budget.clone(),
            device: self.arguments.device.clone(),
            owner: self.owner(),
            label: self.arguments.label.clone(),
            model,
            needs: needs.expect("the needs are kept until READY"),
            envelope: inputs.envelope.clone(),
            kv: options.kv(),
            number: self.attempts.number(),
            shrinks: self.attempts.shrinks(),
            first: self.attempts.measured(),
            faults: options.faults.clone(),
            rigour: Rigour::of(options.full_stress, self.arguments.device.is_host_memory()),
            course: self.course.clone(),
            warm: records.as_ref().and_then(Records::warm),
            records: records.filter(|_| options.faults.is_empty()),
            processor,
            progress: self.arguments.progress.clone(),
            weight_store: self.arguments.weight_store.clone(),
        };
        let (engine, generation) = (myself.clone(), attempt.owner.generation);
        let report: ReportAttempt =
            Box::new(move |outcome| Ok(engine.send_message(EngineMessage::Profiled { generation, outcome })?));
        let arguments = ProfileArguments { attempt, report };
        let (profile, _) = ProfileActor::spawn_linked(None, ProfileActor, arguments, myself.get_cell()).await?;
        self.profile = Some(profile.get_cell());
        Ok(())
    }

    /// Returns what the attempt held, then starts a smaller attempt or gives up.
    pub(super) async fn attempt_failed(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        error: ProfileError,
    ) -> Result<(), ActorProcessingErr> {
        self.check_device()?;
        self.arguments.weight_store.shut_down(self.owner().generation).await;
        self.arguments.budget.clear(self.owner()).await?;
        let said = error.to_string();
        let outcome = match (self.course.passed().evidence, error.is_death()) {
            (Some(evidence), _) => Outcome::Refused { evidence },
            (None, true) => Outcome::Died { said },
            (None, false) => Outcome::Failed { said },
        };
        let (was_refused, may_go_on) =
            (matches!(outcome, Outcome::Refused { .. }), !matches!(outcome, Outcome::Failed { .. }));
        self.report(outcome);
        // Whatever the error was, measuring anew may succeed.
        let said = error.to_string();
        let plan = self.plan.as_mut().filter(|_| self.planned.is_some());
        let was_warm = plan.is_some_and(|plan| plan.drop_warm(&said));
        let wait = match was_warm {
            true => self.attempts.forgone(self.born.elapsed()),
            false => self.attempts.failed(was_refused, self.born.elapsed()),
        };
        let Some(wait) = wait.filter(|_| may_go_on || was_warm) else {
            self.work_out_advice(myself, error);
            return Ok(());
        };
        self.arguments.tell_of_restart(Role::Profile, &said);
        if wait.is_zero() {
            // A smaller target has nothing to wait for.
            return self.next_attempt(myself).await;
        }
        let generation = self.owner().generation;
        myself.send_after(wait, move || EngineMessage::Attempt { generation });
        Ok(())
    }

    /// Reports the current attempt as far as it got.
    fn report(&mut self, outcome: Outcome) {
        let Passed { phase, measured, target, .. } = self.course.passed();
        measured.into_iter().for_each(|blocks| self.attempts.measure(blocks));
        let target = target.unwrap_or_else(|| self.attempts.target());
        let report = self.attempts.report(target, phase.unwrap_or(Phase::Load), outcome);
        if let Outcome::Refused { evidence } = &report.outcome {
            let (model, phase) = (self.arguments.label.clone(), evidence.phase);
            self.arguments.budget.tell(Event::Oom { model: model.clone(), phase: phase.name() });
            metric::OOM_TOTAL.add(&(model, phase), 1);
        }
        let reason = match &report.outcome {
            Outcome::Ready => AttemptEnd::Ready,
            Outcome::Refused { .. } => AttemptEnd::Memory,
            Outcome::Died { .. } => AttemptEnd::Died,
            Outcome::Failed { .. } => AttemptEnd::Error,
        };
        // An attempt that was ready and is then refused memory while it serves counts once.
        if report.phase != Phase::Serve || report.outcome == Outcome::Ready {
            metric::PROFILE_ATTEMPTS_TOTAL.add(&(self.arguments.label.clone(), reason), 1);
        }
        self.reports.retain(|earlier| earlier.attempt != report.attempt);
        self.reports.push(report.clone());
        (self.arguments.progress)(Progress::Attempt(report));
    }

    /// Begins to find which knobs would have helped, which takes many plans.
    fn work_out_advice(&mut self, myself: &ActorRef<EngineMessage>, error: ProfileError) {
        let refused = |report: &AttemptReport| match &report.outcome {
            Outcome::Refused { evidence } => Some(evidence.clone()),
            _ => None,
        };
        // An attempt may be too small only because earlier ones were refused memory. It too ends for lack of memory.
        let evidence = self.reports.iter().rev().find_map(refused);
        let (Some(evidence), Some(plan)) = (evidence, self.plan.clone()) else {
            return self.give_up(myself, error, Vec::new());
        };
        let target_tokens = self.reports.last().map_or(0, |report| report.target_tokens);
        let (missing, page) = (evidence.missing(), self.arguments.device.page());
        let (options, is_host) = (self.arguments.options.clone(), self.arguments.device.is_host_memory());
        let StartPlan { unloaded, pictures, target, .. } = plan;
        let (budget, model) = (self.arguments.budget.clone(), self.arguments.label.clone());
        let knobs = async move {
            let room = budget.evidence().await.ok().map(|ledger| ledger.room_of(&model));
            let work = move || {
                let place = Place { is_host, ..Place::of_available(room.unwrap_or_default(), page) };
                let (model, pictures, options) = (&*unloaded, pictures.as_deref(), &options);
                let question = Question { model, pictures, target, options, place };
                advice(&question, target_tokens, missing, room)
            };
            tokio::task::spawn_blocking(work).await.expect("a plan that was made can be made again")
        };
        self.advice = Some(BackgroundTask::begin(myself, knobs, |knobs| EngineMessage::Advised { error, knobs }));
    }

    pub(super) fn give_up(&self, myself: &ActorRef<EngineMessage>, error: ProfileError, knobs: Vec<Suggestion>) {
        let (attempt, attempts) = (self.attempts.number(), self.reports.clone());
        self.fail(myself, StartError::Profile { attempt, attempts, source: Box::new(error), knobs });
    }

    /// Starts all serving actors, after a successful attempt or a shrink.
    pub(super) async fn serve(&mut self, myself: &ActorRef<EngineMessage>) -> Result<(), ActorProcessingErr> {
        let serving = self.start_children(myself, 0).await?;
        self.course.enter(Phase::Serve);
        self.report(Outcome::Ready);
        (self.arguments.progress)(Progress::Ready);
        self.let_in(myself, serving);
        Ok(())
    }

    /// Where the serving actor of a lane reports that memory was refused.
    pub(super) fn refusal_sink(&self, myself: &ActorRef<EngineMessage>, which: WhichLane) -> RefusalSink {
        let (myself, generation) = (myself.clone(), self.servings);
        Arc::new(move |error| {
            // An engine that is gone has taken its actors along.
            drop(myself.send_message(EngineMessage::Refused { which, generation, error }));
        })
    }

    /// Whether the actor started for a lane in that generation is still the current one. Otherwise it was replaced, or
    /// will be.
    pub(super) fn serves_on(&self, which: WhichLane, generation: u64) -> bool {
        match which {
            WhichLane::Step => self.children.scheduler.is_some() && generation == self.servings,
            WhichLane::Vision => self.children.vision.is_some() && generation == self.vision_since,
        }
    }

    pub(super) fn refuse_a_step_if_due(&mut self, lane: &Lane) {
        let number = self.attempts.number();
        let faults: &FaultPlan = &self.arguments.options.faults;
        if faults.is_due(Phase::Serve, number) && self.injected != Some(number) {
            self.injected = Some(number);
            lane.submit(Job::Refuse);
        }
    }

    /// Stops the serving actors, shrinks keys and values by five per cent, and starts successors, which do the refused
    /// work again. Weights, workspaces and graphs stay as they are.
    pub(super) async fn refused_while_serving(
        &mut self,
        myself: &ActorRef<EngineMessage>,
        error: LaneError,
    ) -> Result<(), ActorProcessingErr> {
        self.check_device()?;
        self.arguments.show(Status::Starting);
        // A restart already pending becomes part of this one.
        self.restarting = None;
        for child in self.children.take_from(0) {
            drop(child.kill_and_wait(None).await);
        }
        self.elastic.iter_mut().for_each(|elastic| elastic.serving(myself, None));
        let profiled = self.profiled.clone().expect("sized before served");
        profiled.lanes.idle().await;
        let error = ProfileError::Stress { worst_case: "a request", source: error };
        let ledger = self.arguments.budget.evidence().await.ok();
        let evidence = Evidence::of(&error, Phase::Serve, ledger.as_ref()).expect("memory was refused");
        self.course.end_in(Phase::Serve, Some(evidence.clone()));
        self.report(Outcome::Refused { evidence });
        if self.attempts.failed(true, self.born.elapsed()).is_none() {
            self.work_out_advice(myself, error);
            return Ok(());
        }
        self.course = Course::default();
        let elastic = self.elastic.as_mut().expect("it served");
        match self.arguments.options.kv().is_pinned() {
            // A size that the user fixed stays, as it does at the start.
            true => elastic.pause(myself),
            false => elastic.cap(self.attempts.target(), myself),
        }
        self.serve_again(myself).await
    }

    /// Starts serving again, once keys and values have shrunk as ordered.
    pub(super) async fn serve_again(&mut self, myself: &ActorRef<EngineMessage>) -> Result<(), ActorProcessingErr> {
        let elastic = self.elastic.as_ref().expect("it served");
        if elastic.is_quiet() {
            self.is_redoing = true;
            return Ok(());
        }
        self.is_redoing = false;
        // Registers the lower maximum, so that the budget offers no growth above it.
        elastic.obey(myself);
        let (most, profiled) = (elastic.most(), self.profiled.clone().expect("it served"));
        let record = ProfileRecord { kv_blocks: most, ..profiled.record.clone() };
        let (memory, lanes) = (profiled.memory.clone(), profiled.lanes.clone());
        self.profiled = Some(Arc::new(Profiled { record, memory, lanes }));
        self.course.settle(None, most);
        self.serve(myself).await
    }
}
