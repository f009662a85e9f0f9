//! Facts about a model that a caller may need before it sends a request.

use std::ops::RangeInclusive;

use bursar_model::{
    flow::{Grid, LayoutError, MediaGrid},
    text::{ReplyFormat, TemplateInputs},
};

use super::{ChatError, ModelHandle, preparation::tokens_limit};
use crate::engine::ModelContext;

/// Facts about a loaded model, as shown in a list of models.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelFacts {
    pub name: String,
    /// Maximum tokens of a prompt and its reply together.
    pub context_tokens: usize,
    /// Rows of the output head. Every token id that the model accepts or generates is below this
    /// number. Some rows may be padding.
    pub vocabulary: usize,
    /// Maximum pictures of a chat; 0 if the model takes no pictures.
    pub pictures: usize,
    /// Range in which the maximum of [`Image::within_pixels`](super::Image::within_pixels) must
    /// lie, in pixels. `None` if the model takes no pictures or does not resize them.
    pub picture_pixels: Option<RangeInclusive<u64>>,
    /// Largest value that [`Image::within_tiles`](super::Image::within_tiles) accepts. `None` if
    /// the model does not cut pictures into tiles.
    pub picture_tiles: Option<u32>,
    /// Maximum frames of all videos of a chat; 0 if the model takes no videos.
    pub video_frames: usize,
    /// Whether the chat template shows tools to the model.
    pub shows_tools: bool,
    /// How the model writes tool calls and reasoning, as far as its chat template shows.
    pub reply_format: ReplyFormat,
}

impl ModelHandle {
    /// Returns facts about the model. Waits while its actors are being replaced.
    ///
    /// # Errors
    /// [`ChatError::NotStarted`] or [`ChatError::Stopped`].
    pub async fn facts(&self) -> Result<ModelFacts, ChatError> {
        let serving = self.serving().await?;
        let context = &*serving.context;
        // Tools are set because some checkpoints have a separate template for chats with tools.
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
            // A checkpoint without a template has no tools and no reply format.
            shows_tools: template.shows_tools(&inputs).unwrap_or(false),
            reply_format: template.reply_format(&inputs).unwrap_or_default(),
        })
    }
}

/// Whether a model takes pictures, and whether it takes videos.
fn takes(context: &ModelContext) -> (bool, bool) {
    let Some(processors) = &context.processors else { return (false, false) };
    let step = Grid { t: 1, h: 2, w: 2 };
    let video = MediaGrid::Video { step, steps: 1, frames: 2, frames_per_second: 1.0 };
    // The prompt is empty, so a family that takes videos reports a missing placeholder instead of
    // the errors matched below.
    let refused = context.family.lay_out(Vec::new(), &[video]);
    let has_place = !matches!(refused, Err(LayoutError::NoVideos { .. } | LayoutError::TextOnly { .. }));
    (true, processors.videos.is_some() && has_place)
}
