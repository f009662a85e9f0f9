//! The envelope: the largest inputs that may reach the device. What is outside is resized or refused, never tried.

use serde::{Deserialize, Serialize};

/// The limits that a plan, a stress and every admitted request keep to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// Tokens of a sequence, prompt and answer together.
    pub context_tokens: usize,
    /// Sequences in one step.
    pub sequences: usize,
    /// Tokens in one step, over all sequences.
    pub step_tokens: usize,
    /// Patches of one picture after resizing.
    pub picture_patches: usize,
    /// Pictures of a request, over all turns.
    pub pictures: usize,
    /// Patches in one launch of the vision encoder, over all pictures.
    pub launch_patches: usize,
}

impl Default for Envelope {
    fn default() -> Self {
        Envelope {
            context_tokens: 4096,
            sequences: 16,
            step_tokens: 512,
            picture_patches: 5476,
            pictures: 8,
            launch_patches: 8192,
        }
    }
}
