//! The flow of memory, without a model: request -> ledger -> lease -> segment -> workspace.
//!
//! `cargo run --example 1_lease_to_workspace`

use std::sync::{Arc, Mutex};

use bursar_budgets::{
    Bytes, Class, Device, Effect, FenceWatch, HostConfig, HostDevice, Input, Lease, Ledger, LedgerConfig, Owner,
    ReleaseNote, ReleaseNotes, Request, RequestId, Segment, Workspace,
};

/// Receives the release notes that leases post. In a runtime, the budget actor's mailbox receives
/// them.
#[derive(Default)]
struct Notes(Mutex<Vec<ReleaseNote>>);

impl ReleaseNotes for Notes {
    fn post(&self, note: ReleaseNote) {
        self.0.lock().expect("no holder panicked").push(note);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device: Arc<dyn Device> = Arc::new(HostDevice::new(HostConfig::small(Bytes::mib(16)))?);
    let mut ledger = Ledger::new(LedgerConfig::of(device.as_ref()));
    let notes = Arc::new(Notes::default());

    // A request becomes a lease, or a refusal with the number of missing bytes.
    let ask = |bytes| Request::new(Owner::new("vision", 0), Class::VisionWorkspace, "example", bytes);
    for (number, bytes) in [Bytes::mib(20), Bytes::mib(4)].into_iter().enumerate() {
        let id = RequestId(number as u64 + 1);
        for effect in ledger.step(Input::Ask { id, request: ask(bytes), wait: false }) {
            match effect {
                Effect::Refused(refused) => println!("{bytes}: {}", refused.reason),
                Effect::Granted(grant) => use_it(&device, Lease::issue(&grant, notes.clone()))?,
                other => println!("{other:?}"),
            }
        }
    }
    println!("\n{}\n", ledger.snapshot());

    // The lease was dropped, and its release note returns the bytes to the ledger.
    let mut watch = FenceWatch::default();
    for note in notes.0.lock().expect("no holder panicked").drain(..) {
        let lease = note.lease;
        let passed = watch.released(note);
        ledger.step(Input::Release { lease, passed });
    }
    println!("{}", ledger.snapshot());
    if !ledger.snapshot().leases.is_empty() || device.memory()?.free != device.memory()?.total {
        return Err("the lease was dropped, but its memory was not released".into());
    }
    Ok(())
}

/// Backs the lease with memory and uses it for temporaries.
fn use_it(device: &Arc<dyn Device>, lease: Lease) -> Result<(), Box<dyn std::error::Error>> {
    let bytes = lease.bytes();
    let segment = Segment::reserve(device.clone(), bytes, lease)?;
    segment.back_to(bytes)?;
    let workspace = Workspace::over(segment);
    {
        let layer = workspace.frame();
        layer.take(Bytes::mib(1))?;
        let attention = layer.frame();
        attention.take(Bytes::mib(2))?;
    }
    println!("{bytes}: granted, used as a stack up to {}", workspace.high_water());
    // The frames have returned their bytes. The high-water mark still shows the peak.
    if (workspace.used(), workspace.high_water()) != (Bytes::ZERO, Bytes::mib(3)) {
        return Err("the frames of the workspace did not return their bytes".into());
    }
    Ok(())
}
