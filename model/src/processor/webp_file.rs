//! WebP. `image-webp` decodes the pixels; EXIF and XMP are read from the chunks.

use std::borrow::Cow;
use std::io::Cursor;

use image::ImageDecoder;
use image::codecs::webp::WebPDecoder;
use image::metadata::Orientation;

use super::exif::orientation_by;
use super::file_decoder::{BROKEN_HEADER, FileDecoder, Held, Refusal};
use super::levels::to_rgb;

/// A WebP whose header was read.
pub(super) struct WebPFile<'a> {
    encoded: &'a [u8],
    width: u32,
    height: u32,
    channels: u64,
    /// `true` if the extended header lacks the alpha flag, but the pixels have alpha. libwebp uses
    /// the alpha of such pixels.
    hides_alpha: bool,
}

// Flags of the extended header, and their offset (RFC 9649, section 2.7.1).
const FLAGS_AT: usize = 20;
const ANIMATED: u8 = 2;
const ALPHA: u8 = 16;

impl<'a> WebPFile<'a> {
    /// Opens a WebP. A truncated file is refused, even an animation whose first frame is complete,
    /// as in libwebp.
    pub fn open(encoded: &'a [u8]) -> Result<Self, Refusal> {
        let stated = encoded.get(4..8).and_then(|size| size.try_into().ok()).map_or(0, u32::from_le_bytes);
        if u64::from(stated) + 8 > encoded.len() as u64 {
            return Err(BROKEN_HEADER);
        }
        let decoder = WebPDecoder::new(Cursor::new(encoded)).map_err(|_| BROKEN_HEADER)?;
        let (width, height) = decoder.dimensions();
        let mut file = WebPFile { encoded, width, height, channels: 3, hides_alpha: false };
        file.hides_alpha = file.flags().is_some_and(|flags| flags & (ALPHA | ANIMATED) == 0) && file.has_alpha();
        file.channels = if file.hides_alpha { 4 } else { decoder.color_type().channel_count().into() };
        Ok(file)
    }

    /// The first chunk with this name (RFC 9649, section 2.7). The padding of the last
    /// chunk may be missing.
    fn chunk(&self, name: &[u8; 4]) -> Option<&'a [u8]> {
        let mut rest = self.encoded.get(12..)?;
        loop {
            let (head, content) = rest.split_at_checked(8)?;
            let length = u32::from_le_bytes(head[4..].try_into().ok()?) as usize;
            if head.starts_with(name) {
                return Some(&content[..length.min(content.len())]);
            }
            rest = content.get(length.checked_next_multiple_of(2)?..)?;
        }
    }

    /// Whether a still picture has an alpha chunk, or lossless pixels that use alpha
    /// (RFC 9649, section 3.4).
    fn has_alpha(&self) -> bool {
        let lossless = self.chunk(b"VP8L").and_then(|pixels| pixels.get(4));
        self.chunk(b"ALPH").is_some() || lossless.is_some_and(|bits| bits & 0x10 != 0)
    }

    /// Flags of the extended header. `None` if there is no extended header.
    fn flags(&self) -> Option<u8> {
        self.encoded.get(FLAGS_AT).copied().filter(|_| self.encoded[12..].starts_with(b"VP8X"))
    }

    fn is_animated(&self) -> bool {
        self.flags().is_some_and(|flags| flags & ANIMATED != 0)
    }
}

impl FileDecoder for WebPFile<'_> {
    fn size(&self) -> (u32, u32) {
        (self.width, self.height)
    }

    fn orientation(&self) -> Orientation {
        orientation_by(self.chunk(b"EXIF"), self.chunk(b"XMP "))
    }

    fn held(&self) -> Held {
        // Lossy: the YCbCr planes in whole macroblocks. Lossless: four bytes per pixel. Alpha is
        // decoded as a separate picture, and an animation needs a canvas in addition.
        let pixel_bytes = if self.channels == 4 || self.is_animated() { 10 } else { 5 };
        let (width, height) = (u64::from(self.width).next_multiple_of(16), u64::from(self.height).next_multiple_of(16));
        let scratch_bytes = self.encoded.len() as u64 * 2 + width * height * pixel_bytes;
        Held { raw_channels: self.channels, is_copied: false, scratch_bytes }
    }

    fn decode(&self) -> Option<Vec<u8>> {
        let mut encoded = Cow::Borrowed(self.encoded);
        if self.hides_alpha {
            encoded.to_mut()[FLAGS_AT] |= ALPHA;
        }
        let decoder = WebPDecoder::new(Cursor::new(encoded)).ok()?;
        let mut raw = vec![0; usize::try_from(decoder.total_bytes()).ok()?];
        decoder.read_image(&mut raw).ok()?;
        to_rgb(raw, self.channels as usize)
    }
}
