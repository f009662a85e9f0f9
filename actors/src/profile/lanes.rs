//! The threads of a model: one for steps, one for pictures.

use std::sync::Arc;

use bursar_budgets::{Device, Segment};
use bursar_kernels::OpenError;
use bursar_model::Model;

use super::{ProfileError, WeightStore};
use crate::compute::{Processor, lane::Lane, memory::EngineMemory};

/// A model's lanes. Cloning shares the threads; they end when the last clone is gone.
#[derive(Clone)]
pub struct Lanes {
    /// Steps of the decoder.
    pub step: Lane,
    /// Launches of the vision encoder; none for a model that takes no pictures.
    pub vision: Option<Lane>,
}

/// What lanes work on and in.
#[derive(Clone)]
pub struct LanesPlace {
    /// What computes.
    pub processor: Processor,
    /// Where the memory is.
    pub device: Arc<dyn Device>,
    /// The loaded model.
    pub model: Arc<Model>,
    /// What they share.
    pub memory: Arc<EngineMemory>,
}

impl Lanes {
    /// Starts the threads at their place and records them in the weight store. Those of `before` that still run go on: two
    /// threads must not share a workspace. A lane on a GPU takes page-locked memory, and so do these on a thread of
    /// tokio's that may wait. None if an end was put to the attempt: then none of the new threads is left, either.
    ///
    /// # Errors
    /// A GPU refuses a stream or page-locked memory.
    pub async fn start(
        before: Option<Lanes>,
        place: LanesPlace,
        weight_store: &WeightStore,
        generation: u64,
    ) -> Result<Option<Self>, ProfileError> {
        let kept = weight_store.clone();
        let started = weight_store.on_a_thread(generation, move || {
            let lanes = place.start_lanes(before.as_ref())?;
            if kept.keep_lanes(generation, lanes.clone()) {
                return Ok(Some(lanes));
            }
            // Whoever has put the end to it waits for this thread, and then takes the memory.
            tokio::runtime::Handle::current().block_on(lanes.shut_down());
            Ok(None)
        });
        Ok(started.await?.flatten())
    }

    /// Returns when no job is under way on either.
    pub async fn idle(&self) {
        self.step.idle().await;
        if let Some(vision) = &self.vision {
            vision.idle().await;
        }
    }

    /// Ends both threads; returns when they have let go of their memory.
    pub async fn shut_down(&self) {
        self.step.shut_down().await;
        if let Some(vision) = &self.vision {
            vision.shut_down().await;
        }
    }

    /// Whether all threads still run.
    pub fn are_alive(&self) -> bool {
        self.step.is_alive() && self.vision.as_ref().is_none_or(Lane::is_alive)
    }
}

impl LanesPlace {
    fn start_lanes(&self, before: Option<&Lanes>) -> Result<Lanes, OpenError> {
        let LanesPlace { processor, device, model, memory } = self;
        let start = |name: &str, before: Option<&Lane>, workspace: &Arc<Segment>| match before {
            Some(lane) if lane.is_alive() => Ok(lane.clone()),
            _ => processor.start_lane(name, device, workspace, model, memory),
        };
        let before_vision = before.and_then(|lanes| lanes.vision.as_ref());
        let start_vision = |workspace| start("bursar-vision", before_vision, workspace);
        let before_step = before.map(|lanes| &lanes.step);
        let step = start("bursar-step", before_step, &memory.step_workspace)?;
        match memory.vision_workspace.as_ref().map(start_vision).transpose() {
            Ok(vision) => Ok(Lanes { step, vision }),
            Err(error) => {
                // Nobody knows of the new one: it lets go of the memory before anybody is told.
                if before_step.is_none_or(|lane| !lane.is_alive()) {
                    tokio::runtime::Handle::current().block_on(step.shut_down());
                }
                Err(error)
            }
        }
    }
}
