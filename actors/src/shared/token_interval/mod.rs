//! The promised token interval: costs of steps and encoder batches on this device, and the work
//! that fits next to running streams.
//!
//! The profile measures the costs, the scheduler plans steps by them, and the vision actor limits
//! its encoder batches by them.

mod copy_costs;
mod gpu_load;
mod measured;
mod step_costs;

pub use copy_costs::CopyCosts;
pub use gpu_load::GpuLoad;
pub use measured::{MeasuredCosts, MeasuredLaunch, MeasuredStep, StepWork};
pub use step_costs::StepCosts;

use std::{sync::Arc, time::Duration};

/// The default promised interval in milliseconds: thirty tokens a second, several times as
/// fast as people read.
pub const TOKEN_INTERVAL: usize = 33;

/// The share of the promised interval that a step is planned for. The rest is a margin for delays
/// that the measured costs do not predict.
const PLANNED_SHARE: f64 = 0.9;

/// A promised interval, and the step costs that are used to keep it.
#[derive(Clone, Debug)]
pub struct TokenInterval {
    /// The most time from one token of a reply to the next.
    pub promise: Duration,
    pub costs: StepCosts,
}

impl TokenInterval {
    /// `None` if nothing is promised, or if the costs are not known.
    pub fn new(promise: Option<Duration>, measured: &MeasuredCosts) -> Option<Self> {
        Some(TokenInterval { promise: promise?, costs: StepCosts::of(measured)? })
    }

    /// The time in µs that a step may take next to running streams. `alone` is the predicted time
    /// of a step that only decodes. If `alone` exceeds the planned time, no step with a prompt
    /// chunk can keep the promise. Prompts then get as much time as decoding, because a busy model
    /// would otherwise never start a reply.
    pub fn step_micros(&self, alone: u64) -> u64 {
        let planned = planned_micros(self.promise);
        if alone > planned { alone * 2 } else { planned }
    }
}

/// The part of a promised interval that steps and encoder batches are planned for, in µs.
fn planned_micros(promise: Duration) -> u64 {
    (promise.as_micros() as f64 * PLANNED_SHARE) as u64
}

/// The promised interval and its costs, as the serving actors of a model know them.
#[derive(Clone, Debug, Default)]
pub struct Pacing {
    /// `None` if the user disabled the target (`token_interval` = 0).
    pub promise: Option<Duration>,
    pub measured: MeasuredCosts,
    /// The load that the lanes of all models put on the shared GPU.
    pub card: Arc<GpuLoad>,
}

impl Pacing {
    /// The promise and the costs by which the scheduler plans steps.
    pub fn token_interval(&self) -> Option<TokenInterval> {
        TokenInterval::new(self.promise, &self.measured)
    }

    /// The costs by which the scheduler decides whether to copy blocks back from host memory
    /// or to recompute them.
    pub fn copy_costs(&self) -> CopyCosts {
        CopyCosts::with_steps(StepCosts::of(&self.measured))
    }

    /// Patches that an encoder batch may have while streams run. `None` means no such limit.
    pub fn launch_patches(&self) -> Option<usize> {
        self.measured.patches_within(planned_micros(self.promise?))
    }
}
