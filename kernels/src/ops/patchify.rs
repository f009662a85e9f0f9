//! Patches: picture bytes, cut into the rows that a vision encoder reads and normalized.
//! Uploading bytes moves an eighth of the data that f32 patches would take, and the frame of a
//! still picture is uploaded once.

use crate::{Backend, DType, KernelError, Scope, Tensor, Work};

use super::check;

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
    /// Pixels per side.
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

/// The pictures of one launch, and the patch of each output row. A time step of a video is a
/// picture of several frames.
#[derive(Debug)]
pub struct Pixels<'m> {
    /// `[bytes]` u8, fewer than 2^32. From the innermost: red, green and blue of a pixel, pixels of
    /// a row, rows of a frame, frames of a picture.
    pub bytes: Tensor<'m>,
    /// `[pictures, LAYOUT_NUMBERS]` u32. A picture's frames are consecutive in `bytes`.
    pub layout: Tensor<'m>,
    /// `[pictures, LEVEL_NUMBERS]` f32.
    pub levels: Tensor<'m>,
    /// `[3, patches]` u32: for each row of the output, the picture, and the patch's row and
    /// column in the picture.
    pub places: Tensor<'m>,
}

/// Computes `out[i][channel][frame][y][x] = (level * factor - shift[channel]) / scale[channel]` for
/// the pixel `(y, x)` of patch `places[.., i]`, in single precision and in this order, then
/// converts it to activations.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[bytes]` u8.
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

impl<B: Backend> Scope<'_, B> {
    /// Cuts `pixels` into `out` `[patches, size.values()]`. `out` is a parameter, so that the
    /// caller can free the bytes before the patches are read.
    pub fn patchify(&self, pixels: &Pixels<'_>, size: PatchSize, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        const OP: &str = "patchify";
        let Pixels { bytes, layout, levels, places } = pixels;
        for (what, tensor, dtype, expected) in
            [("bytes", bytes, DType::U8, "u8 levels"), ("levels", levels, DType::F32, "f32")]
        {
            if tensor.dtype() != dtype {
                return Err(KernelError::Type { op: OP, what, expected, found: tensor.dtype() });
            }
        }
        check::shape(OP, "bytes", bytes, [bytes.rows()])?;
        check::holds(u32::try_from(bytes.rows()).is_ok(), OP, "bytes", bytes, "fewer than 2^32 bytes")?;
        check::indices(OP, "layout", layout)?;
        check::shape(OP, "layout", layout, [layout.rows(), LAYOUT_NUMBERS])?;
        check::shape(OP, "levels", levels, [layout.rows(), LEVEL_NUMBERS])?;
        check::indices(OP, "places", places)?;
        check::shape(OP, "places", places, [3, out.rows()])?;
        check::activation(OP, "out", out, self.target().activation())?;
        check::writable(OP, "out", out);
        check::holds(out.is_contiguous(), OP, "out", out, "contiguous rows")?;
        check::shape(OP, "out", out, [out.rows(), size.values()])?;
        check::holds(size.values() > 0, OP, "out", out, "patches of at least one value")?;
        let flops = 3 * out.shape().elements() as u64;
        self.count(Work::over(flops, &[bytes, layout, levels, places, out]));
        self.backend.patchify(Call {
            bytes: bytes.view(),
            layout: layout.view(),
            levels: levels.view(),
            places: places.view(),
            size,
            out: out.view(),
        })
    }
}
