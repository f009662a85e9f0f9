//! Copies between host and device, except those that run concurrently with passes (`copy_blocks`).

use std::{fmt, marker::PhantomData};

use bursar_budgets::Bytes;

use crate::{
    Backend, DType, Element, KernelError, Scope, Shape, Tensor, Work,
    calls::{self, Arrival},
};

use super::check;

/// Elements that are being copied to the host while host and device continue.
#[must_use = "only `wait` returns the downloaded elements"]
pub struct Later<E> {
    arrival: Box<dyn Arrival>,
    elements: usize,
    host: PhantomData<E>,
}

impl<E: Element> Later<E> {
    /// Returns `true` if [`wait`](Later::wait) would return at once.
    pub fn is_ready(&self) -> bool {
        self.arrival.is_ready()
    }

    /// Waits until the device has finished the copy, and therefore all earlier work,
    /// and returns the elements.
    ///
    /// # Errors
    /// Any error that the device reports for that work.
    pub fn wait(self) -> Result<Vec<E>, KernelError> {
        let mut elements = vec![E::default(); self.elements];
        self.arrival.wait(as_bytes_mut(&mut elements))?;
        Ok(elements)
    }
}

/// Prints the count, never the elements.
impl<E> fmt::Debug for Later<E> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Later({} elements)", self.elements)
    }
}

impl<B: Backend> Scope<'_, B> {
    /// Copies `elements` to the device as a tensor of `shape`. Panics if the number of elements
    /// does not match `shape`.
    pub fn upload<E: Element>(&self, shape: impl Into<Shape>, elements: &[E]) -> Result<Tensor<'_>, KernelError> {
        let shape = shape.into();
        assert_eq!(shape.elements(), elements.len(), "upload of {} elements as {shape}", elements.len());
        let out = self.take(shape, E::DTYPE)?;
        self.count(Work::over(0, &[&out]));
        self.backend.upload(calls::Upload { source: as_bytes(elements), out: out.view() })?;
        Ok(out)
    }

    /// Copies `elements` to `out`, which outlives the pass; see [`fill_elements`]. The copy is not
    /// counted as work, because its size depends on more than shapes, and a plan knows only shapes.
    pub fn upload_into<E: Element>(&self, elements: &[E], out: &mut Tensor<'_>) -> Result<(), KernelError> {
        fill_elements(self.backend, elements, out)
    }

    /// Copies `parts` to the device one after another, as `[elements of all parts]`, so that the
    /// host does not have to join them first.
    pub fn upload_parts<E: Element>(&self, parts: &[&[E]]) -> Result<Tensor<'_>, KernelError> {
        let mut out = self.take([parts.iter().map(|part| part.len()).sum()], E::DTYPE)?;
        self.count(Work::over(0, &[&out]));
        let mut first = 0;
        for part in parts {
            let place = out.row_range_mut(first..first + part.len());
            self.backend.upload(calls::Upload { source: as_bytes(part), out: place })?;
            first += part.len();
        }
        Ok(out)
    }

    /// Copies a contiguous tensor of `E` to the host once all earlier work is done.
    pub fn download<E: Element>(&self, source: &Tensor<'_>) -> Result<Vec<E>, KernelError> {
        check_source::<E>("download", source)?;
        self.count(Work::over(0, &[source]));
        let mut elements = vec![E::default(); source.shape().elements()];
        self.backend.download(calls::Download { source: source.view(), out: as_bytes_mut(&mut elements) })?;
        Ok(elements)
    }

    /// Starts copying a contiguous tensor of `E` to the host, ordered after all earlier work, and
    /// returns without waiting. Later calls may overwrite `source`, and its scope may end, because
    /// the copy is ordered before all later work.
    pub fn download_later<E: Element>(&self, source: &Tensor<'_>) -> Result<Later<E>, KernelError> {
        check_source::<E>("download_later", source)?;
        self.count(Work::over(0, &[source]));
        let arrival = self.backend.download_later(calls::DownloadLater { source: source.view() })?;
        Ok(Later { arrival, elements: source.shape().elements(), host: PhantomData })
    }

    /// Returns an empty download that completes when all earlier work has completed.
    pub fn moment(&self) -> Result<Later<u32>, KernelError> {
        let nothing = self.take([0], DType::U32)?;
        self.download_later(&nothing)
    }
}

fn check_source<E: Element>(op: &'static str, source: &Tensor<'_>) -> Result<(), KernelError> {
    if source.dtype() != E::DTYPE {
        return Err(KernelError::Type { op, what: "source", expected: "the host's type", found: source.dtype() });
    }
    check::holds(source.is_contiguous(), op, "source", source, "contiguous rows")
}

/// Copies `source`, the bytes of `out`'s elements row by row, into `out`. This function is called
/// outside any pass, to load weights.
pub fn fill<B: Backend>(backend: &B, source: &[u8], out: &mut Tensor<'_>) -> Result<(), KernelError> {
    const OP: &str = "fill";
    check::writable(OP, "out", out);
    check::holds(out.is_contiguous(), OP, "out", out, "contiguous rows")?;
    check::holds(out.bytes() == Bytes::of_slice(source), OP, "out", out, "as many bytes as the source")?;
    backend.upload(calls::Upload { source, out: out.view() })
}

/// Copies `elements` to `out`, which must have the same number and type of elements. This function
/// updates the inputs of captured graphs, whose addresses are fixed.
///
/// # Errors
/// The errors of [`fill`], and an error if the types differ.
pub fn fill_elements<B: Backend, E: Element>(
    backend: &B,
    elements: &[E],
    out: &mut Tensor<'_>,
) -> Result<(), KernelError> {
    if out.dtype() != E::DTYPE {
        return Err(KernelError::Type {
            op: "fill_elements",
            what: "out",
            expected: "the host's type",
            found: out.dtype(),
        });
    }
    fill(backend, as_bytes(elements), out)
}

/// Waits until the device has finished all work that `backend` was given. Call this function before
/// freeing memory that the device may still write.
///
/// # Errors
/// Any error that the device reports for that work.
pub fn settle<B: Backend>(backend: &B) -> Result<(), KernelError> {
    // An empty download copies nothing, and completes when all earlier work has completed.
    let nothing = Tensor::over(bursar_budgets::Address(64), [0].into(), DType::U32);
    backend.download_later(calls::DownloadLater { source: nothing })?.wait(&mut [])
}

fn as_bytes<E: Element>(elements: &[E]) -> &[u8] {
    // SAFETY: an `Element` is plain data without padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn as_bytes_mut<E: Element>(elements: &mut [E]) -> &mut [u8] {
    // SAFETY: an `Element` is plain data without padding for which every bit pattern is valid, and
    // bytes have no alignment.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}
