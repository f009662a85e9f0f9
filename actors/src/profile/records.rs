//! Profiles of earlier starts, and where this start's profile goes.

use std::sync::Arc;

use bursar_kernels::Tuning;

use super::{Notice, ProfileKey, ProfileRecord, Progress, ProgressSink, RecordPath, RecordedProfile};
use crate::compute::Executor;

/// The profiles of a model that are written down. Cloning shares them.
#[derive(Clone)]
pub struct Records {
    place: RecordPath,
    basis: Arc<ProfileKey>,
    /// One that applies, until it did not hold.
    warm: Option<Arc<RecordedProfile>>,
    progress: ProgressSink,
    /// Whose products a profile that applies has tuned.
    executor: Executor,
}

impl Records {
    /// Relies on the profile `warm`, if one applies: its tuning takes the place of what `executor` has measured.
    pub(crate) fn new(
        place: RecordPath,
        basis: ProfileKey,
        warm: Option<RecordedProfile>,
        progress: ProgressSink,
        executor: Executor,
    ) -> Self {
        if let Some(tuning) = warm.as_ref().and_then(|written| written.tuning.as_ref()) {
            executor.tune(tuning);
        }
        Records { place, basis: Arc::new(basis), warm: warm.map(Arc::new), progress, executor }
    }

    /// The profile that the attempt under way relies on; none if it measures anew.
    pub(crate) fn warm(&self) -> Option<Arc<RecordedProfile>> {
        self.warm.clone()
    }

    /// The attempt that relied on a profile has failed: the next one measures anew. Returns false if none relied on
    /// one.
    pub(crate) fn drop_warm(&mut self, reason: &str) -> bool {
        let did = self.warm.take().is_some();
        if did {
            self.executor.tune(&Tuning::default());
            let (file, reason) = (self.place.path(), reason.to_owned());
            (self.progress)(Progress::Notice(Notice::ProfileDropped { file, reason }));
        }
        did
    }

    /// Records what was measured. If that fails, the start's listener is told. Blocks.
    pub(crate) fn keep(&self, record: &ProfileRecord, shrinks: u32) {
        let written = RecordedProfile::of((*self.basis).clone(), record, shrinks, self.executor.tuning());
        if let Err(error) = self.place.keep(written) {
            let (file, reason) = (self.place.path(), error.to_string());
            (self.progress)(Progress::Notice(Notice::ProfileNotWritten { file, reason }));
        }
    }
}
