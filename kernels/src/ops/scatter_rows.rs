//! Scatter: writes rows to given indices, for example picture embeddings to the prompt's
//! placeholders, or rows of windows back to their original order.

use crate::{Backend, KernelError, Scope, Tensor, Work};

use super::check;

/// Computes `out[rows[i]] = x[i]`. Each row of `out` occurs at most once in `rows`.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[chosen, columns]` activations.
    pub x: Tensor<'a>,
    /// `[chosen]` u32, each below the number of rows of `out`.
    pub rows: Tensor<'a>,
    /// `[rows, columns]` activations. Rows that are not in `rows` keep their contents.
    pub out: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Writes the rows of `x` `[chosen, columns]` to the rows of `out` at
    /// the indices `rows` `[chosen]`.
    pub fn scatter_rows(&self, x: &Tensor<'_>, rows: &Tensor<'_>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        const OP: &str = "scatter_rows";
        check::activation(OP, "x", x, self.target().activation())?;
        check::activation(OP, "out", out, self.target().activation())?;
        check::writable(OP, "out", out);
        check::indices(OP, "rows", rows)?;
        check::shape(OP, "rows", rows, [x.rows()])?;
        check::holds(x.columns() == out.columns(), OP, "x", x, "as many columns as the output")?;
        self.count(Work::over(0, &[x, x, rows]));
        self.backend.scatter_rows(Call { x: x.view(), rows: rows.view(), out: out.view() })
    }
}
