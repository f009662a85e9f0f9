//! The envelope: the largest inputs that may reach the device. Larger inputs are resized
//! or refused, never tried.

use serde::{Deserialize, Serialize};

use crate::MergeSize;

/// The limits that the plan, the stress runs and every admitted request obey.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// Tokens of a sequence, including prompt and reply.
    pub context_tokens: usize,
    pub sequences: usize,
    /// Tokens in one step, over all sequences. The engine raises them for a model whose pictures
    /// must be whole in a step.
    pub step_tokens: usize,
    /// Maximum drafted tokens of a sequence in one step; 0 disables drafts.
    pub draft_tokens: usize,
    /// Patches of one picture after resizing.
    pub picture_patches: usize,
    /// Pictures of a request, over all turns.
    pub pictures: usize,
    /// Number of pictures of the largest size for which the vision cache is sized. A request may
    /// have more pictures, up to `pictures`, if together they have at most as many patches as this
    /// number of largest pictures.
    pub largest_pictures: usize,
    /// Frames of a request's videos, over all turns; 0 refuses videos. Frames have no separate
    /// patch limit: they are resized to the part of [`video_patches`](Self::video_patches) that
    /// pictures do not use.
    pub video_frames: usize,
    /// Patches in one launch of the vision encoder, over all pictures. The limit must be at least
    /// `picture_patches`.
    pub launch_patches: usize,
}

/// The greatest value of any limit. Products of two limits up to this value do not overflow.
const MOST: usize = 1 << 30;

/// Default of `pictures`, so high that a context is usually full before it contains this many
/// pictures.
const PICTURES: usize = 1024;

/// Maximum drafted tokens in one step, over all sequences. They are verified together, so that the
/// weights of the output projection are read once. The logits of 64 rows and 152,064 tokens take
/// 37 MiB.
pub const DRAFTS_OF_STEP: usize = 64;

/// Patches of the smallest picture.
pub const PATCHES_LEAST: usize = 4;

/// A limit that is out of its range or contradicts another limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{limit}` is {value}; expected {required}")]
pub struct LimitError {
    pub limit: String,
    pub value: usize,
    /// The required range, and the reason for it.
    pub required: String,
}

impl Envelope {
    /// Limits that are small enough to be stressed quickly: contexts of 512 tokens, 4 sequences at
    /// once, and two pictures of 448 x 448 pixels (at 14 pixels per patch side), or a larger number
    /// of smaller pictures, per request.
    pub fn small() -> Self {
        Envelope {
            context_tokens: 512,
            sequences: 4,
            step_tokens: 128,
            draft_tokens: 0,
            picture_patches: 1024,
            pictures: PICTURES,
            largest_pictures: 2,
            video_frames: 8,
            launch_patches: 1024,
        }
    }

    /// Limits for common use of a GPU: contexts of 8192 tokens (or the model's own length, if that
    /// is less) and 256 sequences at once. A step can hold 8192 prompt tokens and one token of
    /// each sequence. Pictures are as large as the model's processor makes them, as long as one
    /// picture leaves a quarter of the context for a question and an answer: 24576 patches are 6144
    /// tokens if four patches make one token. If a GPU cannot hold the worst case of these limits,
    /// the plan names the limit to lower.
    pub const fn gpu() -> Self {
        Envelope {
            context_tokens: 8192,
            sequences: 256,
            // The 256 extra tokens ensure that decoding sequences never push a burst of prompts
            // into one more step. The step then also has 66 tiles of 128 rows, half of the 132 SMs
            // of a Hopper GPU, so the tiles of a GEMM divide evenly among the SMs.
            step_tokens: 8192 + 256,
            draft_tokens: 0,
            picture_patches: 24_576,
            pictures: PICTURES,
            largest_pictures: 8,
            video_frames: 768,
            launch_patches: 24_576,
        }
    }

