//! Who came to which exchange, as the host knows it, and the end of a wait for a rank that does not come.
//!
//! A kernel of NCCL's waits for the other ranks without a bound. So a thread of its own looks whether a rank stays behind
//! the others or has lost its device, and if so lets the kernels of those that wait end. That is what `ncclCommAbort` is for. It also
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
    /// The rank whose device is lost, if there is one. Exchanges that it had launched are waited for all the same.
    lost: Lost,
    /// Why there are no more exchanges.
    broken: OnceLock<String>,
    signals: Mutex<Signals>,
    changed: Condvar,
}

/// Asks the devices, in the order of ranks.
pub(super) type Lost = Box<dyn Fn() -> Option<usize> + Send + Sync>;

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
            Some(why) => Err(DeviceError::Lost { reason: format!("a collective of the model's ranks failed: {why}") }),
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
            // All may have launched the same: then none stays behind.
            if let Some(rank) = (self.lost)() {
                self.break_off(&[rank], format!("the device of rank {rank} is lost"));
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
    /// they keep their communicators: what all have is freed with the last one, where it is counted off the devices. But for
    /// those that do not leave the library.
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
        self.break_off(&kept, format!("rank {} {what}", names.join(", ")));
        true
    }

    /// Ends all exchanges of all ranks but those in `kept`, which launch nothing meanwhile and have nothing that waits.
    pub(super) fn break_off(&self, kept: &[usize], why: String) {
        drop(self.broken.set(why));
        let ended = (0..self.ranks.len()).filter(|rank| !kept.contains(rank)).map(|rank| &self.ranks[rank]);
        let mut ended: Vec<_> = ended.map(|rank| (rank.lock_soon(), rank)).collect();
        // Those inside the library first, which lets them out: the last abort frees what all communicators have.
        ended.sort_by_key(|(gate, _)| gate.is_some());
        for (gate, rank) in &mut ended {
            rank.is_aborted.store(true, Ordering::Release);
            // SAFETY: the communicator is alive, and its rank launches nothing any more, or is inside a launch that this ends.
            unsafe { (self.calls.abort)(rank.communicator.0) };
            if gate.is_none() {
                *gate = rank.lock_soon();
            }
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

#[cfg(test)]
mod tests {
    use std::{
        ffi::c_void,
        sync::atomic::{AtomicI32, AtomicUsize},
    };

    use super::*;

    /// What a communicator of a test has come to: 1 after it was aborted, 2 after it was destroyed, and below 0 the error that it
    /// is to have.
    type Fate = AtomicI32;

    unsafe extern "C" fn abort(one: *mut c_void) -> i32 {
        // SAFETY: a test's communicators are these.
        unsafe { &*one.cast::<Fate>() }.store(1, Ordering::SeqCst);
        0
    }

    unsafe extern "C" fn destroy(one: *mut c_void) -> i32 {
        // SAFETY: as above.
        unsafe { &*one.cast::<Fate>() }.store(2, Ordering::SeqCst);
        0
    }

    unsafe extern "C" fn async_error(one: *mut c_void, out: *mut i32) -> i32 {
        // SAFETY: as above, and the place is writable.
        unsafe { *out = (-(*one.cast::<Fate>()).load(Ordering::SeqCst)).max(0) };
        0
    }

    const PATIENCE: Duration = Duration::from_millis(100);

    /// Watches three ranks while `story` runs, then gives back. Returns what the ranks hear, the communicators' fates before that
    /// and after it, and how long it took.
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
            // Ranks that are together are watched until the thread is told to end.
            while !thread.is_finished() && began.elapsed() < 10 * PATIENCE {
                thread::park_timeout(Duration::from_millis(1));
            }
            let took = began.elapsed();
            shared.end();
            took
        });
        let heard = watches[1].check().err().map(|error| error.to_string());
        let fates_now = || [0, 1, 2].map(|rank| fates[rank].load(Ordering::SeqCst));
        let before = fates_now();
        shared.give_back();
        (heard, before, fates_now(), took)
    }

    fn come(watch: &Watch, exchanges: u64) {
        watch.launch(exchanges, || Ok::<_, DeviceError>(())).expect("they are together");
    }

    #[test]
    fn ranks_that_come_to_the_same_exchanges_are_left_alone() {
        let (heard, before, after, _) = watched(|watches, _, _| watches.iter().for_each(|watch| come(watch, 57)));
        assert_eq!((heard, before, after), (None, [0; 3], [2; 3]));
    }

    #[test]
    fn those_who_wait_for_a_late_rank_are_let_go_after_a_bound_and_hear_its_name() {
        let (heard, before, after, took) = watched(|watches, _, _| {
            come(&watches[0], 5);
            come(&watches[1], 3);
            come(&watches[2], 4);
        });
        assert!(heard.expect("it is lost").contains("rank 1 did not join it in time"));
        assert_eq!((before, after), ([1, 0, 1], [1; 3]), "the late one's is the last");
        assert!((PATIENCE..5 * PATIENCE).contains(&took), "{took:?}");
    }

    #[test]
    fn a_rank_that_is_gone_is_not_waited_for_and_launches_fail_from_then_on() {
        let (heard, before, ..) = watched(|watches, _, _| {
            watches.iter().for_each(|watch| come(watch, 2));
            watches[2].leave();
            come(&watches[0], 1);
        });
        assert!(heard.expect("it is lost").contains("rank 2 is gone"));
        assert_eq!(before, [1, 1, 0]);
        watched(|watches, _, _| {
            watches[2].leave();
            come(&watches[0], 1);
            while watches[1].check().is_ok() {
                thread::park_timeout(Duration::from_millis(1));
            }
            let late = watches[1].launch(1, || Ok::<_, DeviceError>(())).expect_err("there are no more exchanges");
            assert!(late.is_lost(), "{late}");
        });
    }

    #[test]
    fn a_lost_device_ends_the_wait_of_ranks_that_have_all_launched_the_same() {
        let (heard, before, after, took) = watched(|watches, _, lost| {
            watches.iter().for_each(|watch| come(watch, 4));
            lost.store(1, Ordering::SeqCst);
        });
        assert!(heard.expect("it is lost").contains("the device of rank 1 is lost"));
        assert_eq!((before, after), ([1, 0, 1], [1; 3]), "the lost one's is the last");
        assert!(took < 5 * PATIENCE, "{took:?}");
    }

    #[test]
    fn a_rank_that_stays_inside_the_library_is_aborted_before_the_others() {
        let (heard, before, ..) = watched(|watches, _, _| {
            come(&watches[0], 2);
            come(&watches[2], 2);
            let inside = watches[1].clone();
            let launch = move || {
                // It leaves when the link is broken, as NCCL does when it is aborted.
                while inside.check().is_ok() {
                    thread::park_timeout(Duration::from_millis(1));
                }
                Ok::<_, DeviceError>(())
            };
            watches[1].launch(1, launch).expect("it began before");
        });
        assert!(heard.expect("it is lost").contains("rank 1 did not join"));
        assert_eq!(before, [1; 3]);
    }

    #[test]
    fn an_error_of_the_library_ends_all() {
        let (heard, before, after, _) = watched(|_, fates, _| fates[1].store(-3, Ordering::SeqCst));
        assert!(heard.expect("it is lost").contains("NCCL failed on rank 1: unhandled (3)"));
        assert_eq!((before, after), ([1; 3], [1; 3]));
    }
}
