//! Supervision of collectives through NCCL: counts the collectives that each rank has launched, and
//! ends the wait for a rank that does not join.
//!
//! A kernel of NCCL waits for the other ranks without a time limit. A separate thread therefore
//! checks whether a rank lags behind the other ranks or has lost its device. If so, the thread ends
//! the kernels of the waiting ranks with `ncclCommAbort`. `ncclCommAbort` also waits until the
//! graphs that were captured with the communicator are dropped. Lanes drop their graphs only after
//! their device has completed its work, so a lane must not call `ncclCommAbort`.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bursar_budgets::DeviceError;

use super::library::{Calls, Communicator, number};

/// Number of checks within `patience`.
const CHECKS_PER_PERIOD: u32 = 10;

/// How long the supervising thread waits for a rank to return from a launch. After this time, the
/// thread aborts the rank's communicator during the launch.
const LAUNCHES: Duration = Duration::from_secs(1);

/// One rank's handle to the supervision of its group. Clones share the same state.
#[derive(Clone)]
pub(in super::super) struct Watch {
    shared: Arc<Shared>,
    rank: usize,
}

pub(super) struct Shared {
    calls: Arc<Calls>,
    patience: Duration,
    ranks: Vec<OfRank>,
    /// Returns the rank whose device is lost, if there is one. A lost device must be detected
    /// separately, because a rank may have launched as many collectives as all other ranks when
    /// it loses its device.
    lost: Lost,
    /// The reason why the link is broken, once it is broken.
    broken: OnceLock<String>,
    signals: Mutex<Signals>,
    changed: Condvar,
}

/// Queries the devices in the order of ranks, and returns the first rank whose device is lost.
pub(super) type Lost = Box<dyn Fn() -> Option<usize> + Send + Sync>;

struct OfRank {
    communicator: Communicator,
    /// Mutex that is locked while the rank launches a collective.
    gate: Mutex<()>,
    /// Number of collectives that the rank has launched.
    came: AtomicU64,
    is_gone: AtomicBool,
    is_aborted: AtomicBool,
}

#[derive(Default)]
struct Signals {
    /// `true` if the supervising thread must end.
    ends: bool,
    /// `true` if the supervising thread must check at once.
    looks: bool,
}

impl Watch {
    /// Creates the handles of all ranks, in order. [`Shared::watch`] must then run
    /// in a separate thread.
    pub(super) fn over(
        calls: &Arc<Calls>,
        communicators: &[Communicator],
        patience: Duration,
        lost: Lost,
    ) -> Vec<Watch> {
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
            lost,
            broken: OnceLock::new(),
            signals: Mutex::default(),
            changed: Condvar::new(),
        });
        (0..communicators.len()).map(|rank| Watch { shared: shared.clone(), rank }).collect()
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Launches `exchanges` collectives of this rank by calling `run`.
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

    /// Returns an error if the link between the ranks is broken.
    pub(in super::super) fn check(&self) -> Result<(), DeviceError> {
        match self.shared.broken.get() {
            None => Ok(()),
            Some(why) => Err(DeviceError::Lost { reason: format!("a collective of the model's ranks failed: {why}") }),
        }
    }

    /// Records that this rank launches no more collectives.
    pub(super) fn leave(&self) {
        self.shared.ranks[self.rank].is_gone.store(true, Ordering::Release);
        self.shared.signal(|signals| signals.looks = true);
    }
}

