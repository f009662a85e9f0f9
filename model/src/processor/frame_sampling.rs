//! Selection of the frames of a video file that become the frames of a
//! [`Video`](crate::flow::Video).

use bursar_budgets::Bytes;

use super::error::VideoError;

/// Samples frames from a video file at even distances, so that a single rate determines the
/// time of every frame.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FrameSampling {
    /// Wanted frames per second.
    pub frames_per_second: f64,
    /// Maximum number of frames. A file with more frames at the wanted rate is sampled at a lower
    /// rate, over its full length.
    pub frames_max: usize,
    /// Maximum total size of the decoded frames, at three bytes per pixel. Frames are shrunk to
    /// fit.
    pub bytes_max: Bytes,
}

impl FrameSampling {
    /// Number of frames of a video file of `seconds` seconds, and their rate: frame `n` is shown at
    /// `n / rate` seconds.
    ///
    /// # Errors
    /// [`VideoError::FrameRate`] if the wanted rate is not above 0 and finite;
    /// [`VideoError::NoFrames`] if `frames_max` is 0.
    pub fn frames(&self, seconds: f64) -> Result<(usize, f64), VideoError> {
        let FrameSampling { frames_per_second, frames_max, .. } = *self;
        if !(frames_per_second.is_finite() && frames_per_second > 0.0) {
            return Err(VideoError::FrameRate { frames_per_second });
        }
        if frames_max == 0 {
            return Err(VideoError::NoFrames);
        }
        // Files store rounded lengths. Without this margin, a frame could be taken at the very end
        // of the video, where it is shown for no time.
        const ROUNDING: f64 = 1e-3;
        let wanted = (seconds.max(0.0) * frames_per_second - ROUNDING).ceil().max(1.0);
        if wanted <= frames_max as f64 {
            return Ok((wanted as usize, frames_per_second));
        }
        Ok((frames_max, frames_max as f64 / seconds))
    }

    /// Maximum pixels of each of `frames` frames.
    pub fn pixels(&self, frames: usize) -> u64 {
        (self.bytes_max.0 / 3 / frames.max(1) as u64).max(1)
    }

    /// Size at which each of `frames` frames is kept.
    pub(super) fn fit(&self, width: u32, height: u32, frames: usize) -> (u32, u32) {
        let pixels = u64::from(width) * u64::from(height);
        let scale = (self.pixels(frames) as f64 / pixels as f64).sqrt().min(1.0);
        let side = |side: u32| ((f64::from(side) * scale) as u32).max(1);
        (side(width), side(height))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: FrameSampling = FrameSampling { frames_per_second: 2.0, frames_max: 8, bytes_max: Bytes(1200) };

    #[test]
    fn frame_sampling_keeps_the_rate_until_the_frame_limit() {
        assert_eq!(TWO.frames(3.0), Ok((6, 2.0)));
        assert_eq!(TWO.frames(3.1), Ok((7, 2.0)));
        assert_eq!(TWO.frames(4.0), Ok((8, 2.0)));
        assert_eq!(TWO.frames(0.0), Ok((1, 2.0)), "a video of zero seconds has one frame");
        let (frames, rate) = TWO.frames(7200.0).expect("a long video is within the limits");
        assert_eq!((frames, frames as f64 / rate), (8, 7200.0));
        assert_eq!(FrameSampling { frames_per_second: 1e300, ..TWO }.frames(4.0), Ok((8, 2.0)));
    }

    #[test]
    fn an_invalid_frame_rate_is_refused() {
        for frames_per_second in [0.0, -1.0, f64::INFINITY] {
            let refused = FrameSampling { frames_per_second, ..TWO }.frames(1.0);
            assert_eq!(refused, Err(VideoError::FrameRate { frames_per_second }));
        }
        assert_eq!(FrameSampling { frames_max: 0, ..TWO }.frames(1.0), Err(VideoError::NoFrames));
    }

    #[test]
    fn a_large_frame_shrinks_and_keeps_its_aspect_ratio() {
        let fit = |width, height| TWO.fit(width, height, 4);
        assert_eq!((fit(10, 10), fit(40, 10), fit(1, 9)), ((10, 10), (20, 5), (1, 9)));
        assert_eq!(fit(100_000, 1), (3162, 1), "a side is never 0");
    }
}
