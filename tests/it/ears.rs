//! Who hears every metric of this process: names, labels, and the most that a gauge has shown.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock},
};

use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// Each metric that was touched, as `name{label=value,...}`, and the largest value it had.
#[derive(Clone, Default)]
pub struct Ears(Arc<Mutex<BTreeMap<String, f64>>>);

struct Heard {
    name: String,
    ears: Ears,
}

impl Heard {
    fn note(&self, value: f64) {
        let mut all = self.ears.0.lock().expect("nobody panics while listening");
        let most = all.entry(self.name.clone()).or_insert(f64::MIN);
        *most = most.max(value);
    }
}

impl CounterFn for Heard {
    fn increment(&self, value: u64) {
        self.note(value as f64);
    }

    fn absolute(&self, value: u64) {
        self.note(value as f64);
    }
}

impl GaugeFn for Heard {
    fn increment(&self, value: f64) {
        self.note(value);
    }

    fn decrement(&self, value: f64) {
        self.note(value);
    }

    fn set(&self, value: f64) {
        self.note(value);
    }
}

impl Recorder for Ears {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(self.of(key)))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(self.of(key)))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.of(key).note(0.0);
        Histogram::noop()
    }
}

impl Ears {
    /// The ears of this process, from now on.
    pub fn open() -> Ears {
        static EARS: OnceLock<Ears> = OnceLock::new();
        let open = || {
            let ears = Ears::default();
            metrics::set_global_recorder(ears.clone()).expect("nobody else records in this process");
            ears
        };
        EARS.get_or_init(open).clone()
    }

    fn of(&self, key: &Key) -> Heard {
        let labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        Heard { name: format!("{}{{{}}}", key.name(), labels.join(",")), ears: self.clone() }
    }

    /// All metrics heard so far, with their labels.
    pub fn names(&self) -> Vec<String> {
        self.0.lock().expect("nobody panics while listening").keys().cloned().collect()
    }

    /// The most that a metric has shown.
    pub fn most(&self, name: &str) -> Option<f64> {
        self.0.lock().expect("nobody panics while listening").get(name).copied()
    }
}
