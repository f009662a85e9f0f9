//! A picture's own limits, which a request sets beside the settings of the model's processor.

/// What one picture is resized to, by the request and not by the model. The default leaves
/// it to the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResizeLimits {
    /// The least pixels after resizing, instead of the processor's: `min_pixels`
    /// of transformers' Qwen processors.
    pub pixels_min: Option<u64>,
    /// The most pixels after resizing, instead of the processor's: `max_pixels` there. A picture
    /// in tiles has fewer.
    pub pixels_max: Option<u64>,
    /// The most tiles, without a thumbnail: `max_patches` of transformers' `GotOcr2ImageProcessor`.
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
