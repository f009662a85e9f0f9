//! Host memory in pages of 2 MiB, which the driver can lock much sooner than it gives memory of its own.

use std::{
    num::NonZero,
    ptr::NonNull,
    sync::{Mutex, PoisonError},
    thread,
};

use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE};

use crate::{Bytes, device::system_memory::system_memory_left};

/// Size of a large page, to which memory is aligned.
const PAGE: usize = 2 << 20;
/// Pages where the kernel gives no large ones.
const SMALL_PAGE: usize = 4 << 10;
/// Threads that touch memory: more were no faster.
const TOUCHERS: usize = 16;
/// What the rest of the process and the system is left at least.
const SPARED: Bytes = Bytes::gib(1);

/// Held from asking what is left until that is taken.
static TAKING: Mutex<()> = Mutex::new(());

/// Memory of the process that is backed as a whole. Dropping it gives it back.
pub(super) struct LargePages {
    address: NonNull<u8>,
    len: usize,
    /// What was mapped, in which `address` is the first large page.
    mapped: NonNull<u8>,
}

// SAFETY: it is memory, reached only through its address. Code that does so must ensure exclusive access.
unsafe impl Send for LargePages {}
// SAFETY: as above: nothing here reads or writes it once it is made.
unsafe impl Sync for LargePages {}

impl LargePages {
    /// This many bytes, rounded up to whole large pages, each touched. None if the system has no such memory: touching what
    /// it lacks would end the process.
    pub(super) fn take(bytes: Bytes) -> Option<Self> {
        let len = bytes.as_usize().checked_next_multiple_of(PAGE)?;
        let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if system_memory_left().is_none_or(|left| left < Bytes(len as u64).saturating_add(SPARED)) {
            return None;
        }
        let (access, kind) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
        // SAFETY: a new private mapping touches no memory of the process.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), len.checked_add(PAGE)?, access, kind, -1, 0) };
        let mapped = NonNull::new(mapped.cast::<u8>()).filter(|_| mapped != MAP_FAILED)?;
        // SAFETY: a page more was mapped than `len`.
        let address = unsafe { mapped.add(mapped.align_offset(PAGE)) };
        let pages = LargePages { address, len, mapped };
        // Advice: where there are no large pages, small ones do. A child of a fork would get a copy of what is locked.
        #[cfg(target_os = "linux")]
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
            // SAFETY: it was mapped above, and no child needs it.
            unsafe { libc::madvise(address.as_ptr().cast(), len, advice) };
        }
        pages.touch();
        Some(pages)
    }

    /// Lets the kernel back every page, on several threads, since it clears each.
    fn touch(&self) {
        let threads = thread::available_parallelism().map_or(1, NonZero::get).min(TOUCHERS);
        let share = (self.len / PAGE).div_ceil(threads) * PAGE;
        let touch = |from: usize| {
            for at in (from..self.len.min(from + share)).step_by(SMALL_PAGE) {
                // SAFETY: it lies in what was mapped for this value, which is not given out yet.
                unsafe { self.address.add(at).write_volatile(0) };
            }
        };
        thread::scope(|scope| {
            for from in (0..self.len).step_by(share) {
                // A system that gives no more threads has this one.
                if thread::Builder::new().spawn_scoped(scope, move || touch(from)).is_err() {
                    touch(from);
                }
            }
        });
    }

    pub(super) fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Its length in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for LargePages {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, once, and by contract nothing uses it any more.
        unsafe { libc::munmap(self.mapped.as_ptr().cast(), self.len + PAGE) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn large_pages_are_aligned_whole_and_all_there() {
        let pages = LargePages::take(Bytes(3 * PAGE as u64 + 1)).expect("8 MiB");
        assert_eq!((pages.len(), pages.address().align_offset(PAGE)), (4 * PAGE, 0));
        // SAFETY: it is this long, and ours alone.
        let all = unsafe { std::slice::from_raw_parts_mut(pages.address().as_ptr(), pages.len()) };
        assert!(all.iter().all(|byte| *byte == 0));
        all.fill(7);
    }

    #[test]
    fn more_than_an_address_space_is_refused() {
        assert!(LargePages::take(Bytes(u64::MAX)).is_none());
        assert!(LargePages::take(Bytes(1 << 60)).is_none());
    }
}
