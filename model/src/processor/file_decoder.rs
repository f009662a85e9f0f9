//! Interface of the file formats: the header is read first, and pixels are decoded on demand.

use image::metadata::Orientation;

/// A file whose header was read and is plausible. No pixel is decoded yet.
pub(super) trait FileDecoder {
    /// Width and height in pixels, as stored.
    fn size(&self) -> (u32, u32);

    /// How the stored picture must be rotated or mirrored for display. Formats without
    /// orientation use this default.
    fn orientation(&self) -> Orientation {
        Orientation::NoTransforms
    }

    /// Upper bound on the host bytes that [`decode`](Self::decode) takes.
    fn held(&self) -> Held;

    /// RGB, `[height, width, 3]`, with transparent pixels blended with white. `None` if the data is
    /// damaged or ends too early.
    fn decode(&self) -> Option<Vec<u8>>;
}

/// Host bytes that decoding takes. An RGB picture counts only if it is written over the stored
/// pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// Channels of the stored pixels, which are `[height, width, raw_channels]` of 8 bits.
    pub raw_channels: u64,
    /// Whether the RGB picture is written to separate memory, and not over the stored pixels.
    pub is_copied: bool,
    /// Bytes of all other memory.
    pub scratch_bytes: u64,
}

impl Held {
    /// Memory of a decoder that writes the RGB picture directly and needs `scratch_bytes` in
    /// addition.
    pub fn scratch(scratch_bytes: u64) -> Self {
        Held { raw_channels: 3, is_copied: false, scratch_bytes }
    }
}

/// Reason why a header was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The header is damaged. The text names the stage that found the damage.
    Damaged(&'static str),
    /// The file uses this feature, which is not supported.
    Unsupported(&'static str),
}

/// Refusal of a header that is truncated or contradicts itself.
pub(super) const BROKEN_HEADER: Refusal = Refusal::Damaged("reading its header");
