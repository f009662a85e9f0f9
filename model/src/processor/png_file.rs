//! PNG, read as tolerantly as browsers and Pillow 13 do: errors in chunks that the pixels do
//! not need are ignored.

use std::io::{Cursor, Read};

use image::metadata::Orientation;
use png::{ColorType, Transformations};

use super::exif::{orientation_by, unpack_raw_profile};
use super::file_decoder::{BROKEN_HEADER, FileDecoder, Held, Refusal};
use super::levels::to_rgb;

/// Maximum bytes that a text chunk may decompress to. XMP has a few kilobytes.
const UNPACKED_BYTES: usize = 256 << 10;

/// A PNG whose header was read.
pub(super) struct PngFile<'a> {
    encoded: &'a [u8],
    width: u32,
    height: u32,
    channels: u64,
}

/// Chunks up to the end of the file: name, content, and whether the checksum is right (PNG, section
/// 5.3). A truncated chunk has the content that is present.
struct Chunks<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Chunks<'a> {
    type Item = (&'a [u8], &'a [u8], bool);

    fn next(&mut self) -> Option<Self::Item> {
        let (head, rest) = self.rest.split_at_checked(8)?;
        let length = u32::from_be_bytes(head[..4].try_into().ok()?) as usize;
        let (content, rest) = rest.split_at(length.min(rest.len()));
        let (sum, rest) = rest.split_at(rest.len().min(4));
        self.rest = rest;
        let mut crc = flate2::Crc::new();
        // Pillow does not check the checksums of pixels, and pixels are most of the file.
        if head[4..] != *b"IDAT" {
            crc.update(&head[4..]);
            crc.update(content);
        }
        Some((&head[4..], content, sum == crc.sum().to_be_bytes()))
    }
}

impl<'a> PngFile<'a> {
    pub fn open(encoded: &'a [u8]) -> Result<Self, Refusal> {
        let Some((b"IHDR", &[w0, w1, w2, w3, h0, h1, h2, h3, _, color, ..], true)) = chunks(encoded).next() else {
            return Err(BROKEN_HEADER);
        };
        let has_transparency = || {
            chunks(encoded)
                .take_while(|(name, ..)| *name != b"IDAT")
                .any(|(name, _, is_whole)| name == b"tRNS" && is_whole)
        };
        let channels = match color {
            0 => 1 + u64::from(has_transparency()),
            2 | 3 => 3 + u64::from(has_transparency()),
            4 => 2,
            6 => 4,
            _ => return Err(BROKEN_HEADER),
        };
        let (width, height) = (u32::from_be_bytes([w0, w1, w2, w3]), u32::from_be_bytes([h0, h1, h2, h3]));
        Ok(PngFile { encoded, width, height, channels })
    }

    /// The same picture with only the chunks that pixels need, and with an end chunk.
    fn essence(&self) -> Vec<u8> {
        let mut kept = Vec::with_capacity(self.encoded.len() + 12);
        kept.extend(&self.encoded[..8]);
        let mut are_pixels = false;
        for (name, content, is_whole) in chunks(self.encoded) {
            let is_kept = match name {
                b"IDAT" => true,
                b"IHDR" | b"PLTE" | b"tRNS" => is_whole && !are_pixels,
                _ => false,
            };
            if is_kept {
                are_pixels |= name == b"IDAT";
                kept.extend((content.len() as u32).to_be_bytes());
                for part in [name, content, &[0; 4]] {
                    kept.extend(part);
                }
            }
        }
        kept.extend(b"\0\0\0\0IEND\xae\x42\x60\x82");
        kept
    }
}

fn chunks(encoded: &[u8]) -> Chunks<'_> {
    Chunks { rest: encoded.get(8..).unwrap_or_default() }
}

impl FileDecoder for PngFile<'_> {
    fn size(&self) -> (u32, u32) {
        (self.width, self.height)
    }

    /// Orientation from `eXIf` anywhere in the file, else from ImageMagick's
    /// profile, else from XMP.
    fn orientation(&self) -> Orientation {
        let (mut exif, mut profile, mut xmp) = (None, None, None);
        for (name, content, is_whole) in chunks(self.encoded).take_while(|(name, ..)| *name != b"IEND") {
            match name {
                b"eXIf" if is_whole => exif = Some(content),
                b"tEXt" | b"zTXt" | b"iTXt" if is_whole => {
                    let key = content.split(|&byte| byte == 0).next().unwrap_or_default();
                    match key {
                        b"Raw profile type exif" => profile = Some((name, content)),
                        b"XML:com.adobe.xmp" => xmp = Some((name, content)),
                        _ => {}
                    }
                }
                _ => {}
            }
        }
        let text = |(name, content)| unpacked_text(name, content);
        let profile = profile.filter(|_| exif.is_none()).and_then(text).and_then(|text| unpack_raw_profile(&text));
        orientation_by(exif.or(profile.as_deref()), xmp.and_then(text).as_deref())
    }

    fn held(&self) -> Held {
        // The kept chunks, rows that are being unfiltered at up to 8 bytes per pixel,
        // and an interlaced pass.
        let scratch_bytes = self.encoded.len() as u64 + 12 + u64::from(self.width) * 40;
        Held { raw_channels: self.channels, is_copied: self.channels < 3, scratch_bytes }
    }

    fn decode(&self) -> Option<Vec<u8>> {
        let mut decoder = png::Decoder::new(Cursor::new(self.essence()));
        decoder.ignore_checksums(true);
        decoder.set_limits(png::Limits { bytes: usize::MAX }); // bounded by `held`
        decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
        let mut reader = decoder.read_info().ok()?;
        let channels = match reader.output_color_type().0 {
            ColorType::Grayscale => 1,
            ColorType::GrayscaleAlpha => 2,
            ColorType::Rgb => 3,
            ColorType::Rgba => 4,
            ColorType::Indexed => return None,
        };
        let bytes = reader.output_buffer_size()?;
        if bytes as u64 != u64::from(self.width) * u64::from(self.height) * self.channels {
            return None;
        }
        let mut raw = vec![0; bytes];
        if reader.info().interlaced {
            reader.next_frame(&mut raw).ok()?;
        } else {
            // Missing data after the last row is ignored.
            let row_bytes = self.width as usize * channels;
            raw.chunks_exact_mut(row_bytes).try_for_each(|row| reader.read_row(row).ok()?.map(drop))?;
        }
        drop(reader);
        to_rgb(raw, channels)
    }
}

/// The text of a chunk, decompressed up to [`UNPACKED_BYTES`] (PNG, section 11.3.3).
fn unpacked_text(name: &[u8], content: &[u8]) -> Option<Vec<u8>> {
    let key_end = content.iter().position(|&byte| byte == 0)?;
    let after = &content[key_end + 1..];
    let (is_packed, text) = match name {
        b"tEXt" => (false, after),
        b"zTXt" => (true, after.get(1..)?),
        _ => {
            let (&packed, rest) = after.split_first()?;
            let mut fields = rest.get(1..)?.splitn(3, |&byte| byte == 0); // language, translated keyword, text
            (packed == 1, fields.nth(2)?)
        }
    };
    if !is_packed {
        return Some(text[..text.len().min(UNPACKED_BYTES)].to_vec());
    }
    let mut unpacked = Vec::with_capacity(UNPACKED_BYTES);
    // Damage after the first `UNPACKED_BYTES` does not matter.
    let _ = flate2::read::ZlibDecoder::new(text).take(UNPACKED_BYTES as u64).read_to_end(&mut unpacked);
    Some(unpacked)
}
