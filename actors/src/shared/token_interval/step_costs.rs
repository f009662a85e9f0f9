//! Pure: predicted durations of steps, by lines through the profile's measurements, multiplied by a
//! factor that is learned from completed steps.

use super::{MeasuredCosts, MeasuredStep, StepWork};

/// A predictor of step durations, fitted to a profile's measurements.
///
/// A step that only decodes takes a base time, a time per sequence, and a time per token that the
/// sequences attend to. Prompt tokens in the same step add a time that is a piecewise linear
/// function of their number, and a time per pair of tokens in attention.
#[derive(Clone, Debug)]
pub struct StepCosts {
    /// The fixed time of a step, in µs.
    base: f64,
    per_sequence: f64,
    per_context_token: f64,
    per_pair: f64,
    /// Points of the curve of the time that prompt tokens add, excluding the time per pair: tokens
    /// and µs, both ascending.
    prompts: Vec<(f64, f64)>,
    /// Correction factors, learned from steps that have prompts and decoding sequences. Factor 0
    /// applies while no pictures are encoded on the same GPU, and factor 1 while pictures are
    /// encoded.
    factors: [Factor; 2],
}

/// The factor by which an encoder batch is assumed to slow down a step, until the slowdown has been
/// observed.
const BESIDE_PICTURES: f64 = 1.5;

impl StepCosts {
    /// `None` if no decode-only step, or no step with prompts, was measured.
    pub fn of(measured: &MeasuredCosts) -> Option<Self> {
        let (alone, mixed): (Vec<MeasuredStep>, Vec<_>) =
            measured.steps.iter().partition(|step| step.work.prompt_tokens == 0);
        let by_size = |step: &&MeasuredStep| (step.work.decoding, step.work.context_tokens);
        let least = alone.iter().min_by_key(by_size)?;
        let longest = alone.iter().max_by_key(by_size)?;
        let of_most = |step: &&MeasuredStep| step.work.decoding == longest.work.decoding;
        let most = alone.iter().filter(of_most).min_by_key(by_size)?;
        let per_context_token = slope(most, longest, |work| work.context_tokens as f64, 0.0);
        let of_context = (most.work.context_tokens as f64 - least.work.context_tokens as f64) * per_context_token;
        let per_sequence = slope(least, most, |work| work.decoding as f64, of_context);
        // Two steps with the same number of prompt tokens differ only in their pairs.
        let pairs = |a: &MeasuredStep, b: &MeasuredStep| slope(a, b, |work| work.prompt_pairs as f64, 0.0);
        let alike = mixed.iter().flat_map(|a| mixed.iter().map(move |b| (a, b)));
        let alike = alike.filter(|(a, b)| a.work.prompt_tokens == b.work.prompt_tokens);
        let per_pair = alike.map(|(a, b)| pairs(a, b)).fold(0.0, f64::max);
        let base = least.micros as f64
            - least.work.decoding as f64 * per_sequence
            - least.work.context_tokens as f64 * per_context_token;
        let mut costs = StepCosts {
            base: base.max(0.0),
            per_sequence,
            per_context_token,
            per_pair,
            prompts: Vec::new(),
            factors: [Factor::from(1.0), Factor::from(BESIDE_PICTURES)],
        };
        costs.prompts = costs.curve(&mixed);
        (!costs.prompts.is_empty()).then_some(costs)
    }

    /// The time that prompt tokens add to a step, by their number. If several steps have the same
    /// number of prompt tokens, the cheapest counts.
    fn curve(&self, mixed: &[MeasuredStep]) -> Vec<(f64, f64)> {
        let added = |step: &MeasuredStep| {
            let without = self.decoding(&step.work) + step.work.prompt_pairs as f64 * self.per_pair;
            (step.work.prompt_tokens as f64, (step.micros as f64 - without).max(0.0))
        };
        let mut points: Vec<_> = mixed.iter().map(added).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        points.dedup_by_key(|point| point.0);
        // More tokens never take less time. Remove measurement noise that says otherwise.
        let mut most = 0.0;
        for (_, micros) in &mut points {
            most = f64::max(most, *micros);
            *micros = most;
        }
        points
    }

