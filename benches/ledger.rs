//! The ledger without an actor: a lease is granted and released while other leases exist.
//!
//! `cargo bench --bench ledger`

use bursar::{Bytes, Class};
use bursar_budgets::{Effect, Input, LeaseId, Ledger, LedgerConfig, Owner, Request, RequestId};
use divan::{Bencher, black_box};

fn main() {
    divan::main();
}

/// Numbers of other leases that exist during the measurement.
const ALIVE: [u64; 2] = [10, 1000];

/// A ledger with some leases of ten owners.
struct Books {
    ledger: Ledger,
    asked: u64,
}

impl Books {
    fn with(alive: u64) -> Self {
        let mut books = Books { ledger: Ledger::new(LedgerConfig::new(Bytes::gib(80))), asked: 0 };
        books.ledger.step(Input::Canary(Bytes::mib(256)));
        for number in 0..alive {
            let class = Class::external(format!("index-{}", number % 10).as_str());
            books.grant(&Request::new(Owner::new(class.label(), 0), class, "user", Bytes::mib(2)));
        }
        books
    }

    fn grant(&mut self, request: &Request) -> LeaseId {
        self.asked += 1;
        let ask = Input::Ask { id: RequestId(self.asked), request: request.clone(), wait: true };
        let effects = self.ledger.step(ask);
        let [Effect::Granted(grant)] = &effects[..] else { panic!("memory is free: {effects:?}") };
        grant.holding().id
    }

    fn release(&mut self, lease: LeaseId) {
        let effects = self.ledger.step(Input::Release { lease, passed: true });
        assert!(matches!(effects[..], [Effect::Freed { .. }]), "the lease was held: {effects:?}");
    }
}

#[divan::bench(args = ALIVE)]
fn grant_and_release(bencher: Bencher, alive: u64) {
    let mut books = Books::with(alive);
    let class = Class::external("index-3");
    let request = Request::new(Owner::new(class.label(), 0), class, "user", Bytes::mib(2));
    bencher.bench_local(|| {
        let lease = books.grant(black_box(&request));
        books.release(lease);
    });
}

#[divan::bench(args = ALIVE)]
fn grow_and_shrink(bencher: Bencher, alive: u64) {
    let mut books = Books::with(alive);
    let lease = LeaseId(1);
    bencher.bench_local(|| {
        for to in [Bytes::mib(4), Bytes::mib(2)] {
            books.asked += 1;
            let id = RequestId(books.asked);
            let effects = books.ledger.step(Input::Resize { id, lease, to, wait: false, passed: true });
            assert!(matches!(effects[..], [Effect::Resized(_)]), "memory is free: {effects:?}");
        }
    });
}

#[divan::bench(args = ALIVE)]
fn snapshot(bencher: Bencher, alive: u64) {
    let books = Books::with(alive);
    bencher.bench_local(|| black_box(&books.ledger).snapshot());
}
