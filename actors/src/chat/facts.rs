//! What a caller may want to know of a model before asking it.

use std::ops::RangeInclusive;

use bursar_model::{
    flow::{Grid, LayoutError, MediaGrid},
    text::{ReplyFormat, TemplateInputs},
};

use super::{ChatError, ModelHandle, preparation::tokens_limit};
use crate::engine::ModelContext;

/// Facts of a loaded model, as a list of models shows them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelFacts {
    /// Its name.
    pub name: String,
    /// The most tokens of a prompt and its reply together.
    pub context_tokens: usize,
    /// Rows of the output head: every token id is smaller. Some may only pad it.
    pub vocabulary: usize,
    /// The most pictures of a chat; 0 if the model takes none.
    pub pictures: usize,
    /// What [`Image::within_pixels`](super::Image::within_pixels) may ask for as the most, in pixels. None if the
    /// model takes no pictures, or resizes none.
    pub picture_pixels: Option<RangeInclusive<u64>>,
    /// The most that [`Image::within_tiles`](super::Image::within_tiles) may ask for. None if the model's pictures are
    /// in one piece.
    pub picture_tiles: Option<u32>,
    /// The most frames of a chat's videos; 0 if the model takes none.
    pub video_frames: usize,
    /// Whether its chat template shows tools to it.
    pub shows_tools: bool,
    /// How it writes calls and reasoning, as far as its chat template tells.
    pub reply_format: ReplyFormat,
}

impl ModelHandle {
    /// Facts of the model. Waits while its actors are being replaced.
    ///
    /// # Errors
    /// [`ChatError::NotStarted`] or [`ChatError::Stopped`].
    pub async fn facts(&self) -> Result<ModelFacts, ChatError> {
        let serving = self.serving().await?;
        let context = &*serving.context;
        // With tools, because some checkpoints have a template of its own for them.
        let inputs = TemplateInputs { tools: Some(Vec::new()), ..TemplateInputs::default() };
        let template = context.prompts.template();
        let (pictures, videos) = takes(context);
        let processor = context.processors.as_ref().map(|processors| &processors.pictures);
        let patches = context.envelope.picture_patches;
        Ok(ModelFacts {
            name: context.name.clone(),
            context_tokens: tokens_limit(context, serving.record.kv_tokens()),
            vocabulary: context.family.decoder().vocabulary,
            pictures: if pictures { context.envelope.pictures } else { 0 },
            picture_pixels: processor.and_then(|processor| processor.own_pixels(patches)),
            picture_tiles: processor.and_then(|processor| processor.own_tiles(patches)),
            video_frames: if videos { context.envelope.video_frames } else { 0 },
            // A checkpoint without a template has neither.
            shows_tools: template.shows_tools(&inputs).unwrap_or(false),
            reply_format: template.reply_format(&inputs).unwrap_or_default(),
        })
    }
}

/// Whether a model takes pictures, and videos.
fn takes(context: &ModelContext) -> (bool, bool) {
    let Some(processors) = &context.processors else { return (false, false) };
    let step = Grid { t: 1, h: 2, w: 2 };
    let film = MediaGrid::Video { step, steps: 1, frames: 2, frames_per_second: 1.0 };
    // A family that takes videos misses the placeholder of this one.
    let refused = context.family.lay_out(Vec::new(), &[film]);
    let has_place = !matches!(refused, Err(LayoutError::NoVideos { .. } | LayoutError::TextOnly { .. }));
    (true, processors.videos.is_some() && has_place)
}
