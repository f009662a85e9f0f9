//! Single limits that a user sets.

/// Limits that a user sets. Those that are `None` keep the envelope's values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// As [`Envelope::context_tokens`](bursar_model::Envelope::context_tokens).
    pub context_tokens: Option<usize>,
    /// As [`Envelope::sequences`](bursar_model::Envelope::sequences). If `step_tokens` is `None`, a step has at least a
    /// token for each.
    pub sequences: Option<usize>,
    /// As [`Envelope::step_tokens`](bursar_model::Envelope::step_tokens).
    pub step_tokens: Option<usize>,
    /// Maximum pixels of a picture after resizing, instead of its processor's limit.
    pub picture_pixels: Option<u64>,
    /// Minimum pixels of a picture after resizing, instead of its processor's limit.
    pub picture_pixels_min: Option<u64>,
    /// As [`Envelope::picture_patches`](bursar_model::Envelope::picture_patches), if no pixels are given.
    pub picture_patches: Option<usize>,
    /// As [`Envelope::pictures`](bursar_model::Envelope::pictures).
    pub pictures: Option<usize>,
    /// As [`Envelope::video_frames`](bursar_model::Envelope::video_frames).
    pub video_frames: Option<usize>,
    /// As [`Envelope::launch_patches`](bursar_model::Envelope::launch_patches), which also limits pictures. By default,
    /// a launch has room for the largest picture.
    pub launch_patches: Option<usize>,
}
