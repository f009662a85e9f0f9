//! The cost of recording metrics with a real recorder: all metrics that the scheduler and the
//! drivers record in one decode step.
//!
//! `cargo bench --bench metrics`

use std::{hint::black_box, time::Duration};

use bursar_actors::{metric, metric::Permit, metric::Recording};
use bursar_budgets::{Bytes, Label};
use divan::Bencher;
use metrics::Recorder;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

fn main() {
    divan::main();
}

/// A recorder installed as an embedder would do it, with Bursar's histogram buckets.
fn prometheus() -> impl Recorder {
    let builder = metric::buckets().fold(PrometheusBuilder::new(), |builder, (name, edges)| {
        builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), edges).expect("the histogram has edges")
    });
    builder.build_recorder()
}

/// Updates the metrics that one decode step updates, in the same order. Each driver has one
/// sequence.
fn decode_step(model: &Label, drivers: &[Recording]) {
    let sequences = drivers.len();
    // The scheduler processes the result of the last step (`scheduler/actor.rs`) …
    metric::GRAPH_REPLAYS_TOTAL.add(model, 1);
    metric::STEP_SECONDS.record(model, Duration::from_micros(4_300));
    // … and launches the next.
    metric::STEP_TOKENS.record(model, sequences);
    metric::SEQUENCES_WAITING.set(model, 0);
    metric::SEQUENCES_RUNNING.set(model, sequences);
    metric::PERMITS_USED.set(&(model.clone(), Permit::Sequences), sequences);
    metric::STEPS_UNDER_WAY.set(model, 2);
    metric::KV_BLOCKS_USED.set(model, 32 * sequences);
    metric::KV_BLOCKS_CACHED.set(model, 100);
    metric::PREFIX_CACHE_BYTES.set(model, Bytes::mib(90));
    metric::GENERATED_TOKENS_TOTAL.add(model, sequences);
    // Each driver gets a token (`chat/stopwatch.rs`).
    drivers.iter().for_each(|intervals| intervals.record(Duration::from_micros(4_300)));
}

fn recorded(bencher: Bencher, sequences: usize) {
    let model = Label::from("Qwen/Qwen2.5-VL-7B-Instruct");
    let drivers: Vec<_> = (0..sequences).map(|_| metric::TOKEN_INTERVAL_SECONDS.recording(&model)).collect();
    bencher.bench_local(|| decode_step(black_box(&model), black_box(&drivers)));
}

#[divan::bench(args = [1, 256])]
fn a_decode_step_with_prometheus(bencher: Bencher, sequences: usize) {
    metrics::with_local_recorder(&prometheus(), || recorded(bencher, sequences));
}

#[divan::bench(args = [1, 256])]
fn a_decode_step_without_a_recorder(bencher: Bencher, sequences: usize) {
    recorded(bencher, sequences);
}