    fn decoding(&self, work: &StepWork) -> f64 {
        self.base + work.decoding as f64 * self.per_sequence + work.context_tokens as f64 * self.per_context_token
    }

    /// The duration of the step by the measurements only, without a factor, in µs.
    fn measured(&self, work: &StepWork) -> f64 {
        let prompts = match work.prompt_tokens {
            0 => 0.0,
            tokens => line(&self.prompts, tokens as f64) + work.prompt_pairs as f64 * self.per_pair,
        };
        self.decoding(work) + prompts
    }

    /// The predicted duration of the step, in µs. `pictures` is `true` if pictures are encoded on
    /// the same GPU during the step.
    pub fn predict(&self, work: &StepWork, pictures: bool) -> u64 {
        (self.measured(work) * self.factors[usize::from(pictures)].value) as u64
    }

    /// Learns from a completed step. Steps without prompts or without decoding sequences are
    /// ignored, because the prompt chunk is limited only in steps that have both.
    pub fn learn(&mut self, work: &StepWork, pictures: bool, micros: u64) {
        if work.prompt_tokens > 0 && work.decoding > 0 {
            self.factors[usize::from(pictures)].learn(micros as f64 / self.measured(work).max(1.0));
        }
    }
}

/// The slope between two steps, in µs per unit that `of` returns. `without` µs of their difference
/// have another cause and are subtracted. 0 if `more` has no more units than `less`.
fn slope(less: &MeasuredStep, more: &MeasuredStep, of: impl Fn(&StepWork) -> f64, without: f64) -> f64 {
    let (run, rise) = (of(&more.work) - of(&less.work), more.micros as f64 - less.micros as f64 - without);
    if run > 0.0 { (rise / run).max(0.0) } else { 0.0 }
}

/// The curve through `points` at `x`. Before the first point the curve is flat, because fewer
/// tokens take as long. Beyond the last point it continues with the slope between the last two
/// points.
fn line(points: &[(f64, f64)], x: f64) -> f64 {
    let after = points.iter().position(|(at, _)| *at >= x).unwrap_or(points.len() - 1);
    let (Some(before), (to, high)) = (after.checked_sub(1), points[after]) else {
        // Flat before the first point. Beyond a single point the time is proportional to `x`.
        let (at, micros) = points[0];
        return micros * (x / at).max(1.0);
    };
    let (from, low) = points[before];
    low + (high - low) * (x - from) / (to - from)
}

/// The ratio of a step's duration to the duration that the profile predicts. The factor moves
/// toward the median of the last three ratios, so that a single outlier changes nothing. It rises
/// faster than it falls, because the promise is about the slowest steps.
#[derive(Clone, Copy, Debug)]
struct Factor {
    value: f64,
    seen: [f64; 3],
}

impl Factor {
    const BOUNDS: (f64, f64) = (0.25, 8.0);
    const UP: f64 = 0.25;
    const DOWN: f64 = 0.05;

    fn from(value: f64) -> Self {
        Factor { value, seen: [value; 3] }
    }