impl Shared {
    /// Checks the ranks until [`Shared::end`] is called or until the link is broken.
    pub(super) fn watch(&self) {
        let period = self.patience / CHECKS_PER_PERIOD;
        let began = Instant::now();
        // For each rank: the number of collectives that it has launched, and a time. Both are from
        // the last check in which the rank had advanced, or had launched as many collectives as the
        // leading rank.
        let mut seen = vec![(0, began); self.ranks.len()];
        while !self.ends_after(period) {
            if let Some(error) = self.failure() {
                self.abort(&[], error);
                return;
            }
            // If all ranks have launched the same number, no rank lags behind, so a lost device
            // must be checked separately.
            if let Some(rank) = (self.lost)() {
                self.abort(&[rank], format!("the device of rank {rank} is lost"));
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
                // Only the ranks with the fewest launches are missing. A rank that has launched
                // more collectives, but fewer than the leader, itself waits for the missing ranks.
                came[*rank] == least && least < most && (is_late || self.ranks[*rank].is_gone.load(Ordering::Acquire))
            };
            let missing: Vec<usize> = (0..came.len()).filter(is_missing).collect();
            if !missing.is_empty() && self.are_still(&missing, &came) {
                return;
            }
        }
    }

    /// Makes the thread that runs [`Shared::watch`] end.
    pub(super) fn end(&self) {
        self.signal(|signals| signals.ends = true);
    }

    /// Gives all communicators that are not yet aborted back to NCCL. The last of these calls frees
    /// the memory of all communicators, after all graphs captured with them have been dropped.
    pub(super) fn give_back(&self) {
        let is_broken = self.broken.get().is_some();
        for rank in self.ranks.iter().filter(|rank| !rank.is_aborted.load(Ordering::Acquire)) {
            // If the link is broken, work on a communicator may never complete. Such a communicator
            // can only be aborted.
            let give = if is_broken { self.calls.abort } else { self.calls.destroy };
            // SAFETY: no rank is left that could use the communicator, and this is its last use.
            unsafe { give(rank.communicator.0) };
        }
    }

    /// Breaks the link because of the missing ranks, and returns `true`. If one of these ranks has
    /// advanced since the check, returns `false` and keeps the link. The missing ranks have no
    /// kernels that wait, so this call does not abort their communicators; `give_back` later does.
    /// The last abort frees the memory of all communicators, which is then subtracted from the
    /// devices' overhead. If a missing rank does not return from the library, this call aborts its
    /// communicator as well.
    fn are_still(&self, missing: &[usize], came: &[u64]) -> bool {
        let gates: Vec<_> = missing.iter().map(|rank| (*rank, self.ranks[*rank].lock_soon())).collect();
        let now = self.came();
        if missing.iter().any(|rank| now[*rank] != came[*rank]) {
            return false;
        }
        let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
        let is_gone = |rank: &usize| self.ranks[*rank].is_gone.load(Ordering::Acquire);
        let what = if missing.iter().all(is_gone) { "is gone" } else { "did not join it in time" };
        let kept: Vec<usize> = gates.iter().filter(|(_, gate)| gate.is_some()).map(|(rank, _)| *rank).collect();
        self.abort(&kept, format!("rank {} {what}", names.join(", ")));
        true
    }

    /// Ends the collectives of all ranks that are not in `kept`. The ranks in `kept` have no
    /// kernels that wait: they launch nothing during this call, or their device is lost.
    pub(super) fn abort(&self, kept: &[usize], why: String) {
        drop(self.broken.set(why));
        let ended = (0..self.ranks.len()).filter(|rank| !kept.contains(rank)).map(|rank| &self.ranks[rank]);
        let mut ended: Vec<_> = ended.map(|rank| (rank.lock_soon(), rank)).collect();
        // The communicators of ranks that are inside the library are aborted first, which makes
        // these ranks return. The last abort frees the memory of all communicators, and should
        // therefore find no rank inside the library.
        ended.sort_by_key(|(gate, _)| gate.is_some());
        for (gate, rank) in &mut ended {
            rank.is_aborted.store(true, Ordering::Release);
            // SAFETY: the communicator is alive. Its rank either launches no more collectives, or
            // is inside a launch that this call ends.
            unsafe { (self.calls.abort)(rank.communicator.0) };
            if gate.is_none() {
                *gate = rank.lock_soon();
            }
        }
    }

