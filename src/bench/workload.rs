//! What is measured: the number and size of requests, and the envelope that admits them. Pure.

use bursar::{Envelope, crates::model::MergeSize};
use clap::ValueEnum;

/// A kind of figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Decode steps, by batch size.
    Decode,
    /// Prompts of one length, in tokens per second.
    Prefill,
    /// Requests with one picture each, in requests per second.
    Pictures,
    /// From the start of the process to the first request, and what memory is used for.
    Start,
}

/// Requests with prompts of equal length.
#[derive(Clone, Copy, Debug)]
pub struct Prompts {
    /// How many run at once.
    pub count: usize,
    /// Tokens of each prompt.
    pub length: usize,
}

/// Requests with one picture each.
#[derive(Clone, Copy, Debug)]
pub struct Pictures {
    /// How many run at once.
    pub count: usize,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Reply lengths in tokens; one figure for each.
    pub replies: &'static [usize],
}

/// One set of measurements.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Prompt tokens before decoding is measured.
    pub context: usize,
    /// A decoding step is the mean of this many; replies are one token longer.
    pub steps: usize,
    /// Batch sizes of decoding; one figure for each.
    pub batches: &'static [usize],
    /// Prompts answered with one token.
    pub prefill: &'static [Prompts],
    pub pictures: &'static [Pictures],
    /// Tokens in a step.
    pub step_tokens: usize,
}

/// The same workload as vLLM's on the same card: see `benches/README.md`. Picture sides are whole patches, so none is
/// resized.
pub const FULL: Workload = Workload {
    context: 512,
    steps: 128,
    batches: &[1, 16, 64, 256],
    prefill: &[
        Prompts { count: 64, length: 512 },
        Prompts { count: 32, length: 2048 },
        Prompts { count: 8, length: 8000 },
    ],
    pictures: &[
        Pictures { count: 64, width: 1036, height: 1036, replies: &[1, 128] },
        Pictures { count: 16, width: 1932, height: 1092, replies: &[1, 128] },
    ],
    step_tokens: Envelope::gpu().step_tokens,
};

/// A small version, for a CPU or a quick check.
pub const QUICK: Workload = Workload {
    context: 64,
    steps: 16,
    batches: &[1, 4, 16],
    prefill: &[Prompts { count: 4, length: 64 }, Prompts { count: 2, length: 256 }],
    pictures: &[
        Pictures { count: 4, width: 224, height: 224, replies: &[1, 8] },
        Pictures { count: 2, width: 448, height: 336, replies: &[1, 8] },
    ],
    step_tokens: 256,
};

/// Pixels along a patch's side, and how patches merge into tokens, in Qwen2.5-VL. The envelope must be chosen
/// before the model is known; for a family that differs it is merely another envelope.
const PATCH: u32 = 14;
const MERGE: MergeSize = MergeSize::new(2);

/// Tokens around a picture, for the turn's markers and the question, at worst one token a byte.
const AROUND: usize = 128;

impl Pictures {
    /// Patches of each picture.
    pub fn patches(&self) -> usize {
        (self.width / PATCH) as usize * (self.height / PATCH) as usize
    }

    fn tokens(&self) -> usize {
        MERGE.tokens(self.patches())
    }
}

impl Workload {
    /// The most requests that run at once.
    pub fn requests(&self) -> usize {
        let prompts = self.prefill.iter().map(|prompts| prompts.count);
        let pictures = self.pictures.iter().map(|pictures| pictures.count);
        self.batches.iter().copied().chain(prompts).chain(pictures).max().unwrap_or(1)
    }

    /// The smallest envelope that admits everything at once.
    pub fn envelope(&self) -> Envelope {
        let of_text = self.prefill.iter().map(|prompts| prompts.length + 1).chain([self.context + self.steps + 1]);
        let of_pictures = self
            .pictures
            .iter()
            .map(|pictures| pictures.tokens() + AROUND + pictures.replies.iter().copied().max().unwrap_or_default());
        let largest = self.pictures.iter().map(Pictures::patches).max().unwrap_or(MERGE.patches_per_token());
        Envelope {
            context_tokens: of_text.chain(of_pictures).max().unwrap_or(2).next_power_of_two(),
            sequences: self.requests(),
            step_tokens: self.step_tokens.max(self.requests()),
            picture_patches: largest,
            pictures: 1,
            video_frames: 1,
            // Room for two of the largest: one leaves parts of a GPU idle, and more would take memory from keys and
            // values.
            launch_patches: 2 * largest,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bursar::{
        crates::model::checkpoint::{Checkpoint, CheckpointSource},
        random_checkpoint,
    };

    use super::*;

    #[test]
    fn the_envelope_admits_everything_at_once() {
        for workload in [FULL, QUICK] {
            let envelope = workload.envelope();
            envelope.check().expect("limits that go together");
            assert!(workload.batches.iter().all(|batch| *batch <= envelope.sequences));
            assert!(workload.prefill.iter().all(|prompts| prompts.length < envelope.context_tokens));
            for pictures in workload.pictures {
                assert!(pictures.patches() <= envelope.picture_patches);
                let (width, height) = (pictures.width, pictures.height);
                assert!(width.is_multiple_of(28) && height.is_multiple_of(28), "{width} x {height} would be resized");
            }
        }
        assert_eq!(FULL.envelope().context_tokens, 8192, "as the peer's");
    }

    #[test]
    fn no_picture_of_the_full_workload_is_resized_for_7b() {
        let random = random_checkpoint("qwen2.5-vl-7b", 0).expect("a known shape");
        let checkpoint = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("it opens");
        let processor = checkpoint.image_processor.expect("it takes pictures");
        let pixels = FULL.envelope().picture_patches as u64 * u64::from(PATCH).pow(2);
        let processor = processor.limited(pixels).expect("a limit");
        for pictures in FULL.pictures {
            let plan = processor.plan(pictures.width, pictures.height).expect("a picture of usual sides");
            assert_eq!((plan.resized, plan.patches), (plan.source, pictures.patches()));
        }
    }
}