    fn learn(&mut self, ratio: f64) {
        let [_, second, third] = self.seen;
        self.seen = [second, third, ratio.clamp(Self::BOUNDS.0, Self::BOUNDS.1)];
        let mut sorted = self.seen;
        sorted.sort_by(f64::total_cmp);
        let weight = if sorted[1] > self.value { Self::UP } else { Self::DOWN };
        self.value += (sorted[1] - self.value) * weight;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The duration of a step on a device with these costs: 4 ms a step, 10 µs a sequence, 1 µs for
    /// 100 tokens of context, 20 µs a prompt token, 1 µs for 1,000 pairs, and 2 ms for a step with
    /// prompts.
    fn micros(work: &StepWork) -> u64 {
        let decoding = 4000 + work.decoding as u64 * 10 + work.context_tokens / 100;
        let prompts = work.prompt_tokens as u64 * 20 + work.prompt_pairs / 1000;
        decoding + if work.prompt_tokens > 0 { 2000 + prompts } else { 0 }
    }

    fn work(prompt: usize, cached: usize, decoding: usize, context: usize) -> StepWork {
        let mut work = StepWork::default();
        if prompt > 0 {
            work.add_prompt(cached, prompt);
        }
        (0..decoding).for_each(|_| work.add_decoding(context));
        work
    }

    fn measured() -> MeasuredCosts {
        let alone = [work(0, 0, 1, 500), work(0, 0, 64, 500), work(0, 0, 64, 4000)];
        let mixed = [16, 256, 1024, 4096].map(|prompt| work(prompt, 0, 16, 500));
        let steps = alone.into_iter().chain(mixed).chain([work(1024, 3000, 16, 500)]);
        let steps = steps.map(|work| MeasuredStep { work, micros: micros(&work) }).collect();
        MeasuredCosts { steps, launches: Vec::new() }
    }

    #[test]
    fn unmeasured_steps_are_predicted_from_fitted_lines() {
        let costs = StepCosts::of(&measured()).expect("the measurements cover all kinds");
        for wanted in [
            work(0, 0, 20, 900),
            work(700, 100, 40, 300),
            work(3000, 5000, 8, 2000),
            work(8000, 0, 64, 100),
            work(2, 0, 1, 10),
        ] {
            let (predicted, is) = (costs.predict(&wanted, false) as f64, micros(&wanted) as f64);
            assert!((predicted / is - 1.0).abs() < 0.06, "{wanted:?}: predicted {predicted}, measured {is}");
        }
    }

    #[test]
    fn costs_are_unknown_until_both_kinds_of_step_were_measured() {
        let MeasuredCosts { steps, .. } = measured();
        for part in [&steps[..0], &steps[..3], &steps[3..]] {
            assert!(StepCosts::of(&MeasuredCosts { steps: part.to_vec(), launches: Vec::new() }).is_none());
        }
    }

    #[test]
    fn step_costs_adapt_to_slower_devices_but_not_outliers() {
        let mut costs = StepCosts::of(&measured()).expect("the measurements cover all kinds");
        let wanted = work(1024, 0, 16, 500);
        let before = costs.predict(&wanted, false);
        costs.learn(&wanted, false, before * 50);
        costs.learn(&wanted, false, before);
        costs.learn(&wanted, false, before);
        assert_eq!(costs.predict(&wanted, false), before, "a single slow step does not change the prediction");
        (0..20).for_each(|_| costs.learn(&wanted, false, before * 2));
        let learned = costs.predict(&wanted, false) as f64 / before as f64;
        assert!((1.95..=2.0).contains(&learned), "{learned}");
        (0..100).for_each(|_| costs.learn(&wanted, false, before * 1000));
        assert!(costs.predict(&wanted, false) <= before * 8, "the correction is bounded");
        let alone = work(0, 0, 16, 500);
        let decoding = costs.measured(&alone);
        costs.learn(&alone, true, 1_000_000);
        assert_eq!(
            costs.factors[1].value, BESIDE_PICTURES,
            "a decode-only step is not learned, because it is not planned by costs: {decoding}"
        );
    }

    #[test]
    fn noise_never_makes_more_tokens_cheaper() {
        let mut noisy = measured();
        noisy.steps[4].micros = 100;
        noisy.steps[6].micros = 90;
        let costs = StepCosts::of(&noisy).expect("the measurements cover all kinds");
        let predicted: Vec<_> = (1..9000).step_by(100).map(|p| costs.predict(&work(p, 0, 16, 500), false)).collect();
        assert!(predicted.is_sorted());
    }
}
