//! Copies between host and device, which are both host memory here.

use super::{memory::host_bytes, threads::Threads};
use crate::ops::transfer::{Download, Upload};

pub(super) fn upload(_: &Threads, call: Upload<'_>) {
    assert_eq!(call.source.len() as u64, call.out.bytes().0, "upload of another size");
    // SAFETY: the maker of `out` vouches for its bytes, and the caller's own memory does not overlap a segment.
    unsafe { std::ptr::copy_nonoverlapping(call.source.as_ptr(), host_bytes(&call.out), call.source.len()) };
}

pub(super) fn download(_: &Threads, call: Download<'_>) {
    assert_eq!(call.out.len() as u64, call.source.bytes().0, "download of another size");
    // SAFETY: as above, the other way round.
    unsafe { std::ptr::copy_nonoverlapping(host_bytes(&call.source), call.out.as_mut_ptr(), call.out.len()) };
}
