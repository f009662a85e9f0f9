//! Pure: state machine of an engine, from its checkpoint to READY and through failures.
//!
//! ```text
//! Waiting ──► Loading ──► Sizing ──► Serving ──┐   its actors restart after a death or refused memory
//!    ▲           │           │                 │
//!    └── TakingBack ◄────────┘                 │   an attempt failed
//!            └──────────► Advising ◄───────────┘   the last attempt failed
//!                             └──────► Over
//! ```

mod attempt_log;
mod effect;
mod input;
mod parts;
mod serving;
mod step;

use std::{mem, time::Duration};

use self::{
    attempt_log::{AttemptLog, Verdict, outcome_of},
    serving::ServingEnd,
    step::Step,
};
pub use self::{
    effect::{Advise, Effect, Size, SizedBy, Start},
    input::{Input, Planned, Sized, WhichLane},
    parts::{Child, Children, Parts},
    serving::Serving,
    step::Rules,
};
use super::StartError;
use crate::{
    profile::{AttemptState, ProfileError},
    tree::Role,
};

/// The state machine of one engine.
pub struct EngineCore<P: Parts> {
    rules: Rules,
    log: AttemptLog,
    phase: Phase<P>,
}

/// The phase of an engine, with the data of that phase.
enum Phase<P: Parts> {
    /// The engine waits before an attempt.
    Waiting(Got<P>),
    /// The engine plans and loads the weights. `earlier` is the plan of an earlier attempt, which
    /// is used if this attempt fails before it has made a plan.
    Loading { began: Duration, earlier: Option<P::Plan> },
    /// An attempt sizes the loaded model.
    Sizing { began: Duration, model: Model<P> },
    /// The memory of a failed attempt is being taken back.
    TakingBack(Got<P>),
    /// The engine serves, or its serving actors are being replaced.
    Serving(Serving<P>),
    /// The last attempt has failed with `error`. Before the engine ends, it looks for knobs that
    /// would have helped, so that its final error can name them. The serving state is kept until
    /// then.
    Advising { error: ProfileError, serving: Option<Serving<P>> },
    /// The engine has published why it ends, and does nothing more.
    Over,
}

/// Data that a failed attempt leaves for the next attempt. The next attempt starts from the latest
/// phase that this data allows.
enum Got<P: Parts> {
    /// A plan, if one was made.
    Plan(Option<P::Plan>),
    Model(Model<P>),
}

struct Model<P: Parts> {
    planned: Planned<P>,
    needs: P::MemoryRequirements,
    loaded: P::Loaded,
}

impl<P: Parts> Got<P> {
    fn plan(&self) -> Option<P::Plan> {
        match self {
            Got::Plan(plan) => plan.clone(),
            Got::Model(model) => Some(model.planned.plan.clone()),
        }
    }
}

impl<P: Parts> EngineCore<P> {
    pub fn new(rules: Rules) -> Self {
        EngineCore { log: AttemptLog::new(rules.is_pinned), rules, phase: Phase::Waiting(Got::Plan(None)) }
    }

    /// The serving state, from READY on.
    pub fn serving(&self) -> Option<&Serving<P>> {
        match &self.phase {
            Phase::Serving(serving) | Phase::Advising { serving: Some(serving), .. } => Some(serving),
            _ => None,
        }
    }

    /// Processes one input at `now`, which is measured from any fixed moment. Returns the effects
    /// to carry out, in order.
    pub fn step(&mut self, input: Input<P>, now: Duration) -> Vec<Effect<P>> {
        let mut step = Step { rules: &self.rules, log: &mut self.log, now, effects: Vec::new() };
        let phase = mem::replace(&mut self.phase, Phase::Over);
        self.phase = phase.step(input, &mut step);
        step.effects
    }
}

impl<P: Parts> Phase<P> {
    fn step(self, input: Input<P>, step: &mut Step<'_, P>) -> Phase<P> {
        let current = step.log.number();
        match (self, input) {
            (Phase::Waiting(got), Input::Attempt { attempt }) if attempt == current => begin(got, step),
            (Phase::Loading { began, .. }, Input::Loaded { plan: planned, needs, loaded }) => {
                step.log.plan(planned.blocks);
                size(Model { planned, needs, loaded }, began, step)
            }
            (Phase::Loading { earlier, .. }, Input::LoadRefused { plan, error }) => {
                plan.iter().for_each(|planned| step.log.plan(planned.blocks));
                failed(Got::Plan(plan.map(|planned| planned.plan).or(earlier)), error, step)
            }
            (Phase::Loading { .. }, Input::LoadFailed(error)) => {
                step.effect(Effect::CheckDevice);
                fail(error, step)
            }
            (Phase::Sizing { began, model }, Input::Profiled { attempt, outcome }) if attempt == current => {
                step.effect(Effect::EndProfile);
                match outcome {
                    Ok(sized) => Phase::Serving(Serving::begin((model.planned, model.loaded), sized, began, step)),
                    Err(error) => failed(Got::Model(model), error, step),
                }
            }
            (Phase::Sizing { model, .. }, Input::ProfileDied { reason }) => {
                failed(Got::Model(model), ProfileError::Died { reason }, step)
            }
            (Phase::TakingBack(got), Input::TakenBack { error, passed }) => taken_back(got, error, &passed, step),
            (Phase::Serving(mut serving), input) => match serving.step(input, step) {
                None => Phase::Serving(serving),
                Some(ServingEnd::LastAttempt(error)) => {
                    let plan = serving.plan().clone();
                    advise(error, Some(plan), Some(serving), step)
                }
                Some(ServingEnd::CrashLoop) => Phase::Over,
            },
            (Phase::Advising { error, serving: Some(mut serving) }, Input::Pool(input)) => {
                serving.change_pool(input, step);
                Phase::Advising { error, serving: Some(serving) }
            }
            (Phase::Advising { error, .. }, Input::Advised(knobs)) => give_up(error, knobs, step),
            // Events from a phase that already ended.
            (phase, _) => phase,
        }
    }
}

