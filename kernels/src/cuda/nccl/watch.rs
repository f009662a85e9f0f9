//! Who came to which exchange, as the host knows it, and the end of a wait for a rank that does not come.
//!
//! A kernel of NCCL's waits for the other ranks without a bound. So a thread of its own looks whether a rank stays behind
//! the others, and if so lets the kernels of those that wait end. That is what `ncclCommAbort` is for. It also
//! waits for the graphs that were captured with the communicator, which lanes drop only once their device is past its work,
//! so no lane calls it.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bursar_budgets::DeviceError;

use super::library::{Calls, Communicator, number};

/// How often the thread looks while ranks have patience with each other.
const LOOKS: u32 = 10;

/// How long a rank that is launching something is waited for before its communicator is aborted beside that.
const LAUNCHES: Duration = Duration::from_secs(1);

/// A rank's place among those that are watched. Clones share it.
#[derive(Clone)]
pub(in super::super) struct Watch {
    shared: Arc<Shared>,
    rank: usize,
}

pub(super) struct Shared {
    calls: Arc<Calls>,
    patience: Duration,
    ranks: Vec<OfRank>,
    /// Why there are no more exchanges.
    broken: OnceLock<String>,
    signals: Mutex<Signals>,
    changed: Condvar,
}

struct OfRank {
    communicator: Communicator,
    /// Held while it launches an exchange.
    gate: Mutex<()>,
    /// Exchanges that it has launched.
    came: AtomicU64,
    is_gone: AtomicBool,
    is_aborted: AtomicBool,
}

#[derive(Default)]
struct Signals {
    /// The thread ends.
    ends: bool,
    /// It looks at once.
    looks: bool,
}

impl Watch {
    /// The places of all ranks, in order, and what watches them when it is run in a thread.
    pub(super) fn over(calls: &Arc<Calls>, communicators: &[Communicator], patience: Duration) -> Vec<Watch> {
        let of_rank = |communicator: &Communicator| OfRank {
            communicator: *communicator,
            gate: Mutex::default(),
            came: AtomicU64::default(),
            is_gone: AtomicBool::default(),
            is_aborted: AtomicBool::default(),
        };
        let shared = Arc::new(Shared {
            calls: calls.clone(),
            patience,
            ranks: communicators.iter().map(of_rank).collect(),
            broken: OnceLock::new(),
            signals: Mutex::default(),
            changed: Condvar::new(),
        });
        (0..communicators.len()).map(|rank| Watch { shared: shared.clone(), rank }).collect()
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Launches so many exchanges of this rank.
    pub(in super::super) fn launch<E: From<DeviceError>>(
        &self,
        exchanges: u64,
        run: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let own = &self.shared.ranks[self.rank];
        let _gate = own.lock();
        self.check()?;
        run()?;
        own.came.fetch_add(exchanges, Ordering::AcqRel);
        Ok(())
    }

    /// The error of ranks that went apart.
    pub(in super::super) fn check(&self) -> Result<(), DeviceError> {
        match self.shared.broken.get() {
            None => Ok(()),
            Some(why) => Err(DeviceError::Lost { reason: format!("the ranks of a model went apart: {why}") }),
        }
    }

    /// This rank launches nothing more.
    pub(super) fn leave(&self) {
        self.shared.ranks[self.rank].is_gone.store(true, Ordering::Release);
        self.shared.signal(|signals| signals.looks = true);
    }
}

impl Shared {
    /// Watches until it is told to end, or until the ranks have gone apart.
    pub(super) fn watch(&self) {
        let period = self.patience / LOOKS;
        let began = Instant::now();
        // When each rank was last seen not to be behind, or to have moved.
        let mut seen = vec![(0, began); self.ranks.len()];
        while !self.ends_after(period) {
            if let Some(error) = self.failure() {
                self.break_off(&[], error);
                return;
            }
            let (came, now) = (self.came(), Instant::now());
            let most = came.iter().copied().max().unwrap_or(0);
            let least = came.iter().copied().min().unwrap_or(0);
            for (seen, came) in seen.iter_mut().zip(&came) {
                if *came == most || *came != seen.0 {
                    *seen = (*came, now);
                }
            }
            let is_missing = |rank: &usize| {
                let is_late = now - seen[*rank].1 >= self.patience + period;
                // One between the others has launched what waits for those at the end.
                came[*rank] == least && least < most && (is_late || self.ranks[*rank].is_gone.load(Ordering::Acquire))
            };
            let missing: Vec<usize> = (0..came.len()).filter(is_missing).collect();
            if !missing.is_empty() && self.are_still(&missing, &came) {
                return;
            }
        }
    }

