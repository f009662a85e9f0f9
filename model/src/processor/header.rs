//! Reading a picture's header: its format, its size and the memory that decoding takes, before any pixel is decoded.

use std::io::Cursor;

use bursar_budgets::Bytes;
use image::codecs::{
    bmp::BmpDecoder, gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, tiff::TiffDecoder, webp::WebPDecoder,
};
use image::metadata::Orientation;
use image::{ColorType, ExtendedColorType, ImageDecoder, Limits};

use super::{gif_frame::FirstFrame, tiff_header};
use crate::flow::ImageError;
use crate::flow::image_bytes::{ImageBytes, ImageLimits, PixelSize};

/// The formats that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// Any bit depth, also interlaced; the default image of an animation.
    Png,
    /// Baseline and progressive; grey, YCbCr, RGB, CMYK.
    Jpeg,
    /// Lossy, lossless, with alpha; the first frame of an animation.
    WebP,
    /// The first frame, on its screen.
    Gif,
    /// Palettes, run lengths, 16 to 32 bits per pixel; no embedded JPEG or PNG.
    Bmp,
    /// The first picture: grey and RGB of 8 and 16 bits, one bit, with alpha; no palettes, CMYK or floating point.
    Tiff,
    /// Not a file: RGB bytes.
    Pixels,
}

impl ImageFormat {
    /// Detects the format from the first bytes. A file's name is not reliable.
    pub fn guess(encoded: &[u8]) -> Option<Self> {
        match encoded {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(ImageFormat::Png),
            [0xff, 0xd8, 0xff, ..] => Some(ImageFormat::Jpeg),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(ImageFormat::WebP),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(ImageFormat::Gif),
            // Two letters are weak evidence, so this also requires one of the seven sizes of the second header.
            [b'B', b'M', _, _, _, _, _, _, _, _, _, _, _, _, 12 | 40 | 52 | 56 | 64 | 108 | 124, 0, 0, 0, ..] => {
                Some(ImageFormat::Bmp)
            }
            [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => Some(ImageFormat::Tiff),
            _ => None,
        }
    }

    /// The format's usual name.
    pub fn name(self) -> &'static str {
        match self {
            ImageFormat::Png => "PNG",
            ImageFormat::Jpeg => "JPEG",
            ImageFormat::WebP => "WebP",
            ImageFormat::Gif => "GIF",
            ImageFormat::Bmp => "BMP",
            ImageFormat::Tiff => "TIFF",
            ImageFormat::Pixels => "pixels",
        }
    }
}

/// Host bytes that decoding takes: an upper bound, computed from the header alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeCost {
    /// Pixels as the decoder yields them.
    pub raw_bytes: Bytes,
    /// Memory that the decoder holds besides.
    pub scratch_bytes: Bytes,
    /// The RGB picture, which stays after decoding.
    pub rgb_bytes: Bytes,
    /// A second RGB picture, if converting grey or applying the EXIF orientation needs one.
    pub second_rgb_bytes: Bytes,
}

impl DecodeCost {
    /// Peak bytes: the greater of decoding and converting, which do not overlap.
    pub fn peak_bytes(&self) -> Bytes {
        let decoding = self.raw_bytes.saturating_add(self.scratch_bytes);
        let converting = self.raw_bytes.max(self.rgb_bytes).saturating_add(self.second_rgb_bytes);
        decoding.max(converting)
    }
}

/// The content of a picture's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// The format, detected from the first bytes.
    pub format: ImageFormat,
    /// Pixels in a row as shown, after the EXIF orientation.
    pub width: u32,
    /// Rows as shown, after the EXIF orientation.
    pub height: u32,
    /// Host bytes that decoding takes.
    pub cost: DecodeCost,
}

impl ImageHeader {
    /// `width * height`.
    pub fn pixels(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }
}

impl ImageBytes {
    /// Reads the header and checks it against `limits`. Decodes nothing and allocates little.
    ///
    /// # Errors
    /// An exceeded limit, [`ImageError::UnknownFormat`], [`ImageError::Empty`] or [`ImageError::Damaged`].
    pub fn probe(&self, limits: &ImageLimits) -> Result<ImageHeader, ImageError> {
        match self.pixel_size() {
            Some(size) => ImageHeader::of_pixels(size, limits),
            None => Ok(OpenImage::open(self.bytes(), limits)?.header),
        }
    }
}

