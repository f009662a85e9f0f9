//! The resources of a process: heap, memory, threads, open files, tasks.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fmt, fs,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::stage::eventually;

static HEAP_BYTES: AtomicU64 = AtomicU64::new(0);

/// The system's allocator with a count of live bytes. Allocations of C code are not counted.
pub struct Counting;

// SAFETY: each call is passed unchanged to the system's allocator, which keeps the contract of
// `GlobalAlloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP_BYTES.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, and `System.alloc` has the same
        // contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        HEAP_BYTES.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, and `System.alloc_zeroed` has
        // the same contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HEAP_BYTES.fetch_sub(layout.size() as u64, Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`, and every pointer was allocated by
        // `System`.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        HEAP_BYTES.fetch_add(size as u64, Relaxed);
        HEAP_BYTES.fetch_sub(layout.size() as u64, Relaxed);
        // SAFETY: the caller keeps the contract of `realloc`, and every pointer was allocated by
        // `System`.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// The resources of a process at one moment.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Live allocations of Rust code.
    pub heap_bytes: u64,
    /// Resident memory in bytes. This field, `threads` and `files` are read from /proc, and are 0
    /// except on Linux.
    pub resident_bytes: u64,
    threads: usize,
    files: usize,
    tasks: usize,
}

impl Reading {
    fn now() -> Self {
        // `status` has kibibytes. `statm` has pages, whose size depends on the machine.
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        let resident_kib: u64 = resident.and_then(|kib| kib.parse().ok()).unwrap_or(0);
        let entries = |folder: &str| fs::read_dir(folder).map_or(0, Iterator::count);
        Reading {
            heap_bytes: HEAP_BYTES.load(Relaxed),
            resident_bytes: resident_kib << 10,
            threads: entries("/proc/self/task"),
            files: entries("/proc/self/fd"),
            tasks: tokio::runtime::Handle::current().metrics().num_alive_tasks(),
        }
    }

    /// Waits until there are no more threads, files and tasks than in `before`. If one of them
    /// never ends, the test fails at the time limit of `eventually`.
    pub async fn of_a_process_at_rest(before: Option<&Reading>) -> Self {
        if let Some(before) = before {
            let what = format!("no more threads, files and tasks than {before}");
            eventually(&what, async || Reading::now().is_at_rest_as(before)).await;
        } else {
            // Idle threads end by themselves, so wait until the counts are stable.
            let mut last = Reading::now();
            eventually("the numbers of threads, files and tasks are stable", async || {
                let earlier = std::mem::replace(&mut last, Reading::now());
                earlier.is_at_rest_as(&last)
            })
            .await;
        }
        Reading::now()
    }

    fn is_at_rest_as(&self, other: &Reading) -> bool {
        self.threads <= other.threads && self.files <= other.files && self.tasks <= other.tasks
    }
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reading { heap_bytes, resident_bytes, threads, files, tasks } = self;
        write!(
            f,
            "heap {:>7} KiB, process {:>7} KiB, {threads} threads, {files} files, {tasks} tasks",
            heap_bytes >> 10,
            resident_bytes >> 10
        )
    }
}
