//! Host memory in pages of 2 MiB. The driver locks such memory much faster than it
//! allocates page-locked memory itself.

use std::{
    num::NonZero,
    ptr::NonNull,
    sync::{Mutex, PoisonError},
    thread,
};

use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE};

use crate::{Bytes, device::system_memory::system_memory_left};

/// The size and alignment of a large page.
const PAGE: usize = 2 << 20;
/// The page size if the kernel provides no large pages.
const SMALL_PAGE: usize = 4 << 10;
/// The maximum number of threads that touch memory. More threads were not faster.
const TOUCHERS: usize = 16;
/// The host memory that must stay available to the rest of the process and to the system.
const SPARED: Bytes = Bytes::gib(1);

/// Locked from the check of available memory until the memory is taken, so that two threads cannot
/// both rely on the same available bytes.
static TAKING: Mutex<()> = Mutex::new(());

/// Host memory, in large pages if the kernel provides them. All of it is backed. Dropping this
/// value unmaps the memory.
pub(super) struct LargePages {
    address: NonNull<u8>,
    len: usize,
    /// The start of the mapping, less than one large page before the aligned `address`.
    mapped: NonNull<u8>,
}

// SAFETY: the memory is not tied to a thread, and code that uses its address
// must ensure exclusive access.
unsafe impl Send for LargePages {}
// SAFETY: after construction no method reads or writes the memory, so
// shared references cannot race.
unsafe impl Sync for LargePages {}

impl LargePages {
    /// Takes this many bytes, rounded up to whole large pages, and touches every page. Returns
    /// `None` if the system does not have enough memory. The available memory is checked first,
    /// because the kernel would kill a process that touches more memory than the system has.
    pub(super) fn take(bytes: Bytes) -> Option<Self> {
        let len = bytes.as_usize().checked_next_multiple_of(PAGE)?;
        let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if system_memory_left().is_none_or(|left| left < Bytes(len as u64).saturating_add(SPARED)) {
            return None;
        }
        let (access, kind) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
        // SAFETY: a new private mapping affects no existing memory of the process.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), len.checked_add(PAGE)?, access, kind, -1, 0) };
        let mapped = NonNull::new(mapped.cast::<u8>()).filter(|_| mapped != MAP_FAILED)?;
        // SAFETY: the mapping is one large page longer than `len`, so the aligned
        // start is within it.
        let address = unsafe { mapped.add(mapped.align_offset(PAGE)) };
        let pages = LargePages { address, len, mapped };
        // The result of both calls is ignored, because small pages work too. MADV_DONTFORK keeps a
        // forked child from getting a copy of the locked memory.
        #[cfg(target_os = "linux")]
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
            // SAFETY: the range was mapped above, and no forked child needs it.
            unsafe { libc::madvise(address.as_ptr().cast(), len, advice) };
        }
        pages.touch();
        Some(pages)
    }

    /// Makes the kernel back every page. Several threads do this in parallel, because the kernel
    /// clears each page.
    fn touch(&self) {
        let threads = thread::available_parallelism().map_or(1, NonZero::get).min(TOUCHERS);
        let share = (self.len / PAGE).div_ceil(threads) * PAGE;
        let touch = |from: usize| {
            for at in (from..self.len.min(from + share)).step_by(SMALL_PAGE) {
                // SAFETY: the address is within the mapping of this value, which no other code uses
                // yet, and each thread writes only to its own range.
                unsafe { self.address.add(at).write_volatile(0) };
            }
        };
        thread::scope(|scope| {
            for from in (0..self.len).step_by(share) {
                // If the system refuses another thread, touch the range in this thread.
                if thread::Builder::new().spawn_scoped(scope, move || touch(from)).is_err() {
                    touch(from);
                }
            }
        });
    }

    pub(super) fn address(&self) -> NonNull<u8> {
        self.address
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for LargePages {
    fn drop(&mut self) {
        // SAFETY: this mapping of `len + PAGE` bytes is unmapped only here, and by contract nothing
        // uses it any more.
        unsafe { libc::munmap(self.mapped.as_ptr().cast(), self.len + PAGE) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn large_pages_are_aligned_zeroed_and_rounded_up() {
        let pages = LargePages::take(Bytes(3 * PAGE as u64 + 1)).expect("8 MiB of large pages");
        assert_eq!((pages.len(), pages.address().align_offset(PAGE)), (4 * PAGE, 0));
        // SAFETY: the memory is this long, and only this test uses it.
        let all = unsafe { std::slice::from_raw_parts_mut(pages.address().as_ptr(), pages.len()) };
        assert!(all.iter().all(|byte| *byte == 0));
        all.fill(7);
    }

    #[test]
    fn sizes_beyond_the_address_space_are_refused() {
        assert!(LargePages::take(Bytes(u64::MAX)).is_none());
        assert!(LargePages::take(Bytes(1 << 60)).is_none());
    }
}
