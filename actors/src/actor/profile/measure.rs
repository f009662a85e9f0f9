//! Measurement of the times of steps and encoder batches under serving conditions: graphs, launches
//! and answers are included. Every sequence is sampled greedily, because sampling costs about the
//! same for most requests.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bursar_kernels::BLOCK_TOKENS;
use bursar_model::{
    RequestCost,
    flow::{BlockTable, Grid, NextToken, SequencePart, StateSlots, StepBatch, StepFormat},
    sampling::{Sampler, SamplingParams},
    worst_cases,
};

use super::{Attempt, Lanes, ProfileError};
use crate::{
    compute::lane::{Acceptance, Answer, Choice, EncodeJob, Job, LaneError, StepJob},
    responder::Responder,
    token_interval::{MeasuredCosts, MeasuredLaunch, MeasuredStep, StepWork},
    tree,
};

/// Time limits of the measurement: the first on a host, the second on a GPU. The limit applies to
/// all measured steps together, and again to all measured encoder batches together. The first two
/// steps and the first encoder batch are measured in any case. The times of sizes that were not
/// measured are extrapolated.
const ALLOWED: (Duration, Duration) = (Duration::from_millis(150), Duration::from_millis(1500));

/// Number of runs of each sample, or fewer if the time limit is reached. The fastest run counts,
/// because the first run loads kernels and fills caches.
const RUNS: usize = 2;

/// Prompt tokens of the measured steps. One more measured step has as many prompt tokens as a step
/// can take.
const PROMPTS: [usize; 4] = [16, 256, 1024, 4096];

/// Patches of the measured encoder batches. One more measured batch has as many patches as a batch
/// can take.
const PATCHES: [usize; 3] = [1024, 4096, 16_384];

/// Tokens of a short context, and the maximum length of each prompt in a measured step.
const SHORT: usize = 512;

/// A step to measure. Its prompts have `prompt` tokens in total. Each prompt follows `cached`
/// cached tokens. The prompts run together with `decoding` sequences that have `context` tokens
/// each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    prompt: usize,
    cached: usize,
    decoding: usize,
    context: usize,
}

/// Limits of the samples, from the envelope.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    sequences: usize,
    step_tokens: usize,
    context_tokens: usize,
}

impl Sizes {
    /// Returns the samples, the most important first. The first two are enough for predictions. If
    /// the envelope allows only one sequence, there are no samples, because a prompt then never
    /// runs together with another sequence.
    fn samples(&self) -> Vec<Sample> {
        if self.sequences < 2 {
            return Vec::new();
        }
        let (short, long) = (SHORT.min(self.context_tokens / 2).max(1), self.context_tokens);
        let beside = (self.sequences / 4).clamp(1, 16);
        let most = (self.step_tokens - beside).min((self.sequences - beside) * short);
        let alone = |decoding, context| Sample { prompt: 0, cached: 0, decoding, context };
        let mixed = |prompt: usize| Sample { prompt: prompt.min(most), cached: 0, decoding: beside, context: short };
        // The same number of prompt tokens as in `mixed(short)`, but at the end of a full context.
        // The additional time is spent on attention to the cached tokens.
        let pairs = Sample { cached: long - short, ..mixed(short) };
        let mut samples = vec![alone(1, short), mixed(PROMPTS[0]), alone(self.sequences, short), mixed(PROMPTS[1])];
        samples.extend([mixed(short), pairs, alone(self.sequences, long), mixed(PROMPTS[2]), mixed(PROMPTS[3])]);
        samples.push(mixed(most));
        let mut seen = Vec::new();
        samples.retain(|sample| {
            !seen.contains(sample) && {
                seen.push(*sample);
                true
            }
        });
        samples
    }
}

impl Sample {
    fn prompts(&self) -> impl Iterator<Item = usize> + use<> {
        let (tokens, at_once) = (self.prompt, SHORT.min(self.context.max(1)));
        (0..tokens.div_ceil(at_once)).map(move |prompt| at_once.min(tokens - prompt * at_once))
    }

    fn work(&self) -> StepWork {
        let mut work = StepWork::default();
        self.prompts().for_each(|tokens| work.add_prompt(self.cached, tokens));
        (0..self.decoding).for_each(|_| work.add_decoding(self.context));
        work
    }

