//! Kinds of picture files that cameras, scanners, browsers and careless programs write. Each is
//! decoded as Pillow 13 and vLLM 0.33 decode it. `tests/pictures/compare.py` compares whole folders
//! of files with Pillow.

mod bmp;
mod careless;
mod orientation;
mod tiff;
mod transparent;

use std::io::Cursor;

pub use tiff::files;

use bursar_budgets::Hint;
use bursar_model::error::ImageError;
use bursar_model::flow::encoded_image::{EncodedImage, ImageLimits};
use bursar_model::flow::rgb_image::RgbImage;
use image::{DynamicImage, ImageFormat};

const WIDTH: u32 = 37;
const HEIGHT: u32 = 23;

/// A picture in which no two pixels of a row and no two rows are equal.
fn scene() -> image::RgbImage {
    image::RgbImage::from_fn(WIDTH, HEIGHT, |x, y| image::Rgb([(x * 6) as u8, (y * 11) as u8, (x * y) as u8]))
}

fn encoded(picture: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut encoded = Cursor::new(Vec::new());
    picture.into().write_to(&mut encoded, format).expect("memory takes it");
    encoded.into_inner()
}

fn try_decode(encoded: impl Into<Vec<u8>>) -> Result<RgbImage, ImageError> {
    EncodedImage::new(encoded.into()).decode(&ImageLimits::default())
}

#[track_caller]
fn decode(name: &str, encoded: impl Into<Vec<u8>>) -> RgbImage {
    try_decode(encoded).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[track_caller]
fn assert_pixels(name: &str, encoded: impl Into<Vec<u8>>, expected: &image::RgbImage) {
    let found = decode(name, encoded);
    assert_eq!((found.width(), found.height()), expected.dimensions(), "{name}");
    let differs = found.data().chunks(3).zip(expected.pixels()).position(|(found, expected)| *found != expected.0);
    let at = differs.map(|at| (at as u32 % found.width(), at as u32 / found.width()));
    let shown = at.map(|(x, y)| (&found.data()[3 * (y * found.width() + x) as usize..][..3], expected.get_pixel(x, y)));
    assert_eq!(None, shown, "{name}: found and expected at {at:?}");
}

/// A chunk of a PNG (PNG, section 5.3).
fn chunk(name: &[u8; 4], content: &[u8]) -> Vec<u8> {
    let mut crc = flate2::Crc::new();
    crc.update(name);
    crc.update(content);
    let length = (content.len() as u32).to_be_bytes();
    [&length[..], name, content, &crc.sum().to_be_bytes()].concat()
}

fn zlib(content: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut packed, content).expect("memory takes it");
    packed.finish().expect("memory takes it")
}

/// A PNG of `scene`'s size: its rows without filters, and chunks before them.
fn png(bits: u8, color: u8, chunks: &[Vec<u8>], rows: &[Vec<u8>]) -> Vec<u8> {
    let size = [WIDTH.to_be_bytes(), HEIGHT.to_be_bytes()].concat();
    let header = chunk(b"IHDR", &[&size[..], &[bits, color, 0, 0, 0]].concat());
    let rows: Vec<u8> = rows.iter().flat_map(|row| [&[0][..], row].concat()).collect();
    [b"\x89PNG\r\n\x1a\n", &header[..], &chunks.concat(), &chunk(b"IDAT", &zlib(&rows)), &chunk(b"IEND", b"")].concat()
}

/// A chunk of a WebP (RFC 9649, section 2.3).
fn riff(name: &[u8; 4], content: &[u8]) -> Vec<u8> {
    let padding = &[0][..content.len() % 2];
    [name, &(content.len() as u32).to_le_bytes()[..], content, padding].concat()
}

/// A WebP with an extended header (RFC 9649, section 2.7): these flags, the chunks of a simple
/// WebP, and more chunks.
fn extended_webp(flags: u8, simple: &[u8], more: &[Vec<u8>]) -> Vec<u8> {
    let side = |side: u32| (side - 1).to_le_bytes()[..3].to_vec();
    let header = riff(b"VP8X", &[vec![flags, 0, 0, 0], side(WIDTH), side(HEIGHT)].concat());
    riff(b"RIFF", &[b"WEBP", &header[..], &simple[12..], &more.concat()].concat())
}

/// In files of phone cameras and browsers, the major brand or a compatible brand identifies
/// the kind of picture.
#[test]
fn heic_and_avif_are_refused_with_a_conversion_command() {
    let file = |brands: &[&[u8; 4]]| {
        let brands = brands.iter().flat_map(|brand| brand.iter().copied()).collect::<Vec<u8>>();
        [&(brands.len() as u32 + 8).to_be_bytes()[..], b"ftyp", &brands, b"\0\0\0\x08meta"].concat()
    };
    let no: &[u8; 4] = b"\0\0\0\0";
    for (brands, name, command) in [
        ([b"heic", no, b"mif1", b"heic"], "HEIC", "`magick picture.heic picture.png`"),
        ([b"mif1", no, b"mif1", b"heix"], "HEIC", "`magick picture.heic picture.png`"),
        ([b"avif", no, b"mif1", b"miaf"], "AVIF", "`magick picture.avif picture.png`"),
        ([b"mif1", no, b"miaf", b"avif"], "AVIF", "`magick picture.avif picture.png`"),
        ([b"avis", no, b"msf1", b"avif"], "AVIF", "`magick picture.avif picture.png`"),
    ] {
        let error = try_decode(file(&brands)).expect_err(name);
        assert!(matches!(error, ImageError::Unsupported { format, .. } if format == name), "{error}");
        assert!(error.hint().contains(command), "{}", error.hint());
    }
    for video in [[b"isom", no, b"mp41", b"avc1"], [b"qt  ", no, no, no]] {
        assert_eq!(Err(ImageError::UnknownFormat), try_decode(file(&video)).map(|_| ()));
    }
}
