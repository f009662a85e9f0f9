//! Gather: copies all rows, or rows at given indices, for example the rows of a window or the row of
//! each sequence's last token.

use bursar_budgets::Bytes;

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
        check::index_list(OP, "rows", rows)?;
        self.copy_to(OP, x, Some(rows), out)
    }

    /// Copies all rows of `x` `[rows, columns]` to `out` `[rows, columns]`. Both may have gaps
    /// between their rows.
    pub fn copy_rows_into(&self, x: &Tensor<'_>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        self.copy_to("copy_rows", x, None, out)
    }

    fn copy_to(
        &self,
        op: &'static str,
        x: &Tensor<'_>,
        rows: Option<&Tensor<'_>>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        check::activation(op, "x", x, self.target().activation())?;
        check::activation(op, "out", out, self.target().activation())?;
        check::writable(op, "out", out);
        check::shape(op, "out", out, [rows.unwrap_or(x).rows(), x.columns()])?;
        let work = Work::over(0, &[out, out]);
        self.count(Work { bytes: work.bytes + rows.map_or(Bytes::ZERO, Tensor::bytes), ..work });
        self.backend.gather_rows(calls::GatherRows { x: x.view(), rows: rows.map(Tensor::view), out: out.view() })
    }
}
