//! Animated GIF and WebP as videos. The blocks of the file are read first, to determine which
//! frames are wanted. Then each frame up to the last wanted frame is decoded, because a frame is
//! drawn over the frames before it.

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bursar_budgets::Bytes;
use image::codecs::{gif::GifDecoder, webp::WebPDecoder};
use image::imageops::thumbnail;
use image::{AnimationDecoder, DynamicImage, Frame, Frames, ImageDecoder, Limits};

use super::animation_blocks::Animation;
use super::error::VideoError;
use super::frame_sampling::FrameSampling;
use super::header::ImageFormat;
use crate::flow::{EncodedImage, FileName, ImageError, ImageLimits, Video};

/// Maximum pixels that are decoded from one animation: 8 frames of the largest picture, or 1,200
/// frames of 800 x 533.
const PIXELS_MAX: u64 = 512_000_000;
/// Bytes that decoding holds per pixel of the screen: the previous drawing, the frame, both
/// combined, and the result.
const PIXEL_BYTES: u64 = 4 + 4 + 4 + 3;

impl Video {
    /// Reads an animated GIF or WebP, with each frame shown for the time that the file states, or
    /// for 100 ms if that time is below 20 ms. Transparent pixels keep their color. Pixels where
    /// nothing was drawn are black. A still WebP is a video of one frame. A GIF with one frame is
    /// sampled like an animation, so a long display time repeats the frame.
    ///
    /// `limits` apply to the bytes of the file, the pixels of a frame, and the
    /// memory that decoding takes.
    ///
    /// # Errors
    /// [`VideoError::NoAnimation`], [`VideoError::FrameRate`], [`VideoError::NoFrames`] if
    /// `sampling` allows no frames, [`VideoError::TooManyPixels`], or [`VideoError::Frame`] with
    /// the first frame that cannot be decoded and the reason.
    pub fn from_animation(encoded: &[u8], sampling: &FrameSampling, limits: &ImageLimits) -> Result<Self, VideoError> {
        let of_frame = |frame| move |source: ImageError| VideoError::Frame { frame, file: FileName::default(), source };
        limits.check_bytes(Bytes::of_slice(encoded)).map_err(of_frame(0))?;
        let format = ImageFormat::guess(encoded).ok_or(VideoError::NoAnimation)?;
        if !matches!(format, ImageFormat::Gif | ImageFormat::WebP) {
            return Err(VideoError::NoAnimation);
        }
        // `probe` also checks the first frame against the limits of one picture.
        let header = EncodedImage::new(encoded).probe(limits).map_err(of_frame(0))?;
        let still = || Video::new(vec![EncodedImage::new(encoded)], sampling.frames_per_second);
        if format == ImageFormat::WebP && encoded.get(12..16) != Some(b"VP8X") {
            return Ok(still());
        }
        let damaged = |stage| ImageError::Damaged { format: format.name(), stage };
        let animation = Animation::read(encoded, format).ok_or_else(|| of_frame(0)(damaged("finding its frames")))?;
        if animation.shown_ms.is_empty() {
            return Ok(still());
        }
        let bytes = Bytes(header.pixels().saturating_mul(PIXEL_BYTES));
        if bytes > limits.decode_bytes_max {
            let bytes_max = limits.decode_bytes_max;
            return Err(of_frame(0)(ImageError::TooMuchDecodeMemory { bytes, bytes_max }));
        }
        let (frames, rate) = sampling.frames(animation.seconds())?;
        let wanted: Vec<usize> = (0..frames).map(|frame| animation.shown_at(frame as f64 / rate)).collect();
        let decoded = 1 + wanted.last().copied().unwrap_or(0);
        let pixels = header.pixels().saturating_mul(decoded as u64);
        if pixels > PIXELS_MAX {
            return Err(VideoError::TooManyPixels { frames: decoded, pixels, limit: PIXELS_MAX });
        }
        let kept = Keeping { sampling, wanted: &wanted, kept: Vec::with_capacity(frames) };
        // A panic of the decoder on a hostile file must become an error of this file.
        let kept = catch_unwind(AssertUnwindSafe(|| kept.all(open(encoded, format, limits)?, decoded)));
        let kept = kept.unwrap_or(Err(0)).map_err(|frame| of_frame(frame)(damaged("decoding its pixels")))?;
        Ok(Video::new(kept, rate))
    }
}

/// Frames of the animation as displayed. A frame is decoded when the iterator reaches it.
fn open<'a>(encoded: &'a [u8], format: ImageFormat, limits: &ImageLimits) -> Result<Frames<'a>, usize> {
    let reader = Cursor::new(encoded);
    match format {
        ImageFormat::Gif => {
            let mut decoder = GifDecoder::new(reader).map_err(|_| 0_usize)?;
            let mut own = Limits::no_limits();
            own.max_alloc = Some(limits.decode_bytes_max.0);
            decoder.set_limits(own).map_err(|_| 0_usize)?;
            Ok(decoder.into_frames())
        }
        _ => Ok(WebPDecoder::new(reader).map_err(|_| 0_usize)?.into_frames()),
    }
}

/// Collects the wanted frames, at the size at which they are kept.
struct Keeping<'a> {
    sampling: &'a FrameSampling,
    /// Indices of the wanted frames, in increasing order. A frame that is shown at several of the
    /// sampled times occurs several times.
    wanted: &'a [usize],
    kept: Vec<EncodedImage>,
}

impl Keeping<'_> {
    /// Returns all wanted frames, or the index of the first frame that cannot be decoded.
    fn all(mut self, frames: Frames<'_>, decoded: usize) -> Result<Vec<EncodedImage>, usize> {
        let mut count = 0;
        for (index, frame) in frames.take(decoded).enumerate() {
            let frame = frame.map_err(|_| index)?;
            let times = self.wanted.iter().filter(|wanted| **wanted == index).count();
            if times > 0 {
                let kept = self.keep(frame).ok_or(index)?;
                self.kept.extend(std::iter::repeat_n(kept, times));
            }
            count = index + 1;
        }
        if count < decoded { Err(count) } else { Ok(self.kept) }
    }

    fn keep(&self, frame: Frame) -> Option<EncodedImage> {
        let picture = DynamicImage::ImageRgba8(frame.into_buffer()).into_rgb8();
        let (width, height) = self.sampling.fit(picture.width(), picture.height(), self.wanted.len());
        let picture =
            if (width, height) == picture.dimensions() { picture } else { thumbnail(&picture, width, height) };
        EncodedImage::from_rgb(width, height, picture.into_raw()).ok()
    }
}
