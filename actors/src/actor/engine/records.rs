//! Profiles that earlier starts of a model recorded for this device, and the file in which this
//! start records its profile.

use std::path::PathBuf;

use bursar_budgets::{Bytes, DeviceError, Snapshot};
use bursar_model::{Envelope, checkpoint::Checkpoint};

use super::EngineArguments;
use crate::{
    compute::Executor,
    profile::{
        Difference, MemoryRequirements, Notice, ProfileKey, ProfileKeySources, Progress, RecordLookup, RecordPath,
        Records,
    },
};

/// Data that identifies the profile to look for.
pub(super) struct RecordQuery<'s> {
    pub(super) checkpoint: &'s Checkpoint,
    pub(super) envelope: &'s Envelope,
    pub(super) executor: &'s Executor,
    pub(super) needs: &'s MemoryRequirements,
}

/// A lookup of recorded profiles for one engine, in the folder that the user chose.
pub(super) struct Search {
    arguments: EngineArguments,
    folder: PathBuf,
    canary: Bytes,
}

impl EngineArguments {
    /// The lookup in the folder where profiles are recorded. `None` if the user chose no folder.
    pub(super) fn search(&self, ledger: &Snapshot) -> Option<Search> {
        let folder = self.options.profiles.clone()?;
        Some(Search { arguments: self.clone(), folder, canary: ledger.canary_wanted })
    }
}

impl Search {
    /// Looks for a profile that applies. If profiles are recorded but none applies, or the file
    /// cannot be used, the reasons are reported to the progress sink. This call blocks.
    pub(super) fn look_up(self, sought: &RecordQuery<'_>) -> Result<Records, DeviceError> {
        let EngineArguments { label, source, options, device, progress, .. } = &self.arguments;
        let executor = sought.executor;
        let profile_key = ProfileKey::of(&ProfileKeySources {
            checkpoint: sought.checkpoint,
            envelope: sought.envelope,
            target: executor.target(),
            device: device.name(),
            driver: &device.driver(),
            library: executor.library().as_deref(),
            total: device.memory()?.total,
            page: device.page(),
            canary: self.canary,
            kv: options.kv(),
        });
        let place = RecordPath::new(&self.folder, &label.to_string(), &source.place(), device.name());
        let found = if options.measures_anew { Ok(RecordLookup::Nothing) } else { place.find(&profile_key) };
        let (warm, reasons) = match found {
            Ok(RecordLookup::Nothing) => (None, Vec::new()),
            Ok(RecordLookup::Differs(differences)) => (None, described(&differences)),
            Ok(RecordLookup::Applies(written)) => match &*written.differences(sought.needs, sought.envelope) {
                [] => (Some(written), Vec::new()),
                differences => (None, described(differences)),
            },
            Err(error) => (None, vec![error.to_string()]),
        };
        if !reasons.is_empty() {
            progress(Progress::Notice(Notice::ProfileIgnored { file: place.path(), reasons }));
        }
        Ok(Records::new(place, profile_key, warm, progress.clone(), executor.clone()))
    }
}

fn described(differences: &[Difference]) -> Vec<String> {
    differences.iter().map(Difference::to_string).collect()
}
