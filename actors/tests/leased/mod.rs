//! Leases of device memory, for tests without a budget actor.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use bursar_budgets::*;

struct Nobody;

impl ReleaseNotes for Nobody {
    fn post(&self, _: ReleaseNote) {}
}

/// A device, and the ledger of its bytes.
pub struct Leased {
    device: Arc<dyn Device>,
    ledger: Mutex<Ledger>,
    asked: AtomicU64,
}

impl Leased {
    pub fn of(device: Arc<dyn Device>, capacity: Bytes) -> Leased {
        let ledger = Mutex::new(Ledger::new(LedgerConfig::new(capacity)));
        Leased { device, ledger, asked: AtomicU64::new(0) }
    }

    pub fn lease(&self, class: Class, bytes: Bytes) -> Lease {
        let id = RequestId(self.asked.fetch_add(1, Ordering::Relaxed));
        let request = Request::new(Owner::new("story", 0), class, "model", bytes);
        let effects =
            self.ledger.lock().expect("the lock is not poisoned").step(Input::Ask { id, request, wait: false });
        let [Effect::Granted(grant)] = &effects[..] else { panic!("{effects:?}") };
        Lease::issue(grant, Arc::new(Nobody))
    }

    /// Leases whole pages and backs them.
    pub fn segment(&self, class: Class, bytes: Bytes) -> Segment {
        let bytes = bytes.round_up(self.device.page());
        let segment = Segment::reserve(self.device.clone(), bytes, self.lease(class, bytes))
            .expect("the addresses can be reserved");
        segment.back_to(bytes).expect("the segment can be backed");
        segment
    }
}
