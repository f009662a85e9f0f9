//! Resize limits that a request sets for one picture, in place of the image processor's settings.

/// Limits on the size to which one picture is resized. The default leaves the size to
/// the model's image processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResizeLimits {
    /// Least number of pixels after resizing, in place of the image processor's setting:
    /// `min_pixels` of transformers' Qwen processors.
    pub pixels_min: Option<u64>,
    /// Largest number of pixels after resizing, in place of the image processor's setting:
    /// `max_pixels` of transformers' Qwen processors. For a picture in tiles, the number is rounded
    /// down to whole tiles.
    pub pixels_max: Option<u64>,
    /// Largest number of tiles, not counting a thumbnail: `max_patches` of transformers'
    /// `GotOcr2ImageProcessor`.
    pub tiles_max: Option<u32>,
}

impl ResizeLimits {
    /// The name of the first limit that is set.
    pub fn first(&self) -> Option<&'static str> {
        let set = [
            ("min_pixels", self.pixels_min.is_some()),
            ("max_pixels", self.pixels_max.is_some()),
            ("tiles", self.tiles_max.is_some()),
        ];
        set.into_iter().find(|(_, is_set)| *is_set).map(|(name, _)| name)
    }
}
