//! Steps of a model with a draft head, each followed by drafts.

use bursar_kernels::Backend;
use bursar_model::{
    blocks::{decoder::StepCaches, draft_head::DraftRows},
    flow::{FurtherDrafts, LogitsOf, StepBatch},
};

use super::{Bench, SequenceChunk, downloaded, greatest};

/// The logits of a step and of the drafts after it. Each inner list has the logits of one row. Rows
/// are in the order of the chunks.
pub struct Drafted {
    pub step: Vec<Vec<f32>>,
    /// The logits of each pass of the head, in order.
    pub drafts: Vec<Vec<Vec<f32>>>,
    /// The tokens that each pass of the head drafts, one per row.
    pub tokens: Vec<Vec<u32>>,
}

impl<B: Backend> Bench<B> {
    /// Runs one step over the next tokens of some sequences, and then `count` drafts for each row
    /// with logits. If `count` is above 1, each chunk must have exactly one such row.
    pub fn step_and_draft(&self, chunks: &mut [SequenceChunk<'_>], count: usize) -> Drafted {
        let pictures: Vec<_> = chunks.iter().map(SequenceChunk::pictures).collect();
        let parts: Vec<_> = chunks.iter().zip(&pictures).map(|(chunk, pictures)| chunk.part(pictures)).collect();
        let next: Vec<_> = chunks.iter().map(SequenceChunk::next).collect();
        let batch = StepBatch::pack_with_drafts(&parts, &next);
        let (layers, cache, rows) = (self.layers(), self.cache(), batch.logit_rows.len());
        let decoder = self.model.config().decoder();
        let (width, positions, all) = (decoder.draft_width(), decoder.draft_positions(), LogitsOf::AllRanks);
        let split = |logits: Vec<f32>| -> Vec<Vec<f32>> {
            logits.chunks_exact((logits.len() / rows.max(1)).max(1)).map(<[f32]>::to_vec).collect()
        };
        let further: Vec<_> = chunks.iter().map(|chunk| chunk.further_drafts(count.saturating_sub(1))).collect();
        let further: Vec<_> = further.iter().map(|place| (place, 0)).collect();
        let greedy = |logits: &[Vec<f32>]| -> Vec<u32> { logits.iter().map(|row| greatest(row)).collect() };
        let drafted = self.pass(|scope| {
            let mut hidden = scope.empty([decoder.draft_rows(batch.token_count(), rows), width])?;
            let step = {
                let (scope, previous) = (scope.scope(), self.previous());
                let caches = StepCaches { layers: &layers, pictures: Some(&cache), previous: &previous };
                let logits = self.model.step(&scope, &batch, &caches, all, Some(&mut hidden), |_, _| Ok(()))?;
                split(downloaded(&scope, &logits)?)
            };
            let mut chosen = scope.upload([rows], &greedy(&step))?;
            let (mut drafts, mut tokens) = (Vec::new(), Vec::new());
            for draft in 0..count {
                let batch = match draft {
                    0 => batch.clone(),
                    _ => FurtherDrafts::batch(&further, draft, positions),
                };
                let mut output = scope.empty([rows, width])?;
                let passed = DraftRows { hidden: &hidden, output: &mut output };
                let caches = StepCaches { layers: &layers, pictures: Some(&cache), previous: &chosen };
                let logits = self.model.draft(scope, &batch, &caches, all, passed)?;
                let mut drafted = scope.empty_u32([rows])?;
                logits.choose(scope, &mut drafted)?;
                tokens.push(scope.download(&drafted)?);
                drafts.push(split(downloaded(scope, &logits.logits)?));
                (chosen, hidden) = (drafted, output);
            }
            Ok(Drafted { step, drafts, tokens })
        });
        chunks.iter_mut().for_each(SequenceChunk::advance);
        let drafted = drafted.expect("the step and the drafts run");
        let mut all = drafted.step.iter().chain(drafted.drafts.iter().flatten()).flatten();
        assert!(all.all(|logit| logit.is_finite()), "poisoned memory reached the logits");
        drafted
    }
}
