//! The weight store: what outlives an engine. Loaded weights stay while the engine's successor starts, and whoever
//! still uses memory can be waited for before it is taken back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bursar_budgets::Owner;
use bursar_model::Model;
use tokio::sync::watch;

use super::{Lanes, ProfileError};
use crate::compute::Processor;

/// Held by the runtime for each model.
#[derive(Clone, Default)]
pub struct WeightStore(Arc<Mutex<Contents>>);

#[derive(Default)]
struct Contents {
    /// Attempts up to this generation are over: a late one may start nothing any more.
    closed_through: Option<u64>,
    weights_owner: Option<Owner>,
    model: Option<Arc<Model>>,
    /// What its passes run on. It outlives the model, so that an engine that starts again loads no kernels anew.
    processor: Option<Processor>,
    lanes: Option<Lanes>,
    /// Threads that take memory or copy weights.
    at_work: Vec<watch::Receiver<()>>,
}

/// Memory is being taken, or weights copied, for as long as this lives.
#[derive(Debug)]
pub struct AtWork(#[expect(dead_code, reason = "held for its drop")] watch::Sender<()>);

impl WeightStore {
    /// The loaded model, if there is one.
    pub fn model(&self) -> Option<Arc<Model>> {
        self.contents().model.clone()
    }

    /// What was loaded to compute with, if it was.
    pub fn processor(&self) -> Option<Processor> {
        self.contents().processor.clone()
    }

    /// Keeps what was loaded to compute with.
    pub fn keep_processor(&self, processor: Processor) {
        self.contents().processor = Some(processor);
    }

    /// Keeps a loaded model.
    pub fn keep_model(&self, model: Arc<Model>) {
        self.contents().model = Some(model);
    }

    /// Remembers that weights are being copied for `owner`; to be held by whoever copies. None if an end was put to the
    /// attempt before it began.
    #[must_use]
    pub fn begin_loading(&self, generation: u64, owner: Owner) -> Option<AtWork> {
        let mut contents = self.contents();
        let work = contents.begin(generation)?;
        contents.weights_owner = Some(owner);
        Some(work)
    }

    /// Remembers that memory is being taken for an attempt; to be held by the thread that takes it. None if an end was
    /// put to the attempt before it began.
    #[must_use]
    fn begin_backing(&self, generation: u64) -> Option<AtWork> {
        self.contents().begin(generation)
    }

    /// Lets a thread take memory for an attempt: that takes its time, and is none that a thread of tokio has. It is waited
    /// for when an end is put to the attempt, so that nothing is taken behind the back of whoever brings its bytes home.
    /// None if that was before it began.
    ///
    /// # Errors
    /// What `work` says; [`ProfileError::Died`] if it panics.
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

    /// Remembers the threads that use an attempt's memory. False if an end was put to the attempt before: then nothing
    /// may be asked of them, as the memory may be gone.
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

    /// Ends the threads of all attempts up to `generation`; returns when nothing uses their memory any more.
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

    /// As whom weights were leased that were not loaded to their end, if there are any.
    pub fn take_unfinished(&self) -> Option<Owner> {
        let mut contents = self.contents();
        match contents.model {
            Some(_) => None,
            None => contents.weights_owner.take(),
        }
    }

    /// Lets go of the model; gives as whom its weights were leased. Drop the model when that owner is cleared: to take so
    /// much back takes a while, which is then over.
    pub fn clear(&self) -> (Option<Owner>, Option<Arc<Model>>) {
        let mut contents = self.contents();
        (contents.weights_owner.take(), contents.model.take())
    }

    /// Lets go of what was loaded to compute with; returns when it is gone, if nobody else has it.
    pub async fn clear_processor(&self) {
        let processor = self.contents().processor.take();
        // A panic of the drop is that thread's, and nothing is left to do about it.
        drop(tokio::task::spawn_blocking(move || drop(processor)).await);
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // Nothing panics while it holds this.
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
