//! The recorder of this process, if it is ours.

use std::{
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use metrics_util::MetricKindMask;

use super::ServeMetricsError;
use crate::metric::{buckets, describe};

/// Samples of histograms are put into their buckets this often, also when nobody scrapes: until then each takes memory.
const UPKEEP: Duration = Duration::from_secs(5);

/// A gauge that was not set for so long is of something that is gone, such as a model, and is told no more: whatever is
/// there sets its gauges each second. A scraper that looks each minute has seen its 0.
const GAUGES_KEPT: Duration = Duration::from_secs(120);

/// A process has one recorder, whoever installs it, and it stays: a runtime that comes later finds it here.
static OURS: Mutex<Option<PrometheusHandle>> = Mutex::new(None);

/// Our recorder; installs it if there is none yet.
pub(super) fn install() -> Result<PrometheusHandle, ServeMetricsError> {
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = ours.as_ref() {
        return Ok(handle.clone());
    }
    let handle = builder(GAUGES_KEPT).install_recorder().map_err(|_| ServeMetricsError::AnotherRecorder)?;
    describe();
    // Ours from now on, whether or not it can be kept up.
    *ours = Some(handle.clone());
    keep_up(handle.clone())?;
    Ok(handle)
}

fn builder(gauges_kept: Duration) -> PrometheusBuilder {
    let with_buckets = |builder: PrometheusBuilder, (name, edges): (&str, &[f64])| {
        builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), edges).expect("a histogram of ours has buckets")
    };
    buckets().fold(PrometheusBuilder::new(), with_buckets).idle_timeout(MetricKindMask::GAUGE, Some(gauges_kept))
}

/// A thread and no task: the recorder outlives the tokio runtime that it was installed in.
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
    async fn gauges_of_an_unloaded_model_vanish_and_its_counters_stay() {
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
