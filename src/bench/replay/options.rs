//! What is replayed, as flags.

use std::path::PathBuf;

use clap::Args;

use super::{
    arrivals::Arrivals,
    objective::Objective,
    read,
    synthetic::{Amount, Synthetic},
};
use crate::failure::Failure;

/// Requests per second for a trace without a rate.
const RATE: f64 = 4.0;

/// Flags of a replay.
#[derive(Args)]
#[command(next_help_heading = "Replay")]
pub struct ReplayOptions {
    /// Plays the requests of a file at their own times, instead of measuring single figures: JSON lines with lengths
    /// and hash ids (Mooncake's traces) or OpenAI's requests, or an object with several runs.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "synthetic"])]
    trace: Option<PathBuf>,
    /// Plays requests that are drawn from the seed.
    #[arg(long, value_name = "KIND", conflicts_with = "only")]
    synthetic: Option<Synthetic>,
    /// Requests a second; several play one run each. A trace is sped up or slowed down to it; one without times gets some.
    #[arg(long, value_name = "RATE,..", value_delimiter = ',', value_parser = rate)]
    rate: Vec<f64>,
    /// How long requests keep coming. With --synthetic.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = rate)]
    seconds: f64,
    /// The folder of a trace's pictures. Without it, pictures of a trace of runs are drawn.
    #[arg(long, value_name = "FOLDER", requires = "trace")]
    pictures_in: Option<PathBuf>,
    /// The side of drawn pictures, in pixels; with --quick 224.
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u32).range(28..=8192))]
    picture_side: Option<u32>,
    /// The latencies that a request must keep to count as good: ttft (until the first token), interval (99 of 100 times between two
    /// of its tokens), tpot (that time on average) and whole (until the last token), each with a time.
    #[arg(long, value_name = "BOUND,..", default_value = "ttft=2s,interval=50ms")]
    objective: Objective,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| (1e-3..=1e6).contains(rate));
    rate.ok_or_else(|| "a number from 0.001 to 1000000 is wanted".to_owned())
}

impl ReplayOptions {
    /// Whether arrivals are played at all.
    pub fn is_wanted(&self) -> bool {
        self.trace.is_some() || self.synthetic.is_some()
    }

    pub fn objective(&self) -> &Objective {
        &self.objective
    }

    /// The runs.
    ///
    /// # Errors
    /// The trace cannot be read.
    pub fn runs(&self, seed: u64, quick: bool) -> Result<Vec<Arrivals>, Failure> {
        let side = self.picture_side.unwrap_or(if quick { 224 } else { 1036 });
        if let Some(trace) = &self.trace {
            let read = read::trace(trace, &read::Pictures { folder: self.pictures_in.as_deref(), side })?;
            if self.rate.is_empty() {
                return Ok(read);
            }
            let at_each =
                |arrivals: &Arrivals| self.rate.iter().map(|rate| arrivals.clone().at_rate(*rate, seed)).collect();
            return Ok(read.iter().flat_map::<Vec<_>, _>(at_each).collect());
        }
        let Some(kind) = self.synthetic else { return Ok(Vec::new()) };
        let rates = if self.rate.is_empty() { &[RATE][..] } else { &self.rate };
        let shortened = if quick { 8.0 } else { 1.0 };
        let amount = |rate: &f64| Amount { rate: *rate, seconds: self.seconds, side, shortened };
        Ok(rates.iter().map(|rate| kind.arrivals(amount(rate), seed)).collect())
    }
}
