//! The promised token interval: what steps and launches cost on this device, and what fits beside running streams.
//!
//! The profile measures costs, the scheduler plans steps by them, and the vision actor limits its launches.

mod copy_costs;
mod gpu_load;
mod measured;
mod step_costs;

pub use copy_costs::CopyCosts;
pub use gpu_load::GpuLoad;
pub use measured::{MeasuredCosts, MeasuredLaunch, MeasuredStep, StepWork};
pub use step_costs::StepCosts;

use std::{sync::Arc, time::Duration};

/// The default promise, in milliseconds: thirty tokens a second, several times as fast as people read.
pub const TOKEN_INTERVAL: usize = 33;

/// The share of the promise that a step is planned for. The rest is for what no prediction knows.
const PLANNED_SHARE: f64 = 0.9;

/// A promised interval, and the costs to keep it by.
#[derive(Clone, Debug)]
pub struct Pace {
    /// The most time from one token of a reply to the next.
    pub promise: Duration,
    /// What steps cost.
    pub costs: StepCosts,
}

impl Pace {
    /// None if nothing is promised, or if no costs are known to keep the promise by.
    pub fn new(promise: Option<Duration>, measured: &MeasuredCosts) -> Option<Self> {
        Some(Pace { promise: promise?, costs: StepCosts::of(measured)? })
    }

    /// The time that a step beside running streams may take, in µs. Where decoding `alone` takes longer than the promise
    /// allows, no chunk would keep it. Prompts then get as much time as decoding does, or a busy model would never begin
    /// a reply.
    pub fn step_micros(&self, alone: u64) -> u64 {
        let planned = planned_micros(self.promise);
        if alone > planned { alone * 2 } else { planned }
    }
}

/// The part of a promise that steps and launches are planned for, in µs.
fn planned_micros(promise: Duration) -> u64 {
    (promise.as_micros() as f64 * PLANNED_SHARE) as u64
}

/// What the serving actors of a model know of the promise.
#[derive(Clone, Debug, Default)]
pub struct Pacing {
    /// The promise. None if the user wants none.
    pub promise: Option<Duration>,
    /// What the profile measured.
    pub measured: MeasuredCosts,
    /// What the lanes of all models do on the card that they share.
    pub card: Arc<GpuLoad>,
}

impl Pacing {
    /// By what the scheduler plans steps.
    pub fn pace(&self) -> Option<Pace> {
        Pace::new(self.promise, &self.measured)
    }

    /// By what the scheduler copies blocks back from host memory, or computes them again.
    pub fn copy_costs(&self) -> CopyCosts {
        CopyCosts::beside(StepCosts::of(&self.measured))
    }

    /// Patches that a launch may have while streams run. None for no such limit.
    pub fn launch_patches(&self) -> Option<usize> {
        self.measured.patches_within(planned_micros(self.promise?))
    }
}
