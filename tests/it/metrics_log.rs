//! A recorder that keeps every metric of this process: names, labels, the highest value of each
//! gauge, and the total of each counter.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock},
};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

/// All recorded metrics, as `name{label=value,...}`.
#[derive(Clone, Default)]
pub struct MetricsLog(Arc<Mutex<BTreeMap<String, MetricValue>>>);

/// The recorded values of one metric.
#[derive(Clone, Copy, Debug)]
pub struct MetricValue {
    /// The type as in `# TYPE` lines.
    pub kind: &'static str,
    /// A gauge's highest value, a counter's total, or a histogram's count.
    pub most: f64,
    /// A gauge's current value. For other types, the same as `most`.
    pub now: f64,
}

struct LoggedMetric {
    name: String,
    kind: &'static str,
    metrics_log: MetricsLog,
}

impl LoggedMetric {
    fn note(&self, change: impl FnOnce(f64) -> f64) {
        let mut all = self.metrics_log.0.lock().expect("no holder panicked");
        let value = all.entry(self.name.clone()).or_insert(MetricValue { kind: self.kind, most: f64::MIN, now: 0.0 });
        value.now = change(value.now);
        value.most = value.most.max(value.now);
    }
}

impl CounterFn for LoggedMetric {
    fn increment(&self, value: u64) {
        self.note(|sum| sum + value as f64);
    }

    fn absolute(&self, value: u64) {
        self.note(|_| value as f64);
    }
}

impl GaugeFn for LoggedMetric {
    fn increment(&self, _: f64) {
        unreachable!("gauges are set: an incremented gauge would have a wrong value in a recorder installed later");
    }

    fn decrement(&self, _: f64) {
        unreachable!("gauges are set, never incremented");
    }

    fn set(&self, value: f64) {
        self.note(|_| value);
    }
}

impl HistogramFn for LoggedMetric {
    fn record(&self, value: f64) {
        assert!(value >= 0.0, "{} took {value} s", self.name);
        self.note(|count| count + 1.0);
    }
}

impl Recorder for MetricsLog {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(self.logged(key, "counter")))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(self.logged(key, "gauge")))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(self.logged(key, "histogram")))
    }
}

impl MetricsLog {
    /// Installs the recorder of this process.
    pub fn open() -> MetricsLog {
        static RECORDER: OnceLock<MetricsLog> = OnceLock::new();
        let open = || {
            let metrics_log = MetricsLog::default();
            metrics::set_global_recorder(metrics_log.clone()).expect("this process has no other recorder");
            metrics_log
        };
        RECORDER.get_or_init(open).clone()
    }

    fn logged(&self, key: &Key, kind: &'static str) -> LoggedMetric {
        let labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        LoggedMetric { name: format!("{}{{{}}}", key.name(), labels.join(",")), kind, metrics_log: self.clone() }
    }

    /// The names of all metrics recorded so far, with labels.
    pub fn names(&self) -> Vec<String> {
        self.all().into_keys().collect()
    }

    /// All metrics recorded so far.
    pub fn all(&self) -> BTreeMap<String, MetricValue> {
        self.0.lock().expect("no holder panicked").clone()
    }

    /// A gauge's highest value, a counter's total, or a histogram's count.
    pub fn most(&self, name: &str) -> Option<f64> {
        self.all().get(name).map(|value| value.most)
    }

    /// A gauge's current value, a counter's total, or a histogram's count. 0 if nothing was
    /// recorded.
    pub fn now(&self, name: &str) -> f64 {
        self.all().get(name).map_or(0.0, |value| value.now)
    }
}
