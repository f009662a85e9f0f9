//! The threads of a model: one for steps, one for pictures.

use std::sync::Arc;

use bursar_budgets::{Device, Segment};
use bursar_kernels::Cpu;
use bursar_model::Model;

use crate::{
    lane::{Bench, Lane},
    memory::EngineMemory,
};

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
    pub fn start(device: &Arc<dyn Device>, model: &Arc<Model>, memory: &Arc<EngineMemory>, threads: usize) -> Self {
        let start = |name: &str, workspace: &Arc<Segment>| {
            let bench = Bench::new(Cpu::new(threads), workspace.clone(), model.clone(), memory.clone());
            Lane::start(name, bench, device.timeline())
        };
        Lanes {
            step: start("bursar-step", &memory.step_workspace),
            vision: memory.vision_workspace.as_ref().map(|workspace| start("bursar-vision", workspace)),
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
