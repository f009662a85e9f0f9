//! One metric: its row of the table, and the typed ways to record it.

use std::{marker::PhantomData, time::Duration};

use metrics::{Key, KeyName, Label, Level, Metadata, SharedString, Unit};

use super::{LabelSet, label::Words};

/// The type of a metric in Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A value that goes up and down.
    Gauge,
    /// A number that only grows; its name ends in `_total`.
    Counter,
    /// Values counted in buckets.
    Histogram,
}

impl Kind {
    /// The name in `# TYPE` lines.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
        }
    }
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The metric's name. It begins with `bursar_`, or with `process_` if every process has it.
    pub name: &'static str,
    /// The type of the metric.
    pub kind: Kind,
    /// The names of its labels, in order.
    pub labels: &'static [&'static str],
    /// For each label, all its values, if they are known in advance.
    pub(super) words: &'static [Words],
    /// What it means, in sentences.
    pub help: &'static str,
    /// The upper edges of a histogram's buckets, rising. Empty for other types.
    pub buckets: &'static [f64],
}

/// The source of all metrics, as the `metrics` facade requires it.
static METADATA: Metadata<'static> = Metadata::new("bursar", Level::INFO, Some("bursar"));

impl Row {
    fn unit(&self) -> Unit {
        let base = self.name.trim_end_matches("_total");
        match () {
            () if base.ends_with("_bytes") => Unit::Bytes,
            () if base.ends_with("_seconds") => Unit::Seconds,
            () => Unit::Count,
        }
    }

    /// Describes the metric to the recorder.
    pub(super) fn describe(&self) {
        let (name, unit, help) = (KeyName::from_const_str(self.name), Some(self.unit()), self.help.trim());
        metrics::with_recorder(|recorder| match self.kind {
            Kind::Gauge => recorder.describe_gauge(name, unit, help.into()),
            Kind::Counter => recorder.describe_counter(name, unit, help.into()),
            Kind::Histogram => recorder.describe_histogram(name, unit, help.into()),
        });
    }

    fn key(&self, labels: Vec<Label>) -> Key {
        Key::from_parts(KeyName::from_const_str(self.name), labels)
    }

    /// All series of one device or model, if that is the first label and all values of the others are known. Otherwise
    /// empty.
    pub(super) fn series_of(&self, name: &'static str, value: SharedString) -> Vec<Vec<Label>> {
        if self.labels.first() != Some(&name) {
            return Vec::new();
        }
        let others = self.labels.iter().zip(self.words).skip(1);
        others.fold(vec![vec![Label::new(name, value)]], |series, (label, words)| {
            let with =
                |word: &'static str| series.iter().map(move |known| [&known[..], &[Label::new(*label, word)]].concat());
            words().into_iter().flat_map(with).collect()
        })
    }

    /// Sets a counter, or the counts of a histogram, to 0.
    pub(super) fn expect(&self, labels: Vec<Label>) {
        match self.kind {
            Kind::Gauge => {}
            Kind::Counter => self.counter(labels).increment(0),
            Kind::Histogram => drop(self.histogram(labels)),
        }
    }

    pub(super) fn gauge(&self, labels: Vec<Label>) -> metrics::Gauge {
        metrics::with_recorder(|recorder| recorder.register_gauge(&self.key(labels), &METADATA))
    }

    pub(super) fn counter(&self, labels: Vec<Label>) -> metrics::Counter {
        metrics::with_recorder(|recorder| recorder.register_counter(&self.key(labels), &METADATA))
    }

    fn histogram(&self, labels: Vec<Label>) -> metrics::Histogram {
        metrics::with_recorder(|recorder| recorder.register_histogram(&self.key(labels), &METADATA))
    }
}

/// The value of a gauge or of a histogram sample: bytes, a count, or seconds.
pub trait Amount {
    /// The value as Prometheus stores it.
    fn amount(self) -> f64;
}

impl Amount for bursar_budgets::Bytes {
    fn amount(self) -> f64 {
        self.0 as f64
    }
}

impl Amount for usize {
    fn amount(self) -> f64 {
        self as f64
    }
}

impl Amount for f64 {
    fn amount(self) -> f64 {
        self
    }
}

impl Amount for i32 {
    fn amount(self) -> f64 {
        self.into()
    }
}

impl Amount for bool {
    fn amount(self) -> f64 {
        self.into()
    }
}

impl Amount for Duration {
    fn amount(self) -> f64 {
        self.as_secs_f64()
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            pub struct $kind<L>(Row, PhantomData<fn(&L)>);

            impl<L: LabelSet> $kind<L> {
                /// The metric's row of the table.
                pub const fn row(&self) -> &Row {
                    &self.0
                }

                pub(super) const fn new(name: &'static str, help: &'static str, buckets: &'static [f64]) -> Self {
                    $kind(Row { name, kind: Kind::$kind, labels: L::NAMES, words: L::WORDS, help, buckets }, PhantomData)
                }
            }
        )*
    };
}

kinds! {
    /// A value that goes up and down.
    Gauge
    /// A number that only grows.
    Counter
    /// Values counted in buckets.
    Histogram
}

impl<L: LabelSet> Gauge<L> {
    /// Sets the value.
    pub fn set(&self, labels: &L, to: impl Amount) {
        self.0.gauge(labels.labels()).set(to.amount());
    }
}

impl<L: LabelSet> Counter<L> {
    /// Adds `more` to the counter.
    pub fn add(&self, labels: &L, more: usize) {
        self.0.counter(labels.labels()).increment(more as u64);
    }

    /// Sets the counter to a total counted elsewhere.
    #[cfg(feature = "prometheus")]
    pub(super) fn reach(&self, labels: &L, count: u64) {
        self.0.counter(labels.labels()).absolute(count);
    }
}

impl<L: LabelSet> Histogram<L> {
    /// Records one sample.
    pub fn record(&self, labels: &L, size: impl Amount) {
        self.recording(labels).record(size);
    }

    /// A looked-up histogram, for callers that record with every token. Keep it no longer than a request, because a
    /// recorder installed later does not see it.
    pub fn recording(&self, labels: &L) -> Recording {
        Recording(self.0.histogram(labels.labels()))
    }
}

/// A histogram with its labels, looked up.
pub struct Recording(metrics::Histogram);

impl Recording {
    /// Records one sample.
    pub fn record(&self, size: impl Amount) {
        self.0.record(size.amount());
    }
}