impl ImageHeader {
    /// Pixels that are decoded already are copied once, before resizing.
    fn of_pixels(PixelSize { width, height }: PixelSize, limits: &ImageLimits) -> Result<Self, ImageError> {
        let pixels = u64::from(width) * u64::from(height);
        if pixels > limits.pixels_max {
            return Err(ImageError::TooManyPixels { width, height, pixels, pixels_max: limits.pixels_max });
        }
        let cost = DecodeCost { rgb_bytes: Bytes(pixels * 3), ..DecodeCost::default() };
        Ok(ImageHeader { format: ImageFormat::Pixels, width, height, cost })
    }
}

/// A picture whose header has been read and is within the limits.
pub(crate) struct OpenImage<'a> {
    pub decoder: Box<dyn ImageDecoder + 'a>,
    pub orientation: Orientation,
    pub header: ImageHeader,
}

impl<'a> OpenImage<'a> {
    pub fn open(encoded: &'a [u8], limits: &ImageLimits) -> Result<Self, ImageError> {
        limits.check_bytes(Bytes::of_slice(encoded))?;
        let format = ImageFormat::guess(encoded).ok_or(ImageError::UnknownFormat)?;
        let unreadable = || ImageError::Damaged { format: format.name(), stage: "reading its header" };
        let damaged = |_| unreadable();
        if format == ImageFormat::WebP && riff_bytes(encoded) > encoded.len() as u64 {
            return Err(unreadable());
        }
        let reader = Cursor::new(encoded);
        let mut decoder: Box<dyn ImageDecoder + 'a> = match format {
            ImageFormat::Png => {
                Box::new(PngDecoder::with_limits(reader, png_limits(encoded, limits)).map_err(damaged)?)
            }
            ImageFormat::Jpeg if jpeg_scans(encoded).count > SCANS_MAX => {
                return Err(ImageError::Damaged { format: format.name(), stage: "counting its scans" });
            }
            ImageFormat::Jpeg => Box::new(JpegDecoder::new(reader).map_err(damaged)?),
            ImageFormat::WebP => Box::new(WebPDecoder::new(reader).map_err(damaged)?),
            ImageFormat::Gif if FirstFrame::find(encoded).is_none() => {
                return Err(ImageError::Damaged { format: format.name(), stage: "finding its first frame" });
            }
            ImageFormat::Gif => Box::new(GifDecoder::new(reader).map_err(damaged)?),
            ImageFormat::Bmp => Box::new(BmpDecoder::new(reader).map_err(damaged)?),
            ImageFormat::Tiff => Box::new(tiff_decoder(encoded, limits).ok_or_else(unreadable)?),
            // `guess` never returns this.
            ImageFormat::Pixels => return Err(ImageError::UnknownFormat),
        };
        let (width, height) = decoder.dimensions();
        if width == 0 || height == 0 {
            return Err(ImageError::Empty { width, height });
        }
        let pixels = u64::from(width) * u64::from(height);
        if pixels > limits.pixels_max {
            return Err(ImageError::TooManyPixels { width, height, pixels, pixels_max: limits.pixels_max });
        }
        // A broken EXIF block does not make the picture unreadable: Pillow ignores it too.
        let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        let color = decoder.color_type();
        // The header's decoder would convert CMYK itself; libjpeg returns it unconverted.
        let is_printed = format == ImageFormat::Jpeg && jpeg_frame(encoded).is_some_and(|frame| frame.components == 4);
        let second = color.channel_count() < 3 || !matches!(orientation, Orientation::NoTransforms);
        let cost = DecodeCost {
            raw_bytes: Bytes(if is_printed { pixels * 4 } else { decoder.total_bytes() }),
            scratch_bytes: Bytes(scratch_bytes(format, encoded, width, height, color)),
            rgb_bytes: Bytes(pixels * 3),
            second_rgb_bytes: if second { Bytes(pixels * 3) } else { Bytes::ZERO },
        };
        if cost.peak_bytes() > limits.decode_bytes_max {
            return Err(ImageError::TooMuchDecodeMemory {
                bytes: cost.peak_bytes(),
                bytes_max: limits.decode_bytes_max,
            });
        }
        let (width, height) = if turns(orientation) { (height, width) } else { (width, height) };
        Ok(OpenImage { decoder, orientation, header: ImageHeader { format, width, height, cost } })
    }
}

