//! Individual limits that a user sets.

/// Limits that a user sets. A limit that is `None` keeps the envelope's value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// See [`Envelope::context_tokens`](bursar_model::Envelope::context_tokens).
    pub context_tokens: Option<usize>,
    /// See [`Envelope::sequences`](bursar_model::Envelope::sequences). If `step_tokens` is `None`,
    /// a step has at least one token for each sequence.
    pub sequences: Option<usize>,
    /// See [`Envelope::step_tokens`](bursar_model::Envelope::step_tokens).
    pub step_tokens: Option<usize>,
    /// Maximum pixels of a picture after resizing, instead of its processor's limit.
    pub picture_pixels: Option<u64>,
    /// Minimum pixels of a picture after resizing, instead of its processor's limit.
    pub picture_pixels_min: Option<u64>,
    /// See [`Envelope::picture_patches`](bursar_model::Envelope::picture_patches). Used only
    /// if `picture_pixels` is `None`.
    pub picture_patches: Option<usize>,
    /// See [`Envelope::pictures`](bursar_model::Envelope::pictures).
    pub pictures: Option<usize>,
    /// See [`Envelope::video_frames`](bursar_model::Envelope::video_frames).
    pub video_frames: Option<usize>,
    /// See [`Envelope::launch_patches`](bursar_model::Envelope::launch_patches), which also limits
    /// the size of a picture. By default, an encoder batch has room for the largest picture.
    pub launch_patches: Option<usize>,
}
