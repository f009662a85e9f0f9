//! The samples of one scrape.

use std::collections::{BTreeMap, BTreeSet};

use bursar::Bytes;

use super::histogram::Histogram;

/// All samples by metric name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples {
    by_name: BTreeMap<String, Vec<Series>>,
}

/// One value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Names and values, as received.
    pub labels: Vec<(String, String)>,
    /// The current value, which may be any float.
    pub value: f64,
}

/// Labels that a series must have.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

impl Series {
    /// Returns the value of a label. Empty if the label is absent, as in Prometheus.
    pub fn label(&self, name: &str) -> &str {
        self.labels.iter().find(|(label, _)| label == name).map_or("", |(_, value)| value)
    }

    fn has(&self, wanted: Labels<'_>) -> bool {
        wanted.iter().all(|(name, value)| self.label(name) == *value)
    }
}

impl Samples {
    pub fn push(&mut self, name: &str, series: Series) {
        match self.by_name.get_mut(name) {
            Some(known) => known.push(series),
            None => drop(self.by_name.insert(name.to_owned(), vec![series])),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Returns all series of a metric with at least these labels.
    pub fn of<'a>(&'a self, name: &str, wanted: Labels<'a>) -> impl Iterator<Item = &'a Series> {
        self.by_name.get(name).into_iter().flatten().filter(move |series| series.has(wanted))
    }

    /// Returns the sum of all series with these labels, without values that are NaN. `None` if
    /// no value is left.
    pub fn value(&self, name: &str, wanted: Labels<'_>) -> Option<f64> {
        let values = self.of(name, wanted).map(|series| series.value).filter(|value| !value.is_nan());
        values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
    }

    /// Like [`value`](Self::value), in bytes. Negative values become 0.
    pub fn bytes(&self, name: &str, wanted: Labels<'_>) -> Option<Bytes> {
        // The cast saturates.
        self.value(name, wanted).map(|value| Bytes(value as u64))
    }

    /// Like [`value`](Self::value), as a count.
    pub fn count(&self, name: &str, wanted: Labels<'_>) -> Option<u64> {
        self.value(name, wanted).map(|value| value as u64)
    }

    /// Returns all values of a label in any of these metrics, without the empty value.
    pub fn values_of(&self, names: &[&str], label: &str) -> BTreeSet<String> {
        let all = names.iter().flat_map(|name| self.of(name, &[]));
        all.map(|series| series.label(label)).filter(|value| !value.is_empty()).map(str::to_owned).collect()
    }

    pub fn histogram(&self, name: &str, wanted: Labels<'_>) -> Histogram {
        let buckets = self.by_name.get(&format!("{name}_bucket")).into_iter().flatten();
        let buckets = buckets.filter(|series| series.has(wanted));
        Histogram::new(buckets.filter_map(|series| Some((series.label("le").parse().ok()?, series.value))))
    }

    /// Returns `true` if any counter fell since `before`. The process has then restarted, or
    /// another process answers.
    pub fn went_back(&self, before: &Samples) -> bool {
        let is_counter = |name: &str| ["_total", "_count", "_bucket"].iter().any(|end| name.ends_with(end));
        let counters = before.by_name.iter().filter(|(name, _)| is_counter(name));
        counters.flat_map(|(name, known)| known.iter().map(move |series| (name, series))).any(|(name, was)| {
            let now = self.by_name.get(name).into_iter().flatten().find(|series| series.labels == was.labels);
            now.is_some_and(|now| now.value < was.value)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{super::exposition::read, *};

    fn samples(text: &str) -> Samples {
        read(text, "").expect("the text is well-formed")
    }

    #[test]
    fn a_value_sums_all_samples_with_the_labels() {
        let samples = samples("a{x=\"1\",y=\"1\"} 1\na{x=\"1\",y=\"2\"} 2\na{x=\"2\"} 4\nb -3\nc 1e300\n");
        assert_eq!(samples.value("a", &[("x", "1")]), Some(3.0));
        assert_eq!(samples.value("a", &[]), Some(7.0));
        assert_eq!(samples.value("a", &[("y", "")]), Some(4.0), "a missing label equals an empty label");
        assert_eq!(samples.value("a", &[("x", "3")]), None);
        assert_eq!(samples.bytes("b", &[]), Some(Bytes::ZERO));
        assert_eq!(samples.bytes("c", &[]), Some(Bytes::MAX));
        assert_eq!(samples.values_of(&["a", "b"], "y"), ["1", "2"].map(str::to_owned).into());
    }

    #[test]
    fn only_a_decreased_counter_indicates_a_restart() {
        let before = samples("a_total{m=\"x\"} 5\nb 9\nc_bucket{le=\"+Inf\"} 3\n");
        assert!(!samples("a_total{m=\"x\"} 5\na_total{m=\"y\"} 0\nb 1\n").went_back(&before));
        assert!(samples("a_total{m=\"x\"} 4\n").went_back(&before));
        assert!(samples("c_bucket{le=\"+Inf\"} 0\n").went_back(&before));
    }
}
