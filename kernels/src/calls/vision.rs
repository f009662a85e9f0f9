//! Input of a vision encoder.

use crate::Tensor;

/// Color channels: red, green and blue.
pub const CHANNELS: usize = 3;

/// Numbers that locate a picture: its first byte, patches down, patches across, frames.
pub const LAYOUT_NUMBERS: usize = 4;

/// Numbers that normalize a picture's color levels: a factor, then each channel's shift,
/// then each channel's scale.
pub const LEVEL_NUMBERS: usize = 1 + 2 * CHANNELS;

/// The size of one patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchSize {
    /// Pixels along each side of the square patch.
    pub side: usize,
    /// Frames per patch. If a picture has fewer frames, its last frame is repeated.
    pub frames: usize,
}

impl PatchSize {
    /// Returns the number of values per patch: `channels x frames x side x side`.
    pub fn values(&self) -> usize {
        CHANNELS * self.frames * self.side * self.side
    }
}

/// Computes `out[i][channel][frame][y][x] = (level * factor - shift[channel]) / scale[channel]` for
/// the pixel `(y, x)` of patch `places[.., i]`, in single precision and in this order, then
/// converts it to activations.
#[non_exhaustive]
pub struct Patchify<'a> {
    /// `[bytes]` u8: the color levels of all pictures.
    pub bytes: Tensor<'a>,
    /// `[pictures, LAYOUT_NUMBERS]` u32. The number of frames is 1 to `size.frames`.
    pub layout: Tensor<'a>,
    /// `[pictures, LEVEL_NUMBERS]` f32.
    pub levels: Tensor<'a>,
    /// `[3, patches]` u32: picture, row, column.
    pub places: Tensor<'a>,
    pub size: PatchSize,
    /// `[patches, CHANNELS * frames * side * side]` activations, contiguous.
    pub out: Tensor<'a>,
}

/// Interpolates `out[i]` from the table at the position
/// `(row * (side - 1) / (rows - 1), column * (side - 1) / (columns - 1))`: the sum of the four
/// surrounding points, weighted by nearness. The corners of the picture coincide with the
/// corners of the grid. If a picture has only one row, this row lies on the grid's first row.
/// The same holds for columns.
///
/// Everything is computed in f32 in this order, and then rounded once. On each axis, where `index`
/// is the patch's row or column, and `count` is the number of patches down or across the picture:
///
/// `place = index * (side - 1) / max(count - 1, 1)`
///
/// The point at `floor(place)` has the weight `1 - (place - floor(place))`, and the next point has
/// 1 minus that weight. The last point counts as its own next point. The result is the sum of
/// `(row's weight * column's weight) * point`, starting with the two points of the first row.
#[non_exhaustive]
pub struct PositionGrid<'a> {
    /// `[side * side, hidden]`, floating point, contiguous: the rows of the grid one after another.
    pub table: Tensor<'a>,
    /// Points per side of the grid.
    pub side: usize,
    /// `[3, patches]` u32: picture, row, column.
    pub places: Tensor<'a>,
    /// `[pictures, LAYOUT_NUMBERS]` u32, of which only the patches down and across are read.
    pub layout: Tensor<'a>,
    /// `[patches, hidden]` activations.
    pub out: Tensor<'a>,
}
