//! Tests of the host device: its counters, its refusals, and its scripted faults.

use bursar_budgets::testing::HostControl;
use bursar_budgets::testing::HostCounts;
use bursar_budgets::testing::Script;
use std::{sync::Arc, thread::ScopedJoinHandle};

use bursar_budgets::*;

const PAGE: Bytes = Bytes::kib(64);

fn device(pages: u64) -> HostDevice {
    HostDevice::new(HostConfig::small(PAGE * pages)).unwrap()
}

fn free(device: &HostDevice) -> Bytes {
    device.memory().unwrap().free
}

#[test]
fn a_host_device_reports_its_configuration() {
    let config = HostConfig { name: "stand-in".into(), driver: "driver 7".into(), ..HostConfig::small(PAGE * 4) };
    let device = HostDevice::new(HostConfig { overhead: PAGE, ..config }).unwrap();
    assert_eq!(
        (device.name(), device.driver().as_str(), device.label().as_str()),
        ("stand-in", "driver 7", "stand-in")
    );
    assert_eq!((device.page(), device.overhead(), device.is_host_memory()), (PAGE, PAGE, true));
    assert_eq!(device.memory().unwrap(), DeviceMemory { total: PAGE * 4, free: PAGE * 3 });
    let config = HostConfig::new(Bytes::mib(4));
    assert_eq!((config.page, config.overhead, config.name.as_str()), (Bytes::mib(2), Bytes::ZERO, "host"));
    assert_eq!(config.driver, format!("{} {}", std::env::consts::OS, std::env::consts::ARCH));
}

#[test]
fn a_capacity_is_one_page_to_the_machines_memory() {
    let capacity = |capacity| HostConfig::small(capacity).check_capacity();
    assert!(capacity(PAGE).is_ok());
    for bad in [PAGE - Bytes(1), Bytes::MAX] {
        let Err(DeviceError::Capacity { capacity: stated, least, most }) = capacity(bad) else { panic!("{bad}") };
        assert!(stated == bad && least == PAGE && (Bytes::gib(1)..Bytes::gib(1 << 20)).contains(&most), "{most}");
        let error = HostDevice::new(HostConfig::small(bad)).unwrap_err();
        assert!(matches!(error, DeviceError::Capacity { .. }), "{error}");
    }
}

