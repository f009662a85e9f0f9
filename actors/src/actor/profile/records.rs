//! Recorded profiles of a model: the profiles of earlier starts, and the profile that this start
//! writes.

use std::sync::Arc;

use bursar_kernels::Tuning;

use super::{Notice, ProfileKey, ProfileRecord, Progress, ProgressSink, RecordPath, RecordedProfile};
use crate::compute::Executor;

/// Access to the recorded profiles of a model. Clones share the files and the executor.
/// `discard_profile` drops the profile only from the clone on which it is called, but resets the
/// tuning of the shared executor.
#[derive(Clone)]
pub struct Records {
    place: RecordPath,
    profile_key: Arc<ProfileKey>,
    /// The recorded profile that applies, until an attempt finds that it does not match.
    warm: Option<Arc<RecordedProfile>>,
    progress: ProgressSink,
    /// The executor whose GEMM algorithms are set from the profile that applies.
    executor: Executor,
}

impl Records {
    /// Creates the access to a model's profiles. `warm` is the recorded profile that applies, if
    /// there is one; its tuning replaces the tuning that `executor` has measured.
    pub(crate) fn new(
        place: RecordPath,
        profile_key: ProfileKey,
        warm: Option<RecordedProfile>,
        progress: ProgressSink,
        executor: Executor,
    ) -> Self {
        if let Some(tuning) = warm.as_ref().and_then(|written| written.tuning.as_ref()) {
            executor.tune(tuning);
        }
        Records { place, profile_key: Arc::new(profile_key), warm: warm.map(Arc::new), progress, executor }
    }

    /// Returns the profile that the current attempt relies on, or `None` if the attempt takes new
    /// measurements.
    pub(crate) fn warm(&self) -> Option<Arc<RecordedProfile>> {
        self.warm.clone()
    }

    /// Drops the profile that applied, because the attempt that relied on it has failed. The next
    /// attempt takes new measurements. Returns `false` if the attempt relied on no profile.
    pub(crate) fn discard_profile(&mut self, reason: &str) -> bool {
        let did = self.warm.take().is_some();
        if did {
            self.executor.tune(&Tuning::default());
            let (file, reason) = (self.place.path(), reason.to_owned());
            (self.progress)(Progress::Notice(Notice::ProfileDropped { file, reason }));
        }
        did
    }

    /// Records the measurements. A write failure is only reported, as `Notice::ProfileNotWritten`.
    /// Blocks on file I/O.
    pub(crate) fn keep(&self, record: &ProfileRecord, shrinks: u32) {
        let written = RecordedProfile::of((*self.profile_key).clone(), record, shrinks, self.executor.tuning());
        if let Err(error) = self.place.keep(written) {
            let (file, reason) = (self.place.path(), error.to_string());
            (self.progress)(Progress::Notice(Notice::ProfileNotWritten { file, reason }));
        }
    }
}
