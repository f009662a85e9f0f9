//! The result of the mixer of a decoder layer.

use bursar_kernels::Tensor;

pub struct Mixed<'s> {
    /// `[tokens, width]`: the input of the mixer's output projection.
    pub rows: Tensor<'s>,
    /// Memory whose contents nothing reads any more, with at least as many elements as `rows`.
    pub spare: Tensor<'s>,
}
