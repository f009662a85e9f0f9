//! Pages of host memory: reserving addresses, and backing them with memory.

#[cfg(unix)]
pub(super) use unix::{close, open, release, reserve, system_memory, system_page};

#[cfg(not(unix))]
pub(super) use other::{close, open, release, reserve, system_memory, system_page};

#[cfg(unix)]
mod unix {
    use std::io;

    use crate::{Address, Bytes};
    use libc::{
        MADV_DONTNEED, MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_NONE, PROT_READ, PROT_WRITE,
    };

    pub fn system_page() -> Bytes {
        // SAFETY: the call only queries a constant of the system.
        Bytes(unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64)
    }

    /// The physical memory of the machine.
    pub fn system_memory() -> Bytes {
        // SAFETY: the call only queries a constant of the system.
        let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
        // A system that does not report its memory is treated as unlimited.
        u64::try_from(pages).ok().and_then(|pages| system_page().checked_mul(pages)).unwrap_or(Bytes::MAX)
    }

    /// Reserves addresses, aligned to `align`. Any access to them faults.
    pub fn reserve(bytes: Bytes, align: Bytes) -> io::Result<Address> {
        let padded = bytes.checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
        let length = usize::try_from(padded.0).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new private mapping that the system places affects no existing memory.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        };
        if start == MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = Address(start as u64);
        let aligned = start.round_up(align);
        // Release the ends outside the aligned range, so that exactly `bytes` stay reserved.
        for (from, to) in [(start, aligned), (aligned.offset(bytes), start.offset(padded))] {
            // SAFETY: both ends belong to the mapping above. The system rejects an empty end.
            unsafe { libc::munmap(from.0 as *mut _, to.distance_from(from).as_usize()) };
        }
        Ok(aligned)
    }

    /// # Safety
    /// `reserve` returned the range, and nothing uses the range any more.
    pub unsafe fn release(address: Address, bytes: Bytes, _align: Bytes) {
        // SAFETY: the caller guarantees that the range is a reservation made here and unused.
        unsafe { libc::munmap(address.0 as *mut _, bytes.as_usize()) };
    }

    /// Makes the range readable and writable. Its bytes read as zero.
    ///
    /// # Safety
    /// The range must be whole pages of a reservation made here.
    pub unsafe fn open(address: Address, bytes: Bytes) -> io::Result<()> {
        // SAFETY: the caller guarantees that the range is whole pages of a reservation made here.
        match unsafe { libc::mprotect(address.0 as *mut _, bytes.as_usize(), PROT_READ | PROT_WRITE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the memory to the system. Any later access to the range faults.
    ///
    /// # Safety
    /// The range was opened, and nothing uses it any more.
    pub unsafe fn close(address: Address, bytes: Bytes) -> io::Result<()> {
        // Some Unix systems do not discard private pages on MADV_DONTNEED. On systems other than
        // Linux, the range is therefore mapped again.
        #[cfg(not(target_os = "linux"))]
        {
            // SAFETY: by contract the range is open and unused. MAP_FIXED replaces only this range.
            let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | libc::MAP_FIXED;
            let _ = MADV_DONTNEED;
            let mapped = unsafe { libc::mmap(address.0 as *mut _, bytes.as_usize(), PROT_NONE, flags, -1, 0) };
            return if mapped == MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) };
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the caller guarantees that the range is open and unused.
        unsafe {
            if libc::madvise(address.0 as *mut _, bytes.as_usize(), MADV_DONTNEED) != 0
                || libc::mprotect(address.0 as *mut _, bytes.as_usize(), PROT_NONE) != 0
            {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        }
    }
}

/// Fallback without `mmap`: the whole reservation is allocated, and accesses after `close` are not
/// caught. This is sufficient to run the demo.
#[cfg(not(unix))]
mod other {
    use std::{alloc, io};

    use crate::{Address, Bytes};

    pub fn system_page() -> Bytes {
        Bytes::kib(4)
    }

    pub fn system_memory() -> Bytes {
        Bytes::MAX
    }

    fn layout(bytes: Bytes, align: Bytes) -> io::Result<alloc::Layout> {
        alloc::Layout::from_size_align(bytes.as_usize(), align.as_usize())
            .map_err(|_| io::ErrorKind::OutOfMemory.into())
    }

    pub fn reserve(bytes: Bytes, align: Bytes) -> io::Result<Address> {
        // SAFETY: the layout is not empty, because the device reserves at least one page.
        let start = unsafe { alloc::alloc_zeroed(layout(bytes, align)?) };
        if start.is_null() { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(Address(start as u64)) }
    }

    pub unsafe fn release(address: Address, bytes: Bytes, align: Bytes) {
        // SAFETY: the caller guarantees that `reserve` allocated this range with the same layout.
        unsafe { alloc::dealloc(address.0 as *mut u8, layout(bytes, align).expect("the layout it was reserved with")) }
    }

    pub unsafe fn open(_address: Address, _bytes: Bytes) -> io::Result<()> {
        Ok(())
    }

    pub unsafe fn close(address: Address, bytes: Bytes) -> io::Result<()> {
        // SAFETY: the caller guarantees that nothing uses the range. Zeroing it makes it read as
        // zero when it is opened again.
        unsafe { std::ptr::write_bytes(address.0 as *mut u8, 0, bytes.as_usize()) };
        Ok(())
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::{release, reserve};
    use crate::Bytes;

    /// The size of this process's address space, in bytes.
    fn addresses() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")).unwrap();
        1024 * size.parse::<u64>().unwrap()
    }

    #[test]
    fn a_reservation_keeps_no_addresses_before_or_after_it() {
        // `align` is much larger than all other tests' reservations together. Each reservation maps
        // 1.5 times `align`, and keeps half of `align`. The rest, before and after the kept part,
        // must be released.
        let align = Bytes(1 << 40);
        let before = addresses();
        let starts = [(); 4].map(|()| reserve(align / 2, align).unwrap());
        let kept = addresses() - before;
        assert!(kept.abs_diff(2 * align.0) < align.0 / 8, "{kept}");
        for start in starts {
            assert!(start.is_multiple_of(align));
            // SAFETY: the range was reserved above, and nothing uses it any more.
            unsafe { release(start, align / 2, align) };
        }
        assert!(addresses() < before + align.0 / 8);
    }
}
