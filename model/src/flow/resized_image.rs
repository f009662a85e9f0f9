//! A resized picture, ready to be cut into patches: its grid, and the hash that is its key
//! in the vision cache.

use std::{fmt, sync::Arc};

use bursar_budgets::Bytes;
use bursar_kernels::ops::patchify::{CHANNELS, LEVEL_NUMBERS, PatchSize};

use super::RgbImage;
use crate::MergeSize;

/// Patches along time, height and width. A still picture has one time step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Time steps, each of `temporal_patch_size` frames.
    pub t: u32,
    /// Patches from top to bottom.
    pub h: u32,
    /// Patches from left to right.
    pub w: u32,
}

impl Grid {
    /// `t * h * w`.
    pub fn patches(&self) -> usize {
        self.t as usize * self.h as usize * self.w as usize
    }

    /// Number of tokens of the picture in the prompt.
    pub fn tokens(&self, merge: MergeSize) -> usize {
        merge.tokens(self.patches())
    }

    /// Rows and columns of tokens in each time step.
    pub fn merged(&self, merge: MergeSize) -> (usize, usize) {
        (self.h as usize / merge.side(), self.w as usize / merge.side())
    }
}

/// How a picture's 8-bit levels become the encoder's input: `(level * factor - shift) / scale`, in
/// single precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Levels {
    /// Multiplier of each level.
    pub factor: f32,
    /// The number that is subtracted after the multiplication, per channel.
    pub shift: [f32; CHANNELS],
    /// The divisor after the subtraction, per channel.
    pub scale: [f32; CHANNELS],
}

impl Levels {
    /// The conversion that leaves levels unchanged.
    pub const PLAIN: Levels = Levels { factor: 1.0, shift: [0.0; CHANNELS], scale: [1.0; CHANNELS] };

    /// The numbers in the order that `patchify` reads them: factor, shifts, scales.
    pub fn numbers(&self) -> [f32; LEVEL_NUMBERS] {
        let ([red, green, blue], [wide_red, wide_green, wide_blue]) = (self.shift, self.scale);
        [self.factor, red, green, blue, wide_red, wide_green, wide_blue]
    }
}

/// A resized still picture, or one resized step of a video. `patchify` cuts it into patches
/// and normalizes it on the device, so the host stores and uploads bytes, not floats.
/// Cloning shares the bytes.
#[derive(Clone, PartialEq)]
pub struct ResizedImage {
    /// One frame of a still picture, or up to [`PatchSize::frames`] frames of a step of a
    /// video. `patchify` repeats the last frame in place of missing frames. Each frame has
    /// `grid.h x grid.w` patches.
    pub frames: Arc<[RgbImage]>,
    /// The grid of the patches, with `t` = 1.
    pub grid: Grid,
    pub levels: Levels,
}

impl ResizedImage {
    /// A black picture with as many frames as a patch covers ([`PatchSize::frames`]). No picture of
    /// the same grid has more bytes.
    pub fn blank(grid: Grid, size: PatchSize) -> Self {
        let side = size.side as u32;
        let (width, height) = (grid.w * side, grid.h * side);
        let bytes = CHANNELS * width as usize * height as usize;
        let frame = || RgbImage::new(width, height, vec![0; bytes]).expect("a grid has at least one patch");
        ResizedImage { frames: (0..size.frames).map(|_| frame()).collect(), grid, levels: Levels::PLAIN }
    }

    /// Host bytes of the frames.
    pub fn bytes(&self) -> Bytes {
        self.frames.iter().map(|frame| Bytes::of_slice(frame.data())).sum()
    }
}

/// Omits the pixels, which are the user's data.
impl fmt::Debug for ResizedImage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ResizedImage").field("grid", &self.grid).field("frames", &self.frames.len()).finish()
    }
}

/// BLAKE3 over everything that determines a picture's patches: the resized pixels, the grid
/// and the processor's settings.
///
/// Equal hashes mean equal encoder input, so requests share embeddings and prompt prefixes by this
/// hash. The hash is cryptographic (256 bits) because an attacker with a collision would get the
/// answer about another user's picture.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PictureHash(pub [u8; 32]);

impl fmt::Debug for PictureHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(formatter, "PictureHash({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_counts_its_patches_and_the_tokens_they_merge_into() {
        let grid = Grid { t: 3, h: 4, w: 10 };
        let tokens = |side| grid.tokens(MergeSize::new(side));
        assert_eq!((grid.patches(), tokens(2), tokens(1)), (120, 30, 120));
    }

    #[test]
    fn levels_reach_patchify_as_factor_shifts_and_scales() {
        let levels = Levels { factor: 2.0, shift: [3.0, 4.0, 5.0], scale: [6.0, 7.0, 8.0] };
        assert_eq!(levels.numbers(), [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    }

    #[test]
    fn a_blank_picture_covers_its_grid_in_every_frame() {
        let blank = ResizedImage::blank(Grid { t: 1, h: 2, w: 3 }, PatchSize { side: 14, frames: 2 });
        let sides: Vec<_> = blank.frames.iter().map(|frame| (frame.width(), frame.height())).collect();
        assert_eq!((sides, blank.bytes()), (vec![(42, 28); 2], Bytes(2 * 42 * 28 * 3)));
        assert_eq!(
            format!("{blank:?}"),
            "ResizedImage { grid: Grid { t: 1, h: 2, w: 3 }, frames: 2 }",
            "the debug output shows no pixels"
        );
    }

    #[test]
    fn a_hash_that_is_printed_shows_its_first_four_bytes() {
        let hash = PictureHash(std::array::from_fn(|index| 0xb0 + index as u8));
        assert_eq!(format!("{hash:?}"), "PictureHash(b0b1b2b3..)");
    }
}
