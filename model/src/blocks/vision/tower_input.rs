//! The input format of a vision tower, and the check that a checkpoint's processors produce it.

use bursar_kernels::ops::patchify::{CHANNELS, PatchSize};

use crate::{
    MergeSize,
    blocks::ConfigError,
    processor::{CountedPixels, ImageProcessor, ImageProcessorConfig, VideoProcessor},
};

/// The input format of a tower, from its `vision_config`.
#[derive(Clone, Copy, Debug)]
pub struct TowerInput {
    /// Pixels and frames of a patch.
    pub patch: PatchSize,
    /// How patches merge into tokens.
    pub merge: MergeSize,
    /// The name of the field of `vision_config` with the merge size.
    pub merge_field: &'static str,
    /// Color channels of a pixel.
    pub channels: usize,
    /// Pixels along a side of a tile, if pictures are cut into tiles.
    pub tile: Option<usize>,
    /// Whether pixel limits apply to a whole video instead of to each of its frames.
    pub counts_whole_videos: bool,
}

impl TowerInput {
    /// Refuses processors whose patches, channels or tiles do not match the input of the tower, and
    /// video processors whose pixel limits apply to a frame instead of the whole video, or the
    /// reverse. Also refuses a checkpoint without an image processor.
    pub fn check(&self, images: Option<&ImageProcessor>, videos: Option<&VideoProcessor>) -> Result<(), ConfigError> {
        let images = images.ok_or_else(|| {
            let text = "the model takes pictures, but there is no preprocessor_config.json or processor_config.json";
            ConfigError::Contradiction(text.to_owned())
        })?;
        self.check_one("image", images.config())?;
        let Some(videos) = videos.map(VideoProcessor::config) else { return Ok(()) };
        self.check_one("video", videos)?;
        let (found, wanted) = match (videos.counted, self.counts_whole_videos) {
            (CountedPixels::Picture, true) => ("each frame", "all frames together"),
            (CountedPixels::Video { .. }, false) => ("all frames together", "each frame"),
            _ => return Ok(()),
        };
        Err(ConfigError::Contradiction(format!(
            "the pixel limits of the video processor apply to {found}, but the model's limits apply to {wanted}: the \
             settings of the processor (in video_preprocessor_config.json or processor_config.json) belong to another \
             model"
        )))
    }

    fn check_one(&self, what: &str, processor: &ImageProcessorConfig) -> Result<(), ConfigError> {
        let pairs = [
            ("patch_size", self.patch.side, processor.patch_size as usize),
            (self.merge_field, self.merge.side(), processor.merge_size as usize),
            ("temporal_patch_size", self.patch.frames, processor.temporal_patch_size as usize),
            ("in_channels", self.channels, CHANNELS),
        ];
        if let Some((field, tower, processor)) = pairs.iter().find(|(_, tower, processor)| tower != processor) {
            return Err(ConfigError::Contradiction(format!(
                "vision_config.{field} is {tower}, but the {what} processor's is {processor}"
            )));
        }
        let side = processor.tiling.map(|tiling| tiling.side as usize);
        let described =
            |side: Option<usize>| side.map_or_else(|| "no tiles".to_owned(), |side| format!("tiles of {side}"));
        if side == self.tile {
            Ok(())
        } else {
            Err(ConfigError::Contradiction(format!(
                "the model takes {}, but the {what} processor makes {}",
                described(self.tile),
                described(side)
            )))
        }
    }
}
