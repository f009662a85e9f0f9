//! A receiver of release notes, for tests without a budget actor.

use std::sync::Mutex;

use bursar_budgets::{LeaseId, ReleaseNote, ReleaseNotes, RevokeHandle};

/// Collects notes, as a budget actor would.
#[derive(Default)]
pub struct Notes {
    pub posted: Mutex<Vec<ReleaseNote>>,
    pub revokers: Mutex<Vec<(LeaseId, RevokeHandle)>>,
}

impl ReleaseNotes for Notes {
    fn post(&self, note: ReleaseNote) {
        self.posted.lock().unwrap().push(note);
    }

    fn segment_reserved(&self, lease: LeaseId, revoker: RevokeHandle) {
        self.revokers.lock().unwrap().push((lease, revoker));
    }
}