    /// Returns the sample as a step of a model whose steps have this `format`, and that has a draft
    /// head if `has_draft_head`. All sequences use the same KV blocks, because no block has content
    /// yet. With recurrent states, each sequence writes a separate state.
    fn batch(&self, blocks: usize, vocabulary: usize, format: StepFormat, has_draft_head: bool) -> StepBatch {
        let decoding = std::iter::repeat_n((1, self.context - 1), self.decoding);
        let parts: Vec<_> = decoding.chain(self.prompts().map(|tokens| (tokens, self.cached))).collect();
        let longest = parts.iter().map(|(tokens, cached)| tokens + cached).max().unwrap_or(1);
        let table: Vec<u32> = (0..longest.div_ceil(BLOCK_TOKENS)).map(|block| (block % blocks) as u32).collect();
        let tables = vec![BlockTable::from(table); format.groups];
        // Varied tokens, so that a mixture of experts distributes them over its experts.
        let ids: Vec<u32> = (0..longest).map(|token| (token * 7919 % vocabulary) as u32).collect();
        let positions: Vec<_> = (0..longest).map(|position| [position as u32; 3]).collect();
        let part = |(slot, (tokens, cached)): (usize, &(usize, usize))| SequencePart {
            tokens: &ids[*cached..cached + tokens],
            positions: &positions[*cached..cached + tokens],
            cached_tokens: *cached,
            tables: &tables,
            logit_rows: 1,
            state: format.has_states.then(|| StateSlots::in_place(slot as u32)),
            ..SequencePart::default()
        };
        let parts: Vec<_> = parts.iter().enumerate().map(part).collect();
        if !has_draft_head {
            return StepBatch::pack(&parts);
        }
        StepBatch::pack_with_drafts(&parts, &vec![NextToken::Chosen; parts.len()])
    }
}

/// The time limit of a series of samples.
struct Clock {
    begun: Instant,
    allowed: Duration,
    /// Size, in tokens or patches, and fastest time of the latest sample.
    last: Option<(usize, Duration)>,
}

impl Clock {
    fn start(allowed: Duration) -> Self {
        Clock { begun: Instant::now(), allowed, last: None }
    }

    /// Whether there is time for a sample of this size, estimated from the latest sample.
    fn has_time_for(&self, size: usize) -> bool {
        let Some((before, took)) = self.last else { return true };
        let expected = took.mul_f64((size as f64 / before.max(1) as f64).max(1.0));
        self.begun.elapsed() + expected < self.allowed
    }

    /// Returns the time of the fastest of [`RUNS`] runs, in µs.
    async fn fastest<F: Future<Output = Result<(), ProfileError>>>(
        &mut self,
        size: usize,
        run: impl Fn() -> F,
    ) -> Result<u64, ProfileError> {
        let mut fastest = Duration::MAX;
        for done in 0..RUNS {
            if done > 0 && !self.has_time_for(size) {
                break;
            }
            let begun = Instant::now();
            run().await?;
            fastest = fastest.min(begun.elapsed());
            self.last = Some((size, fastest));
        }
        Ok(fastest.as_micros() as u64)
    }
}

impl Attempt {
    /// Returns the costs of steps and encoder batches at the final size of `blocks` KV blocks. If a
    /// recorded profile applies and contains costs, its costs are returned.
    pub(super) async fn measure_costs(
        &self,
        lanes: &Lanes,
        blocks: usize,
        cache_rows: usize,
    ) -> Result<MeasuredCosts, ProfileError> {
        if let Some(costs) = self.warm.as_ref().and_then(|written| written.costs.clone()) {
            return Ok(costs);
        }
        self.report(MEASURING, self.stressed() + 1 + self.needs.worst_cases.len());
        let allowed = if self.device.is_host_memory() { ALLOWED.0 } else { ALLOWED.1 };
        let steps = self.measure_steps(lanes, blocks, allowed).await?;
        let launches = self.measure_launches(lanes, cache_rows, allowed).await?;
        Ok(MeasuredCosts { steps, launches })
    }

