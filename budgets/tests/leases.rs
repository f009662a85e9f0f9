//! Tests of single leases and segments: their meters, and the release notes that they post when
//! they end.

mod notes;

use bursar_budgets::testing::HostControl;
use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use bursar_budgets::*;
use notes::Notes;

const PAGE: Bytes = Bytes::kib(64);

impl Notes {
    /// Returns the only note posted since the last call.
    #[track_caller]
    fn only(&self) -> ReleaseNote {
        let mut posted = self.posted.lock().unwrap();
        assert_eq!(posted.len(), 1, "exactly one note was posted");
        posted.remove(0)
    }
}

/// A device of eight pages, and a ledger that grants leases on it.
struct Fixture {
    device: Arc<HostDevice>,
    ledger: Ledger,
    notes: Arc<Notes>,
    questions: u64,
}

impl Fixture {
    fn new() -> Fixture {
        let device = Arc::new(HostDevice::new(HostConfig::small(PAGE * 8)).unwrap());
        let ledger = Ledger::new(LedgerConfig::of(device.as_ref()));
        Fixture { device, ledger, notes: Arc::default(), questions: 6 }
    }

    fn grant(&mut self, pages: u64) -> Grant {
        self.questions += 1;
        let request = Request::new(Owner::new("kv", 2), Class::Kv, "demo", PAGE * pages).priority(Priority::Startup);
        match self.ledger.step(Input::Ask { id: RequestId(self.questions), request, wait: false }).remove(0) {
            Effect::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    fn lease(&mut self, pages: u64) -> Lease {
        let grant = self.grant(pages);
        Lease::issue(&grant, self.notes.clone())
    }

    fn segment(&mut self, pages: u64) -> Segment {
        let lease = self.lease(pages);
        let segment = Segment::reserve(self.device.clone(), PAGE * 16, lease).unwrap();
        segment.back_to(PAGE * pages).unwrap();
        segment
    }
}

#[test]
fn a_lease_reports_its_grant() {
    let mut fixture = Fixture::new();
    let grant = fixture.grant(3);
    assert_eq!(grant.request(), RequestId(7));
    let lease = Lease::issue(&grant, fixture.notes.clone());
    assert_eq!((lease.id(), lease.bytes(), lease.backed()), (LeaseId(1), PAGE * 3, Bytes::ZERO));
    assert_eq!((lease.class(), lease.owner(), lease.model().as_str()), (&Class::Kv, &Owner::new("kv", 2), "demo"));
    assert_eq!((lease.priority(), &lease.holding()), (Priority::Startup, grant.holding()));
    assert_eq!(format!("{lease:?}"), "lease 1 (192.0 KiB kv of demo for kv#2)");
    assert_eq!(format!("{:>9}|", lease.id()), "  lease 1|");
}

#[test]
fn a_lease_takes_the_size_that_the_ledger_granted() {
    let mut fixture = Fixture::new();
    let lease = fixture.lease(2);
    let grow = Input::Resize { id: RequestId(9), lease: lease.id(), to: PAGE * 5, wait: false, passed: false };
    let [Effect::Resized(resized)] = fixture.ledger.step(grow)[..] else { panic!("5 of 8 pages fit") };
    assert_eq!((resized.request(), resized.lease()), (RequestId(9), lease.id()));
    assert_eq!((resized.from(), resized.to()), (PAGE * 2, PAGE * 5));
    lease.resize(&resized);
    assert_eq!((lease.bytes(), lease.holding().bytes), (PAGE * 5, PAGE * 5));
}

#[test]
#[should_panic(expected = "the resize is for another lease")]
fn resizing_a_lease_with_another_leases_grant_panics() {
    let mut fixture = Fixture::new();
    let (mine, other) = (fixture.lease(1), fixture.lease(1));
    let shrink = Input::Resize { id: RequestId(9), lease: other.id(), to: Bytes(1), wait: false, passed: true };
    let [Effect::Resized(resized)] = fixture.ledger.step(shrink)[..] else { panic!("the lease shrinks") };
    mine.resize(&resized);
}

#[test]
#[should_panic(expected = "lease 1 cannot shrink to 64.0 KiB: 128.0 KiB are still backed")]
fn shrinking_a_lease_below_its_backed_bytes_panics() {
    let mut fixture = Fixture::new();
    let segment = fixture.segment(2);
    let lease = segment.lease().id();
    let shrink = Input::Resize { id: RequestId(9), lease, to: PAGE, wait: false, passed: true };
    let [Effect::Resized(resized)] = fixture.ledger.step(shrink)[..] else { panic!("the lease shrinks") };
    segment.lease().resize(&resized);
}

#[test]
fn a_lease_is_released_after_the_given_fence() {
    let mut fixture = Fixture::new();
    let lane = Timeline::new();
    let (lease, step) = (fixture.lease(2), lane.issue());
    lease.release_after(lane.fence_here());
    let note = fixture.notes.only();
    assert!(note.lease == LeaseId(1) && !note.fence.is_passed() && note.backings.is_empty());
    lane.complete(step);
    assert!(note.fence.is_passed());
}

#[test]
fn a_segment_is_released_after_the_given_fence() {
    let mut fixture = Fixture::new();
    let lane = Timeline::new(); // This timeline does not belong to the device, which is idle.
    let (segment, step) = (fixture.segment(2), lane.issue());
    segment.release_after(lane.fence_here());
    assert_eq!(fixture.device.counts().backed, PAGE * 2, "the segment stays backed until the fence passes");
    let note = fixture.notes.only();
    assert_eq!((note.fence.is_passed(), note.backings.len()), (false, 1));
    assert_eq!(format!("{:?}", note.backings[0]).split(" at ").next(), Some("128.0 KiB of 1.0 MiB backed"));
    lane.complete(step);
    assert!(note.fence.is_passed());
    drop(note);
    assert_eq!(fixture.device.counts().backed, Bytes::ZERO);
}

#[test]
fn a_lease_meter_reports_a_back_or_unback_in_progress() {
    let mut fixture = Fixture::new();
    let lease = Arc::new(fixture.lease(2));
    let segment = Segment::reserve(fixture.device.clone(), PAGE * 2, lease.clone()).unwrap();
    let (meter, device) = (lease.meter(), fixture.device.clone());
    let seen_during = |call: &(dyn Fn() + Sync)| {
        assert!(!meter.is_moving(), "no call is in progress");
        device.hold_calls();
        std::thread::scope(|scope| {
            let calling = scope.spawn(call);
            while device.counts().held_calls == 0 {
                assert!(!calling.is_finished(), "the call was not held");
                std::thread::yield_now();
            }
            let (is_moving, used) = (meter.is_moving(), meter.used(PAGE * 2));
            device.let_calls_pass();
            calling.join().unwrap();
            assert!(is_moving && !meter.is_moving());
            used
        })
    };
    // Bytes count before the device backs them, and until after the device has unbacked them.
    assert_eq!(seen_during(&|| segment.back_to(PAGE * 2).unwrap()), PAGE * 2);
    assert_eq!(seen_during(&|| segment.shrink_to(PAGE, &Fence::passed()).unwrap()), PAGE * 2);
    assert_eq!(meter.used(PAGE * 2), PAGE);
}

#[test]
fn a_segment_reports_its_address_and_sizes() {
    let mut fixture = Fixture::new();
    let lease = fixture.lease(2);
    let segment = Segment::reserve(fixture.device.clone(), PAGE * 2 + Bytes(1), lease).unwrap();
    segment.back_to(PAGE + Bytes(1)).unwrap();
    assert_eq!((segment.backed(), segment.reserved(), segment.lease().id()), (PAGE * 2, PAGE * 3, LeaseId(1)));
    assert_eq!(segment.device().page(), PAGE);
    let message = format!("128.0 KiB of 192.0 KiB backed at {}", segment.address());
    assert_eq!(format!("{:?}", segment.revoker()), format!("revoker of Some({message})"));
    assert!(segment.address().0.is_multiple_of(PAGE.0) && segment.address().0 > 0);
}

#[test]
#[should_panic(expected = "192.0 KiB of 128.0 KiB reserved cannot be backed")]
fn backing_a_segment_beyond_its_reservation_panics() {
    let mut fixture = Fixture::new();
    let lease = fixture.lease(4);
    let segment = Segment::reserve(fixture.device.clone(), PAGE * 2, lease).unwrap();
    segment.back_to(PAGE * 2).unwrap();
    let _ = segment.back_to(PAGE * 3);
}

#[test]
fn a_resize_that_changes_nothing_does_not_call_the_device() {
    let mut fixture = Fixture::new();
    let segment = fixture.segment(2);
    let before = fixture.device.counts();
    for pages in [1, 2] {
        segment.back_to(PAGE * pages).unwrap();
    }
    for pages in [2, 3] {
        segment.shrink_to(PAGE * pages, &Fence::passed()).unwrap();
    }
    assert_eq!((fixture.device.counts(), segment.backed()), (before, PAGE * 2));
}

#[test]
fn a_segment_is_revoked_once_and_never_backed_again() {
    let mut fixture = Fixture::new();
    let segment = fixture.segment(2);
    let revoker = segment.revoker();
    assert!(!revoker.is_dropped());
    revoker.revoke().unwrap();
    revoker.revoke().unwrap();
    assert_eq!((segment.backed(), fixture.device.counts().unbacks), (Bytes::ZERO, 1));
    let error = segment.back_to(PAGE).unwrap_err();
    assert!(error.to_string().ends_with("cannot be backed: the lease was revoked"), "{error}");
    drop(segment);
    assert!(revoker.is_dropped());
    revoker.revoke().unwrap();
}

#[test]
fn a_revoker_waits_for_a_segment_that_is_being_dropped() {
    let mut fixture = Fixture::new();
    let segment = fixture.segment(2);
    let (revoker, device) = (segment.revoker(), fixture.device.clone());
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    device.hold_calls();
    std::thread::scope(|scope| {
        let dropped = scope.spawn(move || drop(segment));
        while fixture.device.counts().held_calls == 0 && !dropped.is_finished() {
            std::thread::yield_now();
        }
        scope.spawn(move || {
            revoker.revoke().unwrap();
            sender.send(device.counts().backed).unwrap();
        });
        let early = receiver.recv_timeout(std::time::Duration::from_millis(50));
        fixture.device.let_calls_pass();
        assert!(early.is_err(), "memory is reported as returned only when unbacked: {early:?}");
        assert_eq!(receiver.recv().unwrap(), Bytes::ZERO);
    });
}

#[test]
fn a_segment_without_memory_can_be_revoked() {
    let mut fixture = Fixture::new();
    let lease = fixture.lease(2);
    let segment = Segment::reserve(fixture.device.clone(), PAGE * 2, lease).unwrap();
    segment.revoker().revoke().unwrap();
    assert!(segment.back_to(PAGE).is_err());
    assert_eq!(fixture.device.counts().calls, 1, "only addresses were reserved");
}

#[test]
fn a_fence_watch_forgets_revokers_of_dropped_segments() {
    let mut fixture = Fixture::new();
    let (mut watch, lease) = (FenceWatch::default(), Arc::new(fixture.lease(2)));
    let reserve = || Segment::reserve(fixture.device.clone(), PAGE, lease.clone()).unwrap();
    let (gone, stays) = (reserve(), reserve());
    watch.segment_reserved(lease.id(), gone.revoker());
    watch.segment_reserved(lease.id(), stays.revoker());
    let late = reserve();
    drop(gone);
    watch.segment_reserved(lease.id(), late.revoker());
    assert_eq!(format!("{watch:?}").matches("revoker of Some").count(), 2);
    assert_eq!(format!("{watch:?}").matches("revoker of").count(), 2);
    watch.revoke(lease.id(), Fence::passed());
    assert_eq!(watch.passed().unwrap(), [lease.id()]);
    assert!(stays.back_to(PAGE).is_err() && late.back_to(PAGE).is_err(), "both segments are revoked");
}

#[test]
fn a_fence_watch_is_idle_without_waiting_or_pending_reclaims() {
    let (mut watch, lane) = (FenceWatch::default(), Timeline::new());
    assert!(watch.is_idle() && watch.waiting() == 0);
    let step = lane.issue();
    for lease in 1..4 {
        watch.wait(LeaseId(lease), lane.fence_here());
    }
    assert!(!watch.is_idle() && watch.waiting() == 3 && watch.waits_for(LeaseId(2)));
    assert!(!watch.waits_for(LeaseId(4)) && !watch.is_being_released(LeaseId(2)));
    lane.complete(step);
    let due = watch.due();
    assert_eq!(due.iter().map(PendingReclaim::lease).collect::<Vec<_>>(), [LeaseId(1), LeaseId(2), LeaseId(3)]);
    assert!(!watch.is_idle() && watch.waiting() == 0 && watch.is_being_released(LeaseId(2)));
    for reclaim in due {
        assert!(reclaim.is_light());
        assert_eq!(watch.finish_release(reclaim.lease()), reclaim.lease());
    }
    assert!(watch.is_idle() && !watch.waits_for(LeaseId(2)));
}

#[test]
fn a_release_note_with_backed_memory_waits_for_its_reclaim() {
    let mut fixture = Fixture::new();
    let lane = fixture.device.timeline();
    let (segment, step) = (fixture.segment(2), lane.issue());
    drop(segment);
    lane.complete(step);
    let note = fixture.notes.only();
    assert!(note.fence.is_passed());
    let mut watch = FenceWatch::default();
    assert!(!watch.released(note), "the segment is still backed");
    let reclaim = watch.due().pop().expect("the fence of the lease has passed");
    assert!(!reclaim.is_light());
    watch.requeue(reclaim);
    assert_eq!((watch.passed().unwrap(), fixture.device.counts().backed), (vec![LeaseId(1)], Bytes::ZERO));
}

/// A device that cannot unback memory while `is_stuck` is set.
struct Stuck {
    device: Arc<HostDevice>,
    is_stuck: AtomicBool,
}

impl Device for Stuck {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn page(&self) -> Bytes {
        self.device.page()
    }

    fn is_host_memory(&self) -> bool {
        true
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        self.device.memory()
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.device.check()
    }

    fn overhead(&self) -> Bytes {
        self.device.overhead()
    }

    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        self.device.reserve(bytes)
    }

    fn release_reservation(&self, address: Address) -> Result<(), DeviceError> {
        self.device.release_reservation(address)
    }

    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.device.back(address, bytes)
    }

    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        if self.is_stuck.load(Relaxed) {
            return Err(DeviceError::BadRange { address, bytes, verb: "unbacked", reason: "the device is stuck" });
        }
        self.device.unback(address, bytes)
    }

    fn timeline(&self) -> Timeline {
        self.device.timeline()
    }

    fn fence_here(&self) -> Fence {
        self.device.fence_here()
    }
}

