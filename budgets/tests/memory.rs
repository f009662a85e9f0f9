//! Tests of segments on the host device: the backed memory never exceeds the lease, whichever call
//! fails.

mod notes;

use bursar_budgets::testing::HostControl;
use bursar_budgets::testing::Script;
use std::sync::Arc;

use bursar_budgets::*;
use notes::Notes;
use proptest::prelude::*;

const PAGE: Bytes = Bytes::kib(64);

/// A budget without an actor: the ledger, the fence watch, and the notes that leases post.
struct Budget {
    device: Arc<HostDevice>,
    ledger: Ledger,
    watch: FenceWatch,
    notes: Arc<Notes>,
    questions: u64,
}

impl Budget {
    fn new(pages: u64) -> Budget {
        let device = Arc::new(HostDevice::new(HostConfig::small(PAGE * pages)).unwrap());
        let ledger = Ledger::new(LedgerConfig::of(device.as_ref()));
        Budget { device, ledger, watch: FenceWatch::default(), notes: Arc::default(), questions: 0 }
    }

    fn lease(&mut self, name: &str, bytes: Bytes) -> Option<Lease> {
        self.questions += 1;
        let request = Request::new(Owner::new(name, 0), Class::external("t"), "demo", bytes);
        match &self.ledger.step(Input::Ask { id: RequestId(self.questions), request, wait: false })[..] {
            [Effect::Granted(grant)] => Some(Lease::issue(grant, self.notes.clone())),
            _ => None,
        }
    }

    fn resize(&mut self, lease: &Lease, to: Bytes) -> bool {
        self.questions += 1;
        let id = RequestId(self.questions);
        match &self.ledger.step(Input::Resize { id, lease: lease.id(), to, wait: false, passed: true })[..] {
            [Effect::Resized(resized)] => lease.resize(resized),
            _ => return false,
        }
        true
    }

    /// Reads the notes and checks the fences, as a budget actor does before its next message.
    fn settle(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        for (lease, revoker) in self.notes.revokers.lock().unwrap().drain(..) {
            self.watch.segment_reserved(lease, revoker);
        }
        for note in self.notes.posted.lock().unwrap().drain(..) {
            let lease = note.lease;
            let passed = self.watch.released(note);
            effects.extend(self.ledger.step(Input::Release { lease, passed }));
        }
        for lease in self.watch.passed().unwrap() {
            effects.extend(self.ledger.step(Input::FencePassed { lease }));
        }
        effects
    }

    fn segment(&mut self, name: &str, pages: u64) -> Segment {
        let lease = self.lease(name, PAGE * pages).unwrap();
        let segment = Segment::reserve(self.device.clone(), PAGE * 64, lease).unwrap();
        segment.back_to(PAGE * pages).unwrap();
        segment
    }
}

fn write(address: Address, value: u8) {
    // SAFETY: tests write only to the first byte of memory that one of their segments has backed.
    unsafe { (address.0 as *mut u8).write_volatile(value) }
}

fn read(address: Address) -> u8 {
    // SAFETY: tests read only the first byte of memory that one of their segments has backed.
    unsafe { (address.0 as *const u8).read_volatile() }
}

/// Whether an access to this address would fault. The check itself does not fault, because
/// the kernel returns EFAULT.
#[cfg(unix)]
fn faults(address: Address) -> bool {
    use std::{io::ErrorKind, os::fd::AsRawFd};
    let (_reader, writer) = std::io::pipe().unwrap();
    // SAFETY: the kernel copies one byte, or returns an error.
    let written = unsafe { libc::write(writer.as_raw_fd(), address.0 as *const libc::c_void, 1) };
    let error = std::io::Error::last_os_error();
    assert!(written == 1 || error.raw_os_error() == Some(libc::EFAULT) || error.kind() == ErrorKind::Other);
    written != 1
}

