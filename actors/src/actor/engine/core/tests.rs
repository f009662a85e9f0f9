//! Tests of the engine state machine, which compare its effects as text. All data that the
//! effects own is replaced by strings.

use bursar_budgets::{Bytes, DeviceError};
use bursar_kernels::KernelError;
use proptest::prelude::*;

use super::*;
use crate::{
    compute::lane::LaneError,
    engine::{WhichLane, elastic::PoolInput},
    profile::{Evidence, FaultPlan, Outcome, Phase as At},
    supervise::Intensity,
};

mod serving;

/// The engine's data types, replaced by strings.
struct Names;

impl Parts for Names {
    type Plan = &'static str;
    type MemoryRequirements = &'static str;
    type Loaded = &'static str;
    type Profiled = &'static str;
    type Children = Cast;
    /// Number of the start that created the serving actors.
    type Serving = u64;
}

const ROLES: [&str; 2] = ["vision", "scheduler"];

#[derive(Clone, Default)]
struct Cast(Vec<&'static str>);

impl Children for Cast {
    type Child = &'static str;

    fn take_from(&mut self, first: usize) -> Vec<&'static str> {
        let mut taken = self.0.split_off(first.min(self.0.len()));
        taken.reverse();
        taken
    }
}

/// An engine, with a device and actors that answer at once.
struct Bed {
    core: EngineCore<Names>,
    now: Duration,
    /// The progress of the current attempt.
    passed: AttemptState,
    /// Whether the KV cache is being resized.
    is_changing: bool,
    recorded: Vec<String>,
}

fn rules() -> Rules {
    let intensity = Intensity { restarts_max: 3, within: Duration::from_secs(60), back_off: MS };
    Rules { intensity, children: ROLES.len(), is_pinned: false, faults: FaultPlan::none() }
}

const MS: Duration = Duration::from_millis(1);

fn evidence(phase: At) -> Evidence {
    let (asked, free) = (Bytes(100), Bytes(40));
    Evidence {
        phase,
        class: None,
        asked,
        free,
        foreign: Bytes::ZERO,
        card: None,
        message: "memory is short".to_owned(),
    }
}

fn refused() -> LaneError {
    let (asked, free, hint) = (Bytes(100), Bytes(40), "take less".to_owned());
    LaneError::Kernel(KernelError::Device(DeviceError::Refused { asked, free, hint }))
}

/// The error of an attempt that was refused memory by the device.
fn short() -> ProfileError {
    ProfileError::Stress { worst_case: "steps", source: refused() }
}

impl Bed {
    fn new(rules: Rules) -> Self {
        Bed {
            core: EngineCore::new(rules),
            now: Duration::ZERO,
            passed: AttemptState::default(),
            is_changing: false,
            recorded: Vec::new(),
        }
    }

    /// Creates an engine whose weights are loaded and whose first attempt runs.
    fn sizing(rules: Rules, is_warm: bool) -> Self {
        let mut bed = Bed::new(rules);
        bed.give(Input::Attempt { attempt: 0 }).loaded(is_warm).recorded();
        bed
    }

    /// Creates an engine that serves with 100 blocks and never shrinks below 16 blocks.
    fn serving(rules: Rules) -> Self {
        let mut bed = Bed::sizing(rules, false);
        bed.sized(0).recorded();
        bed
    }

    fn give(&mut self, input: Input<Names>) -> &mut Self {
        let mut next = Some(input);
        while let Some(input) = next.take() {
            for effect in self.core.step(input, self.now) {
                assert!(next.is_none(), "only the last effect of a step is followed by an input");
                self.recorded.extend(described(&effect));
                next = self.answer(effect);
            }
        }
        self
    }

    fn answer(&mut self, effect: Effect<Names>) -> Option<Input<Names>> {
        match effect {
            Effect::TakeBack { error, .. } => {
                Some(Input::TakenBack { error, passed: std::mem::take(&mut self.passed) })
            }
            Effect::Start(Start { first, kept, generation, sized, .. }) => {
                assert_eq!(kept.0, ROLES[..first], "the roles before the first restarted role are kept");
                let children = Cast(ROLES.to_vec());
                Some(Input::Started { children, profiled: sized.profiled, serving: generation })
            }
            Effect::Assess { error, .. } => {
                let error = ProfileError::Stress { worst_case: "a request", source: error };
                Some(Input::Assessed { error, evidence: evidence(At::Serve) })
            }
            Effect::Change { .. } => {
                assert!(!self.is_changing, "only one change runs at a time");
                self.is_changing = true;
                None
            }
            _ => None,
        }
    }