#[test]
fn the_next_call_reports_leases_returned_before_an_error() {
    let mut fixture = Fixture::new();
    let stuck = Arc::new(Stuck { device: fixture.device.clone(), is_stuck: AtomicBool::new(true) });
    let mut watch = FenceWatch::default();
    let devices: [Arc<dyn Device>; 3] = [fixture.device.clone(), stuck.clone(), fixture.device.clone()];
    let segments = devices.map(|device| {
        let segment = Segment::reserve(device, PAGE, fixture.lease(1)).unwrap();
        segment.back_to(PAGE).unwrap();
        watch.segment_reserved(segment.lease().id(), segment.revoker());
        watch.revoke(segment.lease().id(), Fence::passed());
        segment
    });
    assert!(watch.passed().is_err(), "the second lease keeps its memory");
    assert_eq!(fixture.device.counts().backed, PAGE * 2);
    stuck.is_stuck.store(false, Relaxed);
    assert_eq!(watch.passed().unwrap(), segments.each_ref().map(|segment| segment.lease().id()));
    assert!(watch.is_idle() && fixture.device.counts().backed == Bytes::ZERO);
}

#[test]
fn a_release_note_without_memory_waits_for_its_fence() {
    let mut fixture = Fixture::new();
    let lane = Timeline::new();
    let (lease, step) = (fixture.lease(2), lane.issue());
    lease.release_after(lane.fence_here());
    let mut watch = FenceWatch::default();
    assert!(!watch.released(fixture.notes.only()) && watch.passed().unwrap().is_empty());
    lane.complete(step);
    assert_eq!(watch.passed().unwrap(), [LeaseId(1)]);
    let late = ReleaseNote { lease: LeaseId(1), fence: Fence::passed(), backings: Vec::new() };
    assert!(watch.released(late), "the lease has nothing left to wait for");
}

