//! What a runtime records of itself: one table of metrics, and the only place that speaks to the `metrics` facade.
//!
//! The embedding application installs a recorder, before or after the runtime starts; without one recording costs next to
//! nothing. Nobody keeps the handle of a metric from before for longer than a request, as it would go on speaking to a
//! recorder that is not there.
//!
//! Values of labels are bounded: names of devices and models, and words of the enums in `label.rs`. No text of a request
//! is ever one of them (rule 15), and all tenants share one.

#[cfg(feature = "prometheus")]
mod address;
mod item;
mod label;
#[cfg(feature = "prometheus")]
pub(crate) mod process;
mod table;

#[cfg(feature = "prometheus")]
pub use address::{MetricsAddress, NoAddress};
pub use item::{Amount, Counter, Gauge, Histogram, Kind, Recording, Row};
pub use label::{
    Architecture, AttemptEnd, Build, DeviceLabel, Dtype, LabelSet, LabelValue, Permit, Preempted, RequestEnd, Version,
    Words,
};
pub use table::*;

use std::time::Duration;

use bursar_budgets::{Class, Label, Memory};
use metrics::SharedString;

/// How often each actor sets its gauges though nothing happens: a recorder may have been installed since.
pub(crate) const SHOWN_EVERY: Duration = Duration::from_secs(1);

/// Tells the recorder that is installed now what each metric is: its help text and unit. Call it once, when it is there.
pub fn describe() {
    TABLE.iter().for_each(Row::describe);
}

/// The histograms, each with the upper edges of its buckets, in seconds or tokens.
///
/// ```
/// let edges = |name| bursar_actors::metric::buckets().find(|(found, _)| *found == name).map(|(_, edges)| edges);
/// assert!(edges("bursar_time_to_first_token_seconds").unwrap().contains(&0.25));
/// assert_eq!(edges("bursar_kv_blocks"), None);
/// ```
pub fn buckets() -> impl Iterator<Item = (&'static str, &'static [f64])> {
    TABLE.iter().filter(|row| row.kind == Kind::Histogram).map(|row| (row.name, row.buckets))
}

/// What this process runs. It is told again and again, as all gauges are.
pub(crate) fn show_build() {
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    BUILD_INFO.set(&(Version(env!("CARGO_PKG_VERSION")), Build(build)), true);
}

/// No actor of a model runs: what its gauges said of it is over. What was counted stays, and so does a plan that was
/// wrong: the model ends by it.
pub fn forget_model(model: &Label) {
    forget(Label::NAME, model.value());
}

/// A device is nobody's any more: what its gauges said of it is over, but for what its leases were at most.
pub(crate) fn forget_device<'l>(device: &DeviceLabel, leases: impl Iterator<Item = &'l (Label, Class)>) {
    forget(DeviceLabel::NAME, device.value());
    for (model, class) in leases {
        let labels = (device.clone(), model.clone(), class.clone());
        LEASE_BYTES.set(&labels, 0);
        if class.memory() == Memory::Device {
            LEASE_USED_BYTES.set(&labels, 0);
        }
    }
}

fn forget(name: &'static str, value: SharedString) {
    let gauges = TABLE.iter().filter(|row| row.kind == Kind::Gauge && row.name != PLAN_ERROR_BYTES.row().name);
    for row in gauges {
        row.series_of(name, value.clone()).into_iter().for_each(|labels| row.gauge(labels).set(0.0));
    }
}

/// A model begins: everything that is counted of it stands at 0, so that the first of each kind shows as a rise.
pub fn expect_model(model: &Label) {
    expect(Label::NAME, model.value());
}

/// The same of a device.
pub fn expect_device(device: &DeviceLabel) {
    expect(DeviceLabel::NAME, device.value());
}

fn expect(name: &'static str, value: SharedString) {
    for row in TABLE {
        row.series_of(name, value.clone()).into_iter().for_each(|labels| row.expect(labels));
    }
}
