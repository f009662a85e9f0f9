//! The interface of the file formats: a header that was read, and pixels on demand.

use image::metadata::Orientation;

/// A file whose header was read and is plausible. Nothing is decoded yet.
pub(super) trait FileDecoder {
    /// Width and height in pixels, as stored.
    fn size(&self) -> (u32, u32);

    /// How the stored picture must be rotated or mirrored for display. Not every format says so.
    fn orientation(&self) -> Orientation {
        Orientation::NoTransforms
    }

    /// Host bytes that [`decode`](Self::decode) takes, an upper bound.
    fn held(&self) -> Held;

    /// RGB, `[height, width, 3]`, with transparent pixels on white. `None` if the data is damaged or ends too early.
    fn decode(&self) -> Option<Vec<u8>>;
}

/// Host bytes that decoding takes, without the RGB picture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// Pixels as they are stored, `[height, width, raw_channels]` of 8 bits.
    pub raw_channels: u64,
    /// Whether the RGB picture is made next to the stored pixels, and not in their place.
    pub is_copied: bool,
    /// Everything else.
    pub scratch_bytes: u64,
}

impl Held {
    /// The RGB picture is written directly, with this much memory in addition.
    pub fn scratch(scratch_bytes: u64) -> Self {
        Held { raw_channels: 3, is_copied: false, scratch_bytes }
    }
}

/// Why a header was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It is damaged, which this stage found.
    Damaged(&'static str),
    /// It uses this feature, which is not supported.
    Unsupported(&'static str),
}

/// The header is cut off or contradicts itself.
pub(super) const BROKEN_HEADER: Refusal = Refusal::Damaged("reading its header");
