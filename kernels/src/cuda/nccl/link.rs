//! A rank's end of a link through NCCL: its communicator and its exchange memory.

use std::{any::Any, cell::Cell, sync::Arc, thread::JoinHandle};

use bursar_budgets::{Address, Bytes};

use super::{
    super::contract::all_reduce::DATA_AT,
    library::{Calls, Communicator},
    watch::{Shared, Watch},
};
use crate::Rank;

/// A rank's end of a link between GPU ranks through NCCL.
///
/// Sums are computed in the activation type and in NCCL's order: a sum is rounded once for each
/// rank after the first, and once more if it is added to the contents of the output. All ranks get
/// the same bits. The bits are reproducible as long as NCCL chooses the same algorithm. All ranks
/// must launch the same operations in the same order. A rank that does not join in time, or that is
/// dropped, breaks the link: the results of the other ranks are undefined from then on, and the
/// other ranks get [`DeviceError::Lost`](bursar_budgets::DeviceError::Lost) when they next wait for
/// results.
pub struct NcclLink {
    pub(super) rank: Rank,
    pub(super) communicator: Communicator,
    pub(super) calls: Arc<Calls>,
    pub(super) memory: Address,
    /// Bytes of each half of the data region in exchange memory.
    pub(super) half: usize,
    pub(super) watch: Watch,
    /// Number of collectives captured so far.
    pub(super) captured: Cell<u64>,
    pub(super) _group: Arc<Group>,
}

/// State that all ends of a link share.
pub(super) struct Group {
    shared: Arc<Shared>,
    watches: Option<JoinHandle<()>>,
    /// The communicators, dropped after the thread has ended. Dropping this field gives the
    /// communicators back to NCCL and subtracts their memory from each device's overhead.
    _counted: Counted,
}

pub(super) type Counted = Box<dyn Any + Send + Sync>;

/// The communicators of a group, which are given back to NCCL on drop.
pub(super) struct Communicators(pub(super) Arc<Shared>);

impl Group {
    /// `watches` is the thread that watches the collectives.
    pub(super) fn new(shared: Arc<Shared>, watches: JoinHandle<()>, counted: Counted) -> Self {
        Group { shared, watches: Some(watches), _counted: counted }
    }
}

impl Drop for Communicators {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.shared.end();
        // Ignore a panic of the thread: the communicators must be given back in any case.
        drop(self.watches.take().map(JoinHandle::join));
    }
}

/// Maximum rows of one all-reduce. An all-reduce of more rows is split. The row indices 0 to
/// `ROWS_MAX - 1` are stored in the region of exchange memory where a
/// [`CudaLink`](super::super::CudaLink) has its control data.
pub(super) const ROWS_MAX: usize = 1 << 16;
const _: () = assert!(ROWS_MAX * size_of::<u32>() <= DATA_AT);

impl NcclLink {
    /// Returns this rank's position in the group.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub(in super::super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Returns the number of collectives captured so far.
    pub(in super::super) fn captured(&self) -> u64 {
        self.captured.get()
    }
}

impl Drop for NcclLink {
    fn drop(&mut self) {
        self.watch.leave();
    }
}

/// Returns the address of the data in exchange memory.
pub(super) fn data_at(memory: Address) -> Address {
    memory.offset(Bytes(DATA_AT as u64))
}
