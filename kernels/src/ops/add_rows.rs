//! Addition of rows at given indices. Models use this operation to add features of a vision
//! encoder's middle layers to the picture tokens in the first layers of the language model.

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Adds the rows of `x` `[n, columns]` at the indices `from` `[chosen]` to the rows
    /// of `out` `[rows, columns]` at the indices `to` `[chosen]`. `x` and `out` may have
    /// gaps between their rows.
    pub fn add_rows(
        &self,
        x: &Tensor<'_>,
        from: &Tensor<'_>,
        to: &Tensor<'_>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        const OP: &str = "add_rows";
        check::activation(OP, "x", x, self.target().activation())?;
        check::activation(OP, "out", out, self.target().activation())?;
        check::writable(OP, "out", out);
        check::index_list(OP, "from", from)?;
        check::indices(OP, "to", to)?;
        check::shape(OP, "to", to, [from.rows()])?;
        check::holds(x.columns() == out.columns(), OP, "x", x, "as many columns as the output")?;
        let elements = from.rows() * out.columns();
        let bytes = out.dtype().bytes(3 * elements) + from.bytes() + to.bytes();
        self.count(Work { flops: elements as u64, bytes, ..Work::default() });
        self.backend.add_rows(calls::AddRows { x: x.view(), from: from.view(), to: to.view(), out: out.view() })
    }
}
