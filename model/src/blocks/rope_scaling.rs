//! Rotary frequencies, and their scaling for contexts longer than the original training context.

use std::f64::consts::TAU;

/// The scaling of the rotary frequencies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeScaling {
    #[default]
    Plain,
    /// Every frequency is divided by `factor` (position interpolation, Chen et
    /// al. 2023, arXiv 2306.15595).
    Linear {
        /// Divisor of all frequencies; at least 1.
        factor: f64,
    },
    /// Gemma 4: only the pairs with the highest frequencies are rotated.
    Proportional {
        /// Fraction of the pairs that are rotated, from 0 to 1.
        rotated: f64,
        /// Divisor of all frequencies; at least 1.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high frequencies are unchanged, and
    /// frequencies in between are blended.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_factor` are low frequencies.
        low_factor: f64,
        /// Wavelengths below `original_context / high_factor` are high frequencies.
        high_factor: f64,
        /// Tokens of the original training context.
        original_context: usize,
    },
    /// YaRN (Peng et al. 2023, arXiv 2309.00071).
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// Pairs that rotate more often than this within the original context keep their frequency.
        beta_fast: f64,
        /// The frequencies of pairs that rotate less often than this are divided by `factor`.
        beta_slow: f64,
        /// Whether the bounds between these groups of pairs are rounded to whole pairs.
        truncates: bool,
        /// Factor that the rotated elements of queries and keys are multiplied by.
        attention_factor: f64,
        /// Tokens of the original training context.
        original_context: usize,
    },
}

impl RopeScaling {
    /// Radians per position for each pair `i` of a head of `dim` elements:
    /// `theta^(-2 i / dim)`, scaled.
    pub fn frequencies(&self, theta: f64, dim: usize) -> Vec<f32> {
        let plain = (0..dim / 2).map(|pair| theta.powf(-2.0 * pair as f64 / dim as f64));
        match *self {
            RopeScaling::Plain => plain.map(|frequency| frequency as f32).collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| (frequency / factor) as f32).collect(),
            RopeScaling::Proportional { rotated, factor } => {
                // Rounded down, as in transformers 5.17 (`_compute_proportional_rope_parameters`).
                let pairs = (rotated * dim as f64 / 2.0) as usize;
                let scaled = |(pair, frequency)| if pair < pairs { (frequency / factor) as f32 } else { 0.0 };
                plain.enumerate().map(scaled).collect()
            }
            RopeScaling::Llama3 { factor, low_factor, high_factor, original_context } => {
                let scaled = |frequency: f64| {
                    let turns = original_context as f64 * frequency / TAU;
                    let kept = ((turns - low_factor) / (high_factor - low_factor)).clamp(0.0, 1.0);
                    (frequency * (kept + (1.0 - kept) / factor)) as f32
                };
                plain.map(scaled).collect()
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, truncates, original_context, .. } => {
                // The pair that rotates `turns` times within the original context.
                let pair_of =
                    |turns: f64| dim as f64 * (original_context as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
                let (first, last) = (pair_of(beta_fast), pair_of(beta_slow));
                let (first, last) = if truncates { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, mut last) = (first.max(0.0), last.min(dim as f64 - 1.0));
                if first == last {
                    last += 0.001;
                }
                let scaled = |(pair, frequency): (usize, f64)| {
                    let divided = ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
                    (frequency * (1.0 - divided + divided / factor)) as f32
                };
                plain.enumerate().map(scaled).collect()
            }
        }
    }

    /// Factor that the rotated elements of queries and keys are multiplied by.
    pub fn attention_factor(&self) -> f32 {
        match self {
            RopeScaling::Yarn { attention_factor, .. } => *attention_factor as f32,
            _ => 1.0,
        }
    }

    /// Tokens of the longest context that the model serves. `context_tokens` is the context length
    /// in the file. With YaRN, the file may contain the original context length, so the result is
    /// at least the original context length times the factor.
    pub fn context_tokens(&self, context_tokens: usize) -> usize {
        match self {
            RopeScaling::Yarn { factor, original_context, .. } => {
                context_tokens.max((*original_context as f64 * factor) as usize)
            }
            _ => context_tokens,
        }
    }
}
