//! TIFF: the first picture.

use std::io::Cursor;

use image::codecs::tiff::TiffDecoder;
use image::metadata::Orientation;
use image::{ExtendedColorType, ImageDecoder};

use super::exif::orientation_of;
use super::levels::to_rgb;
use super::picture_file::{BROKEN_HEADER, Held, PictureFile, Refusal};
use super::tiff_directory::Directory;

/// A TIFF whose header was read.
pub(super) struct TiffFile<'a> {
    encoded: &'a [u8],
    directory: Directory<'a>,
    width: u32,
    height: u32,
    channels: usize,
    bytes: usize,
}

impl<'a> TiffFile<'a> {
    pub fn open(encoded: &'a [u8]) -> Result<Self, Refusal> {
        let directory = Directory::read(encoded).ok_or(BROKEN_HEADER)?;
        if [273, 279, 324, 325].iter().any(|tag| directory.entry(*tag).is_some_and(|entry| entry.count > 1 << 16)) {
            return Err(BROKEN_HEADER);
        }
        let size = |tag| directory.first(tag).unwrap_or(0);
        let padded = |side: u64, tile: u64| if tile == 0 { side } else { side.next_multiple_of(tile) };
        if padded(size(256), size(322)).saturating_mul(padded(size(257), size(323)))
            > 4 * size(256) * size(257) + (1 << 20)
        {
            return Err(BROKEN_HEADER);
        }
        let decoder = TiffDecoder::new(Cursor::new(encoded)).map_err(|_| BROKEN_HEADER)?;
        let is_ink = matches!(decoder.original_color_type(), ExtendedColorType::Cmyk8 | ExtendedColorType::Cmyk16);
        let color = decoder.color_type();
        let channels = color.channel_count() as usize;
        let bytes = color.bytes_per_pixel() as usize / channels;
        if is_ink || bytes > 2 {
            return Err(BROKEN_HEADER);
        }
        let (width, height) = decoder.dimensions();
        Ok(TiffFile { encoded, directory, width, height, channels, bytes })
    }
}

impl PictureFile for TiffFile<'_> {
    fn size(&self) -> (u32, u32) {
        (self.width, self.height)
    }

    fn orientation(&self) -> Orientation {
        orientation_of(&self.directory).unwrap_or(Orientation::NoTransforms)
    }

    fn held(&self) -> Held {
        let pixels = u64::from(self.width) * u64::from(self.height);
        let raw_channels = (self.channels * self.bytes) as u64;
        Held { raw_channels, is_copied: true, scratch_bytes: pixels * raw_channels + (6 << 20) }
    }

    fn decode(&self) -> Option<Vec<u8>> {
        let decoder = TiffDecoder::new(Cursor::new(self.encoded)).ok()?;
        let mut raw = vec![0; usize::try_from(decoder.total_bytes()).ok()?];
        decoder.read_image(&mut raw).ok()?;
        if self.bytes == 2 {
            raw = raw.chunks_exact(2).map(|level| (u16::from_ne_bytes([level[0], level[1]]) >> 8) as u8).collect();
        }
        to_rgb(raw, self.channels)
    }
}
