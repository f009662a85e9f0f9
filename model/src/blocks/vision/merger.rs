//! A merger, at the end of a vision tower or after one of its blocks (DeepStack): each square of
//! patches becomes one row.

use bursar_kernels::{Backend, KernelError, Scope, Tensor, ops::gelu::Gelu};

use crate::{
    MergeSize,
    blocks::layer_norm::LayerNorm,
    weights::{Linear, WeightError, WeightMap},
};

#[derive(Clone, Copy)]
pub struct MergerSizes {
    /// Width of a patch.
    pub hidden: usize,
    pub merge: MergeSize,
    /// Width of the intermediate rows between the two matrices.
    pub middle: usize,
    /// Width of an embedding.
    pub out: usize,
    /// Epsilon that the norm adds to the variance.
    pub epsilon: f32,
    pub normed: Normed,
}

/// The rows that a merger normalizes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Normed {
    /// Each patch, before the patches of a square are joined into one row.
    Patches,
    /// The joined row of a square.
    Squares,
}

pub struct Merger {
    sizes: MergerSizes,
    norm: LayerNorm,
    up: Linear,   // [middle, square]
    down: Linear, // [out, middle]
}

impl MergerSizes {
    /// Width of a row that joins the patches of a square.
    pub fn square(&self) -> usize {
        self.merge.patches(self.hidden)
    }
}

impl Merger {
    /// Claims the weights of the norm and of both matrices.
    pub fn claim(map: &mut WeightMap<'_>, sizes: MergerSizes, names: [&str; 3]) -> Result<Self, WeightError> {
        let ([norm, up, down], square) = (names, sizes.square());
        let normed = if sizes.normed == Normed::Patches { sizes.hidden } else { square };
        Ok(Merger {
            sizes,
            norm: LayerNorm::claim(map, norm, normed, sizes.epsilon)?,
            up: map.linear(up, sizes.middle, square, true)?,
            down: map.linear(down, sizes.out, sizes.middle, true)?,
        })
    }

    /// Merges `hidden` `[patches, hidden]` and writes the embeddings to the rows `rows`
    /// `[embeddings]` of `out` `[any, out]`.
    pub fn scatter<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        hidden: &Tensor<'_>,
        rows: &Tensor<'_>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let squares = [rows.rows(), self.sizes.square()];
        let normed = match self.sizes.normed {
            Normed::Patches => self.norm.forward(&scope, hidden)?.into_shape(squares),
            Normed::Squares => self.norm.forward(&scope, &hidden.reshape(squares))?,
        };
        let mut widened = self.up.forward(&scope, &normed)?; // [embeddings, middle]
        scope.gelu(&mut widened, Gelu::Erf)?;
        let embeddings = self.down.forward(&scope, &widened)?; // [embeddings, out]
        scope.scatter_rows(&embeddings, rows, out)
    }
}
