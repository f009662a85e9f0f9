//! Decoding: encoded bytes to RGB, with the results of Pillow's `exif_transpose` and `convert("RGB")`.
//!
//! Like Hugging Face's `load_image` (transformers 5.17, `image_utils.py`), this applies the EXIF orientation and then
//! converts to RGB. Alpha is dropped, not blended. 16-bit channels keep their high byte, as Pillow does for colour. For
//! 16-bit *grey* Pillow 13 clips at 255, which makes nearly every such picture white; we keep the high byte there too.

use std::panic::{AssertUnwindSafe, catch_unwind};

use image::metadata::Orientation;
use image::{ColorType, DynamicImage};

use super::decode_jpeg::decode_jpeg;
use super::gif_frame::FirstFrame;
use super::header::{ImageFormat, OpenImage};
use crate::flow::ImageError;
use crate::flow::image_bytes::{ImageBytes, ImageLimits};
use crate::flow::rgb_image::RgbImage;

impl ImageBytes {
    /// Decodes the picture and applies its EXIF orientation. Pixels are only copied.
    ///
    /// Takes at most `probe(limits)?.cost.peak_bytes()` of host memory.
    ///
    /// # Errors
    /// As [`probe`](Self::probe); [`ImageError::Damaged`].
    pub fn decode(&self, limits: &ImageLimits) -> Result<RgbImage, ImageError> {
        if let Some(size) = self.pixel_size() {
            let header = self.probe(limits)?;
            let damaged = ImageError::Damaged { format: header.format.name(), stage: "counting its pixels" };
            return RgbImage::new(size.width, size.height, self.bytes().to_vec()).ok_or(damaged);
        }
        let OpenImage { decoder, orientation, header } = OpenImage::open(self.bytes(), limits)?;
        let damaged = || ImageError::Damaged { format: header.format.name(), stage: "decoding its pixels" };
        let (width, height) = decoder.dimensions();
        let color = decoder.color_type();
        let mut raw = vec![0; usize::try_from(header.cost.raw_bytes.0).map_err(|_| damaged())?];
        // A decoder that panics on a hostile picture must not take down the actor, which holds other users' pictures.
        let decoded = catch_unwind(AssertUnwindSafe(|| match header.format {
            ImageFormat::Jpeg => decode_jpeg(self.bytes(), width, height, &mut raw).is_some(),
            _ => decoder.read_image_boxed(&mut raw).is_ok(),
        }));
        if !matches!(decoded, Ok(true)) {
            return Err(damaged());
        }
        let mut data = match header.format {
            ImageFormat::Jpeg if raw.len() as u64 == 4 * header.pixels() => narrow(raw, 4, printed),
            _ => to_rgb(raw, color).ok_or_else(damaged)?,
        };
        if let Some(frame) = FirstFrame::find(self.bytes()).filter(|_| header.format == ImageFormat::Gif) {
            frame.fill_around(&mut data);
        }
        let (width, height, data) = orient(width, height, data, orientation).ok_or_else(damaged)?;
        RgbImage::new(width, height, data).ok_or_else(damaged)
    }
}

/// `[pixels, channels]` of 8 or 16 bits to `[pixels, 3]` of 8 bits.
fn to_rgb(raw: Vec<u8>, color: ColorType) -> Option<Vec<u8>> {
    Some(match color {
        ColorType::Rgb8 => raw,
        ColorType::Rgba8 => narrow(raw, 4, |pixel| [pixel[0], pixel[1], pixel[2]]),
        ColorType::Rgb16 => narrow(raw, 6, |pixel| [high(pixel, 0), high(pixel, 1), high(pixel, 2)]),
        ColorType::Rgba16 => narrow(raw, 8, |pixel| [high(pixel, 0), high(pixel, 1), high(pixel, 2)]),
        ColorType::L8 => raw.iter().flat_map(|&grey| [grey; 3]).collect(),
        ColorType::La8 => raw.chunks_exact(2).flat_map(|pixel| [pixel[0]; 3]).collect(),
        ColorType::L16 => raw.chunks_exact(2).flat_map(|pixel| [high(pixel, 0); 3]).collect(),
        ColorType::La16 => raw.chunks_exact(4).flat_map(|pixel| [high(pixel, 0); 3]).collect(),
        _ => return None,
    })
}

/// CMYK to RGB as Pillow does it (`libImaging/Convert.c`, `cmyk2rgb`): each ink takes its share of the light that black
/// leaves. Files hold the inks inverted, as Adobe's programs write them; Pillow assumes that, and so do we.
fn printed(pixel: &[u8]) -> [u8; 3] {
    let light = u32::from(pixel[3]);
    [0, 1, 2].map(|colour| {
        let ink = (255 - u32::from(pixel[colour])) * light + 128;
        light.saturating_sub(((ink >> 8) + ink) >> 8) as u8
    })
}

/// The high byte of a 16-bit channel in the machine's byte order.
fn high(pixel: &[u8], channel: usize) -> u8 {
    (u16::from_ne_bytes([pixel[2 * channel], pixel[2 * channel + 1]]) >> 8) as u8
}

/// Converts in place, so that no second picture is needed. As `pixel_bytes >= 3`, writing never overtakes reading.
fn narrow(mut raw: Vec<u8>, pixel_bytes: usize, rgb: impl Fn(&[u8]) -> [u8; 3]) -> Vec<u8> {
    let pixels = raw.len() / pixel_bytes;
    for pixel in 0..pixels {
        let colors = rgb(&raw[pixel * pixel_bytes..][..pixel_bytes]);
        raw[pixel * 3..][..3].copy_from_slice(&colors);
    }
    raw.truncate(pixels * 3);
    raw
}

fn orient(width: u32, height: u32, data: Vec<u8>, orientation: Orientation) -> Option<(u32, u32, Vec<u8>)> {
    if matches!(orientation, Orientation::NoTransforms) {
        return Some((width, height, data));
    }
    let mut picture = DynamicImage::ImageRgb8(image::RgbImage::from_raw(width, height, data)?);
    picture.apply_orientation(orientation);
    Some((picture.width(), picture.height(), picture.into_rgb8().into_raw()))
}