#[test]
fn a_refused_back_changes_nothing() {
    let mut budget = Budget::new(8);
    let segment = budget.segment("kv", 2);
    let lease = budget.lease("more", PAGE * 2).unwrap();
    let other = Segment::reserve(budget.device.clone(), PAGE * 2, lease).unwrap();
    budget.device.play(Script::new().refuse_back(2));
    let error = other.back_to(PAGE * 2).unwrap_err();
    assert!(error.is_refused() && !error.is_lost());
    assert_eq!(error.to_string(), "the device refused 131,072 B (128.0 KiB); 393,216 B (384.0 KiB) are free");
    assert_eq!((other.backed(), other.lease().backed()), (Bytes::ZERO, Bytes::ZERO));
    assert_eq!((segment.backed(), budget.device.counts().backed), (PAGE * 2, PAGE * 2));
    other.back_to(PAGE * 2).unwrap();
    assert_eq!(budget.device.counts().backed, PAGE * 4);
}

#[test]
fn a_meter_counts_backed_bytes_or_a_whole_lease() {
    let mut budget = Budget::new(8);
    let lease = Arc::new(budget.lease("kv", PAGE * 4).unwrap());
    let (meter, granted) = (lease.meter(), lease.bytes());
    assert_eq!(meter.used(granted), PAGE * 4, "a lease without a segment counts as fully used");
    let layers = [(); 2].map(|()| Segment::reserve(budget.device.clone(), PAGE * 8, lease.clone()).unwrap());
    assert_eq!(meter.used(granted), Bytes::ZERO, "nothing is backed yet");
    layers.iter().for_each(|layer| layer.back_to(PAGE * 2).unwrap());
    assert_eq!((meter.used(granted), budget.device.counts().backed), (PAGE * 4, PAGE * 4));
    layers[0].shrink_to(PAGE, &Fence::passed()).unwrap();
    assert_eq!((meter.used(granted), lease.bytes()), (PAGE * 3, PAGE * 4), "the page is still leased, but not in use");
    // Memory that waits for its fence still counts.
    let lane = budget.device.timeline();
    let step = lane.issue();
    drop((layers, lease));
    assert_eq!((meter.used(granted), budget.device.counts().backed), (PAGE * 3, PAGE * 3));
    lane.complete(step);
    assert!(matches!(budget.settle()[..], [Effect::Freed { .. }]));
}

#[test]
fn another_process_can_take_memory_between_lease_and_back() {
    let mut budget = Budget::new(4);
    let lease = budget.lease("kv", PAGE * 4).unwrap();
    let segment = Segment::reserve(budget.device.clone(), PAGE * 4, lease).unwrap();
    budget.device.play(Script::new().foreign_takes_before_back(1, PAGE * 3));
    let error = segment.back_to(PAGE * 4).unwrap_err();
    assert_eq!(error.hint().unwrap(), "lease 192.0 KiB less, or raise `capacity`");
    assert_eq!(budget.device.memory().unwrap().free, PAGE);
    assert_eq!(budget.device.foreign_gives_back(Bytes::MAX), PAGE * 3);
    segment.back_to(PAGE * 4).unwrap();
    assert_eq!(budget.device.foreign_takes(PAGE), Bytes::ZERO, "no memory is left to take");
}

#[test]
fn a_lost_device_fails_every_call_but_segments_still_drop() {
    let mut budget = Budget::new(4);
    let segment = budget.segment("kv", 1);
    budget.device.lose("illegal address");
    assert!(budget.device.memory().unwrap_err().is_lost());
    assert_eq!(budget.device.reserve(PAGE).unwrap_err().to_string(), "the device is lost: illegal address");
    drop(segment);
    assert_eq!(budget.device.counts().reservations, 0);
}

#[cfg(unix)]
#[test]
fn addresses_are_stable_and_a_use_after_unback_faults() {
    let mut budget = Budget::new(8);
    let segment = budget.segment("kv", 4);
    let (start, tail) = (segment.address(), segment.address().offset(PAGE * 3));
    write(start, 7);
    write(tail, 8);
    segment.shrink_to(PAGE, &Fence::passed()).unwrap();
    assert!(faults(tail) && !faults(start));
    segment.back_to(PAGE * 4).unwrap();
    assert_eq!((segment.address(), read(start), read(tail)), (start, 7, 0), "memory that is backed again is zeroed");
    assert!(faults(segment.address().offset(PAGE * 4)));
    drop(segment);
    assert!(faults(start));
}