    async fn measure_steps(
        &self,
        lanes: &Lanes,
        blocks: usize,
        allowed: Duration,
    ) -> Result<Vec<MeasuredStep>, ProfileError> {
        let envelope = &self.envelope;
        let (sequences, step_tokens) = (envelope.sequences, envelope.step_tokens);
        let sizes = Sizes { sequences, step_tokens, context_tokens: envelope.context_tokens };
        let decoder = self.model.config().decoder();
        let vocabulary = decoder.vocabulary;
        let sampler = Sampler::new(SamplingParams::default(), vocabulary).expect("the default parameters are valid");
        let (mut clock, sampler, mut steps) = (Clock::start(allowed), Arc::new(sampler), Vec::new());
        for (place, sample) in sizes.samples().into_iter().enumerate() {
            let size = sample.prompt + sample.decoding;
            if place >= 2 && !clock.has_time_for(size) {
                continue;
            }
            let batch = sample.batch(blocks, vocabulary, decoder.step_format(), decoder.draft_head.is_some());
            let run = || async {
                let choice = Choice {
                    sampler: sampler.clone(),
                    position: 0,
                    past: None,
                    drafts: Vec::new(),
                    acceptance: Acceptance::Equal,
                    further: None,
                };
                let choices = vec![choice; batch.logit_rows.len()];
                let (reply, answer) = Responder::new();
                let answer_to = Answer::to(|outcome: Result<_, LaneError>| reply.answer(outcome.map(drop)));
                lanes.step.submit(Job::Step(Box::new(StepJob {
                    batch: batch.clone(),
                    choices,
                    scores: Vec::new(),
                    pins: Vec::new(),
                    spans: Vec::new(),
                    answer: answer_to,
                })));
                tree::STRESS.wait(answer).await?.map_err(failed)
            };
            steps.push(MeasuredStep { work: sample.work(), micros: clock.fastest(size, run).await? });
        }
        Ok(steps)
    }

    async fn measure_launches(
        &self,
        lanes: &Lanes,
        cache_rows: usize,
        allowed: Duration,
    ) -> Result<Vec<MeasuredLaunch>, ProfileError> {
        let config = self.model.config();
        let (Some(lane), Some(merge)) = (&lanes.vision, config.merge()) else { return Ok(Vec::new()) };
        let most = self.envelope.launch_patches.min(merge.patches(cache_rows));
        // A measured picture is never larger than a stressed picture. Ranks distribute whole
        // pictures and do not split any.
        let largest = RequestCost::largest(&self.envelope, Some(merge)).picture_patches;
        let (mut clock, mut launches) = (Clock::start(allowed), Vec::<MeasuredLaunch>::new());
        for wanted in PATCHES.into_iter().chain([most]) {
            let side = merge.tokens(wanted.min(most).min(largest)).isqrt() * merge.side();
            let grid = config.tile().unwrap_or(Grid { t: 1, h: side as u32, w: side as u32 });
            let count = wanted.min(most) / grid.patches().max(1);
            // Patches of the rank that gets the most pictures. A batch of a single picture with
            // this many patches would take as long, because one rank encodes it.
            let patches = grid.patches() * count.div_ceil(self.model.picture_ranks());
            let is_larger = launches.last().is_none_or(|last| last.patches < patches);
            if patches == 0 || !is_larger || !clock.has_time_for(patches) {
                continue;
            }
            let run = || async {
                let batch = Arc::new(worst_cases::blank_pictures(&self.model, count, grid));
                let (reply, answer) = Responder::new();
                let answer_to = Answer::to(|outcome| reply.answer(outcome));
                let (host, spans) = (Vec::new(), Vec::new());
                lane.submit(Job::Encode(Box::new(EncodeJob { batch, host, spans, answer: answer_to })));
                tree::STRESS.wait(answer).await?.map_err(failed)
            };
            launches.push(MeasuredLaunch { patches, micros: clock.fastest(patches, run).await? });
        }
        Ok(launches)
    }
}

const MEASURING: &str = "measuring how long steps take";

fn failed(source: LaneError) -> ProfileError {
    ProfileError::Stress { worst_case: MEASURING, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_samples_stay_within_the_envelope() {
        for (sequences, step_tokens, context_tokens) in
            [(256, 8448, 8192), (4, 128, 512), (2, 2, 2), (3, 5, 17), (64, 64, 100_000), (16, 40, 64)]
        {
            let sizes = Sizes { sequences, step_tokens, context_tokens };
            let samples = sizes.samples();
            assert!(samples[0].prompt == 0 && samples[1].prompt > 0 && samples[1].decoding > 0, "{sizes:?}");
            for sample in samples {
                let batch = sample.batch(7, 100, StepFormat::TEXT, false);
                assert!(batch.token_count() <= step_tokens && batch.sequence_count() <= sequences, "{sample:?}");
                assert!(batch.context_lengths.iter().all(|tokens| *tokens as usize <= context_tokens), "{sample:?}");
                let work = sample.work();
                assert_eq!(batch.token_count(), work.prompt_tokens + work.decoding);
                assert_eq!(batch.query_key_pairs, work.prompt_pairs + work.context_tokens, "{sample:?}");
            }
        }
        assert_eq!(Sizes { sequences: 1, step_tokens: 64, context_tokens: 64 }.samples(), []);
    }
}
