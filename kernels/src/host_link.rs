//! The link between ranks that synchronize on the host. The ranks are threads of one process that
//! join a collective and read the other ranks' data: on host devices the threads read the data
//! directly, on GPUs by copies.

use std::{
    fmt::Write,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bursar_budgets::{Address, DeviceError};

use crate::{DType, KernelError, Rank, Tensor};

/// A rank's end of the link between the ranks of a group that synchronize on the host.
///
/// All ranks must call the same operations in the same order. A rank that does not join in time,
/// that is dropped or that calls another operation breaks the link: each rank gets
/// [`DeviceError::Lost`] in this operation and in all later operations.
pub struct HostLink {
    rank: Rank,
    shared: Arc<Shared>,
}

struct Shared {
    /// How long a rank waits for the other ranks.
    patience: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Number of collectives that are over.
    collective: u64,
    /// Data that each rank has contributed to the current collective.
    contributed: Vec<Option<Contribution>>,
    /// Ranks that have finished reading in the current collective.
    done: usize,
    /// The reason why the link is broken.
    broken: Option<String>,
}

/// The data that a rank contributes to a collective: rows that do not change until all
/// ranks have read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contribution {
    op: &'static str,
    pub(crate) shape: [usize; 2],
    pub(crate) dtype: DType,
    pub(crate) start: Address,
    /// Elements from the start of a row to the start of the next.
    pub(crate) pitch: usize,
}

impl Contribution {
    pub(crate) fn of(op: &'static str, tensor: &Tensor<'_>) -> Self {
        let (shape, pitch) = ([tensor.rows(), tensor.columns()], tensor.pitch());
        Contribution { op, shape, dtype: tensor.dtype(), start: tensor.address(), pitch }
    }

    /// Describes rows of `columns` numbers in host memory. The rows must keep their address until
    /// the collective is over.
    pub(crate) fn rows(op: &'static str, numbers: &[f32], columns: usize) -> Self {
        let (shape, start) = ([numbers.len() / columns, columns], Address(numbers.as_ptr().addr() as u64));
        Contribution { op, shape, dtype: DType::F32, start, pitch: columns }
    }
}

impl HostLink {
    /// Creates the ends of a link between `ranks` ranks, in the order of their indices. In each
    /// operation, a rank waits up to `patience` for the other ranks.
    pub fn between(ranks: usize, patience: Duration) -> Vec<HostLink> {
        let state = State { collective: 0, contributed: vec![None; ranks], done: 0, broken: None };
        let shared = Arc::new(Shared { patience, state: Mutex::new(state), changed: Condvar::new() });
        Rank::all(ranks).map(|rank| HostLink { rank, shared: shared.clone() }).collect()
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Contributes `own` to the next collective, waits until all ranks have contributed, and calls
    /// `read` with the data of all ranks in their order. Returns when all ranks have read.
    ///
    /// Only the first wait needs a timeout. After it, all ranks are inside this function and only
    /// read data and compute.
    pub(crate) fn exchange(&self, own: Contribution, read: impl FnOnce(&[Contribution])) -> Result<(), KernelError> {
        let mut state = self.lock();
        let collective = state.collective;
        if state.broken.is_none() {
            state.contributed[self.rank.index()] = Some(own);
            self.shared.changed.notify_all();
        }
        let is_waiting = |state: &mut State| !state.is_complete() && state.broken.is_none();
        (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, self.shared.patience, is_waiting)
            .unwrap_or_else(PoisonError::into_inner);
        if !state.is_complete() {
            if state.broken.is_none() {
                let patience = self.shared.patience.as_secs_f64();
                let reason = format!("{} did not join {} within {patience} s", state.missing(), own.op);
                self.shared.abort(&mut state, reason);
            }
            return Err(lost(&state));
        }
        let all: Vec<Contribution> = state.contributed.iter().flatten().copied().collect();
        if let Some(other) = all.iter().find(|other| (other.op, other.shape) != (all[0].op, all[0].shape)) {
            let (one, other) = (all[0].description(), other.description());
            self.shared.abort(&mut state, format!("one rank called {one}, another {other}"));
        }
        let is_apart = state.broken.is_some() && all.iter().any(|other| (other.op, other.shape) != (own.op, own.shape));
        drop(state);
        let left = Leaving { link: self };
        if !is_apart {
            read(&all);
        }
        drop(left);
        let is_going_on = |state: &mut State| state.collective == collective;
        let state = self.shared.changed.wait_while(self.lock(), is_going_on).unwrap_or_else(PoisonError::into_inner);
        if is_apart { Err(lost(&state)) } else { Ok(()) }
    }

    /// Locks the state and ignores poisoning. A thread that panicked while it held the lock left a
    /// consistent state, because each change of the state is one statement.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HostLink {
    fn drop(&mut self) {
        let reason = format!("rank {} of {} is gone", self.rank.index(), self.rank.of());
        self.shared.abort(&mut self.lock(), reason);
    }
}

impl Shared {
    fn abort(&self, state: &mut State, reason: String) {
        state.broken.get_or_insert(reason);
        self.changed.notify_all();
    }
}

impl State {
    fn is_complete(&self) -> bool {
        self.contributed.iter().all(Option::is_some)
    }

    fn missing(&self) -> String {
        let mut text = String::from("rank");
        for (index, _) in self.contributed.iter().enumerate().filter(|(_, contributed)| contributed.is_none()) {
            let separator = if text == "rank" { "" } else { "," };
            write!(text, "{separator} {index}").expect("a String takes every write");
        }
        text
    }
}

impl Contribution {
    fn description(&self) -> String {
        let [rows, columns] = self.shape;
        format!("{} of [{rows}, {columns}]", self.op)
    }
}

fn lost(state: &State) -> KernelError {
    let reason = state.broken.clone().unwrap_or_default();
    DeviceError::Lost { reason: format!("a collective of the model's ranks failed: {reason}") }.into()
}

/// Counts this rank as finished with the collective when dropped, even if reading panicked. The
/// last rank to finish ends the collective and wakes the other ranks.
struct Leaving<'l> {
    link: &'l HostLink,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut state = self.link.lock();
        state.done += 1;
        if state.done == state.contributed.len() {
            state.done = 0;
            state.contributed.fill(None);
            state.collective += 1;
            self.link.shared.changed.notify_all();
        }
    }
}