/// The size that a WebP's header states. A truncated animation may have a whole first frame, but libwebp refuses it,
/// and so do we.
fn riff_bytes(encoded: &[u8]) -> u64 {
    let size = encoded.get(4..8).and_then(|size| size.try_into().ok()).map_or(0, u32::from_le_bytes);
    u64::from(size) + 8
}

/// Bytes that the side chunks of a PNG (colour profiles, texts, EXIF) may unpack to beyond their packed size. Profiles
/// have a few kilobytes. A larger one is skipped, which changes nothing, as profiles are not applied. These bytes are
/// part of the announced scratch.
const UNPACKED_BYTES: u64 = 512 << 10;

/// Packed bytes of a PNG's side chunks (PNG, section 5.3: length, name, content, checksum).
fn side_bytes(encoded: &[u8]) -> u64 {
    let (mut at, mut bytes) = (8usize, 0);
    while let Some(&[a, b, c, d, ref name @ ..]) = encoded.get(at..at.saturating_add(8)) {
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if name != b"IDAT" {
            bytes += length.min(encoded.len()) as u64;
        }
        at = at.saturating_add(length).saturating_add(12);
    }
    bytes
}

/// Limits the decoder to its side chunks and the few rows that it reserves. The first chunk begins with the width.
fn png_limits(encoded: &[u8], limits: &ImageLimits) -> Limits {
    let width = encoded.get(16..20).and_then(|width| width.try_into().ok()).map_or(0, u32::from_be_bytes);
    let mut allocation = Limits::no_limits();
    allocation.max_alloc =
        Some((u64::from(width) * 16 + UNPACKED_BYTES + 3 * side_bytes(encoded)).min(limits.decode_bytes_max.0));
    allocation
}

/// A TIFF's decoder, if this crate converts the picture's colours bit for bit as Pillow does.
fn tiff_decoder<'a>(encoded: &'a [u8], limits: &ImageLimits) -> Option<TiffDecoder<Cursor<&'a [u8]>>> {
    if !tiff_header::is_plausible(encoded) {
        return None;
    }
    let mut decoder = TiffDecoder::new(Cursor::new(encoded)).ok()?;
    let is_ink = matches!(decoder.original_color_type(), ExtendedColorType::Cmyk8 | ExtendedColorType::Cmyk16);
    if is_ink || matches!(decoder.color_type(), ColorType::Rgb32F | ColorType::Rgba32F) {
        return None;
    }
    let mut allocation = Limits::no_limits();
    allocation.max_alloc =
        Some(decoder.total_bytes().saturating_add(tiff_bytes(encoded)).min(limits.decode_bytes_max.0));
    decoder.set_limits(allocation).ok()?;
    Some(decoder)
}

/// Bytes that a TIFF's decoder may hold besides its pixels: offsets of strips, and one packed strip.
fn tiff_bytes(encoded: &[u8]) -> u64 {
    encoded.len() as u64 + (6 << 20)
}

