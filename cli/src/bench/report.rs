//! The report of all figures, as text and as JSON.

use std::fmt;

use bursar::{Bytes, Envelope, Snapshot};
use bursar_budgets::grouped;
use serde::Serialize;
use serde_json::Value;

use super::{machine::Machine, roofline::Rates};

/// Columns for a figure's name in text. No name is longer.
const NAME_COLUMNS: usize = 58;

#[derive(Debug, Serialize)]
pub struct Report {
    pub model: String,
    /// Whether the weights are random instead of loaded from a checkpoint.
    pub random_weights: bool,
    /// The seed of prompts, pictures and random weights.
    pub seed: u64,
    /// The machine, the build and the date.
    #[serde(flatten)]
    pub machine: Machine,
    /// The largest inputs that the model admits.
    pub envelope: Envelope,
    /// The rates of the device, if known.
    pub rates: Option<Rates>,
    pub figures: Vec<Figure>,
    pub left_out: Vec<LeftOut>,
    /// The failure or signal that ended the measurement early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_by: Option<Value>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Stable identifier, which does not change between versions.
    pub id: String,
    pub name: String,
    pub value: f64,
    pub unit: Unit,
    pub lower_is_better: bool,
    /// Seconds of each run. If the value is a difference of two measurements, the runs of both are
    /// listed.
    pub runs: Vec<f64>,
    /// Time by which the slowest run exceeded the fastest, as a share of the time that the value is
    /// computed from. If the value is a difference of two measurements, only the runs of the longer
    /// measurement count.
    pub spread: Option<f64>,
    /// Operations and bytes of the figure's passes, as planned.
    pub work: Option<PlannedWork>,
    /// The best value that the device could reach.
    pub roofline: Option<Roofline>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Unit {
    #[serde(rename = "ms")]
    Milliseconds,
    /// Prompt tokens per second.
    #[serde(rename = "tokens/s")]
    TokensPerSecond,
    #[serde(rename = "requests/s")]
    RequestsPerSecond,
    #[serde(rename = "tokens")]
    Tokens,
    #[serde(rename = "bytes")]
    Bytes,
}

/// Planned operations and bytes over all passes of a figure.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PlannedWork {
    pub flops: u64,
    /// The part of `flops` in GEMMs that the device multiplies in a quantized type.
    #[serde(rename = "e4m3_flops")]
    pub quantized_flops: u64,
    /// Bytes read and written in device memory.
    pub bytes: Bytes,
}

/// The best value that the device could reach at its rates.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Roofline {
    /// The best value, in the figure's unit.
    pub bound: f64,
    /// The shortest possible time divided by the measured time. 1 means that the bound was reached.
    pub share: f64,
}

/// A figure that could not be measured with this model on this device.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    pub id: String,
    pub name: String,
    pub reason: String,
}

impl Figure {
    /// Returns a figure without a roofline, because no rate of the device limits it.
    pub fn plain(id: &str, name: &str, value: f64, unit: Unit) -> Self {
        Figure {
            id: id.to_owned(),
            name: name.to_owned(),
            value,
            unit,
            lower_is_better: unit == Unit::Milliseconds,
            runs: Vec::new(),
            spread: None,
            work: None,
            roofline: None,
        }
    }
}

/// Returns the bytes of each memory class in `snapshot`, and the capacity of the KV cache.
pub fn memory(snapshot: &Snapshot, kv_tokens: usize) -> Vec<Figure> {
    let bytes = |id: &str, name: &str, bytes: Bytes| Figure::plain(id, name, bytes.0 as f64, Unit::Bytes);
    let classes = snapshot.classes.iter().map(|line| {
        let label = line.class.label();
        bytes(&format!("bytes_{}", label.replace([' ', '-'], "_")), &format!("bytes, {label}"), line.bytes)
    });
    let tokens = Figure::plain("kv_tokens", "tokens, capacity of the KV cache", kv_tokens as f64, Unit::Tokens);
    let rest = [
        bytes("bytes_canary", "bytes, canary", snapshot.canary),
        bytes("bytes_overhead", "bytes, overhead of the process", snapshot.overhead),
        bytes("bytes_foreign", "bytes, other processes", snapshot.foreign),
        bytes("bytes_free", "bytes, free", snapshot.free),
    ];
    [tokens].into_iter().chain(classes).chain(rest).collect()
}