    /// Ends the resize of the KV cache.
    fn changed(&mut self) -> &mut Self {
        self.is_changing = false;
        self.give(Input::Pool(PoolInput::Ended(crate::engine::ResizeOutcome::Done)))
    }

    /// Removes and returns the effects since the last call, as text.
    fn recorded(&mut self) -> Vec<String> {
        std::mem::take(&mut self.recorded)
    }

    fn loaded(&mut self, is_warm: bool) -> &mut Self {
        let plan = Planned { plan: "plan", blocks: 100, is_warm };
        self.give(Input::Loaded { plan, needs: "worst cases", loaded: "weights" })
    }

    /// Ends the attempt successfully, with 100 blocks.
    fn sized(&mut self, attempt: u32) -> &mut Self {
        let passed = AttemptState { phase: Some(At::Validate), measured: Some(100), target: Some(100), evidence: None };
        let sized = Sized { profiled: "sized", floor: 16, blocks: 100, limit: 100, passed };
        self.give(Input::Profiled { attempt, outcome: Ok(sized) })
    }

    /// Ends the attempt with a refusal of memory.
    fn refuse(&mut self, attempt: u32) -> &mut Self {
        self.passed =
            AttemptState { phase: Some(At::Back), evidence: Some(evidence(At::Back)), ..AttemptState::default() };
        self.give(Input::Profiled { attempt, outcome: Err(short()) })
    }

    /// Ends the attempt with an error that a further attempt would not avoid.
    fn break_plan(&mut self, attempt: u32) -> &mut Self {
        let error = ProfileError::TooSmall { tokens: 1, context_tokens: 2 };
        self.give(Input::Profiled { attempt, outcome: Err(error) })
    }

    fn die(&mut self, place: usize) -> &mut Self {
        let actor = [Role::Vision, Role::Scheduler][place];
        self.give(Input::ChildDied { actor, first: place, reason: "a bug".to_owned() })
    }

    fn refuse_serving(&mut self, which: WhichLane, generation: u64) -> &mut Self {
        self.give(Input::Refused { which, generation, error: refused() })
    }
}

/// Formats an effect as text. Returns `None` for an effect that tests do not show.
fn described(effect: &Effect<Names>) -> Option<String> {
    Some(match effect {
        Effect::Load { attempt } => format!("load for {attempt}"),
        Effect::DropWarm { plan, reason } => format!("{plan} is not warm: {reason}"),
        Effect::Size(Size { attempt, shrinks, is_warm, measured, .. }) => {
            let warm = if *is_warm { " warm" } else { "" };
            format!("size {attempt}{warm}, {shrinks} smaller than {measured:?}")
        }
        Effect::EndProfile => "end profile".to_owned(),
        Effect::CheckDevice => "check device".to_owned(),
        Effect::TakeBack { attempt, .. } => format!("take back {attempt}"),
        Effect::Report(report) => {
            let outcome = match &report.outcome {
                Outcome::Ready => "ready",
                Outcome::Refused { .. } => "refused",
                Outcome::Died { .. } => "died",
                Outcome::Failed { .. } => "failed",
            };
            format!("attempt {} {outcome} in {} of {}", report.attempt, report.phase, report.target_tokens)
        }
        Effect::ReportRestart { actor, .. } => format!("{} restarts", actor.name()),
        Effect::AttemptAfter { attempt, wait } => format!("attempt {attempt} after {wait:?}"),
        Effect::Advise(Advise { plan, target_tokens, missing }) => {
            format!("advise on {plan}: {missing} missing for {target_tokens}")
        }
        Effect::Fail(error) => format!("fail: {error}"),
        Effect::GiveUp { reason } => format!("give up: {reason}"),
        Effect::AcceptResizeOrders { floor, most, .. } => format!("accept resize orders from {floor} to {most}"),
        Effect::Freeze => "freeze".to_owned(),
        Effect::Start(Start { first, generation, sized, blocks, most, refuses_a_step, .. }) => {
            let drill = if *refuses_a_step { ", refusing a step" } else { "" };
            let (from, of) = (ROLES[*first], sized.attempt);
            format!("start {generation} from {from} with {blocks} of {most}, owned by {of}{drill}")
        }
        Effect::ReportReady => "ready".to_owned(),
        Effect::AdmitWaiting(generation) => format!("admit requests to {generation}"),
        Effect::ShowStarting => "starting".to_owned(),
        Effect::Stop(children) => format!("stop {}", children.join(", ")),
        // `Assess` has no text, because the input that follows shows it.
        Effect::Assess { .. } => return None,
        Effect::RestartAfter { restart, wait } => format!("restart {restart} after {wait:?}"),
        Effect::ReportResize { from, to } => format!("from {from} to {to}"),
        Effect::Change { change, .. } => format!("{change:?}"),
        Effect::Enlarge { blocks } => format!("scheduler may use {blocks}"),
    })
}

