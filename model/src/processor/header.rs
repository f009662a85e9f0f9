//! Picture headers: format, size and the memory that decoding takes, read before any pixel is
//! decoded.

use bursar_budgets::Bytes;
use image::metadata::Orientation;

use super::bmp_file::BmpFile;
use super::exif::turns;
use super::file_decoder::{FileDecoder, Refusal};
use super::gif_file::GifFile;
use super::jpeg_file::JpegFile;
use super::png_file::PngFile;
use super::tiff_file::{OldJpegTiff, TiffFile};
use super::webp_file::WebPFile;
use crate::flow::ImageError;
use crate::flow::encoded_image::{EncodedImage, ImageLimits, PixelSize};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// Any bit depth, also interlaced. For an animation, its default image.
    Png,
    /// Baseline and progressive; gray, YCbCr, RGB, CMYK.
    Jpeg,
    /// Lossy, lossless, with alpha. For an animation, its first frame.
    WebP,
    /// The first frame, on the logical screen that the file declares.
    Gif,
    /// Palettes, run lengths, 16 to 32 bits per pixel. Embedded JPEG or PNG is refused.
    Bmp,
    /// The first picture, also of a BigTIFF: gray, RGB, palettes, CMYK and YCbCr with 1 to 32 bits
    /// per sample and with alpha, compressed as fax, LZW, JPEG, deflate, PackBits, LZMA or
    /// Zstandard. Floating point is refused.
    Tiff,
    /// Recognized only to be refused by name.
    Heic,
    /// Recognized only to be refused by name.
    Avif,
    /// RGB bytes that are not in a file.
    Pixels,
}

// Brands of files with HEVC and AV1 pictures (ISO/IEC 23008-12, annex B; AVIF 1.1, section 6).
const HEIC_BRANDS: [&[u8]; 8] = [b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"];
const AVIF_BRANDS: [&[u8]; 2] = [b"avif", b"avis"];
/// Maximum number of brands that are examined, including the major brand.
const BRANDS_MAX: usize = 32;

/// The picture format of an ISO base media file, from its brands (the major brand first). `None`
/// for a file without such a brand, for example a video.
fn kind_by_brands(encoded: &[u8]) -> Option<ImageFormat> {
    let (head, rest) = encoded.split_at_checked(8).filter(|(head, _)| head.ends_with(b"ftyp"))?;
    let length = u32::from_be_bytes(head[..4].try_into().ok()?) as usize;
    let brands = &rest[..length.saturating_sub(8).min(rest.len())];
    brands.chunks_exact(4).take(BRANDS_MAX).find_map(|brand| match brand {
        brand if HEIC_BRANDS.contains(&brand) => Some(ImageFormat::Heic),
        brand if AVIF_BRANDS.contains(&brand) => Some(ImageFormat::Avif),
        _ => None,
    })
}

impl ImageFormat {
    /// Detects the format from the first bytes. A file name is not reliable.
    pub fn guess(encoded: &[u8]) -> Option<Self> {
        match encoded {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(ImageFormat::Png),
            [0xff, 0xd8, 0xff, ..] => Some(ImageFormat::Jpeg),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(ImageFormat::WebP),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(ImageFormat::Gif),
            // Two letters are weak evidence, so this pattern also requires one of the seven sizes
            // of the second header.
            [b'B', b'M', _, _, _, _, _, _, _, _, _, _, _, _, 12 | 40 | 52 | 56 | 64 | 108 | 124, 0, 0, 0, ..] => {
                Some(ImageFormat::Bmp)
            }
            [b'I', b'I', 42 | 43, 0, ..] | [b'M', b'M', 0, 42 | 43, ..] => Some(ImageFormat::Tiff),
            _ => kind_by_brands(encoded),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            ImageFormat::Png => "PNG",
            ImageFormat::Jpeg => "JPEG",
            ImageFormat::WebP => "WebP",
            ImageFormat::Gif => "GIF",
            ImageFormat::Bmp => "BMP",
            ImageFormat::Tiff => "TIFF",
            ImageFormat::Heic => "HEIC",
            ImageFormat::Avif => "AVIF",
            ImageFormat::Pixels => "pixels",
        }
    }
}

/// Host bytes that decoding takes: an upper bound, computed only from the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeCost {
    /// Pixels as the decoder returns them.
    pub raw_bytes: Bytes,
    /// Memory that the decoder holds in addition to the pixels.
    pub scratch_bytes: Bytes,
    /// The RGB picture, which remains after decoding.
    pub rgb_bytes: Bytes,
    /// A second RGB picture, if converting gray or applying the orientation needs one.
    pub second_rgb_bytes: Bytes,
}

