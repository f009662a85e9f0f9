//! The weight store: what outlives an engine. Loaded weights stay while a successor starts. Before memory is taken
//! back, the store waits for every thread that still uses it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bursar_budgets::Owner;
use tokio::sync::watch;

use super::{Lanes, ProfileError};
use crate::compute::{Models, Processor};

/// One per model, held by the runtime.
#[derive(Clone, Default)]
pub struct WeightStore(Arc<Mutex<Contents>>);

#[derive(Default)]
struct Contents {
    /// Attempts up to this generation are over. A late one may start nothing more.
    closed_through: Option<u64>,
    weights_owner: Option<Owner>,
    model: Option<Models>,
    /// The CPU threads or GPU kernels that compute. They outlive the model, so that a restarted engine need not load
    /// kernels.
    processor: Option<Processor>,
    lanes: Option<Lanes>,
    /// Threads that take memory or copy weights.
    at_work: Vec<watch::Receiver<()>>,
}

/// While this lives, memory is being taken or weights copied.
#[derive(Debug)]
pub struct AtWork(#[expect(dead_code, reason = "held for its drop")] watch::Sender<()>);

impl WeightStore {
    /// The loaded model, if there is one.
    pub fn model(&self) -> Option<Models> {
        self.contents().model.clone()
    }

    /// The loaded processor, if there is one.
    pub fn processor(&self) -> Option<Processor> {
        self.contents().processor.clone()
    }

    /// Keeps the loaded processor.
    pub fn keep_processor(&self, processor: Processor) {
        self.contents().processor = Some(processor);
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
    fn begin_backing(&self, generation: u64) -> Option<AtWork> {
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
        let Some(at_work) = self.begin_backing(generation) else { return Ok(None) };
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
        let mut contents = self.contents();
        (contents.weights_owner.take(), contents.model.take())
    }

    /// Drops the processor, and waits until that is done if this was its last user.
    pub async fn clear_processor(&self) {
        let processor = self.contents().processor.take();
        // A panic in the drop stays on that thread. Nothing is left to do about it.
        drop(tokio::task::spawn_blocking(move || drop(processor)).await);
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // No code panics while it holds this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn is_closed(&self, generation: u64) -> bool {
        self.closed_through.is_some_and(|closed| generation <= closed)
    }
}
