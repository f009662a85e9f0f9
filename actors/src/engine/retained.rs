//! What a wake need not find out again: kept beside the engines of a model.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bursar_model::checkpoint::Checkpoint;

use super::ModelContext;
use crate::profile::ProfileRecord;

/// One per model, held by the runtime. Clones share it.
#[derive(Clone, Default)]
pub struct RetainedState(Arc<Mutex<Contents>>);

#[derive(Default)]
struct Contents {
    opened: Option<Opened>,
    record: Option<Arc<ProfileRecord>>,
}

/// A checkpoint that is open, and the model's host side.
#[derive(Clone)]
pub(super) struct Opened {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) context: Arc<ModelContext>,
}

impl RetainedState {
    pub(super) fn keep_opened(&self, opened: Opened) {
        self.contents().opened = Some(opened);
    }

    /// What was opened by the last start.
    pub(super) fn opened(&self) -> Option<Opened> {
        self.contents().opened.clone()
    }

    /// Keeps what was stressed and is served from. A smaller size than before counts only if memory was refused to the
    /// larger one: otherwise others had taken the room meanwhile.
    pub(super) fn keep_record(&self, record: &Arc<ProfileRecord>, was_refused: bool) {
        let kept = &mut self.contents().record;
        if was_refused || kept.as_ref().is_none_or(|kept| kept.kv_blocks < record.kv_blocks) {
            *kept = Some(record.clone());
        }
    }

    /// What was stressed when the model last served.
    pub(super) fn record(&self) -> Option<Arc<ProfileRecord>> {
        self.contents().record.clone()
    }

    /// Closes the checkpoint: the next start opens its files again.
    pub(crate) fn close(&self) {
        self.contents().opened = None;
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // No code panics while it holds this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
