//! The serving phase: deaths of its actors, refused memory, and resizes of the KV cache.

use std::{mem, time::Duration};

use super::{
    Child, Children, Effect, Input, Parts, Planned, Sized, SizedBy, Start, WhichLane, attempt_log::Verdict, step::Step,
};
use crate::{
    compute::lane::LaneError,
    engine::elastic::{PoolCore, PoolInput},
    profile::{self, AttemptState, Evidence, Outcome, ProfileError},
    supervise::{Decision, Policy, RestartLog},
    tree::Role,
};

/// The state of an engine from READY on.
pub struct Serving<P: Parts> {
    plan: P::Plan,
    is_warm: bool,
    loaded: P::Loaded,
    profiled: P::Profiled,
    /// Number of the sizing attempt whose leases are in use. Attempts that only shrink the KV cache
    /// do not change it.
    attempt: u32,
    /// The duration of the sizing attempt.
    sized_within: Duration,
    /// The progress of the current attempt.
    passed: AttemptState,
    pool: PoolCore,
    restarts: RestartLog,
    /// The number of starts of serving actors so far.
    starts: u64,
    /// The number of the start that created the vision actor, which can outlive the scheduler.
    vision_since: u64,
    deaths: u64,
    /// The last attempt in which an injected fault made a step run out of memory.
    injected: Option<u32>,
    actors: Actors<P>,
}

enum Actors<P: Parts> {
    /// All actors serve requests.
    Up(P::Children),
    /// Some actors died and will restart. After the back-off, `first` and all later actors start
    /// again. Earlier actors keep running.
    Restarting { restart: u64, first: usize, kept: P::Children },
    /// The actors are being started.
    Starting(Cause),
    /// Memory was refused. The actors start again after the KV cache has shrunk.
    Stopped,
}

/// Why serving actors start.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// An attempt has succeeded, or the KV cache has shrunk after a refusal.
    Attempt,
    /// Some actors died and restart.
    Death,
}

/// Why an engine can no longer serve.
pub enum ServingEnd {
    /// The last attempt ran out of memory, with this error.
    LastAttempt(ProfileError),
    /// The serving actors are in a crash loop.
    CrashLoop,
}

impl<P: Parts> Serving<P> {
    /// Starts serving with the result of a sizing attempt. `began` is the time when that attempt
    /// began.
    pub(super) fn begin(
        model: (Planned<P>, P::Loaded),
        sized: Sized<P>,
        began: Duration,
        step: &mut Step<'_, P>,
    ) -> Self {
        let (Planned { plan, is_warm, .. }, loaded) = model;
        let Sized { profiled, floor, blocks, limit, passed } = sized;
        let mut serving = Serving {
            plan,
            is_warm,
            loaded,
            profiled,
            attempt: step.log.number(),
            sized_within: step.now.saturating_sub(began),
            passed,
            pool: PoolCore::new(floor, blocks, limit),
            restarts: RestartLog::new(Policy::RestForOne, step.rules.intensity, step.rules.children),
            starts: 0,
            vision_since: 0,
            deaths: 0,
            injected: None,
            actors: Actors::Stopped,
        };
        // Send the bounds before freezing the gate. The reply to the freeze then confirms the
        // bounds too, and READY waits for one reply only.
        serving.accept_resize_orders(step);
        step.effect(Effect::Freeze);
        serving.start(0, P::Children::default(), Cause::Attempt, step);
        serving
    }

    /// The serving actors that are running. `None` while actors are being started, and while all of
    /// them are stopped.
    pub fn children(&self) -> Option<&P::Children> {
        match &self.actors {
            Actors::Up(children) | Actors::Restarting { kept: children, .. } => Some(children),
            Actors::Starting(_) | Actors::Stopped => None,
        }
    }

    pub(super) fn plan(&self) -> &P::Plan {
        &self.plan
    }

    pub fn profiled(&self) -> &P::Profiled {
        &self.profiled
    }

    /// The duration of the attempt that sized the model.
    pub fn sized_within(&self) -> Duration {
        self.sized_within
    }

    /// The sized model, and the attempt that owns its leases.
    pub fn sized(&self) -> SizedBy<P> {
        SizedBy { profiled: self.profiled.clone(), attempt: self.attempt }
    }

