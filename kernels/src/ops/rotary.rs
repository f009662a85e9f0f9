//! Rotary position embedding (Su et al., 2021, arXiv 2104.09864), with several position axes for
//! pictures (multimodal rotary positions of Qwen2-VL, arXiv 2409.12191).

use crate::{Backend, DType, KernelError, Scope, Tensor, Work, calls};

use super::{check, rms_norm::RmsNorm};

pub use crate::calls::PairAxes;

/// The frequency and the position axis of each pair of elements.
#[derive(Debug)]
pub struct Rope<'m> {
    /// `[pairs]` f32: radians per position for each pair. Only the first `2 * pairs` elements of a
    /// head are rotated.
    pub frequencies: Tensor<'m>,
    /// The position axis that each pair uses.
    pub axes: PairAxes,
}

impl<B: Backend> Scope<'_, B> {
    /// Rotates the first `heads` heads of every row of `x` by `positions` `[axes, rows]`, in place.
    /// Each head is first normalized if there is a `norm`, whose weight is `[head_dim]`.
    pub fn rotary(
        &self,
        x: &mut Tensor<'_>,
        heads: usize,
        norm: Option<RmsNorm<'_>>,
        positions: &Tensor<'_>,
        rope: &Rope<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "rotary";
        let pairs = rope.frequencies.rows();
        if let Some(RmsNorm { weight, .. }) = norm {
            check::weight(OP, "norm", weight, self.target())?;
            check::shape(OP, "norm", weight, [2 * pairs])?;
        }
        check::activation(OP, "x", x, self.target().activation())?;
        check::writable(OP, "x", x);
        check_rope(OP, x, positions, rope)?;
        check::holds(heads * pairs * 2 <= x.columns(), OP, "x", x, "at least as many heads as are to be rotated")?;
        let turned = x.rows() * heads * pairs * 2;
        let bytes = x.dtype().bytes(2 * turned) + positions.bytes();
        self.count(Work { flops: 3 * turned as u64, bytes, ..Work::default() });
        self.backend.rotary(calls::Rotary {
            x: x.view(),
            heads,
            norm: norm.map(|norm| calls::HeadNorm {
                weight: norm.weight.view(),
                weight_offset: norm.weight_offset,
                epsilon: norm.epsilon,
            }),
            positions: positions.view(),
            frequencies: rope.frequencies.view(),
            axes: &rope.axes,
        })
    }
}

/// Checks that `positions` and `rope` fit the rows of `x`.
pub(super) fn check_rope(
    op: &'static str,
    x: &Tensor<'_>,
    positions: &Tensor<'_>,
    rope: &Rope<'_>,
) -> Result<(), KernelError> {
    let pairs = rope.frequencies.rows();
    if rope.frequencies.dtype() != DType::F32 {
        let found = rope.frequencies.dtype();
        return Err(KernelError::Type { op, what: "frequencies", expected: "f32", found });
    }
    check::shape(op, "frequencies", &rope.frequencies, [pairs])?;
    check::holds(pairs > 0, op, "frequencies", &rope.frequencies, "at least one pair")?;
    check::indices(op, "positions", positions)?;
    check::shape(op, "positions", positions, [rope.axes.count(), x.rows()])?;
    check::holds(rope.axes.fit(pairs), op, "frequencies", &rope.frequencies, "as many pairs as the axes define")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rotary_axes_alternate_by_frequency() {
        // `Qwen3VLTextRotaryEmbedding.recomposition_frequencies`, transformers 5.17: at first all
        // pairs use the time axis. Then every third pair from pair 1 on is changed to height, and
        // every third pair from pair 2 on to width.
        for (pairs, [_, second, third]) in [(64, [24, 20, 20]), (16, [6, 5, 5]), (64, [64, 0, 0])] {
            let mut expected = vec![0; pairs];
            (1..3 * second).step_by(3).for_each(|pair| expected[pair] = 1);
            (2..3 * third).step_by(3).for_each(|pair| expected[pair] = 2);
            let axes = PairAxes::Interleaved(second, third);
            assert_eq!(axes.of_pairs(pairs), expected);
            assert!(axes.fit(pairs));
        }
        assert!(!PairAxes::Interleaved(22, 20).fit(64) && !PairAxes::Interleaved(20, 22).fit(64));
    }
}
