//! The weight store, which outlives an engine. Loaded weights stay on the device while a successor
//! of the engine starts. Before memory is taken back, the store waits for every thread that still
//! uses it.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use bursar_budgets::{Bytes, DeviceError, HostCopy, Lease, Owner, Segment};
use tokio::sync::watch;
use tracing::debug;

use super::{LaneResources, Lanes, ProfileError};
use crate::compute::{Executor, Models};

/// State of a model that outlives its engines. The runtime holds one per model.
#[derive(Clone, Default)]
pub struct WeightStore {
    contents: Arc<Mutex<Contents>>,
    /// Held while weights are copied to host memory.
    copying: Arc<Mutex<()>>,
}

#[derive(Default)]
struct Contents {
    /// Attempts up to this generation have ended. A late thread of such an attempt must not take
    /// memory or start a thread.
    closed_through: Option<u64>,
    weights_owner: Option<Owner>,
    model: Option<Models>,
    /// Lease of the host memory to which the weights of a sleeping model are copied. The memory is
    /// leased before the copy starts, so that no copy has to be thrown away.
    host: Option<Arc<Lease>>,
    copy: Option<Copied>,
    /// Receivers that close when a released copy is freed, or when a thread of
    /// [`copy_ahead`](WeightStore::copy_ahead) has ended.
    spare: Vec<watch::Receiver<()>>,
    /// The CPU threads or GPU kernels that compute. The executor outlives the model, so that a
    /// restarted engine need not load kernels.
    executor: Option<Executor>,
    lanes: Option<Lanes>,
    /// Receivers that close when a thread that takes memory or copies weights has ended.
    at_work: Vec<watch::Receiver<()>>,
}

/// A copy of the weights in host memory.
#[derive(Clone)]
struct Copied {
    copy: Arc<HostCopy>,
    /// Bytes of each rank's memory that were backed when the copy was made.
    backed: Bytes,
    /// Whether the weights are in host memory only.
    is_away: bool,
}

/// Interval at which a fence is polled.
const FENCE_POLL: Duration = Duration::from_millis(1);

