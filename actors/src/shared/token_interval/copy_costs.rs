//! Pure: the choice between copying keys and values back from host memory and recomputing them, by
//! the measured costs of copies and steps.

use super::{StepCosts, StepWork};

/// The cost of copying blocks between device and host, learned from earlier copies. Blocks are
/// copied to the host before any block is copied back, so the cost is known before the first copy
/// back.
#[derive(Clone, Debug, Default)]
pub struct CopyCosts {
    /// The cost of computing tokens. `None` if no steps were measured.
    steps: Option<StepCosts>,
    /// µs per block of each of the last three copies.
    lately: [Option<f64>; 3],
}

impl CopyCosts {
    /// Creates costs without any measured copy. Copies are compared with the costs in `steps`.
    pub fn with_steps(steps: Option<StepCosts>) -> Self {
        CopyCosts { steps, lately: [None; 3] }
    }

    /// Learns that copies of `blocks` blocks, in both directions together, took `micros` µs.
    pub fn learn(&mut self, blocks: usize, micros: u64) {
        if blocks > 0 {
            let [_, second, third] = self.lately;
            self.lately = [second, third, Some(micros as f64 / blocks as f64)];
        }
    }

    /// Returns `true` if copying `blocks` blocks takes no longer than computing their `tokens`
    /// tokens, which follow `cached` computed tokens. Also returns `true` while either cost is
    /// unknown. The cheapest of the last three copies counts, because the slower copies spent their
    /// extra time on something other than copying.
    pub fn is_copy_cheaper(&self, blocks: usize, cached: usize, tokens: usize) -> bool {
        let cheapest = self.lately.iter().flatten().copied().reduce(f64::min);
        let (Some(steps), Some(block)) = (&self.steps, cheapest) else { return true };
        let mut work = StepWork::default();
        work.add_prompt(cached, tokens);
        let computing = steps.predict(&work, false).saturating_sub(steps.predict(&StepWork::default(), false));
        block * blocks as f64 <= computing as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token_interval::{MeasuredCosts, MeasuredStep};

    /// Costs of a device on which a prompt token takes 20 µs, in a step of at least 1 ms.
    fn steps() -> StepCosts {
        let step = |prompt: usize, decoding: usize| {
            let mut work = StepWork::default();
            (0..decoding).for_each(|_| work.add_decoding(100));
            if prompt > 0 {
                work.add_prompt(0, prompt);
            }
            MeasuredStep { work, micros: 1000 + 20 * prompt as u64 }
        };
        let measured = MeasuredCosts { steps: vec![step(0, 1), step(16, 1), step(1024, 1)], launches: Vec::new() };
        StepCosts::of(&measured).expect("the measurements include steps with and without prompts")
    }

    #[test]
    fn blocks_are_copied_when_copying_is_not_slower_than_computing() {
        let mut costs = CopyCosts::with_steps(Some(steps()));
        assert!(costs.is_copy_cheaper(1, 0, 16), "an unmeasured copy is worth it");
        // 16 tokens take 320 µs.
        for (micros, worth) in [(300, true), (400, false)] {
            (0..3).for_each(|_| costs.learn(10, 10 * micros));
            assert_eq!(costs.is_copy_cheaper(20, 0, 320), worth, "{micros} µs per block");
        }
        costs.learn(10, 1000);
        assert!(costs.is_copy_cheaper(20, 0, 320), "one fast copy corrects the estimate");
        costs.learn(0, 1_000_000);
        assert!(costs.is_copy_cheaper(20, 0, 320));
    }

    #[test]
    fn a_short_prefix_is_computed_when_its_step_runs_anyway() {
        let mut costs = CopyCosts::with_steps(Some(steps()));
        (0..3).for_each(|_| costs.learn(1, 330));
        assert!(!costs.is_copy_cheaper(1, 4096, 16), "the step runs for the following tokens anyway");
        let mut unknown = CopyCosts::with_steps(None);
        unknown.learn(1, 1_000_000);
        assert!(unknown.is_copy_cheaper(1, 0, 16), "a copy is worth it when no step was measured");
    }
}
