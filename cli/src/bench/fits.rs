//! Pure: whether a served model can run a measurement. A measurement that does not fit is reported
//! and skipped, not reduced.

use std::sync::Arc;

use bursar::Serving;
use bursar_model::{
    flow::{CacheGroups, MediaGrid},
    processor::{MediaProcessors, Sizing},
};

use super::workload::Prompts;

/// The limits of a served model.
pub struct Fits {
    /// The maximum number of sequences in a step.
    pub sequences: usize,
    /// Token ids below this are text tokens.
    pub text_ids: u32,
    context_tokens: usize,
    step_tokens: usize,
    cache_groups: CacheGroups,
    kv_blocks: usize,
    picture_patches: usize,
    processors: Option<Arc<MediaProcessors>>,
}

impl Fits {
    /// Returns the limits under which the model was stressed.
    pub fn of(serving: &Serving) -> Self {
        let tokenizer = serving.context.prompts.tokenizer();
        let marks = tokenizer.added_tokens().iter().map(|token| token.id);
        Fits {
            sequences: serving.record.sequences,
            text_ids: marks.min().unwrap_or(tokenizer.vocabulary_size() as u32),
            context_tokens: serving.context.envelope.context_tokens,
            step_tokens: serving.context.envelope.step_tokens,
            cache_groups: serving.context.family.decoder().cache_groups(),
            kv_blocks: serving.record.kv_blocks,
            picture_patches: serving.context.envelope.picture_patches,
            processors: serving.context.processors.clone(),
        }
    }

    /// Checks that a sequence of `prompt + reply` tokens is admitted.
    pub fn each(&self, prompt: usize, reply: usize) -> Result<(), String> {
        let of_pool = self.cache_groups.tokens_in(self.kv_blocks, self.step_tokens);
        let (tokens, limit) = (prompt + reply, self.context_tokens.min(of_pool));
        if tokens <= limit {
            Ok(())
        } else {
            Err(format!("prompt and reply have {tokens} tokens; the limit is {limit}"))
        }
    }

    /// Checks that all sequences run in the same steps until they end: a step has permits for all
    /// of them, and the KV cache can hold all of their tokens.
    pub fn together(&self, prompts: Prompts, reply: usize) -> Result<(), String> {
        self.each(prompts.length, reply)?;
        if prompts.count > self.sequences {
            return Err(format!("{} sequences; a step takes at most {}", prompts.count, self.sequences));
        }
        let blocks = self.cache_groups.blocks_together(prompts.count, prompts.length + reply, self.step_tokens);
        if blocks <= self.kv_blocks {
            Ok(())
        } else {
            Err(format!("{} sequences need {blocks} KV cache blocks; the cache has {}", prompts.count, self.kv_blocks))
        }
    }

    /// Returns the grid of patches that the encoder gets for a picture. Fails if the picture and its
    /// reply exceed a limit. Also fails if the picture would be resized, unless the model cuts
    /// pictures into tiles or scales every picture to its token limit.
    pub fn picture(&self, width: u32, height: u32, reply: usize) -> Result<MediaGrid, String> {
        let processors = self.processors.as_ref().ok_or("the model does not take pictures")?;
        let plan = processors.pictures.plan(width, height).map_err(|error| error.to_string())?;
        let has_own_size = plan.tiles.is_none() && processors.pictures.config().sizing == Sizing::Nearest;
        if has_own_size && plan.resized != plan.source {
            return Err(format!("the picture would be resized to {} x {}", plan.resized.width, plan.resized.height));
        }
        if plan.patches > self.picture_patches {
            return Err(format!("the picture has {} patches; the limit is {}", plan.patches, self.picture_patches));
        }
        self.each(plan.tokens, reply)?;
        Ok(plan.visual())
    }
}
