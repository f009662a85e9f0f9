//! Pure: a recorded profile, with the measurements and the facts that they depend on.

use bursar_budgets::Bytes;
use bursar_kernels::{BLOCK_TOKENS, Tuning};
use bursar_model::Envelope;
use serde::{Deserialize, Serialize};

use super::{ATTEMPTS_MAX, Difference, MemoryRequirements, ProfileKey, ProfileRecord};
use crate::token_interval::MeasuredCosts;

/// The measurements of a start and the facts that they depend on. A later start reuses the size of
/// the KV cache, the fastest algorithm for each GEMM, and the measured times. It also runs each
/// worst case once, not twice as a GPU otherwise does. The permits of the later start come from its
/// own [`ProfileRecord`], with limits from its envelope and newly measured peaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedProfile {
    /// The facts that the profile depends on.
    #[serde(rename = "basis")]
    pub profile_key: ProfileKey,
    pub sequences: usize,
    pub step_tokens: usize,
    /// Patches in a vision encoder batch.
    pub launch_patches: usize,
    /// Rows of the encoder cache.
    pub cache_rows: usize,
    pub kv_blocks: usize,
    /// Number of attempts that were refused memory before this size.
    pub shrinks: u32,
    pub peaks: Vec<Peak>,
    /// The result of autotuning. `None` if there was nothing to choose.
    pub tuning: Option<Tuning>,
    /// Measured times of steps and encoder batches. `None` in files of earlier versions; the times
    /// are then measured again.
    #[serde(default)]
    pub costs: Option<MeasuredCosts>,
}

/// A worst case that was run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peak {
    /// Name of the worst case. The field is called `corner` in the file, as in format 2.
    #[serde(rename = "corner")]
    pub worst_case: String,
    /// Peak of the workspace, in bytes.
    pub workspace: Bytes,
}

impl RecordedProfile {
    /// Returns the profile to record after a start that took new measurements.
    pub fn of(profile_key: ProfileKey, record: &ProfileRecord, shrinks: u32, tuning: Option<Tuning>) -> Self {
        let ProfileRecord { sequences, step_tokens, launch_patches, cache_rows, kv_blocks, peaks, costs, .. } = record;
        let peak = |(worst_case, workspace): &(&'static str, Bytes)| Peak {
            worst_case: (*worst_case).to_owned(),
            workspace: *workspace,
        };
        RecordedProfile {
            profile_key,
            sequences: *sequences,
            step_tokens: *step_tokens,
            launch_patches: *launch_patches,
            cache_rows: *cache_rows,
            kv_blocks: *kv_blocks,
            shrinks,
            peaks: peaks.iter().map(peak).collect(),
            tuning,
            costs: Some(costs.clone()),
        }
    }

    /// Compares the recorded size with `found`, the number of blocks that a new measurement yields
    /// for the same number of refusals. Returns the difference, or `None` if the sizes are about
    /// equal. A difference of up to one 64th is ignored: the driver allocates a few pages more or
    /// less each time, which does not justify running all worst cases again.
    pub fn differs_from(&self, found: usize) -> Option<Difference> {
        // The file may have been edited, so it can hold any number.
        let tokens = |blocks: usize| Some(format!("{} tokens", blocks.saturating_mul(BLOCK_TOKENS)));
        let slack = self.kv_blocks / KV_SIZE_SLACK;
        let differs = self.kv_blocks.abs_diff(found) > slack;
        differs.then(|| Difference::of("size of the KV cache", tokens(self.kv_blocks), tokens(found)))
    }

    /// Returns the differences between this profile and the results that a start with this plan and
    /// envelope would measure. If the profile keys are equal, there are differences only if the
    /// file was edited, or if code changed without a new version number.
    pub fn differences(&self, needs: &MemoryRequirements, envelope: &Envelope) -> Vec<Difference> {
        let numbers = [
            ("sequences", self.sequences, envelope.sequences),
            ("step_tokens", self.step_tokens, envelope.step_tokens),
            ("launch_patches", self.launch_patches, envelope.launch_patches),
            ("rows of the vision cache", self.cache_rows, needs.cache_rows),
            ("shrinks", self.shrinks as usize, self.shrinks.min(ATTEMPTS_MAX - 1) as usize),
            ("kv_blocks", self.kv_blocks, self.kv_blocks.max(needs.probe_blocks)),
        ];
        let numbers = numbers.into_iter().filter(|(_, was, is)| was != is);
        let mut differences: Vec<_> =
            numbers.map(|(what, was, is)| Difference::of(what, Some(was), Some(is))).collect();
        let planned = needs.worst_cases.iter().map(|(worst_case, footprint)| (worst_case.name, footprint.workspace));
        let mut planned = planned.peekable();
        for Peak { worst_case, workspace } in &self.peaks {
            let is = planned.next_if(|(name, _)| name == worst_case).map(|(_, workspace)| workspace);
            if is != Some(*workspace) {
                differences.push(Difference::of(&peak(worst_case), Some(*workspace), is));
            }
        }
        differences.extend(planned.map(|(worst_case, is)| Difference::of(&peak(worst_case), None, Some(is))));
        differences
    }
}

/// Inverse of the fraction by which a recorded size may differ.
const KV_SIZE_SLACK: usize = 64;

fn peak(worst_case: &str) -> String {
    format!("the peak of '{worst_case}'")
}
