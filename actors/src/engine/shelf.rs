//! The shelf: what outlives an engine. Loaded weights stay while the engine's successor starts, and whoever still uses
//! memory can be waited for before it is taken back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bursar_budgets::Owner;
use bursar_model::Model;
use tokio::sync::watch;

use super::Lanes;

/// Held by the runtime for each model.
#[derive(Clone, Default)]
pub struct Shelf(Arc<Mutex<Contents>>);

#[derive(Default)]
struct Contents {
    /// Attempts up to this generation are over: a late one may start nothing any more.
    closed_through: Option<u64>,
    weights_owner: Option<Owner>,
    model: Option<Arc<Model>>,
    lanes: Option<Lanes>,
    loading: Option<watch::Receiver<()>>,
}

/// Weights are being copied for as long as this lives.
#[derive(Debug)]
pub struct Loading(#[expect(dead_code, reason = "held for its drop")] watch::Sender<()>);

impl Shelf {
    /// The loaded model, if there is one.
    pub fn model(&self) -> Option<Arc<Model>> {
        self.contents().model.clone()
    }

    /// Keeps a loaded model.
    pub fn keep_model(&self, model: Arc<Model>) {
        self.contents().model = Some(model);
    }

    /// Remembers that weights are being copied for `owner`; to be held by whoever copies. None if an end was put to the
    /// attempt before it began.
    #[must_use]
    pub fn begin_loading(&self, generation: u64, owner: Owner) -> Option<Loading> {
        let mut contents = self.contents();
        if contents.is_closed(generation) {
            return None;
        }
        let (loading, done) = watch::channel(());
        contents.weights_owner = Some(owner);
        contents.loading = Some(done);
        Some(Loading(loading))
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
    pub(super) fn lanes(&self) -> Option<Lanes> {
        self.contents().lanes.clone()
    }

    /// Ends the threads of all attempts up to `generation`; returns when nothing uses their memory any more.
    pub async fn quench(&self, generation: u64) {
        let (lanes, loading) = {
            let mut contents = self.contents();
            contents.closed_through = contents.closed_through.max(Some(generation));
            (contents.lanes.take(), contents.loading.take())
        };
        if let Some(lanes) = lanes {
            lanes.quench().await;
        }
        if let Some(mut loading) = loading {
            while loading.changed().await.is_ok() {}
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

    /// Lets go of the model; gives as whom its weights were leased.
    pub fn clear(&self) -> Option<Owner> {
        let mut contents = self.contents();
        contents.model = None;
        contents.weights_owner.take()
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // Nothing panics while it holds this.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Contents {
    fn is_closed(&self, generation: u64) -> bool {
        self.closed_through.is_some_and(|closed| generation <= closed)
    }
}
