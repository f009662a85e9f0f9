//! Counts during a run, read from this process's own metrics.

use std::time::Duration;

use bursar::MetricsText;
use serde::Serialize;
use tokio::{sync::oneshot, task::JoinHandle, time::MissedTickBehavior};

use crate::{
    failure::Failure,
    top::{self, Samples},
};

/// Counts from the start of a run to its end.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Counts {
    /// Preemptions to free blocks that older sequences needed.
    pub preempted_for_blocks: u64,
    /// Preemptions in favor of sequences with a higher priority.
    pub preempted_for_priority: u64,
    /// Preemptions because the KV cache shrank.
    pub preempted_by_shrinks: u64,
    /// Prompt tokens of starting sequences that were looked up in the prefix cache.
    pub prefix_tokens_sought: u64,
    /// Prompt tokens of starting sequences that the prefix cache contained.
    pub prefix_tokens_found: u64,
    /// Tokens that were copied back from host memory, for starting and for preempted sequences.
    pub prefix_tokens_from_host: u64,
    /// Bytes of the KV cache that were copied to host memory.
    pub kv_bytes_to_host: u64,
    /// Bytes of the KV cache that were copied back from host memory.
    pub kv_bytes_from_host: u64,
    /// Median error of the predicted reply lengths, in tokens, to the resolution of the histogram's
    /// buckets.
    pub prediction_error_p50: Option<f64>,
    /// 99th percentile of the same error.
    pub prediction_error_p99: Option<f64>,
    /// Pictures in all requests.
    pub pictures_wanted: u64,
    /// Pictures that were not encoded because their tokens were in the prefix cache.
    pub pictures_found_computed: u64,
    /// Pictures that the vision encoder processed.
    pub pictures_encoded: u64,
    /// Pictures whose embeddings were copied back from host memory.
    pub pictures_from_host: u64,
    /// Number of times that a sequence had to request its pictures again.
    pub pictures_wanted_again: u64,
    /// Steps that the scheduler ran.
    pub steps: u64,
    /// 99th percentile of a step's duration in milliseconds, to the resolution of the histogram's
    /// buckets.
    pub step_ms_p99: Option<f64>,
    /// Sequence permits in use, sampled ten times per second.
    pub sequences: InUse,
    /// Patch permits in use, sampled ten times per second.
    pub patches: InUse,
}

/// The number of permits, and how many of them were in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct InUse {
    pub permits: f64,
    pub mean: f64,
    pub most: f64,
}

/// Interval at which permits in use are sampled.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Reads this process's own metrics.
#[derive(Clone)]
pub struct Counter(MetricsText);

/// A run during which metrics are sampled.
pub struct Watch {
    counter: Counter,
    before: Samples,
    stop: oneshot::Sender<()>,
    sampling: JoinHandle<[InUse; 2]>,
}

impl Counter {
    /// Installs the metrics recorder, which starts to count. Must be called before a model is
    /// loaded.
    pub fn install() -> Result<Self, Failure> {
        Ok(Counter(MetricsText::install()?))
    }

    fn read(&self) -> Samples {
        top::read(&self.0.render())
    }

    pub fn watch(&self) -> Watch {
        let (stop, stopped) = oneshot::channel();
        let sampling = tokio::spawn(sample(self.clone(), stopped));
        Watch { before: self.read(), counter: self.clone(), stop, sampling }
    }
}

/// Samples the permits until `stopped` resolves.
async fn sample(counter: Counter, mut stopped: oneshot::Receiver<()>) -> [InUse; 2] {
    let mut looks = tokio::time::interval(SAMPLE_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = [InUse::default(); 2];
    let mut times = 0.0;
    loop {
        tokio::select! {
            _ = looks.tick() => {}
            _ = &mut stopped => break,
        }
        let samples = counter.read();
        times += 1.0;
        for (in_use, permit) in seen.iter_mut().zip(["sequences", "patches"]) {
            let value = |name| samples.value(name, &[("permit", permit)]).unwrap_or(0.0);
            let used = value("bursar_permits_used");
            in_use.permits = value("bursar_permits");
            in_use.most = in_use.most.max(used);
            in_use.mean += (used - in_use.mean) / times;
        }
    }
    seen
}

impl Watch {
    pub async fn end(self) -> Counts {
        let Watch { counter, before, stop, sampling } = self;
        drop(stop);
        let [sequences, patches] = sampling.await.unwrap_or_default();
        let after = counter.read();
        let more = |name: &str, labels: &[(&str, &str)]| {
            let of = |samples: &Samples| samples.count(name, labels).unwrap_or(0);
            of(&after).saturating_sub(of(&before))
        };
        let sought = more("bursar_encoder_cache_queries_total", &[]);
        let computed = more("bursar_pictures_found_computed_total", &[]);
        let since = |name| after.histogram(name, &[]).since(&before.histogram(name, &[]));
        let steps = since("bursar_step_seconds");
        let errors = since("bursar_reply_prediction_error_tokens");
        Counts {
            preempted_for_blocks: more("bursar_preemptions_total", &[("reason", "blocks")]),
            preempted_for_priority: more("bursar_preemptions_total", &[("reason", "priority")]),
            preempted_by_shrinks: more("bursar_preemptions_total", &[("reason", "shrink")]),
            prefix_tokens_sought: more("bursar_prefix_cache_queries_total", &[]),
            prefix_tokens_found: more("bursar_prefix_cache_hits_total", &[]),
            prefix_tokens_from_host: more("bursar_prefix_cache_host_hits_total", &[]),
            kv_bytes_to_host: more("bursar_kv_copied_bytes_total", &[("direction", "to_host")]),
            kv_bytes_from_host: more("bursar_kv_copied_bytes_total", &[("direction", "to_device")]),
            prediction_error_p50: errors.quantile(0.5),
            prediction_error_p99: errors.quantile(0.99),
            pictures_wanted: sought + computed,
            pictures_found_computed: computed,
            pictures_encoded: sought.saturating_sub(more("bursar_encoder_cache_hits_total", &[])),
            pictures_from_host: more("bursar_encoder_cache_host_hits_total", &[]),
            pictures_wanted_again: more("bursar_pictures_wanted_again_total", &[]),
            steps: steps.count() as u64,
            step_ms_p99: steps.quantile(0.99).map(|seconds| seconds * 1e3),
            sequences,
            patches,
        }
    }
}