/// Guard that is held while memory is taken or weights are copied.
#[derive(Debug)]
pub struct AtWork(#[expect(dead_code, reason = "held for its drop")] watch::Sender<()>);

impl WeightStore {
    /// Returns the loaded model, if its weights are on the device.
    pub fn model(&self) -> Option<Models> {
        let contents = self.contents();
        contents.model.clone().filter(|_| !contents.is_away())
    }

    pub fn executor(&self) -> Option<Executor> {
        self.contents().executor.clone()
    }

    pub fn keep_executor(&self, executor: Executor) {
        self.contents().executor = Some(executor);
    }

    pub fn keep_model(&self, model: Models) {
        self.contents().model = Some(model);
    }

    /// Records that weights are being copied for `owner`. The copying thread holds the guard.
    /// Returns `None` if the attempt has already ended.
    #[must_use]
    pub fn begin_loading(&self, generation: u64, owner: Owner) -> Option<AtWork> {
        let mut contents = self.contents();
        let work = contents.begin(generation)?;
        contents.weights_owner = Some(owner);
        Some(work)
    }

    /// Records that memory is being taken for an attempt. The thread that takes the memory holds
    /// the guard. Returns `None` if the attempt has already ended.
    #[must_use]
    pub fn begin(&self, generation: u64) -> Option<AtWork> {
        self.contents().begin(generation)
    }

    /// Runs `work`, which takes memory for an attempt, on a blocking thread. Ending the attempt
    /// waits for this thread, so that no memory is taken while the attempt's bytes are being
    /// returned. Returns `None` if the attempt has already ended.
    ///
    /// # Errors
    /// The error of `work`, or [`ProfileError::Died`] if `work` panics.
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

    /// Starts the threads that use an attempt's memory, and stores their handles. Threads of
    /// `before` that still run are kept. Starting a GPU lane allocates page-locked memory, so this
    /// function uses a blocking thread of tokio. Returns `None` if the attempt is being ended; in
    /// that case no new thread is left running.
    ///
    /// # Errors
    /// A GPU refuses a stream or page-locked memory.
    pub async fn start_lanes(
        &self,
        before: Option<Lanes>,
        place: LaneResources,
        generation: u64,
    ) -> Result<Option<Lanes>, ProfileError> {
        let store = self.clone();
        let started = self.on_a_thread(generation, move || {
            let lanes = place.start_lanes(before.as_ref())?;
            if store.keep_lanes(generation, lanes.clone()) {
                return Ok(Some(lanes));
            }
            // Ending the attempt waits for this thread and takes the memory back only afterward.
            tokio::runtime::Handle::current().block_on(lanes.shut_down());
            Ok(None)
        });
        Ok(started.await?.flatten())
    }

    /// Stores the handles of the threads that use an attempt's memory. Returns `false` if the
    /// attempt has already ended. In that case the threads must get no work, because their memory
    /// may be released.
    #[must_use]
    fn keep_lanes(&self, generation: u64, lanes: Lanes) -> bool {
        let mut contents = self.contents();
        if contents.is_closed(generation) {
            return false;
        }
        contents.lanes = Some(lanes);
        true
    }

    /// Returns the threads that use an attempt's memory, if there are any.
    pub(crate) fn lanes(&self) -> Option<Lanes> {
        self.contents().lanes.clone()
    }

    /// Ends the threads of all attempts up to `generation` and waits until no thread uses their
    /// memory.
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

    /// Stores the lease of the host memory to which the weights will be copied.
    pub fn keep_host(&self, lease: Lease) {
        self.contents().host = Some(Arc::new(lease));
    }

    pub fn segment(&self) -> Option<Arc<Segment>> {
        self.contents().segment()
    }

    /// Whether the weights are in host memory only.
    pub fn is_away(&self) -> bool {
        self.contents().is_away()
    }

    /// Begins to copy the weights on a separate thread to the host memory that was leased for them.
    /// Requests may still run, because nothing writes to the weights. Ending the attempt
    /// `generation` waits for the copy.
    pub fn copy_ahead(&self, generation: u64) {
        let Some(at_work) = self.begin(generation) else { return };
        let (done, over) = watch::channel(());
        self.contents().spare.push(over);
        let store = self.clone();
        tokio::task::spawn_blocking(move || {
            // A copy that fails here is tried again by `put_away`.
            drop(store.copy());
            drop((at_work, done));
        });
    }

    /// Returns the copy of the weights in host memory, and makes it first if necessary. Returns
    /// `None` if no host memory was leased, or if no weights are loaded.
    fn copy(&self) -> Result<Option<Copied>, DeviceError> {
        let _turn = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        let (segment, host, earlier) = {
            let contents = self.contents();
            (contents.segment(), contents.host.clone(), contents.copy.clone())
        };
        let (Some(segment), Some(host)) = (segment, host) else { return Ok(None) };
        // A copy that remained after a failed wake is still valid, because the weights have not
        // changed since.
        if earlier.is_some() {
            return Ok(earlier);
        }
        let started = Instant::now();
        let copied = Copied { copy: Arc::new(segment.copy_out()?), backed: segment.backed(), is_away: false };
        debug!(took = ?started.elapsed(), "weights copied to host memory");
        let mut contents = self.contents();
        // If the lease was removed during the copy, the model stays awake and needs no copy.
        if !contents.host.as_ref().is_some_and(|now| Arc::ptr_eq(now, &host)) {
            return Ok(None);
        }
        contents.copy = Some(copied.clone());
        Ok(Some(copied))
    }

    /// Moves the weights to the host memory that was leased for them, and unbacks their device
    /// memory. Their addresses stay reserved, so the model is unchanged once the weights are
    /// [back](Self::bring_back). Blocks. No lane may exist. Returns `false` if no host memory was
    /// leased, or if no weights are loaded.
    ///
    /// # Errors
    /// The copy fails, and the weights stay where they were. Or unbacking fails, and the weights
    /// count as away.
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

    /// Returns the bytes to back before the weights can be brought [back](Self::bring_back).
    /// Returns `None` if the weights are on the device.
    pub fn bytes_away(&self) -> Option<Bytes> {
        self.contents().copy.as_ref().filter(|copied| copied.is_away).map(|copied| copied.backed)
    }

    /// Moves the weights back to the device. Their lease must have its full size again. Blocks. The
    /// copy stays until it is [released](Self::give_copy_back), in case the wake fails later.
    ///
    /// # Errors
    /// The device refuses the memory or the copy.
    pub fn bring_back(&self) -> Result<(), DeviceError> {
        let (segment, copied) = (self.segment(), self.contents().copy.clone());
        let (Some(segment), Some(copied)) = (segment, copied.filter(|copied| copied.is_away)) else { return Ok(()) };
        segment.back_to(copied.backed)?;
        segment.copy_in(&copied.copy)?;
        self.contents().copy = Some(Copied { is_away: false, ..copied });
        Ok(())
    }

    /// Releases the host copy of weights that are on the device. Uses a separate thread, because
    /// unlocking that much memory takes a while.
    pub fn give_copy_back(&self) {
        let mut contents = self.contents();
        if contents.is_away() || contents.host.is_none() {
            return;
        }
        let (gone, spare) = watch::channel(());
        contents.spare.push(spare);
        // The tuple drops in this order: the memory, its lease, and then the sender that signals
        // that both are gone.
        let given = (contents.copy.take(), contents.host.take(), gone);
        tokio::task::spawn_blocking(move || drop(given));
    }

    /// Waits until [released](Self::give_copy_back) copies are freed and no thread of
    /// [`copy_ahead`](Self::copy_ahead) runs. The lease of such a copy must be returned before the
    /// model takes its next lease of host memory.
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

    /// Removes and returns the owner of weights that were leased but not fully loaded, if any.
    pub fn take_unfinished(&self) -> Option<Owner> {
        let mut contents = self.contents();
        match contents.model {
            Some(_) => None,
            None => contents.weights_owner.take(),
        }
    }

    /// Removes and returns the model and the owner of its weights' lease. Also releases the host
    /// copy of the weights. Drop the model only after that owner is cleared: clearing the owner
    /// unmaps the weights, which is slow, and then the drop has nothing left to unmap.
    pub fn clear(&self) -> (Option<Owner>, Option<Models>) {
        let (owner, model) = {
            let mut contents = self.contents();
            contents.copy.iter_mut().for_each(|copied| copied.is_away = false);
            (contents.weights_owner.take(), contents.model.take())
        };
        self.give_copy_back();
        (owner, model)
    }

    /// Drops the executor. If the weight store was its last user, waits until the drop has
    /// finished.
    pub async fn clear_executor(&self) {
        let executor = self.contents().executor.take();
        // A panic in the drop ends only that thread. This code cannot repair it.
        drop(tokio::task::spawn_blocking(move || drop(executor)).await);
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // Poisoning is ignored, because no code panics while it holds this lock.
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
