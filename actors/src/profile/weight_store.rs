//! The weight store: what outlives an engine. Loaded weights stay while a successor starts. Before memory is taken
//! back, the store waits for every thread that still uses it.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use bursar_budgets::{Bytes, DeviceError, HostCopy, Lease, Owner, Segment};
use tokio::sync::watch;
use tracing::debug;

use super::{Lanes, ProfileError};
use crate::compute::{Executor, Models};

/// One per model, held by the runtime.
#[derive(Clone, Default)]
pub struct WeightStore {
    contents: Arc<Mutex<Contents>>,
    /// Held while weights are copied to the host.
    copying: Arc<Mutex<()>>,
}

#[derive(Default)]
struct Contents {
    /// Attempts up to this generation are over. A late one may start nothing more.
    closed_through: Option<u64>,
    weights_owner: Option<Owner>,
    model: Option<Models>,
    /// What the weights of a sleeping model are copied to. The lease is there first, so that no copy is made in vain.
    host: Option<Arc<Lease>>,
    copy: Option<Copied>,
    /// Copies that were given back and are perhaps not gone yet, and threads that copy ahead.
    spare: Vec<watch::Receiver<()>>,
    /// The CPU threads or GPU kernels that compute. They outlive the model, so that a restarted engine need not load
    /// kernels.
    executor: Option<Executor>,
    lanes: Option<Lanes>,
    /// Threads that take memory or copy weights.
    at_work: Vec<watch::Receiver<()>>,
}

/// Weights in host memory.
#[derive(Clone)]
struct Copied {
    copy: Arc<HostCopy>,
    /// As much of each rank's memory was backed.
    backed: Bytes,
    /// They are not on the device meanwhile.
    is_away: bool,
}

/// How often a fence is looked at.
const FENCE_POLL: Duration = Duration::from_millis(1);

