//! Pure: the results of a run.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

use super::{
    arrivals::Kind,
    counts::Counts,
    objective::Objective,
    times::{TimeSummary, Times},
};

/// A request that was answered.
#[derive(Clone, Debug)]
pub struct Answered {
    pub kind: Kind,
    pub times: Times,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub reply_tokens: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    pub name: String,
    /// Requests that were sent. Requests after a failed request of the same caller are not
    /// sent and not counted.
    pub requests: usize,
    /// Requests per second, by their arrival times.
    pub rate: Option<f64>,
    pub answered: usize,
    /// Number of requests that ended in an error, by the error's text.
    pub failed: BTreeMap<String, usize>,
    /// Number of prompts of random tokens that were truncated to fit the context.
    pub cut: usize,
    /// Seconds from the start to the end of the last request.
    pub seconds: f64,
    /// Prompt tokens of all answered requests.
    pub prompt_tokens: usize,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: usize,
    pub reply_tokens: usize,
    /// Reply tokens per second.
    pub throughput: f64,
    pub objective: Objective,
    /// Requests per second that met the objective.
    pub goodput: f64,
    /// Share of all requests that met the objective.
    pub met: f64,
    /// Time to the first token, by kind, in milliseconds.
    pub first_token_ms: BTreeMap<&'static str, TimeSummary>,
    /// Time between tokens over all requests, in milliseconds.
    pub interval_ms: TimeSummary,
    /// The longest time between tokens of each request, in milliseconds.
    pub longest_interval_ms: TimeSummary,
    /// Time to the last token, in milliseconds.
    pub whole_ms: TimeSummary,
    /// Preemptions, cache hits and copies during the run, from the metrics of the process.
    pub counts: Counts,
}

/// A run that has ended.
pub struct Ended {
    pub name: String,
    pub rate: Option<f64>,
    pub cut: usize,
    pub time: Duration,
    pub answered: Vec<Answered>,
    pub failed: Vec<String>,
    pub counts: Counts,
}

impl Figures {
    pub fn of(ended: Ended, objective: &Objective) -> Self {
        let Ended { name, rate, cut, time, answered, failed, counts } = ended;
        let requests = answered.len() + failed.len();
        let seconds = time.as_secs_f64();
        let sum = |tokens: fn(&Answered) -> usize| answered.iter().map(tokens).sum::<usize>();
        let of = |times: fn(&Times) -> Duration| TimeSummary::of(answered.iter().map(|a| times(&a.times)).collect());
        let met = answered.iter().filter(|answered| objective.is_met(&answered.times)).count();
        let first = |kind: Kind| {
            let of_kind = answered.iter().filter(|answered| answered.kind == kind);
            TimeSummary::of(of_kind.map(|answered| answered.times.first).collect())
        };
        let first = Kind::ALL.iter().map(|kind| (kind.name(), first(*kind)));
        let reply_tokens = sum(|answered| answered.reply_tokens);
        let intervals = answered.iter().flat_map(|answered| answered.times.intervals.iter().copied());
        Figures {
            name,
            requests,
            rate,
            answered: answered.len(),
            failed: failed.into_iter().fold(BTreeMap::new(), |mut failed, error| {
                *failed.entry(error).or_default() += 1;
                failed
            }),
            cut,
            seconds,
            prompt_tokens: sum(|answered| answered.prompt_tokens),
            cached_tokens: sum(|answered| answered.cached_tokens),
            reply_tokens,
            throughput: reply_tokens as f64 / seconds,
            goodput: met as f64 / seconds,
            met: if requests > 0 { met as f64 / requests as f64 } else { 0.0 },
            objective: objective.clone(),
            first_token_ms: first.filter(|(_, first)| first.count > 0).collect(),
            interval_ms: TimeSummary::of(intervals.collect()),
            longest_interval_ms: of(|times| times.intervals.iter().max().copied().unwrap_or_default()),
            whole_ms: of(|times| times.whole),
            counts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(kind: Kind, first: u64, intervals: &[u64]) -> Answered {
        let milliseconds = |time: &u64| Duration::from_millis(*time);
        let times = Times {
            first: milliseconds(&first),
            intervals: intervals.iter().map(milliseconds).collect(),
            whole: milliseconds(&(first + intervals.iter().sum::<u64>())),
        };
        Answered { kind, times, prompt_tokens: 100, cached_tokens: 16, reply_tokens: intervals.len() + 1 }
    }

    #[test]
    fn figures_summarize_a_run_by_kind_and_objective() {
        let ended = Ended {
            name: "4/s".to_owned(),
            rate: Some(4.0),
            cut: 0,
            time: Duration::from_secs(2),
            answered: vec![
                answered(Kind::Text, 20, &[5, 5, 60]),
                answered(Kind::Text, 30, &[5]),
                answered(Kind::Picture, 200, &[]),
            ],
            failed: vec!["too many".to_owned(), "too many".to_owned()],
            counts: Counts::default(),
        };
        let figures = Figures::of(ended, &"ttft=100ms,interval=50ms".parse().expect("a valid objective"));
        assert_eq!((figures.requests, figures.answered, figures.failed["too many"]), (5, 3, 2));
        assert_eq!((figures.prompt_tokens, figures.cached_tokens, figures.reply_tokens), (300, 48, 7));
        assert_eq!((figures.throughput, figures.goodput, figures.met), (3.5, 0.5, 0.2));
        let text = figures.first_token_ms["text"];
        assert_eq!((text.count, text.mean, text.p50, text.p99), (2, Some(25.0), Some(30.0), Some(30.0)));
        assert_eq!(figures.first_token_ms["picture"].p99, Some(200.0));
        assert_eq!((figures.interval_ms.count, figures.interval_ms.p50), (4, Some(5.0)));
        assert_eq!(figures.longest_interval_ms.p99, Some(60.0));
    }
}
