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
    /// The names of the fields of `vision_config` with the sizes of a patch and of a merge.
    pub fields: [&'static str; 2],
    /// Color channels of a pixel.
    pub channels: usize,
    /// Pixels along a side of a tile, if pictures are cut into tiles.
    pub tile: Option<usize>,
    /// Whether pixel limits apply to a whole video instead of to each of its frames.
    pub counts_whole_videos: bool,
    /// The field of `vision_config` with the number of learned positions along each side, and its
    /// value, if the processors must be checked against it.
    pub positions: Option<(&'static str, usize)>,
}

impl TowerInput {
    /// Refuses processors whose patches, channels or tiles do not match the input of the tower, and
    /// video processors whose pixel limits apply to a frame instead of the whole video, or the
    /// reverse. Also refuses a checkpoint without an image processor, and processors that allow more
    /// patches along a side than the tower has positions.
    pub fn check(&self, images: Option<&ImageProcessor>, videos: Option<&VideoProcessor>) -> Result<(), ConfigError> {
        let images = images.ok_or_else(|| {
            let text = "the model takes pictures, but there is no preprocessor_config.json or processor_config.json";
            ConfigError::Contradiction(text.to_owned())
        })?;
        self.check_one("image", images.config())?;
        let videos = videos.map(VideoProcessor::config);
        if let Some(videos) = videos {
            self.check_one("video", videos)?;
            self.check_counted(videos)?;
        }
        self.check_positions([Some(images.config()), videos])
    }

    fn check_counted(&self, videos: &ImageProcessorConfig) -> Result<(), ConfigError> {
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

    fn check_positions(&self, processors: [Option<&ImageProcessorConfig>; 2]) -> Result<(), ConfigError> {
        let Some((field, positions)) = self.positions else { return Ok(()) };
        let most =
            processors.into_iter().flatten().filter_map(ImageProcessorConfig::side_tokens_max).max().unwrap_or(0);
        let patches = most.saturating_mul(self.merge.side() as u64);
        if patches <= positions as u64 {
            return Ok(());
        }
        Err(ConfigError::Contradiction(format!(
            "vision_config.{field} is {positions}, but the processors allow {patches} patches along a side"
        )))
    }

    fn check_one(&self, what: &str, processor: &ImageProcessorConfig) -> Result<(), ConfigError> {
        let pairs = [
            (self.fields[0], self.patch.side, processor.patch_size as usize),
            (self.fields[1], self.merge.side(), processor.merge_size as usize),
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