/// Whether an orientation swaps the sides.
fn turns(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

/// Bytes that a decoder holds besides its output, from the sources of png 0.18, libjpeg-turbo and image-webp 0.2.
/// `tests/decode_cost.rs` checks Rust's allocations against it.
fn scratch_bytes(format: ImageFormat, encoded: &[u8], width: u32, height: u32, color: ColorType) -> u64 {
    const FIXED_BYTES: u64 = 1 << 20;
    let (encoded_bytes, width, height) = (encoded.len() as u64, u64::from(width), u64::from(height));
    let varying = match format {
        // Rows being unfiltered, an interlaced pass, and side chunks, which are read into a doubling buffer and then
        // copied.
        ImageFormat::Png => {
            8 * width * u64::from(color.bytes_per_pixel()) + 2 * UNPACKED_BYTES + 4 * side_bytes(encoded)
        }
        // The header's decoder copies its input. A picture of several scans keeps two bytes per coefficient, in whole
        // MCUs of up to 32 x 32 pixels. One whose single scan has all colours keeps a few rows of MCUs.
        ImageFormat::Jpeg => {
            let frame = jpeg_frame(encoded).unwrap_or(JpegFrame { progressive: true, components: 4 });
            let (across, down) = (width.next_multiple_of(32), height.next_multiple_of(32));
            let scans = jpeg_scans(encoded);
            let is_kept = frame.progressive || scans.count > 1 || scans.first_components < frame.components;
            let rows = if is_kept { down } else { 4 * 32 };
            encoded_bytes + across * rows * frame.components * 2 + across * 4 * 32 * 4
        }
        // Lossy: the YCbCr planes in whole macroblocks. Lossless: four bytes per pixel. Alpha is a separate picture,
        // and an animation has a canvas as well.
        ImageFormat::WebP => {
            let pixel_bytes = if color.has_alpha() || is_animated_webp(encoded) { 10 } else { 5 };
            encoded_bytes * 2 + width.next_multiple_of(16) * height.next_multiple_of(16) * pixel_bytes
        }
        // Indices of the frame's pixels, and a separate copy of a frame that does not cover the screen's rows. Texts
        // are read into a doubling buffer.
        ImageFormat::Gif => 5 * FirstFrame::find(encoded).map_or(0, |frame| frame.pixels()) + 2 * encoded_bytes,
        // One row and one run.
        ImageFormat::Bmp => 8 * width,
        // A second copy of all pixels.
        ImageFormat::Tiff => width * height * u64::from(color.bytes_per_pixel()) + tiff_bytes(encoded),
        ImageFormat::Pixels => 0,
    };
    FIXED_BYTES + varying
}

/// The flag in the extended header (RFC 9649, section 2.7).
fn is_animated_webp(encoded: &[u8]) -> bool {
    encoded.get(12..16) == Some(b"VP8X") && encoded.get(20).is_some_and(|flags| flags & 2 != 0)
}

struct JpegFrame {
    progressive: bool,
    components: u64,
}

/// Finds the start-of-frame segment (ITU T.81, B.2.2).
fn jpeg_frame(encoded: &[u8]) -> Option<JpegFrame> {
    let mut at = 2;
    loop {
        let &[mark, kind] = encoded.get(at..at + 2)? else { return None };
        if mark != 0xff {
            return None;
        }
        match kind {
            0xff => at += 1, // padding
            0x01 | 0xd0..=0xd8 => at += 2,
            0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => {
                let components = u64::from(*encoded.get(at + 9)?);
                return Some(JpegFrame { progressive: matches!(kind, 0xc2 | 0xc6 | 0xca | 0xce), components });
            }
            0xd9 | 0xda => return None,
            _ => {
                let &[high, low] = encoded.get(at + 2..at + 4)? else { return None };
                at += 2 + usize::from(u16::from_be_bytes([high, low])).max(2);
            }
        }
    }
}

/// Maximum scans of a JPEG. A progressive one has about ten. Each costs a pass over all pixels, yet takes only a
/// hundred bytes of the file.
const SCANS_MAX: u64 = 256;

/// A JPEG's scans, up to its end or to one more than [`SCANS_MAX`].
struct JpegScans {
    count: u64,
    /// Colours in the first scan. If some are missing, the decoder keeps all coefficients even without another scan.
    first_components: u64,
}

/// Walks over the markers as libjpeg does, skipping everything else (ITU T.81, B.1.1.2 and B.2.3).
fn jpeg_scans(encoded: &[u8]) -> JpegScans {
    let mut scans = JpegScans { count: 0, first_components: 0 };
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
                let length = encoded.get(at + 2..at + 4).map_or(2, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
                at += 2 + usize::from(length).max(2);
            }
            // Padding, a restart marker, a zero stuffed after 255, or entropy-coded data.
            _ => at += 1,
        }
    }
    scans
}