impl DecodeCost {
    /// Peak bytes: the greater of the peaks of decoding and of converting, which do not overlap.
    pub fn peak_bytes(&self) -> Bytes {
        let decoding = self.raw_bytes.saturating_add(self.scratch_bytes);
        let converting = self.raw_bytes.max(self.rgb_bytes).saturating_add(self.second_rgb_bytes);
        decoding.max(converting)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// Format, detected from the first bytes.
    pub format: ImageFormat,
    /// Width in pixels as displayed, after the EXIF or XMP orientation is applied.
    pub width: u32,
    /// Height in pixels as displayed, after the EXIF or XMP orientation is applied.
    pub height: u32,
    /// Host bytes that decoding takes.
    pub cost: DecodeCost,
}

impl ImageHeader {
    pub fn pixels(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }
}

impl EncodedImage {
    /// Reads the header and checks it against `limits`. Decodes nothing and allocates little.
    ///
    /// # Errors
    /// An exceeded limit, [`ImageError::UnknownFormat`], [`ImageError::Unsupported`],
    /// [`ImageError::Empty`] or [`ImageError::Damaged`].
    pub fn probe(&self, limits: &ImageLimits) -> Result<ImageHeader, ImageError> {
        match self.pixel_size() {
            Some(size) => ImageHeader::of_pixels(size, limits),
            None => Ok(OpenedImage::open(self.bytes(), limits)?.header),
        }
    }
}

impl ImageHeader {
    /// Header of pixels that are already decoded. The pixels are copied once before resizing.
    fn of_pixels(PixelSize { width, height }: PixelSize, limits: &ImageLimits) -> Result<Self, ImageError> {
        let pixels = u64::from(width) * u64::from(height);
        if pixels > limits.pixels_max {
            return Err(ImageError::TooManyPixels { width, height, pixels, pixels_max: limits.pixels_max });
        }
        let cost = DecodeCost { rgb_bytes: Bytes(pixels * 3), ..DecodeCost::default() };
        Ok(ImageHeader { format: ImageFormat::Pixels, width, height, cost })
    }
}

/// A picture whose header was read and is within the limits.
pub(crate) struct OpenedImage<'a> {
    pub(super) file: Box<dyn FileDecoder + 'a>,
    pub orientation: Orientation,
    pub header: ImageHeader,
}

impl<'a> OpenedImage<'a> {
    pub fn open(encoded: &'a [u8], limits: &ImageLimits) -> Result<Self, ImageError> {
        limits.check_bytes(Bytes::of_slice(encoded))?;
        let format = ImageFormat::guess(encoded).ok_or(ImageError::UnknownFormat)?;
        let file = open_file(format, encoded).map_err(|refusal| match refusal {
            Refusal::Damaged(stage) => ImageError::Damaged { format: format.name(), stage },
            Refusal::Unsupported(feature) => ImageError::Unsupported { format: format.name(), feature },
        })?;
        let (width, height) = file.size();
        if width == 0 || height == 0 {
            return Err(ImageError::Empty { width, height });
        }
        let pixels = u64::from(width) * u64::from(height);
        if pixels > limits.pixels_max {
            return Err(ImageError::TooManyPixels { width, height, pixels, pixels_max: limits.pixels_max });
        }
        let (orientation, held) = (file.orientation(), file.held());
        let second = held.is_copied || !matches!(orientation, Orientation::NoTransforms);
        let cost = DecodeCost {
            raw_bytes: Bytes(pixels * held.raw_channels),
            scratch_bytes: Bytes(held.scratch_bytes.saturating_add(FIXED_BYTES)),
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
        Ok(OpenedImage { file, orientation, header: ImageHeader { format, width, height, cost } })
    }
}

/// Additional bytes that any decoder may take, for tables and buffers of fixed sizes.
/// `tests/decode_cost.rs` checks Rust's allocations against the total cost.
const FIXED_BYTES: u64 = 1 << 20;

fn open_file<'a>(format: ImageFormat, encoded: &'a [u8]) -> Result<Box<dyn FileDecoder + 'a>, Refusal> {
    Ok(match format {
        ImageFormat::Png => Box::new(PngFile::open(encoded)?),
        ImageFormat::Jpeg => Box::new(JpegFile::open(encoded)?),
        ImageFormat::WebP => Box::new(WebPFile::open(encoded)?),
        ImageFormat::Gif => Box::new(GifFile::open(encoded)?),
        ImageFormat::Bmp => Box::new(BmpFile::open(encoded)?),
        ImageFormat::Tiff => match OldJpegTiff::find(encoded) {
            Some(file) => Box::new(file),
            None => Box::new(TiffFile::open(encoded)?),
        },
        ImageFormat::Heic => return Err(Refusal::Unsupported("HEVC compression")),
        ImageFormat::Avif => return Err(Refusal::Unsupported("AV1 compression")),
        // `guess` never returns this variant.
        ImageFormat::Pixels => return Err(Refusal::Unsupported("no encoding")),
    })
}