#[test]
fn each_kind_of_bad_range_has_a_separate_error() {
    let device = HostDevice::new(HostConfig::small(PAGE * 8)).unwrap();
    let address = device.reserve(PAGE * 4).unwrap();
    device.back(address, PAGE).unwrap();
    let says = |error: DeviceError| error.to_string().rsplit(": ").next().unwrap().to_string();
    assert_eq!(says(device.back(address, PAGE).unwrap_err()), "part of the range is already backed");
    assert_eq!(
        says(device.back(address.offset(PAGE), PAGE * 4).unwrap_err()),
        "the range does not lie within one reservation"
    );
    assert_eq!(says(device.back(address.offset(Bytes(1)), PAGE).unwrap_err()), "the range is not made of whole pages");
    assert_eq!(says(device.unback(address, PAGE * 2).unwrap_err()), "part of the range is not backed");
    assert_eq!(says(device.back(Address(0), PAGE).unwrap_err()), "the address is not reserved");
    assert_eq!(
        says(device.release_reservation(address.offset(PAGE)).unwrap_err()),
        "no reservation starts at this address"
    );
    assert_eq!(device.counts().backs, 1, "scripts do not count calls with bad ranges");
    let bad = HostDevice::new(HostConfig { page: Bytes(1000), ..HostConfig::new(PAGE) }).unwrap_err();
    assert!(bad.to_string().starts_with("the page size is 1,000 B: it must be a power of two"));
}

#[test]
fn a_dropped_segment_keeps_its_memory_until_its_fence_passes() {
    let mut budget = Budget::new(4);
    let lane = budget.device.timeline();
    let segment = budget.segment("vision", 4);
    let step = lane.issue();
    drop(segment);
    assert!(budget.settle().is_empty());
    assert_eq!(budget.device.counts().backed, PAGE * 4);
    assert_eq!(budget.ledger.held_by("vision"), PAGE * 4);
    lane.complete(step);
    assert!(matches!(budget.settle()[..], [Effect::Freed { .. }]));
    assert_eq!(budget.device.counts().backed, Bytes::ZERO);
    assert_eq!(budget.ledger.held_by("vision"), Bytes::ZERO);
}

#[test]
fn a_held_fence_keeps_a_dead_owners_bytes_backed() {
    let mut budget = Budget::new(4);
    let _lane = budget.device.timeline();
    let segment = budget.segment("vision", 4);
    let address = segment.address();
    budget.settle();
    budget.device.hold_fences();
    for effect in budget.ledger.step(Input::OwnerDied { owner: Owner::new("vision", 0) }) {
        if let Effect::Revoking { lease } = effect {
            budget.watch.revoke(lease, budget.device.fence_here());
        }
    }
    assert!(budget.settle().is_empty());
    assert_eq!(budget.device.counts().backed, PAGE * 4);
    budget.device.let_fences_pass();
    let effects = budget.settle();
    assert!(matches!(effects[..], [Effect::Freed { .. }, Effect::OwnerCleared { .. }]), "{effects:?}");
    assert_eq!(budget.device.counts().backed, Bytes::ZERO, "revoked memory is unbacked although the segment lives");
    #[cfg(unix)]
    assert!(faults(address));
    let error = segment.back_to(PAGE * 4);
    assert!(matches!(error, Err(DeviceError::BadRange { reason: "the lease was revoked", .. })), "{error:?}");
    drop(segment);
    assert!(budget.settle().is_empty(), "the late note has no effect");
    assert_eq!(budget.device.counts().reservations, 0);
}

#[test]
fn segments_that_share_a_lease_post_one_release_note() {
    let mut budget = Budget::new(8);
    let lease = Arc::new(budget.lease("kv", PAGE * 4).unwrap());
    let layers: Vec<Segment> =
        (0..2).map(|_| Segment::reserve(budget.device.clone(), PAGE * 8, lease.clone()).unwrap()).collect();
    layers.iter().for_each(|layer| layer.back_to(PAGE * 2).unwrap());
    assert_eq!((lease.backed(), lease.bytes()), (PAGE * 4, PAGE * 4));
    drop(lease);
    drop(layers);
    assert!(matches!(budget.settle()[..], [Effect::Freed { .. }]));
}

#[test]
#[should_panic(expected = "covers 64.0 KiB; 128.0 KiB were to be backed")]
fn backing_more_than_the_lease_panics() {
    let mut budget = Budget::new(8);
    let lease = budget.lease("kv", PAGE).unwrap();
    let segment = Segment::reserve(budget.device.clone(), PAGE * 8, lease).unwrap();
    let _ = segment.back_to(PAGE * 2);
}

