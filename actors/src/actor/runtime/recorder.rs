//! The metrics recorder of this process, if Bursar installed it, and the errors of serving metrics.

use std::{
    io,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use bursar_budgets::Hint;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use metrics_util::MetricKindMask;
use thiserror::Error;

use crate::metric::{MetricsAddress, NoAddress, buckets, describe, process};

/// Reasons why metrics cannot be served.
#[derive(Debug, Error)]
pub enum ServeMetricsError {
    #[error(transparent)]
    NoAddress(#[from] NoAddress),
    /// The system cannot listen on the address.
    #[error("metrics cannot be served on {address}: {source}")]
    Refused { address: MetricsAddress, source: io::Error },
    /// The process already has a metrics recorder that is not Bursar's.
    #[error("this process already has a metrics recorder that is not Bursar's")]
    AnotherRecorder,
    /// The thread that keeps histograms small could not be spawned.
    #[error("the thread that maintains histograms did not start: {0}")]
    Thread(io::Error),
}

impl Hint for ServeMetricsError {
    type Text = String;

    fn hint(&self) -> String {
        let hint = match self {
            ServeMetricsError::NoAddress(_) => "give a port, or an address and a port",
            ServeMetricsError::Refused { source, .. } => match source.kind() {
                io::ErrorKind::AddrInUse => {
                    "stop the process that listens there, or give another port; port 0 takes any free one"
                }
                io::ErrorKind::PermissionDenied => "give a port of 1024 or above",
                io::ErrorKind::AddrNotAvailable => "give an address of this machine, such as 127.0.0.1",
                _ => "give another address",
            },
            ServeMetricsError::AnotherRecorder => {
                "use your recorder, which already receives Bursar's metrics; if it is a PrometheusBuilder, give it the \
                 edges of bursar::metric::buckets() with set_buckets_for_metric, call bursar::metric::describe(), and \
                 serve its own handle"
            }
            ServeMetricsError::Thread(_) => "allow this process more threads",
        };
        hint.to_owned()
    }
}

/// Interval at which histogram samples are put into buckets. Until then each sample takes memory,
/// even if no scraper is connected.
const UPKEEP: Duration = Duration::from_secs(5);

/// A gauge that was not set for this long is dropped, because its subject no longer exists, for
/// example after a model was unloaded. Live gauges are set every second. A scraper that reads once
/// a minute still sees the final 0.
const GAUGES_KEPT: Duration = Duration::from_secs(120);

/// The recorder that Bursar installed. A process keeps its recorder until the process ends, so a
/// later runtime of the process uses this recorder.
static OURS: Mutex<Option<PrometheusHandle>> = Mutex::new(None);

/// The metrics of this process in Prometheus' text format, for embedders with their own server.
#[derive(Clone)]
pub struct MetricsText(PrometheusHandle);

impl MetricsText {
    /// Installs a recorder, unless Bursar has already installed one.
    /// [`serve_metrics`](super::Runtime::serve_metrics) does the same.
    ///
    /// # Errors
    /// [`ServeMetricsError::AnotherRecorder`], [`ServeMetricsError::Thread`].
    pub fn install() -> Result<Self, ServeMetricsError> {
        install().map(MetricsText)
    }

    /// Returns the current text. Its content type is `text/plain; version=0.0.4; charset=utf-8`.
    pub fn render(&self) -> String {
        process::show();
        self.0.render()
    }
}

/// Returns Bursar's recorder, and installs it first if necessary.
pub(super) fn install() -> Result<PrometheusHandle, ServeMetricsError> {
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = ours.as_ref() {
        return Ok(handle.clone());
    }
    let handle = builder(GAUGES_KEPT).install_recorder().map_err(|_| ServeMetricsError::AnotherRecorder)?;
    describe();
    // The recorder is installed from now on, even if the upkeep thread cannot be started.
    *ours = Some(handle.clone());
    keep_up(handle.clone())?;
    Ok(handle)
}

fn builder(gauges_kept: Duration) -> PrometheusBuilder {
    let with_buckets = |builder: PrometheusBuilder, (name, edges): (&str, &[f64])| {
        builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), edges).expect("each histogram has buckets")
    };
    buckets().fold(PrometheusBuilder::new(), with_buckets).idle_timeout(MetricKindMask::GAUGE, Some(gauges_kept))
}

/// Spawns the upkeep thread. A tokio task is not sufficient, because the recorder outlives the
/// tokio runtime in which it was installed.
fn keep_up(handle: PrometheusHandle) -> Result<(), ServeMetricsError> {
    let upkeep = move || {
        loop {
            thread::park_timeout(UPKEEP);
            handle.run_upkeep();
        }
    };
    let thread = thread::Builder::new().name("bursar-metrics".to_owned()).spawn(upkeep);
    thread.map(drop).map_err(ServeMetricsError::Thread)
}

#[cfg(test)]
mod tests {
    use bursar_budgets::Label;

    use super::*;
    use crate::metric;

    #[tokio::test]
    async fn an_unloaded_models_gauges_are_removed_and_its_counters_kept() {
        let recorder = builder(Duration::from_millis(20)).build_recorder();
        let (here, gone) = (Label::from("here"), Label::from("gone"));
        metrics::with_local_recorder(&recorder, || {
            metric::KV_BLOCKS.set(&gone, 7);
            metric::expect_model(&gone);
        });
        assert!(recorder.handle().render().contains("bursar_kv_blocks{model=\"gone\"} 7"));
        let mut looks = tokio::time::interval(Duration::from_millis(1));
        let text = loop {
            looks.tick().await;
            metrics::with_local_recorder(&recorder, || metric::KV_BLOCKS.set(&here, 8));
            let text = recorder.handle().render();
            if !text.contains("bursar_kv_blocks{model=\"gone\"}") {
                break text;
            }
        };
        assert!(text.contains("bursar_kv_blocks{model=\"here\"} 8"), "{text}");
        for zero in ["bursar_kv_shrinks_total", "bursar_step_seconds_count", "bursar_step_tokens_sum"] {
            assert!(text.contains(&format!("{zero}{{model=\"gone\"}} 0\n")), "{zero}: {text}");
        }
    }
}