#[test]
fn a_lease_that_waits_twice_waits_for_both_fences() {
    let (mut watch, one, other) = (FenceWatch::default(), Timeline::new(), Timeline::new());
    let (first, second) = (one.issue(), other.issue());
    watch.wait(LeaseId(1), one.fence_here());
    watch.released(ReleaseNote { lease: LeaseId(1), fence: other.fence_here(), backings: Vec::new() });
    one.complete(first);
    assert!(watch.passed().unwrap().is_empty());
    other.complete(second);
    assert_eq!(watch.passed().unwrap(), [LeaseId(1)]);
}

#[test]
fn a_lease_that_is_being_reclaimed_is_not_due_again() {
    let (mut watch, lane) = (FenceWatch::default(), Timeline::new());
    watch.wait(LeaseId(1), lane.fence_here());
    let reclaim = watch.due().pop().expect("the lease is due");
    watch.wait(LeaseId(1), Fence::passed());
    assert!(watch.due().is_empty(), "the lease is already being returned");
    watch.requeue(reclaim);
    assert_eq!(watch.passed().unwrap(), [LeaseId(1)]);
    assert!(watch.is_idle());
}

#[test]
#[should_panic(expected = "ticket 1 is not of this timeline, which has issued 0")]
fn completing_another_timelines_ticket_panics() {
    let ticket = Timeline::new().issue();
    Timeline::new().complete(ticket);
}

