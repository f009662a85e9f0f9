//! Pure: the input of the device views and model views, and types that both use.

use serde::Serialize;

use crate::top::{
    rate::Since,
    samples::{Labels, Samples},
};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Actor {
    pub actor: String,
    pub is_up: bool,
    /// Number of times that the actor was restarted.
    pub restarts: u64,
}

/// A count by reason, phase or class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Count {
    /// The reason, phase or class.
    pub of: String,
    pub count: u64,
}

/// A scrape, and the earlier scrapes that it is compared with.
#[derive(Clone, Copy, Debug)]
pub struct ScrapeWindow<'a> {
    pub now: &'a Samples,
    /// The previous scrape, for rates.
    pub last: Option<Since<'a>>,
    /// A scrape about a minute older, for quantiles and shares. Early in a session, it may be only
    /// 5 seconds older.
    pub minute: Option<Since<'a>>,
}

/// Returns counts by the values of a label, without zeros, the highest first.
pub(super) fn counts(now: &Samples, name: &str, labels: Labels<'_>, by: &str) -> Vec<Count> {
    let all = now.of(name, labels).map(|series| Count { of: series.label(by).to_owned(), count: series.value as u64 });
    let mut all: Vec<_> = all.filter(|tally| tally.count > 0).collect();
    all.sort_by(|one, other| other.count.cmp(&one.count).then_with(|| one.of.cmp(&other.of)));
    all
}
