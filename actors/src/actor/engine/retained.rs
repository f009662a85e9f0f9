//! State that a wake reuses instead of computing it again. The runtime keeps it outside the model's
//! engines, which may end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bursar_model::checkpoint::Checkpoint;

use super::ModelContext;
use crate::profile::ProfileRecord;

/// State that later engines of a model reuse. The runtime keeps one such value per model. Clones
/// share the same state.
#[derive(Clone, Default)]
pub struct RetainedState(Arc<Mutex<Contents>>);

#[derive(Default)]
struct Contents {
    opened: Option<Opened>,
    record: Option<Arc<ProfileRecord>>,
}

/// An open checkpoint, and the model's host-side context: tokenizer, chat template, media
/// processors.
#[derive(Clone)]
pub(super) struct Opened {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) context: Arc<ModelContext>,
}

impl RetainedState {
    pub(super) fn keep_opened(&self, opened: Opened) {
        self.contents().opened = Some(opened);
    }

    pub(super) fn opened(&self) -> Option<Opened> {
        self.contents().opened.clone()
    }

    /// Keeps the profile record of the largest KV cache size that serving may now use. The record
    /// of a smaller size replaces the record of a larger size only if memory was refused to the
    /// larger size. In all other cases, the size is smaller only because other processes or models
    /// hold memory at the moment.
    pub(super) fn keep_record(&self, record: &Arc<ProfileRecord>, was_refused: bool) {
        let kept = &mut self.contents().record;
        if was_refused || kept.as_ref().is_none_or(|kept| kept.kv_blocks < record.kv_blocks) {
            *kept = Some(record.clone());
        }
    }

    /// The kept record. It belongs to the largest KV cache size that passed its stress test, unless
    /// memory was later refused to that size.
    pub(super) fn record(&self) -> Option<Arc<ProfileRecord>> {
        self.contents().record.clone()
    }

    /// Closes the checkpoint. The next start opens its files again.
    pub(crate) fn close(&self) {
        self.contents().opened = None;
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // No code panics while it holds this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
