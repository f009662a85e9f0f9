//! Pure: the number and sizes of the requests of a measurement, and the envelope that admits them.

use bursar::Envelope;
use bursar_model::{MergeSize, processor::Size, processor::Tiling};
use clap::ValueEnum;

/// A kind of figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Measurement {
    /// Decode steps, by batch size.
    Decode,
    /// Prompts of one length, in tokens per second.
    Prefill,
    /// Requests with one picture each, in requests per second.
    Pictures,
    /// The time from process start until the model is ready, and the use of memory by class.
    Start,
}

/// Requests with prompts of equal length.
#[derive(Clone, Copy, Debug)]
pub struct Prompts {
    /// Number of concurrent requests.
    pub count: usize,
    /// Tokens of each prompt.
    pub length: usize,
}

/// Requests with one picture each.
#[derive(Clone, Copy, Debug)]
pub struct PictureLoad {
    /// Number of concurrent requests.
    pub count: usize,
    /// Width of each picture in pixels.
    pub width: u32,
    /// Height of each picture in pixels.
    pub height: u32,
    /// Reply lengths in tokens, with one figure for each.
    pub replies: &'static [usize],
}

/// How a model cuts pictures.
#[derive(Clone, Copy, Debug)]
pub struct PatchGeometry {
    /// Pixels along a patch's side.
    pub patch: u32,
    /// How patches merge into tokens.
    pub merge: MergeSize,
    /// Tiles that pictures are cut into, if any.
    pub tiling: Option<Tiling>,
}

/// Sizes of all measurements of one run.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Tokens of the prompts that precede the measured decode steps.
    pub context: usize,
    /// Number of decode steps that are averaged. Replies are one token longer.
    pub steps: usize,
    /// Batch sizes for decoding, with one figure for each.
    pub batches: &'static [usize],
    /// Prompts that are answered with one token.
    pub prefill: &'static [Prompts],
    pub pictures: [PictureLoad; 2],
    /// How pictures are cut.
    pub cut: PatchGeometry,
    /// Maximum tokens in a step.
    pub step_tokens: usize,
}

/// The workload with which Bursar and vLLM were compared on the same GPU: see `benches/README.md`.
pub const FULL: Workload = Workload {
    context: 512,
    steps: 128,
    batches: &[1, 16, 64, 256],
    prefill: &[
        Prompts { count: 64, length: 512 },
        Prompts { count: 32, length: 2048 },
        Prompts { count: 8, length: 8000 },
    ],
    pictures: [
        PictureLoad { count: 64, width: 1036, height: 1036, replies: &[1, 128] },
        PictureLoad { count: 16, width: 1932, height: 1092, replies: &[1, 128] },
    ],
    cut: PatchGeometry { patch: 14, merge: MERGE_2X2, tiling: None },
    step_tokens: Envelope::gpu().step_tokens,
};

/// A smaller workload, for a CPU or a quick check.
pub const QUICK: Workload = Workload {
    context: 64,
    steps: 16,
    batches: &[1, 4, 16],
    prefill: &[Prompts { count: 4, length: 64 }, Prompts { count: 2, length: 256 }],
    pictures: [
        PictureLoad { count: 4, width: 224, height: 224, replies: &[1, 8] },
        PictureLoad { count: 2, width: 448, height: 336, replies: &[1, 8] },
    ],
    cut: PatchGeometry { patch: 14, merge: MERGE_2X2, tiling: None },
    step_tokens: 256,
};

/// Most families merge 2 x 2 patches into one token.
const MERGE_2X2: MergeSize = MergeSize::new(2);

/// Upper bound of the tokens around a picture: the turn's markers and the question, at one token
/// per byte.
const AROUND: usize = 128;

impl Workload {
    /// Returns the same workload for a model whose pictures are cut by `cut`. Each side of a
    /// picture becomes the nearest whole number of merged patches, so that no picture is resized,
    /// unless the model cuts pictures into tiles or resizes all pictures to one size.
    pub fn cut_by(self, cut: PatchGeometry) -> Workload {
        let factor = cut.patch * cut.merge.side() as u32;
        let whole = |side: u32| (side + factor / 2) / factor * factor;
        let pictures = self.pictures.map(|pictures| PictureLoad {
            width: whole(pictures.width),
            height: whole(pictures.height),
            ..pictures
        });
        Workload { pictures, cut, ..self }
    }

    /// Returns the number of patches of each picture.
    pub fn patches(&self, pictures: &PictureLoad) -> usize {
        let PatchGeometry { patch, tiling, .. } = self.cut;
        let of = |width: u32, height: u32| (width / patch) as usize * (height / patch) as usize;
        let PictureLoad { width, height, .. } = *pictures;
        let Some(tiling) = tiling else { return of(width, height) };
        let tiles = tiling.choose(Size { width, height }, u64::MAX).expect("a picture has at least one pixel");
        tiles.count() * of(tiling.side, tiling.side)
    }