#[test]
#[should_panic(expected = "the device still uses the tail")]
fn unbacking_before_the_fence_panics() {
    let mut budget = Budget::new(8);
    let lane = budget.device.timeline();
    let segment = budget.segment("kv", 2);
    let _step = lane.issue();
    let _ = segment.shrink_to(PAGE, &lane.fence_here());
}

#[test]
fn a_passed_fence_stays_passed_and_settling_passes_pending_fences() {
    let lane = Timeline::new();
    let (first, _second) = (lane.issue(), lane.issue());
    let early = lane.fence_here();
    lane.complete(first);
    assert!(!early.is_passed());
    lane.settle();
    assert!(early.is_passed());
    lane.hold();
    let late = lane.fence_here();
    assert!(early.is_passed() && !late.is_passed() && !early.clone().and(late.clone()).is_passed());
    lane.let_pass();
    assert!(late.is_passed());
    lane.hold();
    assert!(!lane.fence_here().is_passed());
}

#[derive(Clone, Debug)]
enum Op {
    Open { pages: u64 },
    Grow { pick: usize, pages: u64 },
    Shrink { pick: usize, pages: u64 },
    Close { pick: usize },
    Refuse { next: u64 },
    Issue,
    Complete,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn backed_bytes_never_exceed_leased_bytes(ops in proptest::collection::vec(
        prop_oneof![
            3 => (1..12u64).prop_map(|pages| Op::Open { pages }),
            3 => (any::<usize>(), 1..16u64).prop_map(|(pick, pages)| Op::Grow { pick, pages }),
            2 => (any::<usize>(), 0..8u64).prop_map(|(pick, pages)| Op::Shrink { pick, pages }),
            2 => any::<usize>().prop_map(|pick| Op::Close { pick }),
            1 => (1..4u64).prop_map(|next| Op::Refuse { next }),
            1 => Just(Op::Issue),
            1 => Just(Op::Complete),
        ], 1..50)
    ) {
        let mut budget = Budget::new(24);
        let lane = budget.device.timeline();
        let mut segments: Vec<Segment> = Vec::new();
        for op in ops {
            let count = segments.len();
            match op {
                Op::Open { pages } => if let Some(lease) = budget.lease("kv", PAGE * pages) {
                    let segment = Segment::reserve(budget.device.clone(), PAGE * 16, lease).unwrap();
                    let before = budget.device.counts().backed;
                    let backed = segment.back_to(PAGE * pages).map(|()| PAGE * pages).unwrap_or_default();
                    prop_assert_eq!(budget.device.counts().backed, before + backed);
                    segments.push(segment);
                },
                Op::Grow { pick, pages } if count > 0 => {
                    let segment = &segments[pick % count];
                    let before = segment.backed();
                    let grown = PAGE * pages > segment.lease().bytes()
                        && budget.resize(segment.lease(), PAGE * pages);
                    if grown && segment.back_to(PAGE * pages).is_err() {
                        prop_assert_eq!(segment.backed(), before);
                    }
                }
                Op::Shrink { pick, pages } if count > 0 => {
                    let segment = &segments[pick % count];
                    if PAGE * pages < segment.lease().bytes() {
                        segment.shrink_to(PAGE * pages, &Fence::passed()).unwrap();
                        prop_assert!(budget.resize(segment.lease(), PAGE * pages));
                    }
                }
                Op::Close { pick } if count > 0 => drop(segments.swap_remove(pick % count)),
                Op::Refuse { next } => {
                    budget.device.play(Script::new().refuse_back(budget.device.counts().backs + next));
                }
                Op::Issue => { let _later = lane.issue(); }
                Op::Complete => lane.settle(),
                _ => {}
            }
            budget.settle();
            for segment in &segments {
                prop_assert_eq!(segment.lease().backed(), segment.backed());
                prop_assert!(segment.backed() <= segment.lease().bytes());
            }
            let granted = budget.ledger.snapshot().granted;
            prop_assert!(budget.device.counts().backed <= granted, "rule 1 also holds for the device's own count");
        }
        drop(segments);
        lane.settle();
        budget.settle();
        prop_assert_eq!(budget.device.counts().backed, Bytes::ZERO);
        prop_assert_eq!(budget.ledger.snapshot().granted, Bytes::ZERO);
        prop_assert_eq!(budget.device.counts().reservations, 0);
    }
}

