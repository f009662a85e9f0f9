//! Scatter: writes rows to given indices, for example picture embeddings to the prompt's
//! placeholders, or rows of windows back to their original order.

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

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
        self.backend.scatter_rows(calls::ScatterRows { x: x.view(), rows: rows.view(), out: out.view() })
    }
}
