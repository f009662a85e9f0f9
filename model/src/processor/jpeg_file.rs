//! JPEG decoding with the arithmetic of libjpeg-turbo, which Pillow and torchvision use: the
//! same inverse cosine transform, chroma upsampling and conversion to RGB. Other decoders differ
//! by up to four levels.

use std::io::{BufRead, Error, ErrorKind, Read, Result as IoResult};

use image::metadata::Orientation;
use mozjpeg::{ColorSpace, Decompress};

use super::exif::orientation_by;
use super::file_decoder::{BROKEN_HEADER, FileDecoder, Held, Refusal};
use super::levels::{narrow, printed};

/// Maximum scans of a JPEG. A progressive JPEG has about ten. Each scan costs a pass over all
/// pixels, but takes only a hundred bytes of the file.
const SCANS_MAX: u64 = 256;

// Prefixes of APP1 contents (EXIF 2.3, section 4.7.2; XMP part 3, section 1.1.3).
const EXIF: &[u8] = b"Exif\0\0";
const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";

/// A JPEG whose markers were read.
pub(super) struct JpegFile<'a> {
    encoded: &'a [u8],
    frame: Frame,
    scans: Scans,
    exif: Option<&'a [u8]>,
    xmp: Option<&'a [u8]>,
}

/// A start-of-frame segment (ITU T.81, B.2.2).
#[derive(Clone, Copy)]
struct Frame {
    width: u32,
    height: u32,
    is_progressive: bool,
    components: u64,
}

impl<'a> JpegFile<'a> {
    pub fn open(encoded: &'a [u8]) -> Result<Self, Refusal> {
        let (mut frame, mut exif, mut xmp) = (None, None, None);
        for (kind, content) in segments(encoded) {
            match kind {
                0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf if frame.is_none() => {
                    frame = Some(Frame::read(kind, content)?);
                }
                0xe1 if content.starts_with(EXIF) => exif = exif.or(Some(content)),
                0xe1 if content.starts_with(XMP) => xmp = Some(&content[XMP.len()..]),
                _ => {}
            }
        }
        let frame = frame.ok_or(BROKEN_HEADER)?;
        let scans = Scans::count(encoded);
        if scans.count > SCANS_MAX {
            return Err(Refusal::Damaged("counting its scans"));
        }
        Ok(JpegFile { encoded, frame, scans, exif, xmp })
    }

    pub fn components(&self) -> u64 {
        self.frame.components
    }
}

impl Frame {
    fn read(kind: u8, content: &[u8]) -> Result<Self, Refusal> {
        let &[bits, h1, h0, w1, w0, components, ..] = content else { return Err(BROKEN_HEADER) };
        match (kind, bits, components) {
            (0xc3 | 0xc7 | 0xcb | 0xcf, ..) => Err(Refusal::Unsupported("lossless compression")),
            (0xc5 | 0xc6 | 0xcd | 0xce, ..) => Err(Refusal::Unsupported("hierarchical compression")),
            (_, 8, 1 | 3 | 4) => Ok(Frame {
                width: u16::from_be_bytes([w1, w0]).into(),
                height: u16::from_be_bytes([h1, h0]).into(),
                is_progressive: matches!(kind, 0xc2 | 0xca),
                components: components.into(),
            }),
            (_, 8, _) => Err(Refusal::Unsupported("a number of colors other than 1, 3 or 4")),
            _ => Err(Refusal::Unsupported("12 bits per color")),
        }
    }
}

/// Segments before the first scan: marker and content (ITU T.81, B.1.1).
fn segments(encoded: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut rest = encoded.get(2..).unwrap_or_default();
    std::iter::from_fn(move || {
        loop {
            match *rest {
                [0xff, 0xda | 0xd9, ..] => return None,
                [0xff, 0x01 | 0xd0..=0xd8, ref after @ ..] => rest = after,
                [0xff, kind @ 0x02..=0xfe, high, low, ref after @ ..] => {
                    let length = usize::from(u16::from_be_bytes([high, low])).saturating_sub(2);
                    let (content, after) = after.split_at_checked(length)?;
                    rest = after;
                    return Some((kind, content));
                }
                // Padding, or bytes between segments, which libjpeg skips.
                [_, ref after @ ..] => rest = after,
                [] => return None,
            }
        }
    })
}

/// Scans of a JPEG, counted up to its end or up to one more than [`SCANS_MAX`].
struct Scans {
    count: u64,
    /// Color components in the first scan. If some are missing, the decoder keeps all coefficients
    /// even if there is no further scan.
    first_components: u64,
}