impl Unit {
    fn label(self) -> &'static str {
        match self {
            Unit::Milliseconds => "ms",
            Unit::TokensPerSecond => "tokens/s",
            Unit::RequestsPerSecond => "requests/s",
            Unit::Tokens => "tokens",
            Unit::Bytes => "",
        }
    }

    /// Formats the number without its unit.
    fn show(self, value: f64) -> String {
        match self {
            Unit::Bytes => Bytes(value as u64).to_string(),
            _ if value >= 100.0 => grouped(value.round() as u64),
            _ => format!("{value:.2}"),
        }
    }
}

/// Writes the first lines of a report: the model, the machine, the build, the date and the seed.
pub fn write_head(
    f: &mut fmt::Formatter<'_>,
    model: &str,
    random_weights: bool,
    machine: &Machine,
    seed: u64,
) -> fmt::Result {
    let Machine { device, driver, cpus, version, commit, date, .. } = machine;
    let weights = if random_weights { ", random weights" } else { "" };
    let driver = driver.as_ref().map(|driver| format!(", driver {driver}")).unwrap_or_default();
    let commit = commit.as_ref().map(|commit| format!(" ({commit})")).unwrap_or_default();
    writeln!(f, "{model}{weights} on {device}{driver}, {cpus} CPUs")?;
    writeln!(f, "bursar {version}{commit}, {date}, seed {seed}")
}

/// Writes only the lines above the figures.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_head(f, &self.model, self.random_weights, &self.machine, self.seed)?;
        if let Some(rates) = &self.rates {
            let (flops, bytes) = (rates.flops_per_second / 1e12, rates.bytes_per_second / 1e12);
            writeln!(f, "roofline: {flops} TFLOP/s and {bytes} TB/s ({})", rates.source)?;
        }
        Ok(())
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, unit) = (self.unit.show(self.value), self.unit.label());
        let share = self.roofline.map(|roofline| {
            let percent = (100.0 * roofline.share).round();
            format!("  {percent:>3} % of {}", self.unit.show(roofline.bound))
        });
        let spread = self.spread.map(|spread| format!("  spread {:>3.0} %", 100.0 * spread)).unwrap_or_default();
        let line = format!("{:NAME_COLUMNS$}  {value:>12} {unit:<10}{spread}{}", self.name, share.unwrap_or_default());
        f.write_str(line.trim_end())
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not measured: {}: {}", self.name, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_prints_as_a_line_of_columns() {
        let figure = Figure {
            roofline: Some(Roofline { bound: 1.75, share: 0.7 }),
            spread: Some(0.042),
            ..Figure::plain("decode_1", "decode, a step of batch 1", 2.5, Unit::Milliseconds)
        };
        assert_eq!(
            figure.to_string(),
            format!("{:58}  {:>12} {:<10}  spread   4 %   70 % of 1.75", figure.name, "2.50", "ms")
        );
        let plain = Figure::plain("bytes_free", "bytes, free", 2_147_483_648.0, Unit::Bytes);
        assert_eq!(plain.to_string(), format!("{:58}  {:>12}", plain.name, "2.0 GiB"));
    }

    #[test]
    fn large_numbers_are_grouped_and_small_numbers_keep_decimals() {
        let shown = [99.994, 100.4, 999.0, 1000.0, 2_230_000.0].map(|value| Unit::Tokens.show(value));
        assert_eq!(shown, ["99.99", "100", "999", "1,000", "2,230,000"]);
        assert_eq!(Unit::Bytes.show(2_147_483_648.0), "2.0 GiB");
    }
}
