//! Scopes: a scope is one frame of the workspace together with the backend that computes on it.

use bursar_budgets::{Bytes, Frame, Workspace};

use crate::{
    ActivationFormat, ActivationScratch, Activations, Backend, DType, KernelError, Quantization, QuantizedRows, Rank,
    Shape, Target, Tensor, Work, WorkCounter,
};

/// The frame from which a pass allocates its temporaries, and the backend that runs its operations.
///
/// A tensor that an operation returns lives in the scope that the operation was called on. An inner
/// [`scope`](Scope::scope) releases its memory when it is dropped, so the order in which model code
/// opens scopes *is* the memory plan. The operations are methods, one file each in [`crate::ops`].
///
/// ```
/// use bursar_budgets::Workspace;
/// use bursar_kernels::{DType, Plan, Scope, WorkCounter, Target};
///
/// let (workspace, counter) = (Workspace::dry(), WorkCounter::default());
/// let plan = Plan::new(Target::Cpu { threads: 2 });
/// let pass = Scope::new(&plan, &workspace, &counter);
/// let hidden = pass.upload([3, 64], &[0.0f32; 192])?; // [tokens, hidden]
/// {
///     let layer = pass.scope();
///     let halves = layer.silu_mul(&hidden)?; // [tokens, hidden / 2]
///     assert_eq!(halves.shape(), [3, 32].into());
/// }
/// assert_eq!(workspace.high_water().0, 768 + 512);
/// # Ok::<(), bursar_kernels::KernelError>(())
/// ```
pub struct Scope<'w, B> {
    pub(crate) backend: &'w B,
    frame: Frame<'w>,
    counter: &'w WorkCounter,
}

impl<'w, B: Backend> Scope<'w, B> {
    /// Opens the outermost scope of a pass.
    ///
    /// # Panics
    /// If a backend that computes is given a dry workspace, which has no memory.
    pub fn new(backend: &'w B, workspace: &'w Workspace, counter: &'w WorkCounter) -> Self {
        assert!(!B::COMPUTES || !workspace.is_dry(), "a dry workspace has no memory to compute on");
        Scope { backend, frame: workspace.frame(), counter }
    }

    /// Opens a scope within this one. While the inner scope lives, the outer
    /// scope cannot allocate memory.
    pub fn scope(&self) -> Scope<'_, B> {
        Scope { backend: self.backend, frame: self.frame.frame(), counter: self.counter }
    }

    /// Returns the machine that this pass is planned for or runs on.
    pub fn target(&self) -> &Target {
        self.backend.target()
    }

    /// Returns the rank of this device among the devices that compute a model together.
    pub fn rank(&self) -> Rank {
        self.backend.rank()
    }

    /// Notifies the other ranks that this rank takes part in no further collectives; see
    /// [`Backend::abort_collectives`].
    pub fn abort_collectives(&self) {
        self.backend.abort_collectives();
    }

    /// Allocates an uninitialized tensor of the target's activation type.
    pub fn empty(&self, shape: impl Into<Shape>) -> Result<Tensor<'_>, KernelError> {
        self.take(shape, self.target().activation())
    }

    /// Allocates an uninitialized tensor of `f32`. Logits are `f32` for every activation type.
    pub fn empty_f32(&self, shape: impl Into<Shape>) -> Result<Tensor<'_>, KernelError> {
        self.take(shape, DType::F32)
    }

    /// Allocates an uninitialized tensor of `u32`, for indices that operations return.
    pub fn empty_u32(&self, shape: impl Into<Shape>) -> Result<Tensor<'_>, KernelError> {
        self.take(shape, DType::U32)
    }

    pub(crate) fn take(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor<'_>, KernelError> {
        let shape = shape.into();
        let stretch = self.frame.take(dtype.bytes(shape.elements()))?;
        Ok(Tensor::over(stretch.address, shape, dtype))
    }

    /// Takes space from the workspace for activations `[rows, columns]` that are in one of
    /// `formats` at a time.
    pub fn activation_scratch(
        &self,
        formats: impl IntoIterator<Item = ActivationFormat>,
        rows: usize,
        columns: usize,
    ) -> Result<ActivationScratch<'_>, KernelError> {
        let mut of_all = (false, None);
        for format in formats {
            of_all.0 |= format.is_unquantized;
            let scales = format.quantization.map(|quantization| quantization.row_scales(columns));
            of_all.1 = of_all.1.max(scales);
        }
        let (is_unquantized, scales) = of_all;
        Ok(ActivationScratch {
            plain: is_unquantized.then(|| self.empty([rows, columns])).transpose()?,
            data: scales.map(|_| self.take([rows, columns], Quantization::ELEMENTS)).transpose()?,
            scales: scales.map(|of_row| self.empty_f32([rows, of_row])).transpose()?,
        })
    }

    /// Allocates uninitialized activations `[rows, columns]` in this format.
    pub(crate) fn empty_in(
        &self,
        format: ActivationFormat,
        rows: usize,
        columns: usize,
    ) -> Result<Activations<'_>, KernelError> {
        let plain = if format.is_unquantized { Some(self.empty([rows, columns])?) } else { None };
        let quantized = match format.quantization {
            Some(quantization) => Some(QuantizedRows {
                data: self.take([rows, columns], Quantization::ELEMENTS)?,
                scales: self.empty_f32([rows, quantization.row_scales(columns)])?,
                quantization,
            }),
            None => None,
        };
        Ok(Activations { plain, quantized })
    }

    /// Allocates scratch of a size that the target declared. The backend decides how to use it.
    /// Zero bytes allocate no memory.
    pub(crate) fn take_scratch(&self, bytes: Bytes) -> Result<Tensor<'_>, KernelError> {
        self.take([DType::F32.elements(bytes)], DType::F32)
    }

    /// Returns the bytes that are left in the workspace.
    pub(crate) fn left(&self) -> Bytes {
        let workspace = self.frame.workspace();
        workspace.capacity() - workspace.used()
    }

    pub(crate) fn count(&self, work: Work) {
        self.counter.add(work);
    }

    /// Counts the work of a GEMM whose activations are `x`.
    pub(crate) fn count_product(&self, x: &Activations<'_>, work: Work) {
        let is_quantized = x.quantized.is_some() && self.target().has_quantized_mma();
        self.count(Work { quantized_flops: if is_quantized { work.flops } else { 0 }, ..work });
    }
}
