//! Profiles of earlier starts, and where this start's profile goes.

use std::sync::Arc;

use bursar_kernels::Tuning;

use super::{Basis, Notice, ProfileRecord, Progress, ProgressSink, RecordPlace, WrittenProfile};
use crate::compute::Processor;

/// The profiles of a model that are written down. Cloning shares them.
#[derive(Clone)]
pub struct Records {
    pub(crate) place: RecordPlace,
    pub(crate) basis: Arc<Basis>,
    /// One that applies, until it did not hold.
    pub(crate) warm: Option<Arc<WrittenProfile>>,
    pub(crate) progress: ProgressSink,
    /// Whose products a profile that applies has tuned.
    pub(crate) processor: Processor,
}

impl Records {
    /// The profile that the attempt under way relies on; none if it measures anew.
    pub(crate) fn warm(&self) -> Option<Arc<WrittenProfile>> {
        self.warm.clone()
    }

    /// The attempt that relied on a profile has failed, for whatever reason: the next measures anew. False if none did.
    pub(crate) fn drop_warm(&mut self, reason: &str) -> bool {
        let did = self.warm.take().is_some();
        if did {
            self.processor.tune(&Tuning::default());
            let (file, reason) = (self.place.path(), reason.to_owned());
            (self.progress)(Progress::Notice(Notice::ProfileDropped { file, reason }));
        }
        did
    }

    /// Writes down what was measured. Where that cannot be, whoever watches the start is told. Blocks.
    pub(crate) fn keep(&self, record: &ProfileRecord, shrinks: u32) {
        let written = WrittenProfile::of((*self.basis).clone(), record, shrinks, self.processor.tuning());
        if let Err(error) = self.place.keep(written) {
            let (file, reason) = (self.place.path(), error.to_string());
            (self.progress)(Progress::Notice(Notice::ProfileNotWritten { file, reason }));
        }
    }
}
