//! The recorder of this process, if it is ours.

use std::{
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use metrics_util::MetricKindMask;

use super::{ServeMetricsError, buckets, describe};

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
    let with_buckets = |builder: PrometheusBuilder, (name, edges): (&str, &[f64])| {
        builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), edges).expect("a histogram of ours has buckets")
    };
    let builder = buckets().fold(PrometheusBuilder::new(), with_buckets);
    let builder = builder.idle_timeout(MetricKindMask::GAUGE, Some(GAUGES_KEPT));
    let handle = builder.install_recorder().map_err(|_| ServeMetricsError::AnotherRecorder)?;
    describe();
    // Ours from now on, whether or not it can be kept up.
    *ours = Some(handle.clone());
    keep_up(handle.clone())?;
    Ok(handle)
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
