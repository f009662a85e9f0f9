//! Profiles that earlier starts of a model recorded for this device, and where this start records its own.

use std::path::PathBuf;

use bursar_budgets::{Bytes, DeviceError, Snapshot};
use bursar_model::{Envelope, checkpoint::Checkpoint};

use super::EngineArguments;
use crate::{
    compute::Processor,
    profile::{Basis, BasisParts, Difference, Found, Needs, Notice, Progress, RecordPlace, Records},
};

/// What identifies the profile to look for.
pub(super) struct Sought<'s> {
    pub(super) checkpoint: &'s Checkpoint,
    pub(super) envelope: &'s Envelope,
    pub(super) processor: &'s Processor,
    pub(super) needs: &'s Needs,
}

/// Where to look, and the facts that only actors know.
pub(super) struct Search {
    arguments: EngineArguments,
    folder: PathBuf,
    canary: Bytes,
}

impl EngineArguments {
    /// Where profiles are recorded, if the user chose a folder.
    pub(super) fn search(&self, ledger: &Snapshot) -> Option<Search> {
        let folder = self.options.profiles.clone()?;
        Some(Search { arguments: self.clone(), folder, canary: ledger.canary_wanted })
    }
}

impl Search {
    /// Looks for a profile that applies. If files exist but none applies, the progress sink hears why. Blocks.
    pub(super) fn look_up(self, sought: &Sought<'_>) -> Result<Records, DeviceError> {
        let EngineArguments { label, source, options, device, progress, .. } = &self.arguments;
        let processor = sought.processor;
        let basis = Basis::of(&BasisParts {
            checkpoint: sought.checkpoint,
            envelope: sought.envelope,
            target: processor.target(),
            device: device.name(),
            driver: &device.driver(),
            library: processor.library().as_deref(),
            total: device.memory()?.total,
            page: device.page(),
            canary: self.canary,
            kv: options.kv(),
        });
        let place = RecordPlace::new(&self.folder, &label.to_string(), &source.place(), device.name());
        let found = if options.measures_anew { Ok(Found::Nothing) } else { place.find(&basis) };
        let (warm, reasons) = match found {
            Ok(Found::Nothing) => (None, Vec::new()),
            Ok(Found::Differs(differences)) => (None, told(&differences)),
            Ok(Found::Applies(written)) => match &*written.differences(sought.needs, sought.envelope) {
                [] => (Some(written), Vec::new()),
                differences => (None, told(differences)),
            },
            Err(error) => (None, vec![error.to_string()]),
        };
        if !reasons.is_empty() {
            progress(Progress::Notice(Notice::ProfileIgnored { file: place.path(), reasons }));
        }
        Ok(Records::new(place, basis, warm, progress.clone(), processor.clone()))
    }
}

fn told(differences: &[Difference]) -> Vec<String> {
    differences.iter().map(Difference::to_string).collect()
}
