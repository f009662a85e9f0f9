//! One metric: its row in the table, and typed methods to record it.

use std::{marker::PhantomData, time::Duration};

use metrics::{Key, KeyName, Label, Level, Metadata, SharedString, Unit};

use super::{LabelSet, label::Words};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Gauge,
    /// A number that only increases. The metric's name ends in `_total`.
    Counter,
    Histogram,
}

impl Kind {
    /// The name in the `# TYPE` lines of Prometheus.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The metric's name. It begins with `bursar_`, or with `process_` if it is a standard
    /// Prometheus process metric.
    pub name: &'static str,
    pub kind: Kind,
    /// The names of the labels, in order.
    pub labels: &'static [&'static str],
    /// For each label, all values that are known in advance.
    pub(super) words: &'static [Words],
    /// The meaning of the metric, in sentences.
    pub help: &'static str,
    /// The upper edges of a histogram's buckets, in increasing order. Empty for other types.
    pub buckets: &'static [f64],
}

/// The source of all metrics, which the `metrics` facade requires.
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

    /// Returns all series of one device or model, if that is the first label and all values of the
    /// other labels are known. Otherwise returns nothing.
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

    /// Registers the counter or histogram, so that a new series is exported with 0. Existing counts
    /// are kept.
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
    Gauge
    Counter
    Histogram
}

impl<L: LabelSet> Gauge<L> {
    pub fn set(&self, labels: &L, to: impl Amount) {
        self.0.gauge(labels.labels()).set(to.amount());
    }
}

impl<L: LabelSet> Counter<L> {
    /// Adds `more` to the counter.
    pub fn add(&self, labels: &L, more: usize) {
        self.0.counter(labels.labels()).increment(more as u64);
    }

    /// Sets the counter to a total that was counted elsewhere.
    #[cfg(feature = "prometheus")]
    pub(super) fn reach(&self, labels: &L, count: u64) {
        self.0.counter(labels.labels()).absolute(count);
    }
}

impl<L: LabelSet> Histogram<L> {
    pub fn record(&self, labels: &L, size: impl Amount) {
        self.recording(labels).record(size);
    }

    /// Looks up the histogram for these labels, for callers that record a sample with every token.
    /// Do not keep the result longer than a request lasts: samples would not reach a recorder that
    /// is installed later.
    pub fn recording(&self, labels: &L) -> Recording {
        Recording(self.0.histogram(labels.labels()))
    }
}

/// A histogram that was looked up for its labels.
pub struct Recording(metrics::Histogram);

impl Recording {
    pub fn record(&self, size: impl Amount) {
        self.0.record(size.amount());
    }
}
