//! The options of `bursar bench`.

use bursar::{BlasSearch, LoadOptions};
use clap::Args;

use super::{
    replay::ReplayOptions,
    roofline::Rates,
    workload::{FULL, Part, QUICK, Workload},
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
    /// Measures only these kinds of figures.
    #[arg(long, value_delimiter = ',', value_name = "KIND,..")]
    only: Vec<Part>,
    /// Uses small sizes, which take seconds on a CPU.
    #[arg(long)]
    quick: bool,
    /// Tokens of the prompts before decoding is measured: by default 512, or 64 of small sizes.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    decode_context: Option<u32>,
    /// Steps that a decoding step is the mean of: by default 128, or 16 of small sizes. After long prompts, whose time is
    /// taken off, more are wanted.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    decode_steps: Option<u32>,
    /// Batch sizes of decoding, instead of the usual ones. They should fit the cache at once.
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..))]
    batches: Vec<u32>,
    /// Seed of prompts, pictures and random weights. By default, another one each time.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// The device's floating-point operations per second on 16-bit numbers, in 10^12. On E4M3 it is taken to do twice as
    /// many, if it multiplies those.
    #[arg(long, value_name = "RATE", requires = "terabytes", value_parser = rate, help_heading = "The roofline")]
    teraflops: Option<f64>,
    /// The device's memory bandwidth, in 10^12 bytes per second.
    #[arg(long, value_name = "RATE", requires = "teraflops", value_parser = rate, help_heading = "The roofline")]
    terabytes: Option<f64>,
    /// The commit that the figures belong to, if the binary does not know its own.
    #[arg(long, value_name = "HASH", default_value = option_env!("BURSAR_COMMIT"))]
    pub commit: Option<String>,

    #[command(flatten)]
    pub replay: ReplayOptions,
    #[command(flatten)]
    pub knobs: KnobOptions,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "a number is wanted".to_owned())?;
    if rate.is_finite() && rate > 0.0 { Ok(rate) } else { Err("a number above 0 is wanted".to_owned()) }
}

impl Options {
    /// Whether figures of this kind were asked for.
    pub fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    /// Whether sizes are to be small.
    pub fn is_quick(&self) -> bool {
        self.quick
    }

    pub fn workload(&self) -> Workload {
        let usual = if self.quick { QUICK } else { FULL };
        let batches = match &self.batches[..] {
            [] => usual.batches,
            // As long as the program, like the usual ones.
            batches => batches.iter().map(|batch| *batch as usize).collect::<Vec<_>>().leak(),
        };
        let context = self.decode_context.map_or(usual.context, |tokens| tokens as usize);
        let steps = self.decode_steps.map_or(usual.steps, |steps| steps as usize);
        Workload { context, steps, batches, ..usual }
    }

    /// Load options: the envelope follows from the figures unless a knob sets it.
    pub fn load(&self, workload: &Workload, blas: BlasSearch) -> Result<LoadOptions, Failure> {
        let (envelope, requests) = (Some(workload.envelope()), workload.requests());
        // Single figures are of throughput: all requests come at once, and no reader waits for one's tokens.
        let token_interval = None;
        self.knobs.over(LoadOptions { envelope, requests, blas, token_interval, ..LoadOptions::default() })
    }

    /// The rates given by flags.
    pub fn rates(&self) -> Option<Rates> {
        let (teraflops, terabytes) = (self.teraflops?, self.terabytes?);
        Some(Rates::new(teraflops * 1e12, terabytes * 1e12, "--teraflops and --terabytes"))
    }
}
