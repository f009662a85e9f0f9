//! The threads of a model: one for steps, one for pictures.

use std::sync::Arc;

use bursar_budgets::{Device, Segment};
use bursar_kernels::OpenError;
use bursar_model::Model;

use super::Processor;
use crate::{lane::Lane, memory::EngineMemory};

/// A model's lanes. Cloning shares the threads; they end when the last clone is gone.
#[derive(Clone)]
pub struct Lanes {
    /// Steps of the decoder.
    pub step: Lane,
    /// Launches of the vision encoder; none for a model that takes no pictures.
    pub vision: Option<Lane>,
}

impl Lanes {
    /// Starts the threads on `memory`.
    ///
    /// # Errors
    /// A GPU refuses a stream or page-locked memory.
    pub fn start(
        processor: &Processor,
        device: &Arc<dyn Device>,
        model: &Arc<Model>,
        memory: &Arc<EngineMemory>,
    ) -> Result<Self, OpenError> {
        Lanes::start_beside(None, processor, device, model, memory)
    }

    /// The same, but threads of `before` that still run go on: two threads must not share a workspace.
    ///
    /// # Errors
    /// As there.
    pub fn start_beside(
        before: Option<&Lanes>,
        processor: &Processor,
        device: &Arc<dyn Device>,
        model: &Arc<Model>,
        memory: &Arc<EngineMemory>,
    ) -> Result<Self, OpenError> {
        let start = |name: &str, before: Option<&Lane>, workspace: &Arc<Segment>| match before {
            Some(lane) if lane.is_alive() => Ok(lane.clone()),
            _ => processor.start_lane(name, device, workspace, model, memory),
        };
        let before_vision = before.and_then(|lanes| lanes.vision.as_ref());
        let start_vision = |workspace| start("bursar-vision", before_vision, workspace);
        Ok(Lanes {
            step: start("bursar-step", before.map(|lanes| &lanes.step), &memory.step_workspace)?,
            vision: memory.vision_workspace.as_ref().map(start_vision).transpose()?,
        })
    }

    /// Returns when no job is under way on either.
    pub async fn idle(&self) {
        self.step.idle().await;
        if let Some(vision) = &self.vision {
            vision.idle().await;
        }
    }

    /// Ends both threads; returns when they have let go of their memory.
    pub async fn quench(&self) {
        self.step.quench().await;
        if let Some(vision) = &self.vision {
            vision.quench().await;
        }
    }

    /// Whether all threads still run.
    pub fn are_alive(&self) -> bool {
        self.step.is_alive() && self.vision.as_ref().is_none_or(Lane::is_alive)
    }
}
