//! Copies between host and device, which are both host memory on this backend.

use bursar_budgets::Bytes;

use super::{memory::host_bytes, threads::Threads};
use crate::{
    KernelError,
    calls::{Arrival, Download, DownloadLater, Upload},
};

pub(super) fn upload(_: &Threads, call: Upload<'_>) {
    assert_eq!(Bytes::of_slice(call.source), call.out.bytes(), "the upload has the size of its target");
    // SAFETY: the creator of `out` guarantees that its bytes are valid, and the caller's memory
    // does not overlap a segment.
    unsafe { std::ptr::copy_nonoverlapping(call.source.as_ptr(), host_bytes(&call.out), call.source.len()) };
}

pub(super) fn download(_: &Threads, call: Download<'_>) {
    assert_eq!(Bytes::of_slice(call.out), call.source.bytes(), "the download has the size of its source");
    // SAFETY: the creator of `source` guarantees that its bytes are valid, and the caller's memory
    // does not overlap a segment.
    unsafe { std::ptr::copy_nonoverlapping(host_bytes(&call.source), call.out.as_mut_ptr(), call.out.len()) };
}

pub(super) fn download_later(threads: &Threads, call: DownloadLater<'_>) -> Box<dyn Arrival> {
    // All earlier calls are already done, so the copy can be made at once.
    let mut bytes = vec![0; call.source.bytes().as_usize()];
    download(threads, Download { source: call.source, out: &mut bytes });
    Box::new(Copied(bytes))
}

/// A snapshot of the source's bytes. Later work may overwrite the source.
struct Copied(Vec<u8>);

impl Arrival for Copied {
    fn is_ready(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>, out: &mut [u8]) -> Result<(), KernelError> {
        out.copy_from_slice(&self.0);
        Ok(())
    }
}
