//! Smart resize: the size nearest to a picture's own whose sides are multiples of a factor and whose pixels are within
//! bounds.

use bursar_budgets::Bytes;
use serde::{Deserialize, Serialize};

use crate::flow::ImageError;

/// The largest ratio of the longer side to the shorter that the Qwen processors accept.
pub const ASPECT_RATIO_MAX: f64 = 200.0;

/// A picture's sides in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Size {
    /// Pixels in a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

impl Size {
    /// `width * height`.
    pub fn pixels(self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// Bytes of the picture as RGB, 3 per pixel.
    pub fn rgb_bytes(self) -> Bytes {
        Bytes(3 * self.pixels())
    }
}

/// Bounds on the pixels of a resized picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PixelBounds {
    /// The least number of pixels; smaller pictures are enlarged.
    pub min: u64,
    /// The greatest number of pixels, which only very thin pictures may exceed by rounding up.
    pub max: u64,
}

/// Rounds each side to the nearest multiple of `factor`, and scales when the pixels are out of bounds.
///
/// Gives the same numbers as `smart_resize` in transformers 5.17, `models/qwen2_vl/image_processing_qwen2_vl.py`:
/// Python's `round` rounds halves to even, and its `/` divides doubles. As there, the result for a picture thinner than
/// `factor` may exceed `bounds.max`, so check it against the envelope.
///
/// # Errors
/// [`ImageError::Empty`]; [`ImageError::AspectRatio`] over 200; [`ImageError::NoSize`] if a side would be 0 or beyond
/// `u32`.
pub fn smart_resize(size: Size, factor: u32, bounds: PixelBounds) -> Result<Size, ImageError> {
    let Size { width, height } = size;
    if width == 0 || height == 0 {
        return Err(ImageError::Empty { width, height });
    }
    let ratio = f64::from(width.max(height)) / f64::from(width.min(height));
    if ratio > ASPECT_RATIO_MAX {
        return Err(ImageError::AspectRatio { width, height, ratio, ratio_max: ASPECT_RATIO_MAX });
    }
    let (rows, columns, step) = (f64::from(height), f64::from(width), f64::from(factor));
    let pixels = size.pixels() as f64;
    let (mut tall, mut wide) = ((rows / step).round_ties_even() * step, (columns / step).round_ties_even() * step);
    if tall * wide > bounds.max as f64 {
        let beta = (pixels / bounds.max as f64).sqrt();
        tall = step.max((rows / beta / step).floor() * step);
        wide = step.max((columns / beta / step).floor() * step);
    } else if tall * wide < bounds.min as f64 {
        let beta = (bounds.min as f64 / pixels).sqrt();
        tall = (rows * beta / step).ceil() * step;
        wide = (columns * beta / step).ceil() * step;
    }
    let side = |value: f64| (value >= 1.0 && value <= f64::from(u32::MAX)).then_some(value as u32);
    match (side(wide), side(tall)) {
        (Some(width), Some(height)) => Ok(Size { width, height }),
        _ => Err(ImageError::NoSize { width, height }),
    }
}