    /// Returns the failure that NCCL itself reports, if any.
    fn failure(&self) -> Option<String> {
        self.ranks.iter().enumerate().find_map(|(rank, of_rank)| {
            let mut result = number::SUCCESS;
            // SAFETY: the communicator is alive, and `result` is writable.
            let asked = unsafe { (self.calls.async_error)(of_rank.communicator.0, &mut result) };
            let is_well = asked == number::SUCCESS && matches!(result, number::SUCCESS | number::IN_PROGRESS);
            (!is_well).then(|| format!("NCCL failed on rank {rank}: {}", self.calls.words(result.max(asked))))
        })
    }

    fn came(&self) -> Vec<u64> {
        self.ranks.iter().map(|rank| rank.came.load(Ordering::Acquire)).collect()
    }

    /// Waits for `period`, or less if a signal arrives. Returns `true` if the supervising thread
    /// must end.
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
        // Ignore poisoning: the mutex guards no data that a panic could leave half changed.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Like `lock`, but returns `None` if the rank does not return from the library within
    /// `LAUNCHES`, because a collective that the rank launched earlier still waits.
    fn lock_soon(&self) -> Option<MutexGuard<'_, ()>> {
        let began = Instant::now();
        loop {
            match self.gate.try_lock() {
                Ok(gate) => return Some(gate),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(_) if began.elapsed() > LAUNCHES => return None,
                Err(_) => thread::park_timeout(Duration::from_millis(1)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::c_void,
        sync::atomic::{AtomicI32, AtomicUsize},
    };

    use super::*;

    /// The fate of a test's communicator: 1 after an abort, 2 after it was destroyed. A negative
    /// value is the negated error code that NCCL reports for the communicator.
    type Fate = AtomicI32;

    unsafe extern "C" fn abort(one: *mut c_void) -> i32 {
        // SAFETY: the communicators of these tests are pointers to `Fate`.
        unsafe { &*one.cast::<Fate>() }.store(1, Ordering::SeqCst);
        0
    }

    unsafe extern "C" fn destroy(one: *mut c_void) -> i32 {
        // SAFETY: the communicators of these tests are pointers to `Fate`.
        unsafe { &*one.cast::<Fate>() }.store(2, Ordering::SeqCst);
        0
    }

    unsafe extern "C" fn async_error(one: *mut c_void, out: *mut i32) -> i32 {
        // SAFETY: the communicators of these tests are pointers to `Fate`, and `out` is writable.
        unsafe { *out = (-(*one.cast::<Fate>()).load(Ordering::SeqCst)).max(0) };
        0
    }

    const PATIENCE: Duration = Duration::from_millis(100);

    /// Supervises three ranks while `story` runs, then gives the communicators back. Returns the
    /// error that rank 1 gets, the communicators' fates before and after they are given back, and
    /// the time until the supervision ended.
    fn watched(story: impl FnOnce(&[Watch], &[Fate], &AtomicUsize)) -> (Option<String>, [i32; 3], [i32; 3], Duration) {
        let fates: [Fate; 3] = Default::default();
        let communicators = [0, 1, 2].map(|rank| Communicator((&raw const fates[rank]).cast_mut().cast()));
        let calls = Arc::new(Calls::faked(abort, destroy, async_error));
        let lost = Arc::new(AtomicUsize::new(usize::MAX));
        let is_lost = lost.clone();
        let asks = Box::new(move || (0..3).find(|rank| *rank == is_lost.load(Ordering::SeqCst)));
        let watches = Watch::over(&calls, &communicators, PATIENCE, asks);
        let (shared, began) = (watches[0].shared().clone(), Instant::now());
        let took = thread::scope(|scope| {
            let thread = scope.spawn(|| shared.watch());
            story(&watches, &fates, &lost);
            // If no rank is missing, the thread runs until `end` is called.
            while !thread.is_finished() && began.elapsed() < 10 * PATIENCE {
                thread::park_timeout(Duration::from_millis(1));
            }
            let took = began.elapsed();
            shared.end();
            took
        });
        let error = watches[1].check().err().map(|error| error.to_string());
        let fates_now = || [0, 1, 2].map(|rank| fates[rank].load(Ordering::SeqCst));
        let before = fates_now();
        shared.give_back();
        (error, before, fates_now(), took)
    }

    fn join_exchanges(watch: &Watch, exchanges: u64) {
        watch.launch(exchanges, || Ok::<_, DeviceError>(())).expect("all ranks join the exchange");
    }

    #[test]
    fn ranks_that_join_the_same_collectives_are_not_aborted() {
        let (error, before, after, _) =
            watched(|watches, _, _| watches.iter().for_each(|watch| join_exchanges(watch, 57)));
        assert_eq!((error, before, after), (None, [0; 3], [2; 3]));
    }

    #[test]
    fn ranks_stop_waiting_for_a_late_rank_after_a_timeout() {
        let (error, before, after, took) = watched(|watches, _, _| {
            join_exchanges(&watches[0], 5);
            join_exchanges(&watches[1], 3);
            join_exchanges(&watches[2], 4);
        });
        assert!(error.expect("the link is lost").contains("rank 1 did not join it in time"));
        assert_eq!((before, after), ([1, 0, 1], [1; 3]), "the communicator of the late rank is released last");
        assert!((PATIENCE..5 * PATIENCE).contains(&took), "{took:?}");
    }

    #[test]
    fn launches_fail_after_a_rank_has_left() {
        let (error, before, ..) = watched(|watches, _, _| {
            watches.iter().for_each(|watch| join_exchanges(watch, 2));
            watches[2].leave();
            join_exchanges(&watches[0], 1);
        });
        assert!(error.expect("the link is lost").contains("rank 2 is gone"));
        assert_eq!(before, [1, 1, 0]);
        watched(|watches, _, _| {
            watches[2].leave();
            join_exchanges(&watches[0], 1);
            while watches[1].check().is_ok() {
                thread::park_timeout(Duration::from_millis(1));
            }
            let late = watches[1]
                .launch(1, || Ok::<_, DeviceError>(()))
                .expect_err("no exchange is allowed after the link is lost");
            assert!(late.is_lost(), "{late}");
        });
    }

    #[test]
    fn a_lost_device_ends_a_collective_that_all_ranks_joined() {
        let (error, before, after, took) = watched(|watches, _, lost| {
            watches.iter().for_each(|watch| join_exchanges(watch, 4));
            lost.store(1, Ordering::SeqCst);
        });
        assert!(error.expect("the link is lost").contains("the device of rank 1 is lost"));
        assert_eq!((before, after), ([1, 0, 1], [1; 3]), "the communicator of the lost rank is released last");
        assert!(took < 5 * PATIENCE, "{took:?}");
    }

    #[test]
    fn a_rank_that_hangs_inside_nccl_is_aborted_first() {
        let (error, before, ..) = watched(|watches, _, _| {
            join_exchanges(&watches[0], 2);
            join_exchanges(&watches[2], 2);
            let inside = watches[1].clone();
            let launch = move || {
                // The launch returns when the link is broken, as NCCL does when
                // its communicator is aborted.
                while inside.check().is_ok() {
                    thread::park_timeout(Duration::from_millis(1));
                }
                Ok::<_, DeviceError>(())
            };
            watches[1].launch(1, launch).expect("the launch began before the link was lost");
        });
        assert!(error.expect("the link is lost").contains("rank 1 did not join"));
        assert_eq!(before, [1; 3]);
    }

    #[test]
    fn an_nccl_error_aborts_all_ranks() {
        let (error, before, after, _) = watched(|_, fates, _| fates[1].store(-3, Ordering::SeqCst));
        assert!(error.expect("the link is lost").contains("NCCL failed on rank 1: unhandled (3)"));
        assert_eq!((before, after), ([1; 3], [1; 3]));
    }
}
