//! Host memory in pages of 2 MiB, which the driver can lock much sooner than it gives memory of its own.

use std::{fs, num::NonZero, ptr::NonNull, thread};

use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE};

use crate::Bytes;

/// Size of a large page, to which memory is aligned.
const PAGE: usize = 2 << 20;
/// Pages where the kernel gives no large ones.
const SMALL_PAGE: usize = 4 << 10;
/// Threads that touch memory: more were no faster.
const TOUCHERS: usize = 16;

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
        if left().is_none_or(|left| left < Bytes(len as u64)) {
            return None;
        }
        let (access, kind) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
        // SAFETY: a new private mapping touches no memory of the process.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), len.checked_add(PAGE)?, access, kind, -1, 0) };
        let mapped = NonNull::new(mapped.cast::<u8>()).filter(|_| mapped != MAP_FAILED)?;
        // SAFETY: a page more was mapped than `len`.
        let address = unsafe { mapped.add(mapped.align_offset(PAGE)) };
        let pages = LargePages { address, len, mapped };
        // Advice: where there are no large pages, small ones do.
        #[cfg(target_os = "linux")]
        // SAFETY: it was mapped above.
        unsafe {
            libc::madvise(address.as_ptr().cast(), len, libc::MADV_HUGEPAGE)
        };
        pages.touch();
        Some(pages)
    }

    /// Lets the kernel back every page, on several threads, since it clears each.
    fn touch(&self) {
        let threads = thread::available_parallelism().map_or(1, NonZero::get).min(TOUCHERS);
        let share = (self.len / PAGE).div_ceil(threads) * PAGE;
        thread::scope(|scope| {
            for from in (0..self.len).step_by(share) {
                scope.spawn(move || {
                    for at in (from..self.len.min(from + share)).step_by(SMALL_PAGE) {
                        // SAFETY: it lies in what was mapped for this value, which nobody else has yet.
                        unsafe { self.address.add(at).write_volatile(0) };
                    }
                });
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

/// Memory that the system and the process's control group have left, as far as it is told.
fn left() -> Option<Bytes> {
    let system = available(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let of_group = |limit: &str, used: &str| {
        let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse().ok().map(Bytes);
        // "max" is no number: there is no limit.
        Some(number(limit)?.saturating_sub(number(used)?))
    };
    let groups = [
        of_group("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        of_group("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ];
    groups.into_iter().flatten().chain([system]).min()
}

/// What /proc/meminfo says is available.
fn available(told: &str) -> Option<Bytes> {
    let line = told.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok().map(Bytes::kib)
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

    #[test]
    fn what_is_available_is_read_from_the_system() {
        let told = "MemTotal:       24673888 kB\nMemAvailable:   22012344 kB\nBuffers: 1 kB\n";
        assert_eq!(available(told), Some(Bytes::kib(22_012_344)));
        assert_eq!(available("MemTotal: 1 kB"), None);
        assert!(left().is_some_and(|left| left > Bytes::ZERO));
    }
}
