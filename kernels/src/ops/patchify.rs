//! Patches: picture bytes are cut into the rows that a vision encoder reads, and are normalized.
//! For a still picture and patches of two frames, uploading bytes moves an eighth of the data that
//! f32 patches would take: a byte is a quarter of an f32, and the frame is uploaded once, not once
//! per patch frame.

use crate::{Backend, DType, KernelError, Scope, Tensor, Work, calls};

use super::check;

pub use crate::calls::{CHANNELS, LAYOUT_NUMBERS, LEVEL_NUMBERS, PatchSize};

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
        self.backend.patchify(calls::Patchify {
            bytes: bytes.view(),
            layout: layout.view(),
            levels: levels.view(),
            places: places.view(),
            size,
            out: out.view(),
        })
    }
}
