//! Learned position embeddings of a square grid, interpolated between its points: the embeddings
//! that Qwen3-VL's vision encoder adds to its patches (transformers 5.17,
//! `vision_utils.py::get_vision_interpolation_indices_and_weights`, bilinear, corners aligned).

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::{check, patchify::LAYOUT_NUMBERS};

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
        self.backend.position_grid(calls::PositionGrid {
            table: table.view(),
            side,
            places: places.view(),
            layout: layout.view(),
            out: out.view(),
        })
    }
}