#[test]
fn host_pages_are_powers_of_two_from_the_systems_page() {
    let with = |page| HostDevice::new(HostConfig { page: Bytes(page), ..HostConfig::new(Bytes::mib(4)) });
    for page in [0, 1, 1024, 65_537, 3 * 65_536] {
        assert!(matches!(with(page), Err(DeviceError::BadPage { .. })), "{page}");
    }
    let error = with(1).unwrap_err().to_string();
    let system: u64 = error.split("at least ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(with(system).is_ok() && with(system / 2).is_err());
}

#[test]
fn free_memory_excludes_leases_overhead_drift_and_foreign() {
    let device = HostDevice::new(HostConfig { overhead: PAGE, ..HostConfig::small(PAGE * 16) }).unwrap();
    let address = device.reserve(PAGE * 16).unwrap();
    device.back(address, PAGE * 2).unwrap();
    assert_eq!((device.foreign_takes(PAGE * 3), free(&device)), (PAGE * 3, PAGE * 10));
    assert_eq!((device.overhead_grows(PAGE * 4), free(&device)), (PAGE * 4, PAGE * 6));
    assert_eq!((device.drifts(PAGE), free(&device)), (PAGE, PAGE * 5));
    assert_eq!((device.overhead_grows(PAGE), device.drifts(PAGE)), (PAGE, PAGE));
    assert_eq!((device.overhead(), device.process_bytes()), (PAGE * 6, Some(PAGE * 10)));
    assert_eq!((device.counts().foreign, device.foreign_gives_back(PAGE)), (PAGE * 3, PAGE));
    assert_eq!(free(&device), PAGE * 4);
    let refused = device.back(address.offset(PAGE * 2), PAGE * 5).unwrap_err();
    assert_eq!(refused.hint().unwrap(), "lease 64.0 KiB less, or raise `capacity`");
    assert_eq!((device.drifts(PAGE * 9), free(&device)), (PAGE * 4, Bytes::ZERO), "all free memory is taken");
    assert_eq!((device.overhead_grows(PAGE), device.foreign_takes(PAGE)), (Bytes::ZERO, Bytes::ZERO));
}

#[test]
fn a_host_device_counts_calls_and_backed_bytes() {
    let device = device(8);
    let (one, other) = (device.reserve(PAGE * 8).unwrap(), device.reserve(Bytes(1)).unwrap());
    device.back(one, PAGE * 5).unwrap();
    device.back(other, PAGE).unwrap();
    device.unback(one.offset(PAGE), PAGE * 2).unwrap();
    device.unback(one.offset(PAGE * 3), PAGE).unwrap();
    let counts = HostCounts {
        calls: 4,
        backs: 2,
        unbacks: 2,
        reservations: 2,
        backed: PAGE * 3,
        high_water: PAGE * 6,
        ..HostCounts::default()
    };
    assert_eq!(device.counts(), counts);
    device.reset_high_water();
    assert_eq!(device.counts(), HostCounts { high_water: PAGE * 3, ..counts });
    device.release_reservation(one).unwrap();
    assert_eq!(device.counts(), HostCounts { reservations: 1, backed: PAGE, high_water: PAGE * 3, ..counts });
}

#[test]
fn only_whole_pages_are_backed() {
    let device = device(8);
    let address = device.reserve(PAGE * 8).unwrap();
    for (start, bytes) in [(Bytes::ZERO, Bytes::ZERO), (Bytes::ZERO, PAGE - Bytes(1)), (Bytes(1), PAGE)] {
        let error = device.back(address.offset(start), bytes).unwrap_err();
        assert!(error.to_string().ends_with("cannot be backed: the range is not made of whole pages"), "{error}");
    }
    let error = device.back(address.offset(PAGE), Bytes::MAX).unwrap_err();
    assert!(error.to_string().ends_with("the range exceeds the address space"), "{error}");
    device.back(address, PAGE * 8).unwrap();
    assert_eq!(free(&device), Bytes::ZERO);
}

#[test]
fn a_reservation_is_from_1_byte_to_128_tib() {
    let device = device(1);
    let error_of = |bytes| device.reserve(bytes).map_or_else(|error| error.to_string(), |_| String::new());
    let limits = "expected from 1 byte to 128 TiB";
    let most = Bytes(1 << 47);
    for bytes in [Bytes::ZERO, most + Bytes(1), Bytes::MAX] {
        assert!(error_of(bytes).ends_with(limits), "{bytes}");
    }
    // The system may refuse a size that the device allows, with a different error text.
    assert!(!error_of(most).ends_with(limits) && error_of(Bytes(1)).is_empty());
}

#[test]
fn reservations_start_on_pages_and_do_not_overlap() {
    let device = HostDevice::new(HostConfig { page: Bytes::mib(2), ..HostConfig::new(Bytes::mib(64)) }).unwrap();
    let mut starts: Vec<Address> = (0..8).map(|_| device.reserve(Bytes::mib(6)).unwrap()).collect();
    for start in &starts {
        assert!(start.0.is_multiple_of(Bytes::mib(2).0));
        device.back(*start, Bytes::mib(6)).unwrap();
        for byte in [start.0, start.offset(Bytes::mib(6)).0 - 1] {
            // SAFETY: `byte` is the address of the first or last byte of memory
            // that was just backed.
            unsafe { (byte as *mut u8).write_volatile(1) };
        }
    }
    starts.sort_unstable();
    assert!(starts.windows(2).all(|pair| pair[1].distance_from(pair[0]) >= Bytes::mib(6)));
}

#[test]
fn a_script_refuses_the_listed_calls() {
    let device = device(8);
    device.play(Script::new().refuse_call(1).refuse_call(4).refuse_back(3));
    assert!(device.reserve(PAGE * 8).unwrap_err().to_string().ends_with("the test script refused it"));
    let address = device.reserve(PAGE * 8).unwrap();
    device.back(address, PAGE).unwrap();
    let mut outcomes = Vec::new();
    for page in 1..4 {
        outcomes.push(device.back(address.offset(PAGE * page), PAGE).map_err(|error| error.hint()));
    }
    let refused = Err(Some("the test script refused it; ask again".into()));
    assert_eq!(outcomes, [refused.clone(), refused, Ok(())]);
    assert_eq!((device.counts().calls, device.counts().backs), (6, 4));
}

#[test]
fn a_back_refused_for_two_reasons_is_refused_once() {
    let device = device(8);
    let address = device.reserve(PAGE * 8).unwrap();
    device.play(Script::new().refuse_back(1).refuse_back(2).refuse_call(3));
    let refused = [(); 3].map(|()| device.back(address, PAGE).is_err());
    assert_eq!(refused, [true, true, false], "refused for one reason, then for two, then not at all");
}

#[test]
fn an_armed_faulty_device_refuses_the_next_back_once() {
    let inner = Arc::new(device(8));
    let device = FaultyDevice::over(inner.clone());
    let address = device.reserve(PAGE * 8).unwrap();
    let armed = device.refuse_next_back();
    let error = device.back(address, PAGE).unwrap_err();
    assert_eq!(error.hint(), Some("this error was injected by a drill; ask again".into()));
    assert!(matches!(error, DeviceError::Refused { asked, free, .. } if asked == PAGE && free == PAGE * 8));
    device.back(address, PAGE).unwrap();
    drop(armed);
    drop(device.refuse_next_back());
    device.back(address.offset(PAGE), PAGE).unwrap();
    assert_eq!(inner.counts().backed, PAGE * 2);
}

#[test]
fn a_faulty_device_forwards_all_other_calls() {
    let inner = Arc::new(device(8));
    let device = FaultyDevice::over(inner.clone());
    assert_eq!((device.name(), device.label(), device.driver()), (inner.name(), inner.label(), inner.driver()));
    assert_eq!((device.page(), device.is_host_memory()), (inner.page(), inner.is_host_memory()));
    assert_eq!(device.memory().unwrap(), inner.memory().unwrap());
    let overheads = |device: &dyn Device| (device.overhead(), device.overhead_by_source(), device.process_bytes());
    assert_eq!(overheads(&*device), overheads(&*inner));
    let address = device.reserve(PAGE).unwrap();
    device.back(address, PAGE).unwrap();
    device.unback(address, PAGE).unwrap();
    assert_eq!((inner.counts().backed, inner.counts().unbacks), (Bytes::ZERO, 1));
    device.release_reservation(address).unwrap();
    assert!(device.back(address, PAGE).is_err(), "the addresses were released");
    let lane = device.timeline();
    let fence = inner.fence_here();
    assert!(device.fence_here().is_passed() && fence.is_passed(), "{lane:?} has no work");
    inner.lose("a test says so");
    assert!(device.check().is_err_and(|error| error.is_lost()));
    assert!((device.clone() as Arc<dyn Device>).as_cuda().is_none());
}

#[test]
fn a_script_loses_the_device_at_the_listed_back() {
    let device = device(8);
    let address = device.reserve(PAGE * 8).unwrap();
    device.play(Script::new().lose_at_back(2));
    device.back(address, PAGE).unwrap();
    assert!(device.check().is_ok());
    let error = device.back(address.offset(PAGE), PAGE).unwrap_err();
    assert_eq!(error.to_string(), "the device is lost: the test script reported it lost");
    assert!(device.check().is_err() && device.counts().backed == PAGE);
}

#[test]
fn a_script_takes_foreign_memory_before_the_listed_back() {
    let device = device(8);
    let address = device.reserve(PAGE * 8).unwrap();
    device.play(Script::new().foreign_takes_before_back(2, PAGE).foreign_takes_before_back(2, PAGE * 2));
    device.back(address, PAGE).unwrap();
    assert_eq!(device.counts().foreign, Bytes::ZERO);
    device.back(address.offset(PAGE), PAGE).unwrap();
    assert_eq!(device.counts().foreign, PAGE * 3);
}

/// The size of this process's address space, including system libraries.
#[cfg(target_os = "linux")]
fn addresses() -> Bytes {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")).unwrap();
    Bytes::kib(size.parse().unwrap())
}

#[cfg(target_os = "linux")]
#[test]
fn a_dropped_host_device_releases_all_addresses() {
    let device = device(1);
    let before = addresses();
    device.reserve(Bytes::gib(1 << 10)).unwrap();
    assert!(addresses() >= before + Bytes::gib(900));
    drop(device);
    assert!(addresses() < before + Bytes::gib(100), "other tests reserve far less than 100 GiB");
}

/// Waits until all calls are blocked, except `ended` calls that have returned.
fn until_held(device: &HostDevice, calls: &[ScopedJoinHandle<'_, ()>], ended: usize) {
    while device.counts().held_calls as usize + ended != calls.len() {
        if calls.iter().filter(|call| call.is_finished()).count() > ended {
            device.let_calls_pass();
            panic!("a call was not held");
        }
        std::thread::yield_now();
    }
}

#[test]
fn held_device_calls_pass_one_by_one_or_together() {
    let device = device(8);
    let address = device.reserve(PAGE * 8).unwrap();
    device.hold_calls();
    device.let_one_call_pass(); // The next call may pass.
    device.back(address, PAGE).unwrap();
    // A panic inside this scope would wait for the blocked calls, so the results are
    // checked after the scope.
    let seen = std::thread::scope(|scope| {
        let device = &device;
        let calls = [1, 2, 3].map(|page| scope.spawn(move || device.back(address.offset(PAGE * page), PAGE).unwrap()));
        until_held(device, &calls, 0);
        let before = (device.counts().backed, free(device));
        device.let_one_call_pass();
        until_held(device, &calls, 1);
        let after = device.counts().backed;
        device.let_calls_pass();
        (before, after)
    });
    assert_eq!(seen, ((PAGE, PAGE * 7), PAGE * 2), "only one call passes, and the counters can be read");
    assert_eq!((device.counts().held_calls, device.counts().backed), (0, PAGE * 4));
    device.unback(address, PAGE).unwrap();
    device.hold_calls();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| device.unback(address.offset(PAGE), PAGE).unwrap());
        until_held(&device, &[call], 0);
        device.let_calls_pass();
    });
}
