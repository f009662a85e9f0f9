//! Smart resize: the size nearest to a picture's original size whose sides are multiples of a
//! factor and whose number of pixels is within bounds.

use bursar_budgets::Bytes;
use serde::{Deserialize, Serialize};

use crate::flow::ImageError;

/// The largest ratio of the longer side to the shorter side that the Qwen processors accept.
pub const ASPECT_RATIO_MAX: f64 = 200.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Size {
    pub width: u32,
    pub height: u32,
}

impl Size {
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
    /// Minimum number of pixels. Smaller pictures are enlarged.
    pub min: u64,
    /// Maximum number of pixels. Very thin pictures may exceed this maximum, because sides are
    /// rounded up. Enlarged pictures may have up to [`reach`](Self::reach) pixels.
    pub max: u64,
}

impl PixelBounds {
    /// Upper bound on the pixels of a resized picture, unless the picture is thin or has few
    /// tokens. Enlarging rounds sides up. If `min` is close to `max`, an enlarged picture may
    /// therefore exceed `max`, but by less than `min`.
    pub fn reach(self) -> u64 {
        self.max.max(self.min.saturating_mul(2))
    }

    /// The same bounds with at most `pixels_max` pixels. The bounds are unchanged if
    /// [`reach`](Self::reach) does not exceed `pixels_max`.
    pub fn within(self, pixels_max: u64) -> Self {
        if pixels_max >= self.reach() {
            return self;
        }
        let max = self.max.min(pixels_max);
        // With a lower minimum, enlarged pictures stay within the limit when they are rounded up.
        let min = if self.min > max / 2 { max / 4 } else { self.min };
        PixelBounds { min, max }
    }
}

/// Rounds each side to the nearest multiple of `factor`, and scales the picture if its pixels
/// are out of bounds.
///
/// Returns the same numbers as `smart_resize` in transformers 5.17,
/// `models/qwen2_vl/image_processing_qwen2_vl.py`: Python's `round` rounds halves to even, and its
/// `/` divides doubles. As in that function, the result for a picture thinner than `factor` may
/// exceed `bounds.max`, so check the result against the envelope.
///
/// # Errors
/// [`ImageError::Empty`]; [`ImageError::AspectRatio`] over 200; [`ImageError::NoSize`] if a side
/// would be 0 or beyond `u32`.
pub fn smart_resize(size: Size, factor: u32, bounds: PixelBounds) -> Result<Size, ImageError> {
    resize_length(size, VideoLength::STILL, factor, bounds)
}

/// How the size of a picture is chosen within the pixel bounds. Both sides become multiples of a
/// factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizing {
    /// The size that is nearest to the picture's; see [`smart_resize`].
    Nearest,
    /// The largest size; see [`largest_size`].
    Largest,
}

impl Sizing {
    /// The size of a picture of `size`.
    ///
    /// # Errors
    /// See [`smart_resize`] and [`largest_size`].
    pub fn choose(self, size: Size, factor: u32, bounds: PixelBounds) -> Result<Size, ImageError> {
        match self {
            Sizing::Nearest => smart_resize(size, factor, bounds),
            Sizing::Largest => largest_size(size, factor, bounds.max),
        }
    }
}

/// The largest size of at most `pixels_max` pixels whose sides are multiples of `factor`, with about
/// the aspect ratio of `size`. Small pictures are enlarged.
///
/// Returns the same numbers as `get_aspect_ratio_preserving_size` in transformers 5.17,
/// `models/gemma4/image_processing_gemma4.py`, if `pixels_max` is a multiple of the square of
/// `factor`; other values are first rounded down to such a multiple.
///
/// # Errors
/// [`ImageError::Empty`]; [`ImageError::NoSize`] if `pixels_max` is below the square of `factor`.
pub fn largest_size(size: Size, factor: u32, pixels_max: u64) -> Result<Size, ImageError> {
    let Size { width, height } = size;
    if width == 0 || height == 0 {
        return Err(ImageError::Empty { width, height });
    }
    let groups = pixels_max / u64::from(factor).pow(2);
    let target = groups * u64::from(factor).pow(2);
    let scale = (target as f64 / size.pixels() as f64).sqrt();
    let fitting = |side: u32| (scale * f64::from(side) / f64::from(factor)).floor() as u64;
    // If one side would be 0, it gets one group, and the other side as many as the aspect ratio.
    let along = |long: u32, short: u32| u64::from(long / short).min(groups);
    let (across, down) = match (fitting(width), fitting(height)) {
        (0, 0) => return Err(ImageError::NoSize { width, height }),
        (_, 0) => (along(width, height), 1),
        (0, _) => (1, along(height, width)),
        both => both,
    };
    let side = |groups: u64| u32::try_from(groups).ok().and_then(|groups| groups.checked_mul(factor));
    match (side(across), side(down)) {
        (Some(width), Some(height)) => Ok(Size { width, height }),
        _ => Err(ImageError::NoSize { width, height }),
    }
}

/// Same as [`smart_resize`] for the frames of a video, where the bounds apply to the pixels of all
/// frames together.
///
/// Returns the same numbers as `smart_resize` in transformers 5.17,
/// `models/qwen3_vl/video_processing_qwen3_vl.py`: the number of pixels that is checked against the
/// bounds uses the frame count rounded to whole steps, the scaling factor uses the actual frame
/// count, and a frame thinner than `factor` is enlarged first.
///
/// # Errors
/// The errors of [`smart_resize`].
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

#[derive(Clone, Copy, Debug)]
pub struct VideoLength {
    pub frames: usize,
    /// Frames per time step.
    pub temporal: usize,
}

impl VideoLength {
    const STILL: VideoLength = VideoLength { frames: 1, temporal: 1 };

    /// Number of frames, rounded to whole steps. A half rounds to the even number.
    pub fn rounded(self) -> usize {
        (self.frames as f64 / self.temporal as f64).round_ties_even() as usize * self.temporal
    }
}

/// Refuses a picture without pixels, and a picture whose aspect ratio exceeds [`ASPECT_RATIO_MAX`].
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