#[test]
fn a_fence_passes_after_all_work_issued_before_it() {
    let lane = Timeline::new();
    let (first, second) = (lane.issue(), lane.issue());
    let fence = lane.fence_here();
    let third = lane.issue();
    lane.complete(first);
    assert!(!fence.is_passed());
    lane.complete(second);
    assert!(fence.is_passed() && !lane.fence_here().is_passed());
    lane.complete(first);
    assert!(fence.is_passed(), "a fence that has passed stays passed");
    lane.complete(third);
    assert!(lane.fence_here().is_passed());
}

#[test]
fn holding_a_timeline_twice_stops_its_pending_fences() {
    let lane = Timeline::new();
    let step = lane.issue();
    let early = lane.fence_here();
    lane.let_pass();
    assert!(!early.is_passed(), "no work was completed");
    lane.hold();
    lane.complete(step);
    lane.hold();
    assert!(!early.is_passed() && !lane.fence_here().is_passed(), "fences are held although the work is done");
    lane.let_pass();
    lane.let_pass();
    assert!(early.is_passed() && lane.fence_here().is_passed());
}

#[test]
fn holding_fences_also_holds_timelines_opened_later() {
    let device = Fixture::new().device;
    let early = device.timeline();
    device.hold_fences();
    let late = device.timeline();
    assert!(!early.fence_here().is_passed() && !late.fence_here().is_passed() && !device.fence_here().is_passed());
    device.let_fences_pass();
    assert!(early.fence_here().is_passed() && late.fence_here().is_passed() && device.fence_here().is_passed());
    assert!(device.timeline().fence_here().is_passed());
}
