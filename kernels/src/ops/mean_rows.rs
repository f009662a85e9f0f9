//! Means of consecutive rows, such as the average pooling of a picture's patches.

use crate::{Backend, KernelError, Scope, Tensor, Work, calls};

use super::check;

impl<B: Backend> Scope<'_, B> {
    /// Returns `[rows / count, columns]`: the mean of every `count` consecutive rows of `x`
    /// `[rows, columns]`, computed in f32. `rows` is a multiple of `count`.
    pub fn mean_rows(&self, x: &Tensor<'_>, count: usize) -> Result<Tensor<'_>, KernelError> {
        const OP: &str = "mean_rows";
        check::activation(OP, "x", x, self.target().activation())?;
        let is_whole = count > 0 && x.rows().is_multiple_of(count);
        check::holds(is_whole, OP, "x", x, &format!("a multiple of {count} rows"))?;
        let out = self.empty([x.rows() / count, x.columns()])?;
        self.count(Work::over(x.shape().elements() as u64, &[x, &out]));
        self.backend.mean_rows(calls::MeanRows { x: x.view(), count, out: out.view() })?;
        Ok(out)
    }
}
