//! Prefixes of the weight names of a vision tower and its decoder. transformers 4.52 changed these
//! prefixes, and checkpoints use the old or the new ones.

use crate::weights::WeightMap;

/// The prefixes of the weights' names.
pub struct Prefixes {
    pub tower: &'static str,
    pub decoder: &'static str,
}

impl Prefixes {
    /// The prefixes that the checkpoint uses. Each prefix is looked up separately, because
    /// transformers also renames each one separately (5.17, `conversion_mapping.py`, under
    /// `Qwen2VLForConditionalGeneration`).
    pub fn of(map: &WeightMap<'_>) -> Self {
        let has_new = |name, new, old| if map.has(name) { new } else { old };
        Prefixes {
            tower: has_new("model.visual.patch_embed.proj.weight", "model.visual", "visual"),
            decoder: has_new("model.language_model.norm.weight", "model.language_model", "model"),
        }
    }
}