fn begin<P: Parts>(got: Got<P>, step: &mut Step<'_, P>) -> Phase<P> {
    match got {
        Got::Model(model) => size(model, step.now, step),
        Got::Plan(earlier) => {
            step.effect(Effect::Load { attempt: step.log.number() });
            Phase::Loading { began: step.now, earlier }
        }
    }
}

fn size<P: Parts>(mut model: Model<P>, began: Duration, step: &mut Step<'_, P>) -> Phase<P> {
    if step.log.shrinks() > 0 {
        discard_profile(&mut model, "memory was refused to an earlier attempt of this start", step);
    }
    let Model { planned: Planned { plan, is_warm, .. }, needs, loaded } = &model;
    let size = Size {
        plan: plan.clone(),
        needs: needs.clone(),
        loaded: loaded.clone(),
        is_warm: *is_warm,
        attempt: step.log.number(),
        shrinks: step.log.shrinks(),
        measured: step.log.measured(),
    };
    step.effect(Effect::Size(size));
    Phase::Sizing { began, model }
}

/// Stops relying on a recorded profile. Returns `false` if the attempt did not rely on one.
fn discard_profile<P: Parts>(model: &mut Model<P>, reason: &str, step: &mut Step<'_, P>) -> bool {
    let was_warm = mem::replace(&mut model.planned.is_warm, false);
    if was_warm {
        step.effect(Effect::DropWarm { plan: model.planned.plan.clone(), reason: reason.to_owned() });
    }
    was_warm
}

/// Handles a failed attempt. Before anything else, all memory of the attempt is taken back.
fn failed<P: Parts>(got: Got<P>, error: ProfileError, step: &mut Step<'_, P>) -> Phase<P> {
    step.effect(Effect::CheckDevice);
    step.effect(Effect::TakeBack { attempt: step.log.number(), error });
    Phase::TakingBack(got)
}

/// Begins a smaller attempt, repeats the same attempt, or ends.
fn taken_back<P: Parts>(
    mut got: Got<P>,
    error: ProfileError,
    passed: &AttemptState,
    step: &mut Step<'_, P>,
) -> Phase<P> {
    let (outcome, message) = (outcome_of(passed, &error), error.to_string());
    step.report(passed, outcome.clone());
    let was_warm = match &mut got {
        Got::Model(model) => discard_profile(model, &message, step),
        Got::Plan(_) => false,
    };
    let Verdict::Again(wait) = step.log.failed(&outcome, was_warm, step.now) else {
        return advise(error, got.plan(), None, step);
    };
    step.effect(Effect::ReportRestart { actor: Role::Profile, reason: message });
    if wait.is_zero() {
        // An attempt with a smaller target can begin at once.
        return begin(got, step);
    }
    step.effect(Effect::AttemptAfter { attempt: step.log.number(), wait });
    Phase::Waiting(got)
}

/// Starts the search for knobs that would have helped, which takes many plans. If no memory was
/// refused, no knob would have helped, and the engine gives up at once.
fn advise<P: Parts>(
    error: ProfileError,
    plan: Option<P::Plan>,
    serving: Option<Serving<P>>,
    step: &mut Step<'_, P>,
) -> Phase<P> {
    let missing = step.log.last_evidence().map(|evidence| evidence.missing());
    let (Some(missing), Some(plan)) = (missing, plan) else { return give_up(error, Vec::new(), step) };
    let target_tokens = step.log.reports().last().map_or(0, |report| report.target_tokens);
    step.effect(Effect::Advise(Advise { plan, target_tokens, missing }));
    Phase::Advising { error, serving }
}

fn give_up<P: Parts>(error: ProfileError, knobs: Vec<super::Suggestion>, step: &mut Step<'_, P>) -> Phase<P> {
    let (attempt, attempts) = (step.log.number(), step.log.reports().to_vec());
    fail(StartError::Profile { attempt, attempts, source: Box::new(error), knobs }, step)
}

fn fail<P: Parts>(error: StartError, step: &mut Step<'_, P>) -> Phase<P> {
    step.effect(Effect::Fail(error));
    Phase::Over
}

#[cfg(test)]
mod tests;
