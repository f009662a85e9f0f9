//! The table of deaths: victim, kind of fault, moment and outcome. Every possible cell is run.

use super::{cell, faults::Victim::*, faults::Way::*, faults::*};
use crate::stage::story;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Requests and starts in progress end as they would have without the fault, at most after a
    /// pause. Weights are kept.
    GoesOn,
    /// Each request and start in progress ends with one typed error, every byte is returned,
    /// and another runtime works.
    Over,
    /// This death cannot happen, for this reason.
    Cannot(&'static str),
}

const ON: Outcome = Outcome::GoesOn;
const OVER: Outcome = Outcome::Over;
const NO_PROFILE: Outcome = Outcome::Cannot("a profile lives only while a model is sized");
const NOT_YET: Outcome = Outcome::Cannot("vision and scheduler start when the model is sized");
const NO_LANE: Outcome = Outcome::Cannot("lanes start with the first attempt at sizing, after the weights are loaded");
const NO_ERR: Outcome = Outcome::Cannot("a failed job is an answer of a running lane; the job's sender dies");
const NO_KILL: Outcome = Outcome::Cannot("a thread cannot be killed");
const NO_STOP: Outcome = Outcome::Cannot("a lane stops only when its supervisor dies and takes the lane's memory back");

type Row = (Victim, Way, [Outcome; MOMENTS.len()]);

