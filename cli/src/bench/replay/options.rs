//! The flags of a replay.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;

use super::{
    arrivals::Arrivals,
    objective::Objective,
    read,
    synthetic::{Amount, Synthetic},
};
use crate::failure::Failure;

/// Requests per second of synthetic requests if --rate is not given.
const RATE: f64 = 4.0;

/// Flags of a replay.
#[derive(Args)]
#[command(next_help_heading = "Replay")]
pub struct ReplayOptions {
    /// Replays the requests of a file at their recorded times, instead of measuring single figures.
    /// The file has JSON lines with lengths and hash ids (Mooncake traces) or with OpenAI requests,
    /// or one object with several runs.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "synthetic"])]
    trace: Option<PathBuf>,
    /// Replays synthetic requests, which are drawn from the seed.
    #[arg(long, value_name = "KIND", conflicts_with = "only")]
    synthetic: Option<Synthetic>,
    /// Requests per second. Each of several rates is a separate run. A trace is sped up or slowed
    /// down to the rate. A trace without times gets random arrival times.
    #[arg(long, value_name = "RATE,..", value_delimiter = ',', value_parser = rate)]
    rate: Vec<f64>,
    /// Time in seconds during which new requests arrive. Used with --synthetic.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = rate)]
    seconds: f64,
    /// Keeps at most this many requests in flight. The others wait for a reply to end, and their
    /// times count from when they are sent. With a trace whose requests all arrive at time 0, this
    /// is a closed loop.
    #[arg(long, value_name = "REQUESTS")]
    max_concurrency: Option<NonZeroUsize>,
    /// Folder with the pictures of a trace. Without it, pictures of a trace with several runs are
    /// generated from the seed.
    #[arg(long, value_name = "FOLDER", requires = "trace")]
    pictures_in: Option<PathBuf>,
    /// Side of generated pictures, in pixels. Default 1036, or 224 with --quick.
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u32).range(28..=8192))]
    picture_side: Option<u32>,
    /// Latency limits for a request to count as good: ttft (time to the first token), interval (p99
    /// of the time between tokens), tpot (mean time between tokens) and whole (time to the last
    /// token), each with a time.
    #[arg(long, value_name = "BOUND,..", default_value = "ttft=2s,interval=50ms")]
    objective: Objective,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| (1e-3..=1e6).contains(rate));
    rate.ok_or_else(|| "expected a number from 0.001 to 1000000".to_owned())
}

impl ReplayOptions {
    /// Whether a replay was asked for.
    pub fn is_wanted(&self) -> bool {
        self.trace.is_some() || self.synthetic.is_some()
    }

    pub fn objective(&self) -> &Objective {
        &self.objective
    }

    /// The maximum number of requests in flight.
    pub fn max_concurrency(&self) -> Option<usize> {
        self.max_concurrency.map(NonZeroUsize::get)
    }

    /// Returns the requests of each run.
    ///
    /// # Errors
    /// The trace cannot be read.
    pub fn runs(&self, seed: u64, quick: bool) -> Result<Vec<Arrivals>, Failure> {
        let side = self.picture_side.unwrap_or(if quick { 224 } else { 1036 });
        if let Some(trace) = &self.trace {
            let read = read::trace(trace, &read::PictureSource { folder: self.pictures_in.as_deref(), side })?;
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
