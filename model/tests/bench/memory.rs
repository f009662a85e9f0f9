//! Leased memory of a host device.

use std::{cell::Cell, cell::RefCell, sync::Arc};

use bursar_budgets::*;

struct Nobody;

impl ReleaseNotes for Nobody {
    fn post(&self, _: ReleaseNote) {}
}

/// A device with small pages, and the ledger of its bytes.
pub struct Memory {
    device: Arc<HostDevice>,
    ledger: RefCell<Ledger>,
    asked: Cell<u64>,
}

impl Memory {
    pub fn new(capacity: Bytes) -> Self {
        let device = Arc::new(HostDevice::new(HostConfig::small(capacity)).expect("host memory"));
        let ledger = RefCell::new(Ledger::new(LedgerConfig::new(capacity)));
        Memory { device, ledger, asked: Cell::new(0) }
    }

    /// A segment of whole pages, backed and full of not-a-numbers.
    pub fn poisoned(&self, class: Class, bytes: Bytes) -> Segment {
        let bytes = bytes.max(Bytes(1)).round_up(self.device.page());
        self.asked.set(self.asked.get() + 1);
        let request = Request::new(Owner::new("story", 0), class, "model", bytes);
        let ask = Input::Ask { id: RequestId(self.asked.get()), request, wait: false };
        let effects = self.ledger.borrow_mut().step(ask);
        let [Effect::Granted(grant)] = &effects[..] else { panic!("{effects:?}") };
        let segment = Segment::reserve(self.device.clone(), bytes, Lease::issue(grant, Arc::new(Nobody)));
        let segment = segment.expect("addresses");
        segment.back_to(bytes).expect("memory");
        poison(&segment, segment.backed());
        segment
    }
}

/// Makes the first `bytes` of a segment not-a-numbers in every floating-point type, and indices out of all bounds.
pub fn poison(segment: &Segment, bytes: Bytes) {
    assert!(bytes <= segment.backed());
    // SAFETY: so much is backed, and a story is one thread.
    unsafe { std::ptr::write_bytes(segment.address().0 as *mut u8, 0xff, bytes.as_usize()) };
}
