//! Single limits that a user sets.

/// What is said of single limits; the others are those of the envelope that it is laid over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// As [`Envelope::context_tokens`](bursar_model::Envelope::context_tokens).
    pub context_tokens: Option<usize>,
    /// As [`Envelope::sequences`](bursar_model::Envelope::sequences). A step that nothing is said of has a token for each.
    pub sequences: Option<usize>,
    /// As [`Envelope::step_tokens`](bursar_model::Envelope::step_tokens).
    pub step_tokens: Option<usize>,
    /// Pixels of a picture after resizing at most, instead of what its processor says.
    pub picture_pixels: Option<u64>,
    /// Pixels of a picture after resizing at least, instead of what its processor says.
    pub picture_pixels_min: Option<u64>,
    /// As [`Envelope::picture_patches`](bursar_model::Envelope::picture_patches), where nothing is said of pixels.
    pub picture_patches: Option<usize>,
    /// As [`Envelope::pictures`](bursar_model::Envelope::pictures).
    pub pictures: Option<usize>,
    /// As [`Envelope::video_frames`](bursar_model::Envelope::video_frames).
    pub video_frames: Option<usize>,
    /// As [`Envelope::launch_patches`](bursar_model::Envelope::launch_patches), to which larger pictures are lowered. A launch that nothing is said of takes the
    /// largest picture.
    pub launch_patches: Option<usize>,
}
