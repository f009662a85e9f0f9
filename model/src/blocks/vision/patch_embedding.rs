//! Patch embedding: a projection of the patches, and a table of learned positions on a grid.

use bursar_kernels::{Backend, KernelError, Scope, Tensor};

use super::{PackedImages, PatchPlaces};
use crate::weights::Linear;

/// The weights of a patch embedding with learned positions.
pub struct PatchEmbedding {
    /// `[hidden, values]`: the kernel and the bias of the patch convolution.
    pub projection: Linear,
    /// `[others + side * side, hidden]`: positions that do not belong to patches, then the
    /// positions of a square grid, row by row.
    pub table: Tensor<'static>,
    /// Number of positions in the table that do not belong to patches.
    pub others: usize,
    /// Positions along a side of the grid.
    pub side: usize,
}

impl PatchEmbedding {
    /// Cuts patches and returns their embeddings, `[patches, hidden]`: the position table, resized
    /// to the grid of each picture, plus the projected patches.
    pub fn forward<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &PackedImages,
        places: &PatchPlaces<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let mut hidden = scope.empty([batch.patches(), self.table.columns()])?;
        let grid = self.table.row_range(self.others..self.table.rows());
        scope.position_grid(&grid, self.side, &places.places, &places.layout, &mut hidden)?;
        let inner = scope.scope();
        let mut patches = inner.empty([batch.patches(), self.projection.weight.columns()])?;
        batch.cut(&inner, places, &mut patches)?;
        self.projection.forward_add(&inner, &patches, &mut hidden)?;
        drop(inner);
        Ok(hidden)
    }
}
