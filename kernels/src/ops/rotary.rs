//! Rotary position embedding (Su et al., 2021, arXiv 2104.09864), with several position axes for
//! pictures (multimodal rotary positions of Qwen2-VL, arXiv 2409.12191).

use crate::{Backend, DType, KernelError, Scope, Tensor, Work};

use super::check;

/// The rotation of each pair of elements, per position.
#[derive(Debug)]
pub struct Rope<'m> {
    /// `[head_dim / 2]` f32: radians per position for each pair.
    pub frequencies: Tensor<'m>,
    /// The axis of the position that each pair follows.
    pub axes: PairAxes,
}

/// The axis of a position that each pair of elements follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PairAxes {
    /// `sections[axis]` consecutive pairs follow each axis, and the sections together cover all
    /// pairs. If positions have one axis, there is one entry.
    Sections(Vec<usize>),
    /// Pairs 1, 4, 7, ... below `3 * .0` follow the second axis, and pairs 2, 5, 8,
    /// ... below `3 * .1` follow the third axis. All other pairs follow the first
    /// axis (Qwen3-VL, arXiv 2511.21631).
    Interleaved(usize, usize),
}

impl PairAxes {
    /// Returns the number of axes that a position must have.
    pub fn count(&self) -> usize {
        match self {
            PairAxes::Sections(sections) => sections.len(),
            PairAxes::Interleaved(..) => 3,
        }
    }

    /// Returns the axis of each of `pairs` pairs.
    pub fn of_pairs(&self, pairs: usize) -> Vec<usize> {
        match self {
            PairAxes::Sections(sections) => {
                let axes = sections.iter().enumerate().flat_map(|(axis, count)| std::iter::repeat_n(axis, *count));
                axes.take(pairs).collect()
            }
            PairAxes::Interleaved(second, third) => {
                let axis = |pair: usize| match pair % 3 {
                    1 if pair < 3 * second => 1,
                    2 if pair < 3 * third => 2,
                    _ => 0,
                };
                (0..pairs).map(axis).collect()
            }
        }
    }

    /// Returns `true` if the axes are defined for exactly `pairs` pairs.
    fn fit(&self, pairs: usize) -> bool {
        match self {
            PairAxes::Sections(sections) => sections.iter().sum::<usize>() == pairs,
            PairAxes::Interleaved(second, third) => 3 * second <= pairs + 1 && 3 * third <= pairs,
        }
    }
}

/// Rotates, in each of the first `heads` heads of a row, the pair of element `i` and element
/// `i + head_dim / 2` by `positions[axis of i][row] * frequencies[i]` (the halves convention).
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, at least heads * head_dim]` activations, changed in place.
    pub x: Tensor<'a>,
    /// Heads to rotate. The columns after them are unchanged.
    pub heads: usize,
    /// `[axes, rows]` u32.
    pub positions: Tensor<'a>,
    /// `[head_dim / 2]` f32.
    pub frequencies: Tensor<'a>,
    /// The axis that each pair follows.
    pub axes: &'a PairAxes,
}

impl<B: Backend> Scope<'_, B> {
    /// Rotates the first `heads` heads of every row of `x` by `positions` `[axes, rows]`, in place.
    pub fn rotary(
        &self,
        x: &mut Tensor<'_>,
        heads: usize,
        positions: &Tensor<'_>,
        rope: &Rope<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "rotary";
        let pairs = rope.frequencies.rows();
        check::activation(OP, "x", x, self.target().activation())?;
        check::writable(OP, "x", x);
        check_rope(OP, x, positions, rope)?;
        check::holds(heads * pairs * 2 <= x.columns(), OP, "x", x, "at least as many heads as are to be rotated")?;
        let turned = x.rows() * heads * pairs * 2;
        let bytes = x.dtype().bytes(2 * turned) + positions.bytes();
        self.count(Work { flops: 3 * turned as u64, bytes, ..Work::default() });
        self.backend.rotary(Call {
            x: x.view(),
            heads,
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
    check::holds(rope.axes.fit(pairs), op, "frequencies", &rope.frequencies, "as many pairs as have an axis")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_axes_are_those_of_qwen3_vl() {
        // `Qwen3VLTextRotaryEmbedding.recomposition_frequencies`, transformers 5.17: at
        // first all pairs follow time. Then every third pair is changed to height, and every
        // third pair to width.
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
