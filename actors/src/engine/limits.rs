//! Single limits that a user has said, over the envelope that is expected of a device.

use bursar_model::Envelope;

use crate::profile::Unsaid;

/// What is said of single limits; the others are those of the envelope that it is laid over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// As [`Envelope::context_tokens`].
    pub context_tokens: Option<usize>,
    /// As [`Envelope::sequences`]. A step that nothing is said of has a token for each.
    pub sequences: Option<usize>,
    /// As [`Envelope::step_tokens`].
    pub step_tokens: Option<usize>,
    /// Pixels of a picture behind resizing at most, instead of what its processor says. A launch that nothing is said of
    /// takes one.
    pub picture_pixels: Option<u64>,
    /// Pixels of a picture behind resizing at least, instead of what its processor says.
    pub picture_pixels_min: Option<u64>,
    /// As [`Envelope::picture_patches`], where nothing is said of pixels. A launch that nothing is said of takes one.
    pub picture_patches: Option<usize>,
    /// As [`Envelope::pictures`].
    pub pictures: Option<usize>,
    /// As [`Envelope::video_frames`].
    pub video_frames: Option<usize>,
    /// As [`Envelope::launch_patches`].
    pub launch_patches: Option<usize>,
}

impl Limits {
    /// What nothing is said of among the limits that others raise, as it is in `envelope`.
    pub fn unsaid(&self, envelope: &Envelope) -> Unsaid {
        let unless = |said: Option<usize>, expected| if said.is_some() { None } else { Some(expected) };
        Unsaid {
            step_tokens: unless(self.step_tokens, envelope.step_tokens),
            launch_patches: unless(self.launch_patches, envelope.launch_patches),
        }
    }

    /// `envelope` with these limits, for a model whose patches have so many pixels; none for one that takes no pictures.
    pub fn over(&self, envelope: &Envelope, patch_pixels: Option<u64>) -> Envelope {
        let sequences = self.sequences.unwrap_or(envelope.sequences);
        let grown = |said: Option<usize>, least: usize| if said.is_some() { least } else { 0 };
        let in_patches = |pixels: u64| Some(usize::try_from(pixels / patch_pixels?).unwrap_or(usize::MAX));
        let said = self.picture_pixels.and_then(in_patches).or(self.picture_patches);
        let picture_patches = said.unwrap_or(envelope.picture_patches);
        Envelope {
            context_tokens: self.context_tokens.unwrap_or(envelope.context_tokens),
            sequences,
            step_tokens: self.step_tokens.unwrap_or(envelope.step_tokens.max(grown(self.sequences, sequences))),
            picture_patches,
            pictures: self.pictures.unwrap_or(envelope.pictures),
            video_frames: self.video_frames.unwrap_or(envelope.video_frames),
            launch_patches: self.launch_patches.unwrap_or(envelope.launch_patches.max(grown(said, picture_patches))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_makes_room_for_what_is() {
        let small = Envelope::small();
        assert_eq!(Limits::default().over(&small, Some(196)), small);
        let many = Limits { sequences: Some(500), picture_pixels: Some(2_000_000), ..Limits::default() };
        let envelope = many.over(&small, Some(196));
        assert_eq!((envelope.sequences, envelope.step_tokens), (500, 500));
        assert_eq!((envelope.picture_patches, envelope.launch_patches), (10_204, 10_204));
        let fewer = Limits { step_tokens: Some(100), launch_patches: Some(2000), ..many };
        let envelope = fewer.over(&small, Some(196));
        assert_eq!((envelope.step_tokens, envelope.launch_patches), (100, 2000), "what is said stays");
        assert!(envelope.check().is_err(), "and is refused where it does not go together");
        assert_eq!(fewer.over(&small, None).picture_patches, small.picture_patches, "nobody shows it pictures");
    }
}