    /// Processes one input. Returns the reason if the engine can no longer serve.
    pub(super) fn step(&mut self, input: Input<P>, step: &mut Step<'_, P>) -> Option<ServingEnd> {
        match input {
            Input::Started { children, profiled, serving } => self.started(children, profiled, serving, step),
            Input::Refused { which, generation, error } => self.refused(which, generation, error, step),
            Input::Assessed { error, evidence } => return self.assessed(error, evidence, step),
            Input::Pool(input) => self.pool(input, step),
            Input::ChildDied { actor, first, reason } => return self.child_died(actor, first, &reason, step),
            Input::Restart { restart } => self.restart(restart, step),
            // Late events from sizing attempts that preceded READY.
            _ => {}
        }
        None
    }

    /// Starts the serving actors from `first` on.
    fn start(&mut self, first: usize, kept: P::Children, cause: Cause, step: &mut Step<'_, P>) {
        self.starts += 1;
        if first == 0 {
            self.vision_since = self.starts;
        }
        self.actors = Actors::Starting(cause);
        let start = Start {
            first,
            kept,
            generation: self.starts,
            loaded: self.loaded.clone(),
            is_warm: self.is_warm,
            sized: self.sized(),
            blocks: self.pool.blocks(),
            most: self.pool.most(),
            refusals: step.log.shrinks(),
            refuses_a_step: self.refuses_a_step(step),
        };
        step.effect(Effect::Start(start));
    }

    /// Returns `true` if an injected fault refuses memory to a step of the current attempt. The
    /// fault is injected at most once per attempt.
    fn refuses_a_step(&mut self, step: &Step<'_, P>) -> bool {
        let number = step.log.number();
        let is_due = step.rules.faults.is_due(profile::Phase::Serve, number) && self.injected != Some(number);
        if is_due {
            self.injected = Some(number);
        }
        is_due
    }

    fn started(&mut self, children: P::Children, profiled: P::Profiled, serving: P::Serving, step: &mut Step<'_, P>) {
        let Actors::Starting(cause) = self.actors else { return };
        (self.profiled, self.actors) = (profiled, Actors::Up(children));
        if cause == Cause::Attempt {
            self.passed.phase = Some(profile::Phase::Serve);
            step.report(&self.passed, Outcome::Ready);
            step.effect(Effect::ReportReady);
        }
        step.effect(Effect::AdmitWaiting(serving));
        self.change_pool(PoolInput::Serving(true), step);
    }

    fn child_died(&mut self, actor: Role, first: usize, reason: &str, step: &mut Step<'_, P>) -> Option<ServingEnd> {
        // A pending restart is merged into this restart.
        let (pending, mut kept) = match mem::replace(&mut self.actors, Actors::Stopped) {
            Actors::Up(children) => (None, children),
            Actors::Restarting { first, kept, .. } => (Some(first), kept),
            actors => {
                self.actors = actors;
                return None;
            }
        };
        step.effect(Effect::CheckDevice);
        step.effect(Effect::ShowStarting);
        match self.restarts.died(first, step.now) {
            Decision::Restart { children, after: wait } => {
                step.effect(Effect::ReportRestart { actor, reason: reason.to_owned() });
                step.effect(Effect::Stop(kept.take_from(children.start)));
                self.change_pool(PoolInput::Serving(false), step);
                self.deaths += 1;
                let (restart, first) = (self.deaths, children.start.min(pending.unwrap_or(children.start)));
                self.actors = Actors::Restarting { restart, first, kept };
                step.effect(Effect::RestartAfter { restart, wait });
                None
            }
            Decision::GiveUp { restarts, within } => {
                let within = within.as_secs();
                let reason = format!("{restarts} restarts within {within} s; the last failure: {reason}");
                step.effect(Effect::GiveUp { reason });
                Some(ServingEnd::CrashLoop)
            }
        }
    }

    fn restart(&mut self, number: u64, step: &mut Step<'_, P>) {
        match mem::replace(&mut self.actors, Actors::Stopped) {
            Actors::Restarting { restart, first, kept } if restart == number => {
                self.start(first, kept, Cause::Death, step);
            }
            actors => self.actors = actors,
        }
    }