    /// Returns the largest number of concurrent requests.
    pub fn requests(&self) -> usize {
        let prompts = self.prefill.iter().map(|prompts| prompts.count);
        let pictures = self.pictures.iter().map(|pictures| pictures.count);
        self.batches.iter().copied().chain(prompts).chain(pictures).max().unwrap_or(1)
    }

    /// Returns the smallest envelope that admits all measurements.
    pub fn envelope(&self) -> Envelope {
        let of_text = self.prefill.iter().map(|prompts| prompts.length + 1).chain([self.context + self.steps + 1]);
        let of_pictures = self.pictures.iter().map(|pictures| {
            let reply = pictures.replies.iter().copied().max().unwrap_or_default();
            self.cut.merge.tokens(self.patches(pictures)) + AROUND + reply
        });
        let patches = self.pictures.iter().map(|pictures| self.patches(pictures));
        let largest = patches.max().unwrap_or(self.cut.merge.patches_per_token());
        Envelope {
            context_tokens: of_text.chain(of_pictures).max().unwrap_or(2).next_power_of_two(),
            sequences: self.requests(),
            step_tokens: self.step_tokens.max(self.requests()),
            draft_tokens: 0,
            picture_patches: largest,
            pictures: 1,
            largest_pictures: 1,
            video_frames: 1,
            // Two of the largest pictures. One picture at a time would leave parts of a GPU idle,
            // and more than two would take memory from the KV cache.
            launch_patches: 2 * largest,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bursar_model::{
        checkpoint::Checkpoint, checkpoint::CheckpointSource, processor::TileCut, registry::shape_settings,
    };

    use super::*;

    const SIXTEEN: PatchGeometry = PatchGeometry { patch: 16, merge: MERGE_2X2, tiling: None };
    const TILES: PatchGeometry = PatchGeometry { patch: 14, merge: MERGE_2X2, tiling: Some(INTERNVL) };
    const INTERNVL: Tiling = Tiling { side: 448, least: 1, most: 12, has_thumbnail: true, cut: TileCut::Resized };

    #[test]
    fn a_tiled_picture_has_the_patches_of_all_tiles() {
        let workload = FULL.cut_by(TILES);
        let patches = workload.pictures.map(|pictures| workload.patches(&pictures));
        assert_eq!(patches, [(9 + 1) * 1024, (8 + 1) * 1024], "three by three tiles, and four by two");
    }

    #[test]
    fn the_envelope_admits_the_whole_workload_at_once() {
        for workload in [FULL, QUICK, FULL.cut_by(SIXTEEN), QUICK.cut_by(SIXTEEN), FULL.cut_by(TILES)] {
            let envelope = workload.envelope();
            envelope.check().expect("the limits agree with each other");
            assert!(workload.batches.iter().all(|batch| *batch <= envelope.sequences));
            assert!(workload.prefill.iter().all(|prompts| prompts.length < envelope.context_tokens));
            for pictures in &workload.pictures {
                assert!(workload.patches(pictures) <= envelope.picture_patches);
            }
        }
        assert_eq!(FULL.envelope().context_tokens, 8192, "the context length of the vLLM measurement");
    }

    #[test]
    fn no_picture_of_the_full_workload_is_resized() {
        for (shape, patch) in [("qwen2.5-vl-7b", 14), ("qwen3-vl-8b", 16)] {
            let workload = FULL.cut_by(PatchGeometry { patch, merge: MERGE_2X2, tiling: None });
            let random = shape_settings(shape).expect("a known shape");
            let checkpoint = Checkpoint::open(CheckpointSource::Random(Arc::new(random))).expect("a checkpoint");
            let processor = checkpoint.image_processor.expect("the model takes pictures");
            let pixels = workload.envelope().picture_patches as u64 * u64::from(patch).pow(2);
            let processor = processor.limited(pixels).expect("a valid limit");
            for pictures in &workload.pictures {
                let plan = processor.plan(pictures.width, pictures.height).expect("the picture's sides are accepted");
                assert_eq!((plan.resized, plan.patches), (plan.source, workload.patches(pictures)), "{shape}");
            }
        }
        let [square, wide] = FULL.cut_by(SIXTEEN).pictures.map(|pictures| (pictures.width, pictures.height));
        assert_eq!((square, wide), ((1024, 1024), (1920, 1088)), "the nearest multiples of 32 pixels");
    }
}
