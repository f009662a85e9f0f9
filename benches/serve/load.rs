//! The load of the benchmark: when requests are sent, and the summary of their replies.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use tokio::time::{sleep_until, timeout};

use crate::{
    Failure, Options,
    client::{Answered, Client, Request},
};

pub enum Load {
    /// Streams that send a request whenever their previous request has ended.
    Streams { count: usize, time: Duration, words: usize, tokens: usize },
    /// Requests that are sent at fixed times.
    Arrivals { name: String, requests: Arc<[(Duration, Request)]> },
}

#[derive(Deserialize)]
struct Trace {
    runs: Vec<TraceRun>,
}

#[derive(Deserialize)]
struct TraceRun {
    name: String,
    requests: Vec<TraceRequest>,
}

#[derive(Deserialize)]
struct TraceRequest {
    t: f64,
    prompt: usize,
    out: usize,
    file: String,
}

/// Time limit of a reply, longer than any reply takes.
const PATIENCE: Duration = Duration::from_secs(300);

/// The results of a run.
#[derive(Default, Serialize, Deserialize)]
pub struct Summary {
    pub seconds: f64,
    pub tokens: usize,
    pub failed: usize,
    /// CPU time of the process that runs the model.
    pub cpu: Duration,
    /// Time until the first text of each reply, in milliseconds.
    pub first: Vec<f64>,
    /// Mean time between the tokens of each reply, in milliseconds.
    pub between: Vec<f64>,
}

impl Load {
    pub fn all(options: &Options) -> Result<Vec<Load>, Failure> {
        let Some(trace) = &options.trace else {
            let time = Duration::from_secs_f64(options.seconds);
            let of =
                |count: &usize| Load::Streams { count: *count, time, words: options.words, tokens: options.tokens };
            return Ok(options.streams.iter().map(of).collect());
        };
        let trace: Trace = serde_json::from_slice(&fs::read(trace)?)?;
        let mut number = 0;
        let mut request = |request: TraceRequest| {
            number += 1;
            let picture = (!request.file.is_empty()).then_some(request.file);
            let words = request.prompt.max(8);
            (Duration::from_secs_f64(request.t), Request { number, words, picture, tokens: request.out })
        };
        let mut run = |run: TraceRun| Load::Arrivals {
            name: run.name,
            requests: run.requests.into_iter().map(&mut request).collect(),
        };
        Ok(trace.runs.into_iter().map(&mut run).collect())
    }

    pub fn name(&self) -> String {
        match self {
            Load::Streams { count, .. } => format!("{count} streams"),
            Load::Arrivals { name, .. } => name.clone(),
        }
    }

    pub async fn run(&self, client: &Client) -> Summary {
        let begun = Instant::now();
        let mut asking = Vec::new();
        match self {
            Load::Streams { count, time, words, tokens } => {
                let numbers = Arc::new(AtomicU64::new(0));
                for _ in 0..*count {
                    let (client, numbers, end) = (client.clone(), numbers.clone(), begun + *time);
                    let (words, tokens) = (*words, *tokens);
                    asking.push(tokio::spawn(async move {
                        let mut answers = Vec::new();
                        while Instant::now() < end {
                            let number = numbers.fetch_add(1, Relaxed);
                            answers.push(ask(&client, &Request { number, words, picture: None, tokens }).await);
                        }
                        answers
                    }));
                }
            }
            Load::Arrivals { requests, .. } => {
                for (time, request) in requests.iter() {
                    let (client, request, time) = (client.clone(), request.clone(), begun + *time);
                    asking.push(tokio::spawn(async move {
                        sleep_until(time.into()).await;
                        vec![ask(&client, &request).await]
                    }));
                }
            }
        }
        let mut summary = Summary::default();
        for asked in asking {
            asked.await.unwrap_or_default().into_iter().for_each(|answer| summary.add(answer));
        }
        summary.seconds = begun.elapsed().as_secs_f64();
        summary
    }
}

async fn ask(client: &Client, request: &Request) -> Option<Answered> {
    match timeout(PATIENCE, client.ask(request)).await.map_err(Failure::from).flatten() {
        Ok(answered) => Some(answered),
        Err(error) => {
            eprintln!("a request failed: {error}");
            None
        }
    }
}

impl Summary {
    pub const HEAD: &str = "| load | way | replies | failed | tok/s | first text, median and p99, ms | between tokens, \
                            median and p99, ms | processor, us a token |\n|---|---|---|---|---|---|---|---|";

    fn add(&mut self, answer: Option<Answered>) {
        let Some(Answered { first, whole, tokens }) = answer else {
            self.failed += 1;
            return;
        };
        self.tokens += tokens;
        self.first.push(first.as_secs_f64() * 1e3);
        self.between.push((whole - first).as_secs_f64() * 1e3 / tokens.saturating_sub(1).max(1) as f64);
    }

    pub fn line(&self, load: &str, way: &str) -> String {
        let [first, between] = [&self.first, &self.between].map(|times| {
            let mut times = times.clone();
            times.sort_by(f64::total_cmp);
            let at = |share: f64| times.get((times.len() as f64 * share) as usize).or(times.last()).copied();
            format!("{:.2} {:.2}", at(0.5).unwrap_or(f64::NAN), at(0.99).unwrap_or(f64::NAN))
        });
        let rate = self.tokens as f64 / self.seconds;
        let cpu = self.cpu.as_secs_f64() * 1e6 / self.tokens.max(1) as f64;
        format!(
            "| {load} | {way} | {} | {} | {rate:.0} | {first} | {between} | {cpu:.0} |",
            self.first.len(),
            self.failed
        )
    }
}
