//! The executor threads of a model: one lane for decoder steps and one for the vision encoder.

use std::sync::Arc;

use bursar_budgets::{Device, Segment};
use bursar_kernels::OpenError;

use crate::compute::{Executor, Models, lane::Lane, memory::EngineMemory};

/// A model's lanes. Clones share the threads, which end when the last clone is dropped.
#[derive(Clone)]
pub struct Lanes {
    pub step: Lane,
    /// Runs batches of the vision encoder. `None` for a model without pictures.
    pub vision: Option<Lane>,
}

/// Resources that lanes need.
#[derive(Clone)]
pub struct LaneResources {
    /// The CPU threads or GPU kernels that compute.
    pub executor: Executor,
    /// The device on which the lanes' memory is backed.
    pub device: Arc<dyn Device>,
    pub models: Models,
    pub memory: Arc<EngineMemory>,
}

impl Lanes {
    /// Waits until no step, encoder batch or copy is in flight on either lane. Captures and worst
    /// cases are not waited for.
    pub async fn idle(&self) {
        self.step.idle().await;
        if let Some(vision) = &self.vision {
            vision.idle().await;
        }
    }

    /// Ends the threads of both lanes and waits until they have released their memory.
    pub async fn shut_down(&self) {
        self.step.shut_down().await;
        if let Some(vision) = &self.vision {
            vision.shut_down().await;
        }
    }

    pub fn are_alive(&self) -> bool {
        self.step.is_alive() && self.vision.as_ref().is_none_or(Lane::is_alive)
    }
}

impl LaneResources {
    /// Starts the threads. Threads of `before` that still run are kept, because two threads must
    /// not share a workspace. This call blocks.
    ///
    /// # Errors
    /// A GPU refuses a stream or page-locked memory.
    pub(super) fn start_lanes(&self, before: Option<&Lanes>) -> Result<Lanes, OpenError> {
        let LaneResources { executor, device, models, memory } = self;
        let start = |name: &str, before: Option<&Lane>, workspace: &Arc<Segment>, is_linked| match before {
            Some(lane) if lane.is_alive() => Ok(lane.clone()),
            before => {
                // A lane over several ranks may have threads that are still ending.
                if let Some(lane) = before {
                    tokio::runtime::Handle::current().block_on(lane.shut_down());
                }
                executor.start_lane(name, device, workspace, models, memory, is_linked)
            }
        };
        let before_vision = before.and_then(|lanes| lanes.vision.as_ref());
        let start_vision = |workspace| start("bursar-vision", before_vision, workspace, models.picture_ranks() > 1);
        let before_step = before.map(|lanes| &lanes.step);
        let step = start("bursar-step", before_step, &memory.step_workspace, true)?;
        match memory.vision_workspace.as_ref().map(start_vision).transpose() {
            Ok(vision) => Ok(Lanes { step, vision }),
            Err(error) => {
                // No other code has a handle to the new thread, so stop the thread here. Its memory
                // must be released before the caller sees the error.
                if before_step.is_none_or(|lane| !lane.is_alive()) {
                    tokio::runtime::Handle::current().block_on(step.shut_down());
                }
                Err(error)
            }
        }
    }
}
