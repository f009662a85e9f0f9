//! Decoding of encoded bytes to RGB. The pixels equal Pillow's pixels after `exif_transpose`,
//! blending of transparent pixels with white, and `convert("RGB")`.
//!
//! transformers 5.24 (`image_utils.py`, `load_image`, and `image_transforms.py`, `convert_to_rgb`),
//! qwen-vl-utils 0.0.14 and vLLM 0.33 agree on these results. 16-bit channels keep their high byte,
//! as in Pillow for color pictures. Pillow 13 clips 16-bit *gray* at 255, which makes nearly every
//! such picture white, so this decoder keeps the high byte for gray too.

use std::panic::{AssertUnwindSafe, catch_unwind};

use image::DynamicImage;
use image::metadata::Orientation;

use super::header::OpenedImage;
use crate::flow::ImageError;
use crate::flow::encoded_image::{EncodedImage, ImageLimits};
use crate::flow::rgb_image::RgbImage;

impl EncodedImage {
    /// Decodes the picture, blends transparent pixels with white, and applies the EXIF or XMP
    /// orientation.
    ///
    /// Takes at most `probe(limits)?.cost.peak_bytes()` of host memory.
    ///
    /// # Errors
    /// The errors of [`probe`](Self::probe); [`ImageError::Damaged`].
    pub fn decode(&self, limits: &ImageLimits) -> Result<RgbImage, ImageError> {
        if let Some(size) = self.pixel_size() {
            let header = self.probe(limits)?;
            let damaged = ImageError::Damaged { format: header.format.name(), stage: "counting its pixels" };
            return RgbImage::new(size.width, size.height, self.bytes().to_vec()).ok_or(damaged);
        }
        let OpenedImage { file, orientation, header } = OpenedImage::open(self.bytes(), limits)?;
        let damaged = || ImageError::Damaged { format: header.format.name(), stage: "decoding its pixels" };
        let (width, height) = file.size();
        // A panic of a decoder on a hostile picture must not end the actor, which holds other
        // users' pictures.
        let decoded = catch_unwind(AssertUnwindSafe(|| file.decode()));
        drop(file);
        let data = decoded.ok().flatten().ok_or_else(damaged)?;
        let (width, height, data) = orient(width, height, data, orientation).ok_or_else(damaged)?;
        RgbImage::new(width, height, data).ok_or_else(damaged)
    }
}

fn orient(width: u32, height: u32, data: Vec<u8>, orientation: Orientation) -> Option<(u32, u32, Vec<u8>)> {
    if matches!(orientation, Orientation::NoTransforms) {
        return Some((width, height, data));
    }
    let mut picture = DynamicImage::ImageRgb8(image::RgbImage::from_raw(width, height, data)?);
    picture.apply_orientation(orientation);
    Some((picture.width(), picture.height(), picture.into_rgb8().into_raw()))
}