    /// Ends the thread that watches.
    pub(super) fn end(&self) {
        self.signal(|signals| signals.ends = true);
    }

    /// Gives back all communicators that are not yet aborted. The last call frees what all of them have, once no graph that
    /// was captured with one is left.
    pub(super) fn give_back(&self) {
        let is_broken = self.broken.get().is_some();
        for rank in self.ranks.iter().filter(|rank| !rank.is_aborted.load(Ordering::Acquire)) {
            // One that is not past all that it was given can only be aborted.
            let give = if is_broken { self.calls.abort } else { self.calls.destroy };
            // SAFETY: no rank is left that could use it, and this is its last use.
            unsafe { give(rank.communicator.0) };
        }
    }

    /// Breaks the link off because of ranks that are missing, if these are where they were. Theirs have nothing that waits, so
    /// they keep their communicators: what all have is freed with the last one, where it is counted off the devices.
    fn are_still(&self, missing: &[usize], came: &[u64]) -> bool {
        let _gates: Vec<_> = missing.iter().map(|rank| self.ranks[*rank].lock()).collect();
        let now = self.came();
        if missing.iter().any(|rank| now[*rank] != came[*rank]) {
            return false;
        }
        let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
        let is_gone = |rank: &usize| self.ranks[*rank].is_gone.load(Ordering::Acquire);
        let what = if missing.iter().all(is_gone) { "is gone" } else { "did not come to an exchange in time" };
        self.break_off(missing, format!("rank {} {what}", names.join(", ")));
        true
    }

    /// Ends all exchanges of all ranks but those in `kept`, which launch nothing meanwhile and have nothing that waits.
    pub(super) fn break_off(&self, kept: &[usize], why: String) {
        drop(self.broken.set(why));
        for rank in (0..self.ranks.len()).filter(|rank| !kept.contains(rank)).map(|rank| &self.ranks[rank]) {
            let _gate = rank.lock_soon();
            rank.is_aborted.store(true, Ordering::Release);
            // SAFETY: the communicator is alive, and its rank launches nothing any more.
            unsafe { (self.calls.abort)(rank.communicator.0) };
        }
    }

    /// What the library itself says has gone wrong.
    fn failure(&self) -> Option<String> {
        self.ranks.iter().enumerate().find_map(|(rank, of_rank)| {
            let mut result = number::SUCCESS;
            // SAFETY: the communicator is alive, and the place is writable.
            let asked = unsafe { (self.calls.async_error)(of_rank.communicator.0, &mut result) };
            let is_well = asked == number::SUCCESS && matches!(result, number::SUCCESS | number::IN_PROGRESS);
            (!is_well).then(|| format!("NCCL failed on rank {rank}: {}", self.calls.words(result.max(asked))))
        })
    }

    fn came(&self) -> Vec<u64> {
        self.ranks.iter().map(|rank| rank.came.load(Ordering::Acquire)).collect()
    }

    /// Waits for a while, or until there is something to look at. Whether the thread is to end.
    fn ends_after(&self, period: Duration) -> bool {
        let signals = self.signals.lock().unwrap_or_else(PoisonError::into_inner);
        let is_quiet = |signals: &mut Signals| !signals.ends && !signals.looks;
        let waited = self.changed.wait_timeout_while(signals, period, is_quiet);
        let (mut signals, _) = waited.unwrap_or_else(PoisonError::into_inner);
        signals.looks = false;
        signals.ends
    }

    fn signal(&self, change: impl FnOnce(&mut Signals)) {
        change(&mut self.signals.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}

impl OfRank {
    fn lock(&self) -> MutexGuard<'_, ()> {
        // It guards no data that a panic could leave half changed.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As `lock`. None from a rank that does not leave the library, because what it has launched before waits.
    fn lock_soon(&self) -> Option<MutexGuard<'_, ()>> {
        let began = Instant::now();
        loop {
            match self.gate.try_lock() {
                Ok(gate) => return Some(gate),
                Err(_) if began.elapsed() > LAUNCHES => return None,
                Err(_) => thread::park_timeout(Duration::from_millis(1)),
            }
        }
    }
}
