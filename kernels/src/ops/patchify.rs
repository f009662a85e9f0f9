//! Patches: pictures as bytes, cut into the rows that a vision encoder reads and normalised on the way. Bytes are what
//! crosses to the device: an eighth of the f32 patches that they become, and a still picture's frame crosses once.

use crate::{Backend, DType, KernelError, Scope, Tensor, Work};

use super::check;

/// Red, green and blue.
pub const CHANNELS: usize = 3;

/// Numbers that say where a picture lies: its first byte, patches down, patches across, frames.
pub const LAYOUT_NUMBERS: usize = 4;

/// Numbers that a picture's levels are normalised by: a factor, then the shift and then the scale of each channel.
pub const LEVEL_NUMBERS: usize = 1 + 2 * CHANNELS;

/// What one patch covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchSize {
    /// Pixels of its side.
    pub side: usize,
    /// Frames; where a picture has fewer its last is repeated.
    pub frames: usize,
}

impl PatchSize {
    /// Values of one patch: `channels x frames x side x side`.
    pub fn values(&self) -> usize {
        CHANNELS * self.frames * self.side * self.side
    }
}

/// Pictures of one launch, and where in them each row of the output lies. A step of a video is a picture of several
/// frames.
#[derive(Debug)]
pub struct Pixels<'m> {
    /// `[bytes]` u8, fewer than 2^32: red, green and blue of a pixel, pixels of a row, rows of a frame, frames of a
    /// picture.
    pub bytes: Tensor<'m>,
    /// `[pictures, LAYOUT_NUMBERS]` u32. A picture's frames lie one behind the other in `bytes`.
    pub layout: Tensor<'m>,
    /// `[pictures, LEVEL_NUMBERS]` f32.
    pub levels: Tensor<'m>,
    /// `[3, patches]` u32: the picture of each row of the output, and the patch's row and column in it.
    pub places: Tensor<'m>,
}

/// What a backend is asked to compute:
/// `out[i][channel][frame][y][x] = (level * factor - shift[channel]) / scale[channel]` of the pixel `(y, x)` of patch
/// `places[.., i]`, in single precision and in this order, then narrowed to activations.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[bytes]` u8.
    pub bytes: Tensor<'a>,
    /// `[pictures, LAYOUT_NUMBERS]` u32; frames are at least one and at most `size.frames`.
    pub layout: Tensor<'a>,
    /// `[pictures, LEVEL_NUMBERS]` f32.
    pub levels: Tensor<'a>,
    /// `[3, patches]` u32: picture, row, column.
    pub places: Tensor<'a>,
    /// What a patch covers.
    pub size: PatchSize,
    /// `[patches, CHANNELS * frames * side * side]` activations, contiguous.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Cuts `pixels` into `out` `[patches, size.values()]`. It is the caller's so that the bytes can be given back before
    /// the patches are read.
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
