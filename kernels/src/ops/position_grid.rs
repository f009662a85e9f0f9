//! Learned position embeddings of a square grid, interpolated between its points: the embeddings
//! that Qwen3-VL's vision encoder adds to its patches (transformers 5.17,
//! `vision_utils.py::get_vision_interpolation_indices_and_weights`, bilinear, corners aligned).

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::{check, patchify::LAYOUT_NUMBERS};

/// Interpolates `out[i]` from the table at the position
/// `(row * (side - 1) / (rows - 1), column * (side - 1) / (columns - 1))`: the sum of the four
/// surrounding points, weighted by nearness. The corners of the picture coincide with the
/// corners of the grid. If a picture has only one row, this row lies on the grid's first row.
/// The same holds for columns.
///
/// Everything is computed in f32 in this order, and then rounded once. On each axis:
///
/// `place = index * (side - 1) / max(count - 1, 1)`
///
/// The point at `floor(place)` has the weight `1 - (place - floor(place))`, and the next point has
/// 1 minus that weight. The last point counts as its own next point. The result is the sum of
/// `(row's weight * column's weight) * point`, starting with the two points of the first row.
#[non_exhaustive]
pub struct Call<'a> {
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

impl<B: Backend> Scope<'_, B> {
    /// Interpolates the position of each patch from `table` `[side * side, hidden]` into `out`
    /// `[patches, hidden]`. `places` `[3, patches]` and `layout` `[pictures, LAYOUT_NUMBERS]` are
    /// the tensors of [`Pixels`](super::patchify::Pixels).
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
