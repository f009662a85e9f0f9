//! Videos: frames as the user supplies them, and the grids that the placeholders of a prompt
//! represent.

use std::{fmt, sync::Arc};

use super::{EncodedImage, Grid, Tiles};
use crate::{EncoderCost, MergeSize};

/// A video: its frames, each as encoded bytes or as pixels, and the frame rate. Cloning shares the
/// frames. The frames are first checked when a request is planned.
#[derive(Clone, PartialEq)]
pub struct Video {
    frames: Arc<[EncodedImage]>,
    frames_per_second: f64,
}

impl Video {
    /// Takes frames in display order. `frames_per_second` is the rate of these frames, not of the
    /// original video from which they were sampled.
    pub fn new(frames: impl Into<Arc<[EncodedImage]>>, frames_per_second: f64) -> Self {
        Video { frames: frames.into(), frames_per_second }
    }

    /// The frames in display order.
    pub fn frames(&self) -> &[EncodedImage] {
        &self.frames
    }

    /// The rate of these frames.
    pub fn frames_per_second(&self) -> f64 {
        self.frames_per_second
    }
}

/// Omits the frames, which are the user's data.
impl fmt::Debug for Video {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: usize = self.frames.iter().map(|frame| frame.bytes().len()).sum();
        write!(formatter, "Video({} frames, {bytes} bytes, {} a second)", self.frames.len(), self.frames_per_second)
    }
}

/// A picture or a video of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Media {
    Image(EncodedImage),
    Video(Video),
}

/// The grids of the picture or video that one placeholder of a rendered prompt represents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MediaGrid {
    Image(Grid),
    /// A still picture in tiles. The vision encoder processes each tile as a picture.
    Tiles {
        /// The grid of each tile.
        tile: Grid,
        tiles: Tiles,
    },
    /// A video. The vision encoder processes one picture per time step.
    Video {
        /// The grid of each step, with `t` = 1.
        step: Grid,
        /// Number of time steps.
        steps: usize,
        /// Frames of the video. The last step may have fewer frames than the other steps.
        frames: usize,
        /// The rate of the frames. If a step has several frames, the rate of steps is lower.
        frames_per_second: f64,
    },
}

impl MediaGrid {
    /// Pictures that the vision encoder processes: 1, or one per tile or step.
    pub fn pictures(&self) -> usize {
        match self {
            MediaGrid::Image(_) => 1,
            MediaGrid::Tiles { tiles, .. } => tiles.count(),
            MediaGrid::Video { steps, .. } => *steps,
        }
    }

    /// The cost of each picture that the vision encoder processes.
    pub fn costs(&self, merge: MergeSize) -> impl Iterator<Item = EncoderCost> + use<> {
        std::iter::repeat_n(EncoderCost::of(self.each().patches(), merge), self.pictures())
    }

    /// The grid of each picture that the vision encoder processes.
    pub fn each(&self) -> Grid {
        match self {
            MediaGrid::Image(grid) | MediaGrid::Tiles { tile: grid, .. } | MediaGrid::Video { step: grid, .. } => *grid,
        }
    }

    /// Total patches of all tiles or steps.
    pub fn patches(&self) -> usize {
        self.each().patches() * self.pictures()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_video_that_is_printed_shows_nothing_of_its_frames() {
        let video = Video::new(vec![EncodedImage::named(b"my secret".to_vec(), "diary.png"); 3], 2.0);
        assert_eq!(format!("{video:?}"), "Video(3 frames, 27 bytes, 2 a second)");
    }

    #[test]
    fn a_video_keeps_its_frames_in_order_and_their_rate() {
        let frames = ["first", "second"].map(|name| EncodedImage::named(b"png".to_vec(), name));
        let video = Video::new(frames.clone(), 2.5);
        assert_eq!((video.frames(), video.frames_per_second()), (&frames[..], 2.5));
    }

    #[test]
    fn a_video_costs_a_picture_for_each_step_of_time() {
        let step = Grid { t: 1, h: 4, w: 6 };
        let picture = EncoderCost { patches: 24, rows: 6 };
        let image = MediaGrid::Image(step);
        assert_eq!((image.pictures(), image.patches()), (1, 24));
        assert_eq!(image.costs(MergeSize::new(2)).collect::<Vec<_>>(), [picture]);
        let tiles = Tiles { columns: 2, rows: 1, has_thumbnail: true };
        let tiled = MediaGrid::Tiles { tile: step, tiles };
        assert_eq!((tiled.pictures(), tiled.patches()), (3, 72));
        let video = MediaGrid::Video { step, steps: 3, frames: 5, frames_per_second: 2.0 };
        assert_eq!((video.pictures(), video.patches()), (3, 72));
        assert_eq!(video.costs(MergeSize::new(2)).collect::<Vec<_>>(), [picture; 3]);
    }
}