#[test]
fn a_start_loads_sizes_and_serves() {
    let mut bed = Bed::new(rules());
    assert_eq!(bed.give(Input::Attempt { attempt: 0 }).recorded(), ["load for 0"]);
    assert_eq!(bed.loaded(false).recorded(), ["size 0, 0 smaller than None"]);
    assert!(bed.core.serving().is_none());
    bed.now = MS * 7;
    let described = [
        "end profile",
        "accept resize orders from 16 to 100",
        "freeze",
        "start 1 from vision with 100 of 100, owned by 0",
        "attempt 1 ready in serve of 1600",
        "ready",
        "admit requests to 1",
    ];
    assert_eq!(bed.sized(0).recorded(), described);
    assert_eq!(bed.core.serving().expect("the engine serves").sized_within(), MS * 7);
}

#[test]
fn a_refused_attempts_memory_is_reclaimed_before_the_next() {
    let mut bed = Bed::sizing(rules(), false);
    let described = [
        "end profile",
        "check device",
        "take back 0",
        "attempt 1 refused in back of 1600",
        "profile restarts",
        "size 1, 1 smaller than None",
    ];
    assert_eq!(bed.refuse(0).recorded(), described);
    assert_eq!(bed.refuse(1).recorded()[2..4], ["take back 1", "attempt 2 refused in back of 1520"]);
}

#[test]
fn a_dead_attempt_is_repeated_and_its_late_report_ignored() {
    let mut bed = Bed::sizing(rules(), false);
    let described =
        ["check device", "take back 0", "attempt 1 died in load of 1600", "profile restarts", "attempt 1 after 10ms"];
    assert_eq!(bed.give(Input::ProfileDied { reason: "a bug".to_owned() }).recorded(), described);
    assert_eq!(
        bed.sized(0).give(Input::Attempt { attempt: 0 }).recorded(),
        [""; 0],
        "an input of a previous attempt is ignored"
    );
    assert_eq!(bed.give(Input::Attempt { attempt: 1 }).recorded(), ["size 1, 0 smaller than None"]);
    assert_eq!(bed.sized(0).refuse(0).recorded(), [""; 0], "a report of a previous attempt is ignored");
    assert_eq!(bed.sized(1).recorded().last().expect("the last effect exists"), "admit requests to 1");
}

#[test]
fn a_failed_warm_attempt_is_followed_by_a_cold_one() {
    let mut bed = Bed::sizing(rules(), true);
    let error = "the cache would hold 1 tokens, but one sequence may have 2";
    let described = [
        "end profile".to_owned(),
        "check device".to_owned(),
        "take back 0".to_owned(),
        "attempt 1 failed in load of 1600".to_owned(),
        format!("plan is not warm: {error}"),
        "profile restarts".to_owned(),
        "size 1, 0 smaller than None".to_owned(),
    ];
    assert_eq!(bed.break_plan(0).recorded(), described, "every error is handled in the same way");
    assert_eq!(
        bed.break_plan(1).recorded().last().expect("the engine reports an effect"),
        &format!("fail: attempt 2 failed and was the last: {error}")
    );
}

#[test]
fn a_warm_profile_is_not_used_after_a_refusal() {
    let mut bed = Bed::new(rules());
    bed.give(Input::Attempt { attempt: 0 }).recorded();
    bed.passed = AttemptState { phase: Some(At::Load), evidence: Some(evidence(At::Load)), ..AttemptState::default() };
    let described = ["check device", "take back 0", "attempt 1 refused in load of 0", "profile restarts", "load for 1"];
    assert_eq!(bed.give(Input::LoadRefused { plan: None, error: short() }).recorded(), described);
    let reason = "plan is not warm: memory was refused to an earlier attempt of this start";
    assert_eq!(bed.loaded(true).recorded(), [reason, "size 1, 1 smaller than None"]);
}

