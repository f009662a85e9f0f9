//! Copies between host and device: the only ways across, all in plain sight.

use std::{fmt, marker::PhantomData};

use crate::{Backend, DType, Element, KernelError, Scope, Shape, Tensor, Work};

use super::check;

/// What a backend is asked to upload.
#[non_exhaustive]
pub struct Upload<'a> {
    /// The elements' bytes, row after row.
    pub source: &'a [u8],
    /// Contiguous, of the same size.
    pub out: Tensor<'a>,
}

/// What a backend is asked to download.
#[non_exhaustive]
pub struct Download<'a> {
    /// Contiguous.
    pub source: Tensor<'a>,
    /// Of the same size in bytes.
    pub out: &'a mut [u8],
}

/// What a backend is asked to begin to download.
#[non_exhaustive]
pub struct DownloadLater<'a> {
    /// Contiguous. Without an element it is the moment alone that is asked for: the end of all work called before.
    pub source: Tensor<'a>,
}

/// Bytes on their way to the host. One that is dropped is of no interest any more: what the device still writes of it
/// must not reach memory that is used for something else.
pub trait Arrival {
    /// Whether [`wait`](Arrival::wait) would return at once. It never blocks.
    fn has_come(&self) -> bool;

    /// Returns when the device is past the copy, and so past all work called before it, with the bytes in `out`, which is
    /// as long as the source.
    ///
    /// # Errors
    /// What the device says of any of that work.
    fn wait(self: Box<Self>, out: &mut [u8]) -> Result<(), KernelError>;
}

/// Elements on their way to the host: the host goes on meanwhile, and so does the device.
#[must_use = "what is downloaded later comes with `wait`"]
pub struct Later<E> {
    arrival: Box<dyn Arrival>,
    elements: usize,
    host: PhantomData<E>,
}

impl<E: Element> Later<E> {
    /// Whether [`wait`](Later::wait) would return at once.
    pub fn has_come(&self) -> bool {
        self.arrival.has_come()
    }

    /// Returns with the elements when the device is past the copy, and so past all work called before it.
    ///
    /// # Errors
    /// What the device says of any of that work.
    pub fn wait(self) -> Result<Vec<E>, KernelError> {
        let mut elements = vec![E::default(); self.elements];
        self.arrival.wait(as_bytes_mut(&mut elements))?;
        Ok(elements)
    }
}

/// Their count, never the elements.
impl<E> fmt::Debug for Later<E> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Later({} elements)", self.elements)
    }
}

impl<B: Backend> Scope<'_, B> {
    /// Copies `elements` to the device as a tensor of `shape`. Another count of elements is our own bug.
    pub fn upload<E: Element>(&self, shape: impl Into<Shape>, elements: &[E]) -> Result<Tensor<'_>, KernelError> {
        let shape = shape.into();
        assert_eq!(shape.elements(), elements.len(), "upload of {} elements as {shape}", elements.len());
        let out = self.take(shape, E::DTYPE)?;
        self.count(Work::over(0, &[&out]));
        self.backend.upload(Upload { source: as_bytes(elements), out: out.view() })?;
        Ok(out)
    }

    /// Copies `elements` to `out`, memory that outlives the pass: see [`fill_elements`]. It counts as no work: how much it
    /// is depends on more than shapes, which are all that a plan has.
    pub fn upload_into<E: Element>(&self, elements: &[E], out: &mut Tensor<'_>) -> Result<(), KernelError> {
        fill_elements(self.backend, elements, out)
    }

    /// Copies `parts` to the device, one behind the other, as `[elements of all]`: what lies apart on the host need not
    /// be put together there first.
    pub fn upload_parts<E: Element>(&self, parts: &[&[E]]) -> Result<Tensor<'_>, KernelError> {
        let mut out = self.take([parts.iter().map(|part| part.len()).sum()], E::DTYPE)?;
        self.count(Work::over(0, &[&out]));
        let mut first = 0;
        for part in parts {
            let place = out.row_range_mut(first..first + part.len());
            self.backend.upload(Upload { source: as_bytes(part), out: place })?;
            first += part.len();
        }
        Ok(out)
    }

    /// Copies a contiguous tensor of `E` to the host, after all work called before.
    pub fn download<E: Element>(&self, source: &Tensor<'_>) -> Result<Vec<E>, KernelError> {
        check_source::<E>("download", source)?;
        self.count(Work::over(0, &[source]));
        let mut elements = vec![E::default(); source.shape().elements()];
        self.backend.download(Download { source: source.view(), out: as_bytes_mut(&mut elements) })?;
        Ok(elements)
    }

    /// Begins to copy a contiguous tensor of `E` to the host, after all work called before, and returns without waiting.
    /// What is called later may write `source` again, and its scope may end: the copy is before that.
    pub fn download_later<E: Element>(&self, source: &Tensor<'_>) -> Result<Later<E>, KernelError> {
        check_source::<E>("download_later", source)?;
        self.count(Work::over(0, &[source]));
        let arrival = self.backend.download_later(DownloadLater { source: source.view() })?;
        Ok(Later { arrival, elements: source.shape().elements(), host: PhantomData })
    }

    /// The end of all work called before, with no elements to it.
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

/// Copies `source`, the bytes of `out`'s elements row after row, into `out`: how weights get to their place, outside any
/// pass.
pub fn fill<B: Backend>(backend: &B, source: &[u8], out: &mut Tensor<'_>) -> Result<(), KernelError> {
    const OP: &str = "fill";
    check::writable(OP, "out", out);
    check::holds(out.is_contiguous(), OP, "out", out, "contiguous rows")?;
    check::holds(out.bytes().0 == source.len() as u64, OP, "out", out, "as many bytes as the source")?;
    backend.upload(Upload { source, out: out.view() })
}

/// Copies `elements` to `out`, which holds as many of their type: inputs of captured work, which lie where they always do.
///
/// # Errors
/// As [`fill`], and for another type.
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

/// Returns when the device is past all that `backend` was given: before memory goes that it may still write.
///
/// # Errors
/// What the device says of any of it.
pub fn settle<B: Backend>(backend: &B) -> Result<(), KernelError> {
    // Nothing is copied: it is the moment alone that is asked for.
    let nothing = Tensor::over(bursar_budgets::Address(64), [0].into(), DType::U32);
    backend.download_later(DownloadLater { source: nothing })?.wait(&mut [])
}

fn as_bytes<E: Element>(elements: &[E]) -> &[u8] {
    // SAFETY: an `Element` is plain data without padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn as_bytes_mut<E: Element>(elements: &mut [E]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is a value of an `Element`.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}
