//! Leased memory of a device.

use std::{cell::Cell, cell::RefCell, sync::Arc};

use bursar_budgets::*;
use bursar_kernels::{Backend, DType, Tensor, ops::transfer};

struct Nobody;

impl ReleaseNotes for Nobody {
    fn post(&self, _: ReleaseNote) {}
}

/// A device with the ledger of its memory.
pub struct Memory {
    device: Arc<dyn Device>,
    ledger: RefCell<Ledger>,
    asked: Cell<u64>,
}

impl Memory {
    /// Memory of a host device with small pages.
    pub fn new(capacity: Bytes) -> Self {
        Memory::of(Arc::new(HostDevice::new(HostConfig::small(capacity)).expect("host memory")), capacity)
    }

    /// `capacity` bytes of `device`.
    pub fn of(device: Arc<dyn Device>, capacity: Bytes) -> Self {
        let ledger = RefCell::new(Ledger::new(LedgerConfig::new(capacity)));
        Memory { device, ledger, asked: Cell::new(0) }
    }

    /// A backed segment of whole pages, with arbitrary content.
    pub fn leased(&self, class: Class, bytes: Bytes) -> Segment {
        let bytes = bytes.max(Bytes(1)).round_up(self.device.page());
        self.asked.set(self.asked.get() + 1);
        let request = Request::new(Owner::new("story", 0), class, "model", bytes);
        let ask = Input::Ask { id: RequestId(self.asked.get()), request, wait: false };
        let effects = self.ledger.borrow_mut().step(ask);
        let [Effect::Granted(grant)] = &effects[..] else { panic!("{effects:?}") };
        let segment = Segment::reserve(self.device.clone(), bytes, Lease::issue(grant, Arc::new(Nobody)));
        let segment = segment.expect("addresses");
        segment.back_to(bytes).expect("memory");
        segment
    }

    /// Like [`leased`](Memory::leased), but filled with NaN. `backend` must run on this device.
    pub fn poisoned(&self, backend: &impl Backend, class: Class, bytes: Bytes) -> Segment {
        let segment = self.leased(class, bytes);
        poison(backend, &segment, segment.backed());
        segment
    }
}

/// The content of memory that no computation has written.
static POISON: [u8; 1 << 20] = [0xff; 1 << 20];

/// Fills the first `bytes` of a segment with a pattern that is NaN in every floating-point type and
/// out of range as an index.
pub fn poison(backend: &impl Backend, segment: &Segment, bytes: Bytes) {
    assert!(bytes <= segment.backed());
    let whole = POISON.len() as u64;
    for start in (0..bytes.0).step_by(POISON.len()) {
        let part = &POISON[..whole.min(bytes.0 - start) as usize];
        // SAFETY: these bytes are backed, and only the test's thread accesses them.
        let mut out = unsafe { Tensor::persistent(segment.address().offset(Bytes(start)), [part.len()], DType::U8) };
        transfer::fill(backend, part, &mut out).expect("the poison is copied");
    }
}
