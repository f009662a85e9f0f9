//! Learned positions on a square grid, read between its points: what Qwen3-VL's vision encoder adds to its patches
//! (transformers 5.17, `vision_utils.py::get_vision_interpolation_indices_and_weights`, bilinear, corners aligned).

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::{check, patchify::LAYOUT_NUMBERS};

/// Computes `out[i]` as the table at `(row * (side - 1) / (rows - 1), column * (side - 1) / (columns - 1))`: the sum of
/// the four points around it, weighted by nearness. The corners of the picture lie on those of the grid; the only row
/// of a picture of one row lies on the grid's first, and so do columns.
///
/// All is f32 in this order, then rounded once: `place = index * (side - 1) / max(count - 1, 1)` on each axis; the
/// point before it counts `1 - (place - floor(place))` and the one behind it 1 minus that, where the last point is
/// behind itself; then the sum of `(row's weight * column's weight) * point`, the first row's two points first.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[side * side, hidden]`, floating point, contiguous: rows of the grid one after the other.
    pub table: Tensor<'a>,
    /// Points per side of the grid.
    pub side: usize,
    /// `[3, patches]` u32: picture, row, column.
    pub places: Tensor<'a>,
    /// `[pictures, LAYOUT_NUMBERS]` u32, of which the patches down and across are read.
    pub layout: Tensor<'a>,
    /// `[patches, hidden]` activations.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Reads the position of each patch from `table` `[side * side, hidden]` into `out` `[patches, hidden]`. `places`
    /// `[3, patches]` and `layout` `[pictures, LAYOUT_NUMBERS]` are those of
    /// [`Pixels`](super::patchify::Pixels).
    pub fn position_grid(
        &self,
        table: &Tensor<'_>,
        side: usize,
        places: &Tensor<'_>,
        layout: &Tensor<'_>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "position_grid";
        check::weight(OP, "table", table, self.target())?;
        check::holds(table.is_contiguous(), OP, "table", table, "contiguous rows")?;
        check::holds(side > 0 && side.checked_mul(side) == Some(table.rows()), OP, "table", table, "side * side rows")?;
        check::indices(OP, "layout", layout)?;
        check::shape(OP, "layout", layout, [layout.rows(), LAYOUT_NUMBERS])?;
        check::activation(OP, "out", out, self.target().activation())?;
        check::writable(OP, "out", out);
        check::shape(OP, "out", out, [out.rows(), table.columns()])?;
        check::indices(OP, "places", places)?;
        check::shape(OP, "places", places, [3, out.rows()])?;
        let flops = 7 * out.shape().elements() as u64;
        self.count(Work::over(flops, &[table, places, layout, out]));
        self.backend.position_grid(Call {
            table: table.view(),
            side,
            places: places.view(),
            layout: layout.view(),
            out: out.view(),
        })
    }
}
