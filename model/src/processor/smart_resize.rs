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
    /// The greatest number of pixels. Very thin pictures may exceed it by rounding up, and up to [`reach`](Self::reach)
    /// others that are enlarged.
    pub max: u64,
}

impl PixelBounds {
    /// The most pixels that an ordinary picture has. Enlarging rounds up, so with a minimum close to the maximum they
    /// exceed the maximum, by less than the minimum unless they are thin or of few tokens.
    pub fn reach(self) -> u64 {
        self.max.max(self.min.saturating_mul(2))
    }

    /// The same bounds with at most `pixels_max`. They stay as they are where ordinary pictures keep to it anyway.
    pub fn within(self, pixels_max: u64) -> Self {
        if pixels_max >= self.reach() {
            return self;
        }
        let max = self.max.min(pixels_max);
        // Leaves room for rounding up under the limit.
        let min = if self.min > max / 2 { max / 4 } else { self.min };
        PixelBounds { min, max }
    }
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
    resize_length(size, VideoLength::STILL, factor, bounds)
}

/// As [`smart_resize`] for the frames of a video, where the bounds count the pixels of all frames.
///
/// Gives the same numbers as `smart_resize` in transformers 5.17, `models/qwen3_vl/video_processing_qwen3_vl.py`:
/// frames count rounded to whole steps, or as they are where the frames are scaled, and one that is thinner than
/// `factor` is enlarged first.
///
/// # Errors
/// As [`smart_resize`].
pub fn smart_resize_video(
    size: Size,
    length: VideoLength,
    factor: u32,
    bounds: PixelBounds,
) -> Result<Size, ImageError> {
    let Size { width, height } = size;
    let side = width.min(height);
    if side == 0 || side >= factor {
        return resize_length(size, length, factor, bounds);
    }
    let scale = f64::from(factor) / f64::from(side);
    let enlarged = |side: u32| (f64::from(side) * scale).min(f64::from(u32::MAX)) as u32;
    resize_length(Size { width: enlarged(width), height: enlarged(height) }, length, factor, bounds)
}

/// The length of a video.
#[derive(Clone, Copy, Debug)]
pub struct VideoLength {
    /// Its frames.
    pub frames: usize,
    /// Frames of a step.
    pub temporal: usize,
}

impl VideoLength {
    const STILL: VideoLength = VideoLength { frames: 1, temporal: 1 };

    /// Frames, rounded to whole steps; a half goes to the even number.
    pub fn rounded(self) -> usize {
        (self.frames as f64 / self.temporal as f64).round_ties_even() as usize * self.temporal
    }
}

/// Refuses a picture without pixels, and one of more than [`ASPECT_RATIO_MAX`].
pub(super) fn check_sides(Size { width, height }: Size) -> Result<(), ImageError> {
    if width == 0 || height == 0 {
        return Err(ImageError::Empty { width, height });
    }
    let ratio = f64::from(width.max(height)) / f64::from(width.min(height));
    if ratio > ASPECT_RATIO_MAX {
        Err(ImageError::AspectRatio { width, height, ratio, ratio_max: ASPECT_RATIO_MAX })
    } else {
        Ok(())
    }
}

fn resize_length(size: Size, length: VideoLength, factor: u32, bounds: PixelBounds) -> Result<Size, ImageError> {
    let Size { width, height } = size;
    check_sides(size)?;
    let (rows, columns, step) = (f64::from(height), f64::from(width), f64::from(factor));
    let pixels = size.pixels() as f64 * length.frames as f64;
    let counted = length.rounded() as f64;
    let (mut tall, mut wide) = ((rows / step).round_ties_even() * step, (columns / step).round_ties_even() * step);
    if counted * tall * wide > bounds.max as f64 {
        let beta = (pixels / bounds.max as f64).sqrt();
        tall = step.max((rows / beta / step).floor() * step);
        wide = step.max((columns / beta / step).floor() * step);
    } else if counted * tall * wide < bounds.min as f64 {
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
