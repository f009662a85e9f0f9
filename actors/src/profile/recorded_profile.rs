//! A recorded profile: what was measured, and what that depends on. Pure.

use bursar_budgets::Bytes;
use bursar_kernels::{BLOCK_TOKENS, Tuning};
use bursar_model::Envelope;
use serde::{Deserialize, Serialize};

use super::{ATTEMPTS_MAX, Difference, MemoryRequirements, ProfileKey, ProfileRecord};
use crate::pace::MeasuredCosts;

/// What was measured, and on what basis. The start that uses it takes three things: the size of the cache, the right to
/// run each worst case once instead of twice, and the fastest algorithm for each product. Its permits come from its own
/// [`ProfileRecord`], with its own envelope's limits and newly measured peaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedProfile {
    /// What the profile depends on.
    pub basis: ProfileKey,
    /// Sequences in a step.
    pub sequences: usize,
    /// Tokens in a step.
    pub step_tokens: usize,
    /// Patches in a launch.
    pub launch_patches: usize,
    /// Rows of the vision cache.
    pub cache_rows: usize,
    /// Blocks of keys and values.
    pub kv_blocks: usize,
    /// Attempts that were refused memory before this size.
    pub shrinks: u32,
    /// Each worst case with its peak.
    pub peaks: Vec<Peak>,
    /// The result of autotuning. None if there was nothing to choose.
    pub tuning: Option<Tuning>,
    /// What steps and launches took. None in files of earlier versions: it is measured again.
    #[serde(default)]
    pub costs: Option<MeasuredCosts>,
}

/// A worst case that was run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peak {
    /// Its name; `corner` in files of format 2.
    #[serde(rename = "corner")]
    pub worst_case: String,
    /// The peak of its workspace, in bytes.
    pub workspace: Bytes,
}

impl RecordedProfile {
    /// The profile of a start that measured.
    pub fn of(basis: ProfileKey, record: &ProfileRecord, shrinks: u32, tuning: Option<Tuning>) -> Self {
        let ProfileRecord { sequences, step_tokens, launch_patches, cache_rows, kv_blocks, peaks, costs } = record;
        let peak = |(worst_case, workspace): &(&'static str, Bytes)| Peak {
            worst_case: (*worst_case).to_owned(),
            workspace: *workspace,
        };
        RecordedProfile {
            basis,
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

    /// The difference, if a start that measures anew would find room for `found` blocks instead, after as many
    /// refusals. Up to a 64th is no difference: the driver takes a few pages more or less each time, and that is not
    /// worth running all worst cases.
    pub fn differs_from(&self, found: usize) -> Option<Difference> {
        // The file may have been edited and hold any number.
        let tokens = |blocks: usize| Some(format!("{} tokens", blocks.saturating_mul(BLOCK_TOKENS)));
        let slack = self.kv_blocks / ROOM_SLACK;
        let differs = self.kv_blocks.abs_diff(found) > slack;
        differs.then(|| Difference::of("room for keys and values", tokens(self.kv_blocks), tokens(found)))
    }

    /// How it differs from what this plan and envelope would measure. With an equal basis that happens only if the file
    /// was edited, or if code changed and its version did not.
    pub fn differences(&self, needs: &MemoryRequirements, envelope: &Envelope) -> Vec<Difference> {
        let numbers = [
            ("sequences", self.sequences, envelope.sequences),
            ("step_tokens", self.step_tokens, envelope.step_tokens),
            ("launch_patches", self.launch_patches, envelope.launch_patches),
            ("rows of the vision cache", self.cache_rows, needs.cache_rows),
            ("shrinks", self.shrinks as usize, self.shrinks.min(ATTEMPTS_MAX - 1) as usize),
            ("kv_blocks", self.kv_blocks, self.kv_blocks.max(least_blocks(needs, envelope))),
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

/// The fraction by which a recorded size may differ: one 64th.
const ROOM_SLACK: usize = 64;

fn peak(worst_case: &str) -> String {
    format!("the peak of '{worst_case}'")
}

/// The fewest blocks: the probe, and a whole context.
fn least_blocks(needs: &MemoryRequirements, envelope: &Envelope) -> usize {
    needs.probe_blocks.max(envelope.context_tokens.div_ceil(BLOCK_TOKENS))
}
