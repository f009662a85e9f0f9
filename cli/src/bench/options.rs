//! The options of `bursar bench`.

use std::time::SystemTime;

use bursar::{BlasSearch, LoadOptions};
use clap::Args;

use super::{
    replay::options::ReplayOptions,
    roofline::Rates,
    workload::{FULL, Measurement, QUICK, Workload},
};
use crate::{failure::Failure, knobs::KnobOptions, model::ModelOptions};

/// Options of `bursar bench`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    pub model: ModelOptions,
    /// Prints one JSON object with every figure.
    #[arg(long)]
    pub json: bool,
    /// Measures only these kinds of figures. By default, all kinds.
    #[arg(long, value_delimiter = ',', value_name = "KIND,..")]
    only: Vec<Measurement>,
    /// Uses small sizes, which run within seconds on a CPU.
    #[arg(long)]
    quick: bool,
    /// Length in tokens of the prompts that precede the measured decode steps. Default 512, or 64
    /// with --quick.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    decode_context: Option<u32>,
    /// Number of decode steps to average over. Default 128, or 16 with --quick. Long prompts need
    /// more steps, because their time is subtracted.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    decode_steps: Option<u32>,
    /// Batch sizes of decoding, instead of the default ones. All sequences of a batch should fit
    /// the KV cache at once.
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..))]
    batches: Vec<u32>,
    /// Accepts each draft with this probability, whatever the model chooses, and always drafts as
    /// many tokens as the limits allow. Random weights accept no drafts, so this shows the speed
    /// that a trained draft head would give. Needs --draft-method or --draft-tokens.
    #[arg(long, value_name = "RATE", value_parser = acceptance)]
    pub draft_acceptance: Option<f64>,
    /// Seed of prompts, pictures and random weights. By default, a different seed each time.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Floating-point throughput of the device on 16-bit numbers, in 10^12 operations per second. A
    /// device that multiplies E4M3 is assumed to do so at twice this rate.
    #[arg(long, value_name = "RATE", requires = "terabytes", value_parser = rate, help_heading = "The roofline")]
    teraflops: Option<f64>,
    /// Memory bandwidth of the device, in 10^12 bytes per second.
    #[arg(long, value_name = "RATE", requires = "teraflops", value_parser = rate, help_heading = "The roofline")]
    terabytes: Option<f64>,
    /// Commit that the figures belong to, if the binary was built without one.
    #[arg(long, value_name = "HASH", default_value = option_env!("BURSAR_COMMIT"))]
    pub commit: Option<String>,

    #[command(flatten)]
    pub replay: ReplayOptions,
    #[command(flatten)]
    pub knobs: KnobOptions,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if rate.is_finite() && rate > 0.0 { Ok(rate) } else { Err("expected a number above 0".to_owned()) }
}

fn acceptance(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if (0.0..=1.0).contains(&rate) { Ok(rate) } else { Err("expected a probability from 0 to 1".to_owned()) }
}

/// The largest integer that every JSON reader preserves.
const SEED_MOST: u64 = (1 << 53) - 1;

fn seed_of_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64 & SEED_MOST
}

impl Options {
    /// Returns the seed of prompts and weights: the value of --seed, or else a seed from the
    /// current time.
    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(seed_of_now)
    }

    /// Whether figures of this kind were asked for.
    pub fn wants(&self, part: Measurement) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    /// Whether small sizes were asked for.
    pub fn is_quick(&self) -> bool {
        self.quick
    }

    pub fn workload(&self) -> Workload {
        let usual = if self.quick { QUICK } else { FULL };
        let batches = match &self.batches[..] {
            [] => usual.batches,
            // Leak the list, because `Workload` has `'static` lists.
            batches => batches.iter().map(|batch| *batch as usize).collect::<Vec<_>>().leak(),
        };
        let context = self.decode_context.map_or(usual.context, |tokens| tokens as usize);
        let steps = self.decode_steps.map_or(usual.steps, |steps| steps as usize);
        Workload { context, steps, batches, ..usual }
    }

    /// Returns the load options. The envelope follows from the figures, unless a knob sets it.
    pub fn load(&self, workload: &Workload, blas: BlasSearch) -> Result<LoadOptions, Failure> {
        let (envelope, requests) = (Some(workload.envelope()), Some(workload.requests()));
        // Single figures measure throughput: all requests arrive at once, and no client reads the
        // tokens as they arrive.
        let token_interval = None;
        let options = LoadOptions { envelope, requests, blas, token_interval, ..LoadOptions::default() };
        let mut options = self.knobs.over(options)?;
        if let Some(rate) = self.draft_acceptance {
            if options.limits.draft_tokens.unwrap_or(0) == 0 {
                return Err(Failure {
                    error: format!("--draft-acceptance is {rate}, but drafts are off"),
                    hint: "add --draft-method mtp or ngram, or --draft-model, or --draft-tokens N".to_owned(),
                });
            }
            (options.has_fixed_drafts, options.synthetic_acceptance) = (true, Some(rate));
        }
        Ok(options)
    }

    /// Returns the device's rates, if flags give them.
    pub fn rates(&self) -> Option<Rates> {
        let (teraflops, terabytes) = (self.teraflops?, self.terabytes?);
        Some(Rates::new(teraflops * 1e12, terabytes * 1e12, "--teraflops and --terabytes"))
    }
}
