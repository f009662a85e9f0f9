//! The causal convolution before a gated delta net, as in Mamba (Gu and Dao 2023, arXiv
//! 2312.00752), with the last inputs of each sequence kept in its state.

use crate::{Backend, KernelError, Scope, StateLayer, Tensor, Work, calls};

use super::{check, gated_delta::check_sequences};

impl<B: Backend> Scope<'_, B> {
    /// Convolves the rows of each sequence in `x` `[tokens, channels]` with `weight`
    /// `[channels, width]`, applies SiLU, and updates the states in `layer`. Returns
    /// `[tokens, channels]`.
    pub fn causal_conv(
        &self,
        x: &Tensor<'_>,
        weight: &Tensor<'_>,
        layer: &StateLayer,
        sequences: &calls::StateSequences<'_>,
    ) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "causal_conv";
        let shape = layer.shape();
        check::activation(OP, "x", x, self.target().activation())?;
        check::shape(OP, "x", x, [x.rows(), shape.channels])?;
        check::weight(OP, "weight", weight, self.target())?;
        check::shape(OP, "weight", weight, [shape.channels, shape.conv_rows + 1])?;
        check_sequences(OP, sequences, x.rows())?;
        let out = self.empty([x.rows(), shape.channels])?;
        let mut work = Work::over((2 * weight.shape().elements() * x.rows()) as u64, &[x, weight, &out]);
        work.bytes += shape.conv_bytes() * 2 * sequences.writes.rows() as u64;
        self.count(work);
        self.backend.causal_conv(calls::CausalConv {
            x: x.view(),
            weight: weight.view(),
            layer,
            sequences,
            out: out.view(),
        })?;
        Ok(out)
    }
}
