//! Copies between host and device: the only two ways across, both in plain sight.

use crate::{Backend, Element, KernelError, Scope, Shape, Tensor, Work};

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
        const OP: &str = "download";
        if source.dtype() != E::DTYPE {
            return Err(KernelError::Type {
                op: OP,
                what: "source",
                expected: "the host's type",
                found: source.dtype(),
            });
        }
        check::holds(source.is_contiguous(), OP, "source", source, "contiguous rows")?;
        self.count(Work::over(0, &[source]));
        let mut elements = vec![E::default(); source.shape().elements()];
        self.backend.download(Download { source: source.view(), out: as_bytes_mut(&mut elements) })?;
        Ok(elements)
    }
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

fn as_bytes<E: Element>(elements: &[E]) -> &[u8] {
    // SAFETY: an `Element` is plain data without padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn as_bytes_mut<E: Element>(elements: &mut [E]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is a value of an `Element`.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}