    /// Maximum drafted tokens in one step, over all sequences. At most half of a step's tokens, not
    /// counting one decoded token, are drafted. The rest are left to prompts.
    pub fn drafts_of_step(&self) -> usize {
        (self.draft_tokens * self.sequences).min(DRAFTS_OF_STEP).min((self.step_tokens - 1) / 2)
    }

    /// Maximum rows of logits in one step: one for each sequence, and one for each drafted token.
    pub fn logit_rows(&self) -> usize {
        (self.sequences + self.drafts_of_step()).min(self.step_tokens)
    }

    /// Maximum rows of decoding sequences in one step. With recurrent states, a step also reruns
    /// the accepted drafts of the previous step.
    pub fn decoding_rows(&self, has_states: bool) -> usize {
        let repeated = if has_states { self.drafts_of_step() } else { 0 };
        (self.logit_rows() + repeated).min(self.step_tokens)
    }

    /// Maximum total patches of the pictures and videos of one request: the patches of
    /// `largest_pictures` pictures of the largest size. This number ignores the context, into which
    /// fewer patches may fit. The vision cache is sized for the smaller of the two numbers.
    pub fn visual_patches(&self, merge: MergeSize) -> usize {
        self.largest_pictures * merge.patches(merge.tokens(self.picture_patches))
    }

    /// Maximum total patches to which the videos of one request are resized. The result is at most
    /// [`visual_patches`](Self::visual_patches), and leaves a quarter of the context for other text
    /// in addition to `text_tokens` between the videos' steps. Pictures, which a user chooses one
    /// by one, may fill the whole context.
    pub fn video_patches(&self, merge: MergeSize, text_tokens: usize) -> usize {
        let beside = merge.tokens(self.patches_beside_text(merge)).saturating_sub(text_tokens);
        self.visual_patches(merge).min(merge.patches(beside))
    }

    /// The largest number of patches that leaves a quarter of the context for a question and an
    /// answer.
    pub fn patches_beside_text(&self, merge: MergeSize) -> usize {
        merge.patches(self.context_tokens * 3 / 4)
    }

    /// Checks that the limits are in range and consistent with each other.
    ///
    /// # Errors
    /// The first limit that is out of range or contradicts another limit.
    pub fn check(&self) -> Result<(), LimitError> {
        let require = |limit: &str, value: usize, least: usize, why: &str| {
            let wrong = |required| Err(LimitError { limit: limit.to_owned(), value, required });
            match value {
                value if value < least => wrong(format!("at least {least}: {why}")),
                value if value > MOST => wrong(format!("at most {MOST}")),
                _ => Ok(()),
            }
        };
        require("context_tokens", self.context_tokens, 2, "a sequence reads one token and writes one")?;
        require("sequences", self.sequences, 1, "at least one sequence runs")?;
        require("step_tokens", self.step_tokens, self.sequences, "each sequence has a token in a step")?;
        if self.draft_tokens > DRAFTS_OF_STEP {
            let required = format!("at most {DRAFTS_OF_STEP}: this is the limit for all sequences of a step together");
            return Err(LimitError { limit: "draft_tokens".to_owned(), value: self.draft_tokens, required });
        }
        require("launch_patches", self.launch_patches, PATCHES_LEAST, "a launch takes a picture of one token")?;
        require("picture_patches", self.picture_patches, PATCHES_LEAST, "a picture has at least one token")?;
        require("pictures", self.pictures, 1, "a request may have a picture")?;
        require("largest_pictures", self.largest_pictures, 1, "a request may have the largest picture")?;
        require("video_frames", self.video_frames, 0, "it is a count")?;
        require("launch_patches", self.launch_patches, self.picture_patches, "a launch takes the largest picture")
    }
}

impl Default for Envelope {
    fn default() -> Self {
        Envelope {
            context_tokens: 4096,
            sequences: 16,
            step_tokens: 512,
            draft_tokens: 0,
            picture_patches: 4096,
            pictures: PICTURES,
            largest_pictures: 8,
            video_frames: 32,
            launch_patches: 4096,
        }
    }
}