    /// Returns `true` if the actor of this lane is the actor that was started in `generation`.
    /// Otherwise a later start has replaced that actor, or will replace it.
    fn serves_on(&self, which: WhichLane, generation: u64) -> bool {
        match (which, &self.actors) {
            (WhichLane::Step, Actors::Up(_)) => generation == self.starts,
            (WhichLane::Vision, Actors::Up(_)) => generation == self.vision_since,
            (WhichLane::Vision, Actors::Restarting { first, .. }) => *first > 0 && generation == self.vision_since,
            _ => false,
        }
    }

    /// Removes and returns all running children.
    fn take_children(&mut self) -> Vec<Child<P>> {
        match mem::replace(&mut self.actors, Actors::Stopped) {
            Actors::Up(mut children) | Actors::Restarting { kept: mut children, .. } => children.take_from(0),
            Actors::Starting(_) | Actors::Stopped => Vec::new(),
        }
    }

    /// Stops the serving actors. The KV cache shrinks to the attempt log's target, or by five
    /// percent if it is already that small. A size that the user fixed is kept. Then successors of
    /// the actors repeat the refused work. Weights, workspaces and graphs are kept. A pending
    /// restart is merged into the new restart.
    fn refused(&mut self, which: WhichLane, generation: u64, error: LaneError, step: &mut Step<'_, P>) {
        if self.serves_on(which, generation) {
            step.effect(Effect::CheckDevice);
            step.effect(Effect::ShowStarting);
            step.effect(Effect::Stop(self.take_children()));
            self.change_pool(PoolInput::Serving(false), step);
            step.effect(Effect::Assess { profiled: self.profiled.clone(), error });
        }
    }

    fn assessed(&mut self, error: ProfileError, evidence: Evidence, step: &mut Step<'_, P>) -> Option<ServingEnd> {
        (self.passed.phase, self.passed.evidence) = (Some(profile::Phase::Serve), Some(evidence.clone()));
        let outcome = Outcome::Refused { evidence };
        step.report(&self.passed, outcome.clone());
        if step.log.failed(&outcome, false, step.now) == Verdict::Last {
            return Some(ServingEnd::LastAttempt(error));
        }
        self.passed = AttemptState::default();
        // If the user fixed the size of the KV cache, a refusal does not shrink it. Sizing follows
        // the same rule.
        let shrink = if step.rules.is_pinned { PoolInput::Pause } else { PoolInput::Cap(step.log.target()) };
        self.change_pool(shrink, step);
        self.serve_again(step);
        None
    }

    /// Starts serving again, unless the KV cache must still shrink first.
    fn serve_again(&mut self, step: &mut Step<'_, P>) {
        if self.pool.is_quiet() {
            return;
        }
        // Declare the lower maximum to the budget, so that the budget offers no growth above it.
        self.accept_resize_orders(step);
        (self.passed.measured, self.passed.target) = (None, Some(self.pool.most()));
        self.start(0, P::Children::default(), Cause::Attempt, step);
    }

    fn pool(&mut self, input: PoolInput, step: &mut Step<'_, P>) {
        self.change_pool(input, step);
        if matches!((input, &self.actors), (PoolInput::Ended(_), Actors::Stopped)) {
            self.serve_again(step);
        }
    }

    /// Passes an input to the pool, and adds the effects that follow.
    pub(super) fn change_pool(&mut self, input: PoolInput, step: &mut Step<'_, P>) {
        let from = self.pool.blocks();
        let change = self.pool.step(input);
        let to = self.pool.blocks();
        if from != to {
            step.effect(Effect::ReportResize { from, to });
        }
        if let Some(change) = change {
            step.effect(Effect::Change { sized: self.sized(), change });
        }
        if from < to {
            step.effect(Effect::Enlarge { blocks: to });
        }
    }

    fn accept_resize_orders(&self, step: &mut Step<'_, P>) {
        let (floor, most, limit) = (self.pool.floor(), self.pool.most(), self.pool.limit());
        step.effect(Effect::AcceptResizeOrders { sized: self.sized(), floor, most, limit });
    }
}
