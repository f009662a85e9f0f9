//! Leases of every byte of one device: the ledger, segments, workspaces and the memory plan.
//!
//! A request for memory passes through these types: [`Request`] -> [`Ledger`] ->
//! [`Lease`] -> [`Segment`] -> [`Workspace`]. Only a [`Device`] allocates memory, and
//! only the [`Ledger`] grants it.
//!
//! # Scope
//!
//! This crate knows bytes and owners. It must never know tensors, tokens, models (here, a model is
//! only a [`Label`]), async code, candle or ractor. The ledger has no clock, thread, I/O,
//! randomness or hash map: the same inputs produce the same effects.
//!
//! # Rule 1
//!
//! `granted + overhead + foreign + canary <= total`. The ledger grants no request that would break
//! this rule. Such a request waits, or is refused with the number of missing bytes. Only growth of
//! overhead or foreign memory can break the rule.
//!
//! ```
//! use bursar_budgets::*;
//! # use std::sync::Arc;
//! # struct IgnoreNotes;
//! # impl ReleaseNotes for IgnoreNotes { fn post(&self, _: ReleaseNote) {} }
//! let device: Arc<dyn Device> = Arc::new(HostDevice::new(HostConfig::small(Bytes::mib(8)))?);
//! let mut ledger = Ledger::new(LedgerConfig::of(device.as_ref()));
//!
//! let request = Request::new(Owner::new("vision", 0), Class::VisionWorkspace, "demo", Bytes::mib(2));
//! let effects = ledger.step(Input::Ask { id: RequestId(1), request, wait: false });
//! let Effect::Granted(grant) = &effects[0] else { panic!("2 of 8 MiB fit") };
//!
//! let lease = Lease::issue(grant, Arc::new(IgnoreNotes));
//! let segment = Segment::reserve(device, Bytes::mib(4), lease)?;
//! segment.back_to(Bytes::mib(2))?;
//!
//! let workspace = Workspace::over(segment);
//! let frame = workspace.frame();
//! let scores = frame.take(Bytes(1000))?;
//! assert_eq!(workspace.used(), Bytes(1024));
//! # let _ = scores;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![warn(clippy::match_bool)]

mod account;
mod admission;
mod atomic_bytes;
mod backing;
mod class;
mod device;
mod error;
mod fence;
mod gate;
mod label;
mod lease;
mod ledger;
mod ledger_config;
mod owner;
mod plan;
mod request;
mod segment;
mod snapshot;
mod table;
mod units;
mod watch;
mod workspace;

pub use account::Account;
use atomic_bytes::AtomicBytes;

pub use admission::{Admission, Overloaded, Waiting};
pub use backing::{Backing, RevokeHandle};
pub use class::{Class, Memory};
pub use device::{
    Address, CudaCounts, CudaDevice, Device, DeviceError, DeviceGroup, DeviceMemory, FaultyDevice, HostConfig,
    HostCopy, HostDevice, HostMemory, NextBackRefused, Overhead, Pinned, give_back_freed_memory,
    give_large_blocks_back, system_memory_left, testing,
};
pub use error::Hint;
pub use fence::{Fence, Ticket, Timeline, Timelines};
pub use gate::{Gate, GateError, Reservations};
pub use label::Label;
pub use lease::{Grant, Holding, Lease, LeaseId, LeaseMeter, ReleaseNote, ReleaseNotes, Resized};
pub use ledger::{Effect, Input, Ledger, Refusal, Refused};
pub use ledger_config::LedgerConfig;
pub use owner::Owner;
pub use plan::{Claim, DoesNotFit, Knob, MemoryPlan};
pub use request::{Priority, Request, RequestId};
pub use segment::Segment;
pub use snapshot::{ClassLine, GateLine, GpuLine, LeaseLine, LeaseState, Snapshot, WaitingLine};
pub use units::{Bytes, GIB, KIB, MIB, Pages, ParseBytesError, grouped};
pub use watch::{FenceWatch, PendingReclaim};
pub use workspace::{Frame, Temporary, Workspace, WorkspaceFull};