#[test]
fn a_released_lease_waits_for_the_fence_of_its_tail() {
    let (mut watch, lane) = (FenceWatch::default(), Timeline::new());
    let step = lane.issue();
    watch.wait(LeaseId(1), lane.fence_here());
    let note = ReleaseNote { lease: LeaseId(1), fence: Fence::passed(), backings: Vec::new() };
    assert!(!watch.released(note), "the device still uses the tail");
    lane.complete(step);
    assert_eq!(watch.passed().unwrap(), [LeaseId(1)]);
    assert_eq!(watch.waiting(), 0);
}

#[test]
fn memory_is_released_on_another_thread_before_the_ledger_is_informed() {
    let mut budget = Budget::new(16);
    let (lane, segment) = (budget.device.timeline(), budget.segment("dead", 8));
    let lease = segment.lease().id();
    let step = lane.issue();
    budget.settle();
    for effect in budget.ledger.step(Input::OwnerDied { owner: Owner::new("dead", 0) }) {
        let Effect::Revoking { lease } = effect else { panic!("{effect:?}") };
        budget.watch.revoke(lease, budget.device.fence_here());
    }
    assert!(budget.watch.due().is_empty(), "the device still uses the memory");
    lane.complete(step);
    let mut due = budget.watch.due();
    let mut reclaim = due.pop().expect("the fence of the lease has passed");
    assert!(due.is_empty() && !reclaim.is_light() && reclaim.lease() == lease);
    assert!(budget.watch.due().is_empty() && budget.watch.waits_for(lease) && budget.watch.is_being_released(lease));
    // The owner's handle drops while another thread returns the memory. The ledger must be informed
    // only after that thread is done.
    let bringing = std::thread::spawn(move || {
        reclaim.release().unwrap();
        reclaim
    });
    drop(segment);
    assert!(budget.settle().is_empty(), "the lease is already being returned");
    let reclaim = bringing.join().unwrap();
    assert_eq!(budget.device.counts().backed, Bytes::ZERO);
    assert_eq!(budget.ledger.snapshot().granted, PAGE * 8, "the ledger has not been informed yet");
    let lease = budget.watch.finish_release(reclaim.lease());
    let effects = budget.ledger.step(Input::FencePassed { lease });
    assert!(effects.contains(&Effect::OwnerCleared { owner: Owner::new("dead", 0) }), "{effects:?}");
    assert!(!budget.watch.waits_for(lease) && budget.watch.waiting() == 0);
}

#[test]
fn a_failed_reclaim_is_due_again_with_all_its_memory() {
    let mut budget = Budget::new(16);
    let segment = budget.segment("dead", 8);
    let lease = segment.lease().id();
    budget.settle();
    budget.ledger.step(Input::OwnerDied { owner: Owner::new("dead", 0) });
    budget.watch.revoke(lease, Fence::passed());
    for _ in 0..3 {
        let reclaim = budget.watch.due().pop().expect("the lease is due");
        budget.watch.requeue(reclaim);
    }
    assert_eq!(budget.device.counts().backed, PAGE * 8);
    assert_eq!(budget.watch.passed().unwrap(), [lease]);
    assert_eq!(budget.device.counts().backed, Bytes::ZERO);
    assert!(budget.watch.due().is_empty());
}

#[test]
fn a_lost_device_takes_memory_back_but_gives_none() {
    let mut budget = Budget::new(16);
    let segment = budget.segment("mine", 8);
    segment.shrink_to(PAGE * 4, &Fence::passed()).unwrap();
    budget.device.check().unwrap();
    budget.device.lose("a script says so");
    for error in [
        budget.device.check().unwrap_err(),
        budget.device.memory().unwrap_err(),
        segment.back_to(PAGE * 8).unwrap_err(),
        budget.device.reserve(PAGE).unwrap_err(),
    ] {
        assert!(error.is_lost(), "{error}");
    }
    segment.shrink_to(PAGE * 2, &Fence::passed()).unwrap();
    assert_eq!(budget.device.counts().backed, PAGE * 2);
    drop(segment);
    budget.settle();
    assert_eq!((budget.device.counts().backed, budget.ledger.snapshot().granted), (Bytes::ZERO, Bytes::ZERO));
}
