//! Measured durations of steps and encoder batches, in whole µs, so that records can be compared.

use serde::{Deserialize, Serialize};

/// The amounts of work that determine the duration of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepWork {
    pub prompt_tokens: usize,
    /// Pairs of a prompt token and a token that it attends to.
    pub prompt_pairs: u64,
    /// Decoding sequences, with one token each.
    pub decoding: usize,
    /// Tokens that the decoding sequences attend to, summed over all of them.
    pub context_tokens: u64,
}

impl StepWork {
    /// Adds `tokens` tokens of a prompt, which follow `cached` tokens that are already computed.
    pub fn add_prompt(&mut self, cached: usize, tokens: usize) {
        let (cached, tokens64) = (cached as u64, tokens as u64);
        self.prompt_tokens += tokens;
        self.prompt_pairs += tokens64 * cached + tokens64 * (tokens64 + 1) / 2;
    }

    /// Adds a decoding sequence of `tokens` tokens.
    pub fn add_decoding(&mut self, tokens: usize) {
        self.decoding += 1;
        self.context_tokens += tokens as u64;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredStep {
    pub work: StepWork,
    /// The duration in µs, including launch and answer.
    pub micros: u64,
}

/// A measured batch of the vision encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredLaunch {
    pub patches: usize,
    /// The duration on an idle GPU, in µs.
    pub micros: u64,
}

/// The measurements of a profile. Empty if the profile measured nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredCosts {
    /// Steps, in the order in which they ran.
    pub steps: Vec<MeasuredStep>,
    /// Encoder batches, in ascending order of patches.
    pub launches: Vec<MeasuredLaunch>,
}

impl MeasuredCosts {
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.launches.is_empty()
    }

    /// The most patches that an encoder batch of at most `micros` µs can have, interpolated
    /// linearly between the nearest measurements. `None` if no batch was measured.
    pub fn patches_within(&self, micros: u64) -> Option<usize> {
        let mut before = MeasuredLaunch { patches: 0, micros: 0 };
        for launch in &self.launches {
            if launch.micros > micros {
                let of = u128::from(launch.micros.saturating_sub(before.micros)).max(1);
                let part = u128::from(micros.saturating_sub(before.micros));
                let more = launch.patches.saturating_sub(before.patches) as u128 * part / of;
                return Some(before.patches + more as usize);
            }
            before = *launch;
        }
        // Beyond the largest measured batch, the time is proportional to the patches.
        let patches = before.patches as u128 * u128::from(micros) / u128::from(before.micros.max(1));
        (!self.launches.is_empty()).then_some(patches as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_patches_of_a_launch_follow_from_its_time() {
        let launch = |patches, micros| MeasuredLaunch { patches, micros };
        let costs = MeasuredCosts { launches: vec![launch(1000, 4000), launch(3000, 16_000)], steps: Vec::new() };
        let patches = [2000, 4000, 10_000, 32_000].map(|micros| costs.patches_within(micros));
        assert_eq!(patches, [Some(500), Some(1000), Some(2000), Some(6000)]);
        assert_eq!(MeasuredCosts::default().patches_within(1000), None);
    }

    #[test]
    fn query_key_pairs_of_a_prompt_include_its_cached_tokens() {
        let mut work = StepWork::default();
        work.add_prompt(10, 3);
        assert_eq!((work.prompt_tokens, work.prompt_pairs), (3, 11 + 12 + 13));
    }
}
