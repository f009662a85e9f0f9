//! The report of a replay, as text and as JSON.

use std::fmt;

use bursar::{Bytes, Envelope};
use serde::Serialize;

use super::{
    super::{machine::Machine, report::write_head},
    counts::{Counts, InUse},
    figures::Figures,
    times::TimeSummary,
};

#[derive(Debug, Serialize)]
pub struct ReplayReport {
    pub model: String,
    /// Whether the weights are random instead of loaded from a checkpoint.
    pub random_weights: bool,
    /// Seed of all random values: weights, prompts, pictures and arrival times.
    pub seed: u64,
    /// The machine, the build and the date.
    #[serde(flatten)]
    pub machine: Machine,
    /// The largest inputs that the model admits.
    pub envelope: Envelope,
    /// Capacity of the KV cache in tokens.
    pub kv_tokens: usize,
    /// Seconds from the start of the process until the model accepted requests.
    pub ready_seconds: f64,
    pub runs: Vec<Figures>,
}

impl ReplayReport {
    /// `true` if no request was answered in at least one run.
    pub fn is_a_failure(&self) -> bool {
        self.runs.iter().any(|run| run.answered == 0)
    }
}

impl fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_head(f, &self.model, self.random_weights, &self.machine, self.seed)?;
        self.runs.iter().try_for_each(|run| write!(f, "\n{run}"))
    }
}

/// Formats the mean, the median and the 99th percentile.
fn summary(times: &TimeSummary) -> String {
    let shown = |time: Option<f64>| match time {
        None => "-".to_owned(),
        Some(time) if time >= 100.0 => format!("{time:.0}"),
        Some(time) => format!("{time:.1}"),
    };
    format!("{} {} {} ms", shown(times.mean), shown(times.p50), shown(times.p99))
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.rate.map(|rate| format!(", {rate:.1} per second")).unwrap_or_default();
        writeln!(f, "{}: {} requests{rate}, {:.1} s", self.name, self.requests, self.seconds)?;
        let line = |f: &mut fmt::Formatter<'_>, name: &str, value: String| writeln!(f, "  {name:<34}{value}");
        for (kind, first) in &self.first_token_ms {
            line(f, &format!("first token, {kind}, mean p50 p99"), summary(first))?;
        }
        line(f, "between tokens, mean p50 p99", summary(&self.interval_ms))?;
        line(f, "a request's longest, mean p50 p99", summary(&self.longest_interval_ms))?;
        line(f, "whole replies, mean p50 p99", summary(&self.whole_ms))?;
        line(f, "throughput", format!("{:.1} tokens/s", self.throughput))?;
        let met = format!("{:.2} requests/s, {:.1} % of them", self.goodput, 100.0 * self.met);
        line(f, "goodput", met)?;
        let share = |part: f64, of: f64| if of > 0.0 { 100.0 * part / of } else { 0.0 };
        let cached = share(self.cached_tokens as f64, self.prompt_tokens as f64);
        line(f, "prompts", format!("{} tokens, {cached:.1} % cached", self.prompt_tokens))?;
        write_counts(f, &self.counts)?;
        if self.cut > 0 {
            line(f, "cut to the context", format!("{} prompts", self.cut))?;
        }
        self.failed.iter().try_for_each(|(error, count)| line(f, "failed", format!("{count} times: {error}")))
    }
}

fn write_counts(f: &mut fmt::Formatter<'_>, counts: &Counts) -> fmt::Result {
    let Counts { pictures_wanted, pictures_encoded, steps, sequences, patches, .. } = counts;
    let mut line = |name: &str, value: String| writeln!(f, "  {name:<34}{value}");
    let (blocks, shrinks) = (counts.preempted_for_blocks, counts.preempted_by_shrinks);
    let urgent = counts.preempted_for_priority;
    line("preempted", format!("{blocks} for blocks, {urgent} for priority, {shrinks} by shrinks"))?;
    if let (Some(middle), Some(most)) = (counts.prediction_error_p50, counts.prediction_error_p99) {
        line("error of predicted reply length", format!("{middle:.0} tokens (p50), {most:.0} (p99)"))?;
    }
    let (out, back) = (counts.kv_bytes_to_host, counts.kv_bytes_from_host);
    if out > 0 || back > 0 {
        let [out, back] = [out, back].map(Bytes);
        line("KV cache to the host and back", format!("{out} and {back}, {} tokens", counts.prefix_tokens_from_host))?;
    }
    if *pictures_wanted > 0 {
        let (computed, again, host) =
            (counts.pictures_found_computed, counts.pictures_wanted_again, counts.pictures_from_host);
        let found = format!("{pictures_wanted} needed, {computed} in the prefix cache, {host} from the host");
        line("pictures", format!("{found}, {pictures_encoded} encoded, {again} requested again"))?;
    }
    let slow = counts.step_ms_p99.map(|time| format!(", p99 {time:.1} ms")).unwrap_or_default();
    line("steps", format!("{steps}{slow}"))?;
    let shown = |InUse { permits, mean, most }: &InUse| format!("{mean:.1} of {permits} on average, {most} at most");
    line("sequences in use", shown(sequences))?;
    if patches.permits > 0.0 {
        line("patches in use", shown(patches))?;
    }
    Ok(())
}
