//! Argmax: the index of each row's largest element, for greedy decoding without copying the
//! logits to the host.

use crate::{Backend, DType, KernelError, Scope, Tensor, Work, calls};

use super::check;

pub use crate::calls::NO_CHOICE;

impl<B: Backend> Scope<'_, B> {
    /// Returns the first index of the largest element in each row of `x` `[rows, columns]`, as
    /// `[rows]` u32. NaN is ignored, and a row that has only NaN gives [`NO_CHOICE`].
    pub fn argmax(&self, x: &Tensor<'_>) -> Result<Tensor<'_>, KernelError> {
        let mut out = self.take([x.rows()], DType::U32)?;
        self.argmax_into(x, &mut out)?;
        Ok(out)
    }

    /// Like [`argmax`](Scope::argmax), but writes to `out` `[rows]` u32, which outlives the pass.
    /// [`embed`](Scope::embed) in the next pass can read `out` as `previous`.
    pub fn argmax_into(&self, x: &Tensor<'_>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        self.argmax_of(x, None, out)
    }

    /// Like [`argmax_into`](Scope::argmax_into), but writes `ids[i]` in place of the index `i`.
    /// `ids` `[columns]` u32 has, for example, the token of each column of a reduced vocabulary.
    pub fn argmax_ids_into(&self, x: &Tensor<'_>, ids: &Tensor<'_>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        self.argmax_of(x, Some(ids), out)
    }

    fn argmax_of(&self, x: &Tensor<'_>, ids: Option<&Tensor<'_>>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        const OP: &str = "argmax";
        check::activation_or_f32(OP, "x", x, self.target())?;
        check::holds(x.columns() > 0, OP, "x", x, "at least one column")?;
        check::indices(OP, "out", out)?;
        check::shape(OP, "out", out, [x.rows()])?;
        check::writable(OP, "out", out);
        if let Some(ids) = ids {
            check::index_list(OP, "ids", ids)?;
            check::shape(OP, "ids", ids, [x.columns()])?;
        }
        self.count(Work::over(x.shape().elements() as u64, &[x, out]));
        self.backend.argmax(calls::Argmax { x: x.view(), ids: ids.map(Tensor::view), out: out.view() })
    }
}
