//! Gather: copies rows at given indices, for example the rows of a window or the row of
//! each sequence's last token.

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Copies the rows of `x` at the indices `rows` `[chosen]`, in
    /// that order. Returns `[chosen, columns]`.
    pub fn gather_rows(&self, x: &Tensor<'_>, rows: &Tensor<'_>) -> Result<Tensor<'_>, KernelError> {
        let mut out = self.empty([rows.rows(), x.columns()])?;
        self.gather_rows_into(x, rows, &mut out)?;
        Ok(out)
    }

    /// Like [`gather_rows`](Scope::gather_rows), but writes to `out` `[chosen, columns]`, which may
    /// have gaps between its rows.
    pub fn gather_rows_into(&self, x: &Tensor<'_>, rows: &Tensor<'_>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        const OP: &str = "gather_rows";
        check::activation(OP, "x", x, self.target().activation())?;
        check::index_list(OP, "rows", rows)?;
        check::activation(OP, "out", out, self.target().activation())?;
        check::writable(OP, "out", out);
        check::shape(OP, "out", out, [rows.rows(), x.columns()])?;
        self.count(Work::over(0, &[out, out, rows]));
        self.backend.gather_rows(calls::GatherRows { x: x.view(), rows: rows.view(), out: out.view() })
    }
}
