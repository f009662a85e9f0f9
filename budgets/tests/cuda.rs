//! Tests of a GPU's memory, which must behave as the host device does. Without a GPU, each test
//! prints that it was skipped and passes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bursar_budgets::{Address, Bytes, CudaDevice, Device, DeviceError, Hint};
use cudarc::driver::sys;

/// Exclusive use of the GPU by one test. Tests must not overlap, because each test reads how much
/// memory is free, and one test takes all memory.
type GpuLock = MutexGuard<'static, ()>;

/// The first GPU; `None` if there is no GPU. The tests share a context, but each opens its own
/// device, and only one test runs at a time.
fn gpu() -> Option<(GpuLock, CudaDevice)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match CudaDevice::open(0) {
        Ok(device) => Some((turn, device)),
        Err(error @ DeviceError::NoDevice { .. }) => {
            println!("skipped, {error}; {}", error.hint().expect("the error has a hint"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn write(device: &CudaDevice, address: Address, numbers: &[u32]) {
    device.enter().expect("the device works");
    // SAFETY: tests write only to memory that they have backed.
    let written = unsafe { sys::cuMemcpyHtoD_v2(address.0, numbers.as_ptr().cast(), size_of_val(numbers)) };
    assert_eq!(written, sys::CUresult::CUDA_SUCCESS);
}

fn read(device: &CudaDevice, address: Address, count: usize) -> Vec<u32> {
    device.enter().expect("the device works");
    let mut numbers = vec![u32::MAX; count];
    // SAFETY: tests read only from memory that they have backed.
    let read = unsafe { sys::cuMemcpyDtoH_v2(numbers.as_mut_ptr().cast(), address.0, 4 * count) };
    assert_eq!(read, sys::CUresult::CUDA_SUCCESS);
    numbers
}

#[test]
fn backed_memory_is_zeroed_and_keeps_its_content_when_resized() {
    let Some((_gpu_lock, device)) = gpu() else { return };
    let page = device.page();
    assert_eq!(page, Bytes::mib(2));
    let before = device.memory().expect("the driver reports memory").free;
    let address = device.reserve(Bytes::gib(400)).expect("only addresses are reserved");
    assert_eq!(device.memory().expect("the driver reports memory").free, before);
    device.back(address, Bytes::mib(70)).expect("memory is free");
    assert_eq!(device.counts().backed, Bytes::mib(70));
    let pages = 35u64;
    for number in 0..pages {
        assert_eq!(read(&device, address.offset(page * number), 4), [0; 4], "page {number} is not zeroed");
        write(&device, address.offset(page * number), &[number as u32 + 1; 4]);
    }
    // Shrink in steps of one page, across driver allocations (pieces) of many pages each, and then
    // grow again.
    for left in (1..pages).rev() {
        device.unback(address.offset(page * left), page).expect("the tail is unbacked");
        for number in 0..left {
            assert_eq!(
                read(&device, address.offset(page * number), 4),
                [number as u32 + 1; 4],
                "page {number} of {left}"
            );
        }
        assert_eq!(device.counts().backed, page * left);
    }
    device.back(address.offset(page), Bytes::mib(68)).expect("the tail is backed again");
    assert_eq!(read(&device, address, 4), [1; 4]);
    assert_eq!(read(&device, address.offset(page * 20), 4), [0; 4], "memory that is backed again is zeroed");
    device.release_reservation(address).expect("the range is reserved");
    assert_eq!(device.counts().backed, Bytes::ZERO);
    let after = device.memory().expect("the driver reports memory").free;
    assert!(before.saturating_sub(after) <= Bytes::mib(4), "{before} free before, {after} after");
}

#[test]
fn unbacking_the_middle_of_a_piece_keeps_both_sides() {
    let Some((_gpu_lock, device)) = gpu() else { return };
    let address = device.reserve(Bytes::mib(64)).expect("addresses are reserved");
    device.back(address, Bytes::mib(48)).expect("memory is free");
    let at = |mib: u64| address.offset(Bytes::mib(mib));
    (0..24).for_each(|page| write(&device, at(2 * page), &[page as u32 + 100]));
    device.unback(at(20), Bytes::mib(6)).expect("a range over one piece is unbacked");
    device.unback(at(30), Bytes::mib(4)).expect("a range over two pieces is unbacked");
    for page in (0..24).filter(|page| ![10, 11, 12, 15, 16].contains(page)) {
        assert_eq!(read(&device, at(2 * page), 1), [page as u32 + 100], "page {page}");
    }
    for (start, mib) in [(20, 2), (18, 4), (24, 8)] {
        let error = device.unback(at(start), Bytes::mib(mib)).expect_err("a part of the range is not backed");
        assert!(matches!(error, DeviceError::BadRange { verb: "unbacked", .. }), "{error}");
    }
    let error = device.back(at(24), Bytes::mib(8)).expect_err("a part of the range is backed");
    assert!(matches!(error, DeviceError::BadRange { verb: "backed", .. }), "{error}");
    device.back(at(20), Bytes::mib(6)).expect("the hole is backed");
    assert_eq!((read(&device, at(20), 1), read(&device, at(26), 1)), (vec![0], vec![113]));
}

#[test]
fn a_refused_back_reports_both_sizes_and_leaves_nothing_backed() {
    let Some((_gpu_lock, device)) = gpu() else { return };
    let memory = device.memory().expect("the driver reports memory");
    let address = device.reserve(memory.total * 2).expect("only addresses are reserved");
    let asked = (memory.free + Bytes::gib(1)).round_up(device.page());
    let error = device.back(address, asked).expect_err("the device has less memory");
    assert!(error.is_refused() && !error.is_lost(), "{error}");
    let DeviceError::Refused { asked: stated, free, .. } = &error else {
        unreachable!("the variant was checked above")
    };
    assert_eq!(*stated, asked);
    println!("{error}: {}", error.hint().expect("a hint"));
    assert!(*free <= Bytes::gib(1), "{free} were free when it was refused");
    assert_eq!(device.counts().backed, Bytes::ZERO);
    let after = device.memory().expect("the driver reports memory").free;
    assert!(memory.free.saturating_sub(after) <= Bytes::mib(8), "{} before, {after} after", memory.free);
    device.back(address, Bytes::gib(1)).expect("1 GiB is free");
}

#[test]
fn threads_back_and_unback_concurrently() {
    let Some((_gpu_lock, device)) = gpu() else { return };
    let device = Arc::new(device);
    let threads: Vec<_> = (0..4u32)
        .map(|thread| {
            let device = device.clone();
            std::thread::spawn(move || {
                let address = device.reserve(Bytes::gib(1)).expect("addresses are reserved");
                for round in 0..20u64 {
                    let bytes = Bytes::mib(2 * (1 + (round * 7 + u64::from(thread)) % 30));
                    device.back(address, bytes).expect("memory is free");
                    write(&device, address, &[thread; 8]);
                    assert_eq!(read(&device, address, 8), [thread; 8]);
                    device.unback(address, bytes).expect("the range is backed");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("the thread does not panic"));
    assert_eq!(device.counts().backed, Bytes::ZERO);
}

#[test]
fn pinned_memory_copies_to_the_device_and_drops() {
    let Some((_gpu_lock, device)) = gpu() else { return };
    let device = Arc::new(device);
    let address = device.reserve(Bytes::mib(2)).expect("addresses are reserved");
    device.back(address, Bytes::mib(2)).expect("memory is free");
    let before = device.counts();
    let pinned = device.pinned(Bytes(1_000_003)).expect("the host has a megabyte");
    assert_eq!((pinned.len(), device.counts().pinned), (1_000_003, Bytes(1_000_003)));
    assert_eq!(device.counts().allocations, before.allocations + 1);
    assert_eq!(pinned.address() as usize % 4096, 0);
    // SAFETY: the page-locked memory has this length, and no other code uses it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(pinned.address(), pinned.len()) };
    bytes.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index * 7 % 251) as u8);
    // Copy on another thread, as a lane would.
    std::thread::scope(|threads| {
        let copied = threads.spawn(|| {
            device.enter().expect("the device works");
            // SAFETY: both ranges are equally long, and the copies are done once
            // the stream is synchronized.
            unsafe {
                let there =
                    sys::cuMemcpyHtoDAsync_v2(address.0, pinned.address().cast(), pinned.len(), std::ptr::null_mut());
                let over = sys::cuStreamSynchronize(std::ptr::null_mut());
                (there, over)
            }
        });
        assert_eq!(copied.join().expect("no panic"), (sys::CUresult::CUDA_SUCCESS, sys::CUresult::CUDA_SUCCESS));
    });
    assert_eq!(read(&device, address, 2), [u32::from_le_bytes([0, 7, 14, 21]), u32::from_le_bytes([28, 35, 42, 49])]);
    drop(pinned);
    assert_eq!(device.counts().pinned, Bytes::ZERO);
    let error = device.pinned(Bytes::gib(1 << 20)).expect_err("no host has 1 PiB");
    assert!(matches!(error, DeviceError::HostRefused { .. }) && !error.is_lost(), "{error}");
    println!("{error}: {}", error.hint().expect("a hint"));
    assert_eq!(device.counts().pinned, Bytes::ZERO);
    drop(device.pinned(Bytes::ZERO).expect_err("a copy of zero bytes is refused"));
}

/// Memory from the driver's allocator, which no lease can cover.
struct Beside(sys::CUdeviceptr);

impl Beside {
    fn take(bytes: Bytes) -> Result<Beside, DeviceError> {
        let mut taken = 0;
        // SAFETY: the output pointer is valid.
        CudaDevice::check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut taken, bytes.as_usize()) })?;
        Ok(Beside(taken))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated once and is freed only here.
        assert_eq!(unsafe { sys::cuMemFree_v2(self.0) }, sys::CUresult::CUDA_SUCCESS);
    }
}

#[test]
fn memory_outside_leases_counts_as_overhead_until_it_is_freed() {
    let Some((_gpu_lock, device)) = gpu() else { return };
    let device = Arc::new(device);
    let (address, counted) = (device.reserve(Bytes::gib(8)).expect("addresses are reserved"), device.overhead());
    let before = device.counts().allocations;
    // Another thread backs and unbacks memory during the measurement. The measurement must not
    // include that memory.
    std::thread::scope(|threads| {
        let other = threads.spawn(|| {
            for _ in 0..20 {
                device.back(address, Bytes::gib(1)).expect("memory is free");
                device.unback(address, Bytes::gib(1)).expect("the range is backed");
            }
        });
        let held = device.with_overhead("beside", || Beside::take(Bytes::mib(64)));
        other.join().expect("the thread does not panic");
        let held = held.expect("memory is free");
        let more = device.overhead() - counted;
        assert!((Bytes::mib(64)..=Bytes::mib(68)).contains(&more), "{more} were counted as overhead");
        drop(held);
        assert!(device.overhead() - counted <= Bytes::mib(4), "{} left after the drop", device.overhead() - counted);
    });
    assert!(device.counts().allocations > before);
}

#[test]
fn concurrent_overhead_measurements_count_each_byte_once() {
    let Some((_gpu_lock, device)) = gpu() else { return };
    let (device, each) = (Arc::new(device), Bytes::mib(64));
    let counted = device.overhead();
    let begin = std::sync::Barrier::new(3);
    std::thread::scope(|threads| {
        let made: Vec<_> = (0..3)
            .map(|_| {
                threads.spawn(|| {
                    device.enter().expect("the device works");
                    begin.wait();
                    device.with_overhead("beside", || Beside::take(each)).expect("memory is free")
                })
            })
            .collect();
        let made: Vec<_> = made.into_iter().map(|thread| thread.join().expect("the thread does not panic")).collect();
        let more = device.overhead() - counted;
        assert!((each * 3..=each * 3 + Bytes::mib(8)).contains(&more), "{more} were counted as overhead");
        drop(made);
    });
    assert!(device.overhead() - counted <= Bytes::mib(4), "{} left after the drop", device.overhead() - counted);
}

#[test]
fn a_full_device_unbacks_a_page_of_a_large_piece() {
    let Some((_gpu_lock, device)) = gpu() else { return };
    let page = device.page();
    let free = device.memory().expect("the driver reports memory").free;
    let address = device.reserve(free * 2).expect("only addresses are reserved");
    let most = (free - Bytes::mib(64)).round_down(Bytes::mib(16));
    device.back(address, most).expect("memory is free");
    write(&device, address.offset(most - page * 2), &[41; 4]);
    let holes = device.reserve(Bytes::gib(1)).expect("addresses are reserved");
    device.back(holes, Bytes::mib(16)).expect("memory is free");
    write(&device, holes, &[42; 4]);
    write(&device, holes.offset(Bytes::mib(14)), &[43; 4]);
    // Take the rest page by page, until the driver refuses.
    let rest = device.reserve(Bytes::gib(1)).expect("addresses are reserved");
    let pages = (0..).find(|number| device.back(rest.offset(page * *number), page).is_err()).expect("pages run out");
    println!("{most} in large pieces, {pages} pages more; free: {}", device.memory().expect("the driver answers").free);
    // First unback the tail of a large piece, and then a hole inside a piece. To split a piece, the
    // device copies the part to keep. No free memory is left for that copy, so it must go to the
    // spare pages.
    device.unback(address.offset(most - page), page).expect("the tail is unbacked");
    assert_eq!(read(&device, address.offset(most - page * 2), 4), [41; 4]);
    device.back(rest.offset(page * pages), page).expect("spare pages are backed again");
    assert!(device.back(rest.offset(page * (pages + 1)), page).expect_err("no page is left").is_refused());
    device.unback(holes.offset(Bytes::mib(4)), page * 2).expect("the hole is unbacked");
    assert_eq!(read(&device, holes, 4), [42; 4]);
    assert_eq!(read(&device, holes.offset(Bytes::mib(14)), 4), [43; 4]);
    device.back(rest.offset(page * (pages + 1)), page * 2).expect("spare pages are backed again");
}

#[test]
fn backing_and_unbacking_times_are_printed() {
    let Some((_gpu_lock, device)) = gpu() else { return };
    let device = Arc::new(device);
    println!("{}: {:?}, overhead {}", device.name(), device.memory().expect("the driver answers"), device.overhead());
    let address = device.reserve(Bytes::gib(512)).expect("addresses are reserved");
    let free = device.memory().expect("the driver reports memory").free;
    let all = (free - Bytes::mib(512)).round_down(device.page());
    for bytes in [Bytes::mib(2), Bytes::mib(64), Bytes::gib(1), Bytes::gib(16), all] {
        let begun = std::time::Instant::now();
        device.back(address, bytes).expect("memory is free");
        let backed = begun.elapsed();
        let tail = device.page();
        let begun = std::time::Instant::now();
        device.unback(address.offset(bytes - tail), tail).expect("the tail is unbacked");
        let shortened = begun.elapsed();
        let begun = std::time::Instant::now();
        if bytes > tail {
            device.unback(address, bytes - tail).expect("the rest is unbacked");
        }
        println!(
            "{bytes}: backed in {backed:?}, 2 MiB of the tail unbacked in {shortened:?}, the rest in {:?}",
            begun.elapsed()
        );
    }
    let overhead = device.overhead();
    let memory = device.memory().expect("the driver reports memory");
    println!("overhead {overhead}, free {} of {}", memory.free, memory.total);
    let nothing = device.with_overhead("nothing", || Ok::<_, DeviceError>(())).expect("the driver reports memory");
    assert!(device.overhead() - overhead <= Bytes::mib(2), "an empty call adds no overhead");
    drop(nothing);
}
