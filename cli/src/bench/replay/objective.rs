//! Latency objectives. Goodput counts the requests that meet every limit of their objective.

use std::{str::FromStr, time::Duration};

use serde::Serialize;

use super::times::{Times, quantile};

/// Limits on a request's latencies, as in vLLM's `--goodput` and DistServe (arXiv 2401.09670).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Objective {
    /// Time to the first token.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "seconds")]
    pub ttft: Option<Duration>,
    /// Limit on the 99th percentile of the times between two tokens of a request.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "seconds")]
    pub interval: Option<Duration>,
    /// Mean time between two tokens.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "seconds")]
    pub tpot: Option<Duration>,
    /// Time to the last token.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "seconds")]
    pub whole: Option<Duration>,
}

fn seconds<S: serde::Serializer>(bound: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    bound.map(|bound| bound.as_secs_f64()).serialize(serializer)
}

impl Objective {
    /// Whether an answered request met all limits.
    pub fn is_met(&self, times: &Times) -> bool {
        let within = |bound: Option<Duration>, time: Option<Duration>| match (bound, time) {
            (Some(bound), Some(time)) => time <= bound,
            _ => true,
        };
        let decoding = times.whole.saturating_sub(times.first);
        let mean = (!times.intervals.is_empty()).then(|| decoding / times.intervals.len() as u32);
        within(self.ttft, Some(times.first))
            && within(self.interval, quantile(&times.intervals, 0.99))
            && within(self.tpot, mean)
            && within(self.whole, Some(times.whole))
    }
}

impl FromStr for Objective {
    type Err = String;

    /// Parses a list of limits such as `ttft=2s,interval=50ms`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut objective = Objective::default();
        for part in text.split(',') {
            let (name, bound) = part.split_once('=').ok_or_else(|| format!("`{part}` has no bound; e.g. ttft=2s"))?;
            let place = match name.trim() {
                "ttft" => &mut objective.ttft,
                "interval" => &mut objective.interval,
                "tpot" => &mut objective.tpot,
                "whole" => &mut objective.whole,
                name => return Err(format!("unknown objective `{name}`; expected one of ttft, interval, tpot, whole")),
            };
            if place.replace(duration(bound.trim())?).is_some() {
                return Err(format!("`{name}` is given twice"));
            }
        }
        Ok(objective)
    }
}

/// Parses a duration: `2s`, `50ms` or `1.5s`.
fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s').unwrap_or_default(), 1.0),
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * unit).filter(|seconds| *seconds > 0.0);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| format!("`{text}` is not a time above 0, such as 2s or 50ms"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(first: u64, intervals: &[u64]) -> Times {
        let milliseconds = |time: &u64| Duration::from_millis(*time);
        let whole = first + intervals.iter().sum::<u64>();
        Times {
            first: milliseconds(&first),
            intervals: intervals.iter().map(milliseconds).collect(),
            whole: milliseconds(&whole),
        }
    }

    #[test]
    fn a_request_meets_an_objective_only_if_every_bound_holds() {
        let objective: Objective = "ttft=2s,interval=50ms".parse().expect("a valid objective");
        assert!(objective.is_met(&times(2000, &[50; 20])));
        assert!(!objective.is_met(&times(2001, &[50; 20])), "the first token was too late");
        let mut stutters = [10; 20];
        stutters[7] = 51;
        assert!(!objective.is_met(&times(10, &stutters)), "one slow interval of 20 is more than 1 %");
        assert!(objective.is_met(&times(10, &[])), "a reply of one token has no interval, so the objective is met");
        let mut rarely = [10; 300];
        rarely[7] = 500;
        assert!(objective.is_met(&times(10, &rarely)), "one slow interval of 300 is less than 1 %");
        let mean: Objective = "tpot=50ms, whole=1s".parse().expect("a valid objective");
        assert!(mean.is_met(&times(10, &stutters)) && !mean.is_met(&times(900, &[49; 3])));
    }

    #[test]
    fn an_invalid_objective_bound_is_named() {
        for (text, message) in [
            ("ttft", "`ttft` has no bound"),
            ("first=2s", "unknown objective `first`; expected one of ttft"),
            ("ttft=2", "`2` is not a time above 0"),
            ("ttft=-1s", "`-1s` is not a time"),
            ("ttft=infs", "`infs` is not a time"),
            ("ttft=1s,ttft=2s", "`ttft` is given twice"),
        ] {
            let error = text.parse::<Objective>().expect_err(text);
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