#[rustfmt::skip]
const TABLE: [Row; VICTIMS.len() * WAYS.len()] = [
    //                        idle        loading     profiling   prefilling  decoding
    (Runtime,    Panic,      [OVER,       OVER,       OVER,       OVER,       OVER]),
    (Runtime,    Fail,       [OVER,       OVER,       OVER,       OVER,       OVER]),
    (Runtime,    Kill,       [OVER,       OVER,       OVER,       OVER,       OVER]),
    (Runtime,    Stop,       [OVER,       OVER,       OVER,       OVER,       OVER]),
    (Runtime,    Supervisor, [OVER,       OVER,       OVER,       OVER,       OVER]),
    (Engine,     Panic,      [ON,         ON,         ON,         ON,         ON]),
    (Engine,     Fail,       [ON,         ON,         ON,         ON,         ON]),
    (Engine,     Kill,       [ON,         ON,         ON,         ON,         ON]),
    (Engine,     Stop,       [ON,         ON,         ON,         ON,         ON]),
    (Engine,     Supervisor, [OVER,       OVER,       OVER,       OVER,       OVER]),
    (Budget,     Panic,      [ON,         ON,         ON,         ON,         ON]),
    (Budget,     Fail,       [ON,         ON,         ON,         ON,         ON]),
    (Budget,     Kill,       [ON,         ON,         ON,         ON,         ON]),
    (Budget,     Stop,       [ON,         ON,         ON,         ON,         ON]),
    (Budget,     Supervisor, [OVER,       OVER,       OVER,       OVER,       OVER]),
    (Profile,    Panic,      [NO_PROFILE, NO_PROFILE, ON,         NO_PROFILE, NO_PROFILE]),
    (Profile,    Fail,       [NO_PROFILE, NO_PROFILE, ON,         NO_PROFILE, NO_PROFILE]),
    (Profile,    Kill,       [NO_PROFILE, NO_PROFILE, ON,         NO_PROFILE, NO_PROFILE]),
    (Profile,    Stop,       [NO_PROFILE, NO_PROFILE, ON,         NO_PROFILE, NO_PROFILE]),
    (Profile,    Supervisor, [NO_PROFILE, NO_PROFILE, ON,         NO_PROFILE, NO_PROFILE]),
    (Vision,     Panic,      [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (Vision,     Fail,       [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (Vision,     Kill,       [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (Vision,     Stop,       [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (Vision,     Supervisor, [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (Scheduler,  Panic,      [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (Scheduler,  Fail,       [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (Scheduler,  Kill,       [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (Scheduler,  Stop,       [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (Scheduler,  Supervisor, [ON,         NOT_YET,    NOT_YET,    ON,         ON]),
    (StepLane,   Panic,      [ON,         NO_LANE,    ON,         ON,         ON]),
    (StepLane,   Fail,       [NO_ERR,     NO_LANE,    NO_ERR,     NO_ERR,     NO_ERR]),
    (StepLane,   Kill,       [NO_KILL,    NO_LANE,    NO_KILL,    NO_KILL,    NO_KILL]),
    (StepLane,   Stop,       [NO_STOP,    NO_LANE,    NO_STOP,    NO_STOP,    NO_STOP]),
    (StepLane,   Supervisor, [ON,         NO_LANE,    ON,         ON,         ON]),
    (VisionLane, Panic,      [ON,         NO_LANE,    ON,         ON,         ON]),
    (VisionLane, Fail,       [NO_ERR,     NO_LANE,    NO_ERR,     NO_ERR,     NO_ERR]),
    (VisionLane, Kill,       [NO_KILL,    NO_LANE,    NO_KILL,    NO_KILL,    NO_KILL]),
    (VisionLane, Stop,       [NO_STOP,    NO_LANE,    NO_STOP,    NO_STOP,    NO_STOP]),
    (VisionLane, Supervisor, [ON,         NO_LANE,    ON,         ON,         ON]),
];

/// The cells of a victim that are possible.
fn cells(victim: Victim) -> impl Iterator<Item = (Way, Moment, Outcome)> {
    let rows = TABLE.iter().filter(move |(of, ..)| *of == victim);
    let cells =
        rows.flat_map(|(_, way, outcomes)| MOMENTS.into_iter().zip(outcomes).map(|(at, cell)| (*way, at, *cell)));
    cells.filter(|(_, _, outcome)| !matches!(outcome, Outcome::Cannot(_)))
}

#[test]
fn rule_7_the_table_of_deaths_is_complete_and_explains_impossible_cells() {
    for victim in VICTIMS {
        for way in WAYS {
            let rows = TABLE.iter().filter(|(of, by, _)| (*of, *by) == (victim, way)).count();
            assert_eq!(rows, 1, "{victim:?} by {way:?}");
        }
        assert!(cells(victim).count() > 0, "{victim:?} can die in some way");
    }
    for (victim, way, outcomes) in TABLE {
        for (moment, outcome) in MOMENTS.into_iter().zip(outcomes) {
            if let Outcome::Cannot(reason) = outcome {
                assert!(reason.len() > 20, "{victim:?} by {way:?} while {moment:?} has no reason for being impossible");
            }
        }
    }
}

/// Makes one test per victim, so that the tests run concurrently. The list of victims is made here
/// too, so a victim without a test does not compile.
macro_rules! each_victim {
    ($($name:ident: $victim:ident;)*) => {
        pub const VICTIMS: [Victim; [$(Victim::$victim),*].len()] = [$(Victim::$victim),*];
        $(#[test]
        fn $name() {
            story(cell::run_all(Victim::$victim, cells(Victim::$victim).collect()));
        })*
        /// A new victim must be listed here, or the `match` does not compile.
        #[allow(dead_code, reason = "its match is what the compiler looks at")]
        fn is_listed(victim: Victim) {
            match victim { $(Victim::$victim => {})* }
        }
    };
}

each_victim! {
    rule_7_any_runtime_death_ends_each_request_in_one_error: Runtime;
    rule_7_any_engine_death_leaves_each_requests_end_unchanged: Engine;
    rule_7_any_budget_death_leaves_each_requests_end_unchanged: Budget;
    rule_11_any_dead_profiles_bytes_return_before_the_next: Profile;
    rule_7_any_vision_death_leaves_each_requests_end_unchanged: Vision;
    rule_7_any_scheduler_death_leaves_each_requests_end_unchanged: Scheduler;
    rule_7_any_step_lane_death_leaves_each_requests_end_unchanged: StepLane;
    rule_7_any_vision_lane_death_leaves_each_requests_end_unchanged: VisionLane;
}