impl Scans {
    /// Reads the markers as libjpeg does, and skips everything else (ITU T.81, B.1.1.2 and B.2.3).
    fn count(encoded: &[u8]) -> Self {
        let mut scans = Scans { count: 0, first_components: 0 };
        let mut at = 2;
        while let Some(&[mark, kind]) = encoded.get(at..at + 2) {
            match (mark, kind) {
                (0xff, 0xd9) => break,
                (0xff, 0x02..=0xcf | 0xda..=0xfe) => {
                    if kind == 0xda {
                        if scans.count == 0 {
                            scans.first_components = encoded.get(at + 4).map_or(0, |&count| count.into());
                        }
                        scans.count += 1;
                        if scans.count > SCANS_MAX {
                            break;
                        }
                    }
                    let length =
                        encoded.get(at + 2..at + 4).map_or(2, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
                    at += 2 + usize::from(length).max(2);
                }
                // Padding, a restart marker, a zero stuffed after 255, or entropy-coded data.
                _ => at += 1,
            }
        }
        scans
    }
}

impl FileDecoder for JpegFile<'_> {
    fn size(&self) -> (u32, u32) {
        (self.frame.width, self.frame.height)
    }

    fn orientation(&self) -> Orientation {
        orientation_by(self.exif, self.xmp)
    }

    /// The decoder of a picture with several scans keeps two bytes per coefficient, in whole MCUs
    /// of up to 32 x 32 pixels. If a single scan has all color components, the decoder keeps only a
    /// few rows of MCUs.
    fn held(&self) -> Held {
        let Frame { width, height, is_progressive, components } = self.frame;
        let (across, down) = (u64::from(width).next_multiple_of(32), u64::from(height).next_multiple_of(32));
        let is_kept = is_progressive || self.scans.count > 1 || self.scans.first_components < components;
        let rows = if is_kept { down } else { 4 * 32 };
        let scratch_bytes = across * rows * components * 2 + across * 4 * 32 * 4;
        Held { raw_channels: if components == 4 { 4 } else { 3 }, is_copied: false, scratch_bytes }
    }

    fn decode(&self) -> Option<Vec<u8>> {
        let Frame { width, height, components, .. } = self.frame;
        let channels = if components == 4 { 4 } else { 3 };
        let mut pixels = vec![0; width as usize * height as usize * channels];
        let space = if components == 4 { ColorSpace::JCS_CMYK } else { ColorSpace::JCS_RGB };
        decode_jpeg(self.encoded, (width, height), space, &mut pixels)?;
        // Files store the inks inverted, as Adobe's programs write them. Pillow assumes inverted
        // inks, and so does this decoder.
        let is_cmyk = components == 4;
        Some(if is_cmyk { narrow(pixels, |p| printed([255 - p[0], 255 - p[1], 255 - p[2]], p[3])) } else { pixels })
    }
}

/// Decodes into `pixels` `[height, width, colors of space]`. `JCS_UNKNOWN` keeps the colors as
/// stored. Returns `None`, and leaves `pixels` unspecified, if the file is damaged, ends too early
/// or has other colors.
pub(super) fn decode_jpeg(encoded: &[u8], size: (u32, u32), space: ColorSpace, pixels: &mut [u8]) -> Option<()> {
    let decoder = Decompress::new_reader(Complete(encoded)).ok()?;
    let stored = decoder.color_space();
    let space = if space == ColorSpace::JCS_UNKNOWN { stored } else { space };
    let (width, height) = decoder.size();
    if (width, height) != (size.0 as usize, size.1 as usize) {
        return None;
    }
    let mut decoder = decoder.to_colorspace(space).ok()?;
    if decoder.min_flat_buffer_size() != pixels.len() {
        return None;
    }
    let read = decoder.read_scanlines_into::<u8>(pixels).ok()?.len();
    (read == pixels.len()).then_some(())
}

/// Reader that returns an error at the end of its bytes, because libjpeg would fill missing data
/// with gray and only warn. Pillow refuses a file that ends before its last row is decoded, and
/// accepts a missing end marker after the last row.
struct Complete<'a>(&'a [u8]);

impl Read for Complete<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        self.fill_buf()?;
        self.0.read(buffer)
    }
}

impl BufRead for Complete<'_> {
    fn fill_buf(&mut self) -> IoResult<&[u8]> {
        if self.0.is_empty() { Err(Error::from(ErrorKind::InvalidData)) } else { Ok(self.0) }
    }

    fn consume(&mut self, bytes: usize) {
        self.0 = &self.0[bytes..];
    }
}
