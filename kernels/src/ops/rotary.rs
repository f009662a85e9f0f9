//! Rotary position embedding (Su et al., 2021, arXiv 2104.09864), with several position axes for pictures (multimodal
//! rotary positions of Qwen2-VL, arXiv 2409.12191).

use crate::{Backend, DType, KernelError, Scope, Tensor, Work};

use super::check;

/// The angle that each pair of elements rotates by, per position.
#[derive(Debug)]
pub struct Rope<'m> {
    /// `[head_dim / 2]` f32: radians per position for each pair.
    pub frequencies: Tensor<'m>,
    /// Consecutive pairs that follow each position axis; they sum to `head_dim / 2`.
    pub sections: Vec<usize>,
}

/// Rotates, in each of the first `heads` heads of a row, the pair of element `i` and element `i + head_dim / 2` by
/// `positions[axis of i][row] * frequencies[i]` (the halves convention).
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, at least heads * head_dim]` activations, changed in place.
    pub x: Tensor<'a>,
    /// Heads to rotate; the columns after them are unchanged.
    pub heads: usize,
    /// `[axes, rows]` u32.
    pub positions: Tensor<'a>,
    /// `[head_dim / 2]` f32.
    pub frequencies: Tensor<'a>,
    /// Pairs per axis.
    pub sections: &'a [usize],
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
        check::holds(heads * pairs * 2 <= x.columns(), OP, "x", x, "as many heads as are to be turned")?;
        let turned = x.rows() * heads * pairs * 2;
        self.count(Work { flops: 3 * turned as u64, bytes: x.dtype().bytes(2 * turned) + positions.bytes() });
        self.backend.rotary(Call {
            x: x.view(),
            heads,
            positions: positions.view(),
            frequencies: rope.frequencies.view(),
            sections: &rope.sections,
        })
    }
}

/// `positions` and `rope` must fit the rows of `x`.
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
    check::shape(op, "positions", positions, [rope.sections.len(), x.rows()])?;
    let expected = "as many pairs as the sections have together";
    check::holds(rope.sections.iter().sum::<usize>() == pairs, op, "frequencies", &rope.frequencies, expected)
}