/// While this lives, memory is being taken or weights copied.
#[derive(Debug)]
pub struct AtWork(#[expect(dead_code, reason = "held for its drop")] watch::Sender<()>);

impl WeightStore {
    /// The loaded model, if there is one on the device.
    pub fn model(&self) -> Option<Models> {
        let contents = self.contents();
        contents.model.clone().filter(|_| !contents.is_away())
    }

    /// The loaded executor, if there is one.
    pub fn executor(&self) -> Option<Executor> {
        self.contents().executor.clone()
    }

    /// Keeps the loaded executor.
    pub fn keep_executor(&self, executor: Executor) {
        self.contents().executor = Some(executor);
    }

    /// Keeps a loaded model.
    pub fn keep_model(&self, model: Models) {
        self.contents().model = Some(model);
    }

    /// Records that weights are being copied for `owner`; the copying thread holds the guard. None if the attempt was
    /// ended before.
    #[must_use]
    pub fn begin_loading(&self, generation: u64, owner: Owner) -> Option<AtWork> {
        let mut contents = self.contents();
        let work = contents.begin(generation)?;
        contents.weights_owner = Some(owner);
        Some(work)
    }

    /// Records that memory is being taken for an attempt; the thread that takes it holds the guard. None if the attempt
    /// was ended before.
    #[must_use]
    pub fn begin(&self, generation: u64) -> Option<AtWork> {
        self.contents().begin(generation)
    }

    /// Runs `work`, which takes memory for an attempt, on a thread that may block. Ending the attempt waits for this
    /// thread, so that no memory is taken while its bytes are being returned. Returns none if the attempt was ended
    /// before.
    ///
    /// # Errors
    /// The error of `work`, or [`ProfileError::Died`] if it panics.
    pub async fn on_a_thread<T: Send + 'static>(
        &self,
        generation: u64,
        work: impl FnOnce() -> Result<T, ProfileError> + Send + 'static,
    ) -> Result<Option<T>, ProfileError> {
        let Some(at_work) = self.begin(generation) else { return Ok(None) };
        let thread = tokio::task::spawn_blocking(move || {
            let _at_work = at_work;
            work()
        });
        let outcome = thread.await.unwrap_or_else(|died| Err(ProfileError::Died { reason: died.to_string() }));
        outcome.map(Some)
    }

    /// Records the threads that use an attempt's memory. False if the attempt was ended before; then the threads must
    /// get no work, because the memory may be gone.
    #[must_use]
    pub fn keep_lanes(&self, generation: u64, lanes: Lanes) -> bool {
        let mut contents = self.contents();
        if contents.is_closed(generation) {
            return false;
        }
        contents.lanes = Some(lanes);
        true
    }

    /// The threads that use an attempt's memory, if there are any.
    pub(crate) fn lanes(&self) -> Option<Lanes> {
        self.contents().lanes.clone()
    }

    /// Ends the threads of all attempts up to `generation`, and waits until none uses their memory.
    pub async fn shut_down(&self, generation: u64) {
        let (lanes, at_work) = {
            let mut contents = self.contents();
            contents.closed_through = contents.closed_through.max(Some(generation));
            (contents.lanes.take(), std::mem::take(&mut contents.at_work))
        };
        if let Some(lanes) = lanes {
            lanes.shut_down().await;
        }
        for mut work in at_work {
            while work.changed().await.is_ok() {}
        }
    }

    /// Keeps the lease of the host memory to which the weights are to be copied.
    pub fn keep_host(&self, lease: Lease) {
        self.contents().host = Some(Arc::new(lease));
    }

    /// The memory of the weights.
    pub fn segment(&self) -> Option<Arc<Segment>> {
        self.contents().segment()
    }

    /// Whether the weights are in host memory alone.
    pub fn is_away(&self) -> bool {
        self.contents().is_away()
    }

    /// Begins to copy the weights to the host memory that was leased for them, on a thread of its own: nothing writes
    /// weights, so requests may still run. Ending the attempt `generation` waits for it.
    pub fn copy_ahead(&self, generation: u64) {
        let Some(at_work) = self.begin(generation) else { return };
        let (done, over) = watch::channel(());
        self.contents().spare.push(over);
        let store = self.clone();
        tokio::task::spawn_blocking(move || {
            // What fails here is tried again when the weights are put away.
            drop(store.copy());
            drop((at_work, done));
        });
    }

    /// The copy of the weights in host memory, made unless it is there. None if no host memory was leased, or nothing is
    /// loaded.
    fn copy(&self) -> Result<Option<Copied>, DeviceError> {
        let _turn = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        let (segment, host, earlier) = {
            let contents = self.contents();
            (contents.segment(), contents.host.clone(), contents.copy.clone())
        };
        let (Some(segment), Some(host)) = (segment, host) else { return Ok(None) };
        // They were not changed since a wake that failed.
        if earlier.is_some() {
            return Ok(earlier);
        }
        let started = Instant::now();
        let copied = Copied { copy: Arc::new(segment.copy_out()?), backed: segment.backed(), is_away: false };
        debug!(took = ?started.elapsed(), "weights copied to host memory");
        let mut contents = self.contents();
        // Whose lease was taken out meanwhile stays awake.
        if !contents.host.as_ref().is_some_and(|now| Arc::ptr_eq(now, &host)) {
            return Ok(None);
        }
        contents.copy = Some(copied.clone());
        Ok(Some(copied))
    }

    /// Moves the weights to the host memory that was leased for them, and unbacks them. Their addresses stay, so the
    /// model is as before once they are [back](Self::bring_back). Blocks. No lane may be left. False if no host memory
    /// was leased, or nothing is loaded.
    ///
    /// # Errors
    /// The host or the device refuses the copy. The weights are then where they were.
    pub fn put_away(&self) -> Result<bool, DeviceError> {
        let (Some(segment), Some(copied)) = (self.segment(), self.copy()?) else { return Ok(false) };
        let started = Instant::now();
        self.contents().copy = Some(Copied { is_away: true, ..copied });
        let last_use = segment.device().fence_here();
        while !last_use.is_passed() {
            std::thread::park_timeout(FENCE_POLL);
        }
        segment.shrink_to(Bytes::ZERO, &last_use)?;
        debug!(took = ?started.elapsed(), "device memory of the weights released");
        Ok(true)
    }

    /// Whether host memory holds a copy of the weights.
    pub fn has_copy(&self) -> bool {
        self.contents().copy.is_some()
    }

    /// Bytes to back before the weights can come [back](Self::bring_back). None if they are not away.
    pub fn bytes_away(&self) -> Option<Bytes> {
        self.contents().copy.as_ref().filter(|copied| copied.is_away).map(|copied| copied.backed)
    }

    /// Moves the weights back to the device. Their lease must have its size again. Blocks. The copy stays until it is
    /// [given back](Self::give_copy_back), for a wake that fails later.
    ///
    /// # Errors
    /// The device refuses memory, or the copy.
    pub fn bring_back(&self) -> Result<(), DeviceError> {
        let (segment, copied) = (self.segment(), self.contents().copy.clone());
        let (Some(segment), Some(copied)) = (segment, copied.filter(|copied| copied.is_away)) else { return Ok(()) };
        segment.back_to(copied.backed)?;
        segment.copy_in(&copied.copy)?;
        self.contents().copy = Some(Copied { is_away: false, ..copied });
        Ok(())
    }

    /// Gives back the host memory of weights that are on the device, on a thread of its own: unlocking that much takes a
    /// while.
    pub fn give_copy_back(&self) {
        let mut contents = self.contents();
        if contents.is_away() || contents.host.is_none() {
            return;
        }
        let (gone, spare) = watch::channel(());
        contents.spare.push(spare);
        // They go in this order: the memory, its lease, and then what tells that both have gone.
        let given = (contents.copy.take(), contents.host.take(), gone);
        tokio::task::spawn_blocking(move || drop(given));
    }

    /// Waits until what was [given back](Self::give_copy_back) has gone, and no thread copies ahead: their lease has to be
    /// home before the model's next one.
    pub async fn spare_is_gone(&self) {
        let spare = {
            let mut contents = self.contents();
            contents.spare.retain(|spare| spare.has_changed().is_ok());
            contents.spare.clone()
        };
        for mut spare in spare {
            while spare.changed().await.is_ok() {}
        }
    }

    /// The owner of weights that were leased and not fully loaded, if any.
    pub fn take_unfinished(&self) -> Option<Owner> {
        let mut contents = self.contents();
        match contents.model {
            Some(_) => None,
            None => contents.weights_owner.take(),
        }
    }

    /// Takes the model out, with the owner of its weights' lease. Drop the model only after that owner is cleared:
    /// unmapping so much memory is slow, and is done by then.
    pub fn clear(&self) -> (Option<Owner>, Option<Models>) {
        let (owner, model) = {
            let mut contents = self.contents();
            contents.copy.iter_mut().for_each(|copied| copied.is_away = false);
            (contents.weights_owner.take(), contents.model.take())
        };
        self.give_copy_back();
        (owner, model)
    }

    /// Drops the executor, and waits until that is done if this was its last user.
    pub async fn clear_processor(&self) {
        let executor = self.contents().executor.take();
        // A panic in the drop stays on that thread. Nothing is left to do about it.
        drop(tokio::task::spawn_blocking(move || drop(executor)).await);
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // No code panics while it holds this lock.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Contents {
    fn begin(&mut self, generation: u64) -> Option<AtWork> {
        if self.is_closed(generation) {
            return None;
        }
        let (work, done) = watch::channel(());
        self.at_work.retain(|work| work.has_changed().is_ok());
        self.at_work.push(done);
        Some(AtWork(work))
    }

    fn segment(&self) -> Option<Arc<Segment>> {
        self.model.as_ref()?.segment().cloned()
    }

    fn is_away(&self) -> bool {
        self.copy.as_ref().is_some_and(|copied| copied.is_away)
    }

    fn is_closed(&self, generation: u64) -> bool {
        self.closed_through.is_some_and(|closed| generation <= closed)
    }
}