#[test]
fn the_fourth_refusal_fails_the_start_once_with_advice() {
    let mut bed = Bed::sizing(rules(), false);
    bed.refuse(0).refuse(1).refuse(2).recorded();
    assert_eq!(
        bed.refuse(3).recorded().last().expect("the engine reports an effect"),
        "advise on plan: 60 B missing for 1360"
    );
    let failed = bed.core.step(Input::Advised(Vec::new()), bed.now);
    let [Effect::Fail(StartError::Profile { attempt: 4, attempts, .. })] = &failed[..] else {
        panic!("expected the failure as the only effect");
    };
    let targets: Vec<_> = attempts.iter().map(|report| (report.attempt, report.target_tokens)).collect();
    assert_eq!(targets, [(1, 1600), (2, 1520), (3, 1440), (4, 1360)]);
    bed.give(Input::Advised(Vec::new())).refuse(4).loaded(false);
    assert_eq!(bed.recorded(), [""; 0]);
}

#[test]
fn refused_weights_ask_for_advice_on_the_latest_plan() {
    let mut bed = Bed::new(rules());
    bed.give(Input::Attempt { attempt: 0 });
    for name in [Some("first plan"), Some("second plan"), None, None] {
        bed.passed.evidence = Some(evidence(At::Load));
        let plan = name.map(|plan| Planned { plan, blocks: 100, is_warm: false });
        bed.recorded();
        bed.give(Input::LoadRefused { plan, error: short() });
    }
    assert_eq!(
        bed.recorded().last().expect("the engine reports an effect"),
        "advise on second plan: 60 B missing for 1360"
    );
}

#[test]
fn a_failed_load_ends_the_start_unless_the_device_is_lost() {
    let mut bed = Bed::new(rules());
    bed.give(Input::Attempt { attempt: 0 }).recorded();
    let error = StartError::Died("a bug".to_owned());
    assert_eq!(bed.give(Input::LoadFailed(error)).recorded(), ["check device", "fail: the model's loader died: a bug"]);
    assert_eq!(bed.loaded(false).recorded(), [""; 0]);
}

proptest! {
    #[test]
    fn an_engine_ends_once_and_has_no_effects_afterwards(
        inputs in proptest::collection::vec((0u8..14, 0u64..4), 1..80),
    ) {
        let mut bed = Bed::new(Rules { is_pinned: inputs.len() % 2 == 0, ..rules() });
        let is_end = |described: &String| described.starts_with("fail") || described.starts_with("give up");
        for (kind, number) in inputs {
            // The current attempt, or in some cases the attempt before it.
            let attempt = bed.core.log.number().saturating_sub(u32::from(number == 0));
            let runs = bed.core.serving().and_then(Serving::children).map_or(0, |children| children.0.len());
            bed.passed = AttemptState { evidence: (number % 2 == 0).then(|| evidence(At::Back)), ..AttemptState::default() };
            match kind {
                0 | 1 => bed.give(Input::Attempt { attempt }),
                2 | 3 => bed.loaded(number == 0),
                4 => bed.give(Input::LoadRefused { plan: None, error: short() }),
                5 => bed.refuse(attempt),
                6 | 7 => bed.sized(attempt),
                8 => bed.give(Input::ProfileDied { reason: "a bug".to_owned() }),
                9 if (number as usize) < runs => bed.die(number as usize),
                10 => bed.refuse_serving([WhichLane::Step, WhichLane::Vision][number as usize % 2], number),
                11 => bed.give(Input::Restart { restart: number }),
                12 if bed.is_changing => bed.changed(),
                12 => bed.give(Input::Pool(PoolInput::GiveUp(number as usize * 20))),
                _ => bed.give(Input::Advised(Vec::new())),
            };
            bed.now += MS;
            let ends = bed.recorded.iter().filter(|described| is_end(described)).count();
            prop_assert!(ends <= 1, "{:?}", bed.recorded);
            prop_assert!(ends == 0 || is_end(bed.recorded.last().expect("the last effect exists")), "{:?}", bed.recorded);
        }
    }
}
