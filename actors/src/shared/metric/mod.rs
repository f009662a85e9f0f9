//! Metrics of a runtime: one table of all metrics, and the only code that
//! uses the `metrics` facade.
//!
//! The embedding application installs a recorder before or after the runtime starts. Without a
//! recorder, recording costs next to nothing. Do not keep the handle of a metric longer than a
//! request lasts, because a handle keeps using the recorder that was installed when it was created.
//!
//! The number of label values is bounded: the names of devices and models, and the types in
//! `label.rs`. Text of a request is never a label (rule 15). All external leases share one value. A
//! request's tenant is a label value only if `tenant_weights` names it.

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
    Architecture, AttemptEnd, Build, CacheGroupIndex, DeviceLabel, Direction, DraftPosition, Dtype, GroupLabel,
    HttpError, HttpStatus, KvCacheDtype, LabelSet, LabelValue, Late, Permit, Preempted, Quantization, RequestEnd,
    Route, SleepReason, Version, WakeReason, Words,
};
pub use table::*;

use std::time::Duration;

use bursar_budgets::{Class, Device, Label, Memory};
use metrics::SharedString;

/// Interval at which each actor sets its gauges even if nothing has changed, because a recorder may
/// have been installed since.
pub(crate) const SHOWN_EVERY: Duration = Duration::from_secs(1);

/// Describes each metric to the current recorder, with its help text and unit. Call this once,
/// after installing the recorder.
pub fn describe() {
    TABLE.iter().for_each(Row::describe);
}

/// Returns the name of each histogram with the upper edges of its buckets, in seconds or tokens.
///
/// ```
/// let edges = |name| bursar_actors::metric::buckets().find(|(found, _)| *found == name).map(|(_, edges)| edges);
/// assert!(edges("bursar_time_to_first_token_seconds").unwrap().contains(&0.25));
/// assert_eq!(edges("bursar_kv_blocks"), None);
/// ```
pub fn buckets() -> impl Iterator<Item = (&'static str, &'static [f64])> {
    TABLE.iter().filter(|row| row.kind == Kind::Histogram).map(|row| (row.name, row.buckets))
}

/// Sets the gauge with the version and build of this process. Like all gauges, it is set
/// repeatedly, because a recorder may have been installed since.
pub(crate) fn show_build() {
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    BUILD_INFO.set(&(Version(env!("CARGO_PKG_VERSION")), Build(build)), true);
}

/// Sets a model's gauges to 0 once none of its actors runs. Counters stay. The gauge of plan errors
/// stays too: a plan error ends its model, and the size of the error must remain visible.
pub fn forget_model(model: &Label) {
    forget(Label::NAME, model.value());
}

/// Sets a device's gauges to 0 once the device is no longer used. Peaks of leases stay.
pub(crate) fn forget_device<'l>(of: &dyn Device, leases: impl Iterator<Item = &'l (Label, Class)>) {
    let device = &DeviceLabel::of(of);
    forget(DeviceLabel::NAME, device.value());
    for card in of.card_labels() {
        let labels = (GroupLabel(device.clone()), DeviceLabel::named(card));
        OF_A_CARD.iter().for_each(|gauge| gauge.set(&labels, 0));
    }
    for (model, class) in leases {
        let labels = (device.clone(), model.clone(), class.clone());
        LEASE_BYTES.set(&labels, 0);
        if class.memory() == Memory::Device {
            LEASE_USED_BYTES.set(&labels, 0);
        }
    }
}

/// Gauges of each GPU of a group.
const OF_A_CARD: [Gauge<(GroupLabel, DeviceLabel)>; 6] =
    [CARD_TOTAL_BYTES, CARD_FREE_BYTES, CARD_OVERHEAD_BYTES, CARD_BACKED_BYTES, CARD_FOREIGN_BYTES, CARD_DRIFT_BYTES];

fn forget(name: &'static str, value: SharedString) {
    let gauges = TABLE.iter().filter(|row| row.kind == Kind::Gauge && row.name != PLAN_ERROR_BYTES.row().name);
    for row in gauges {
        row.series_of(name, value.clone()).into_iter().for_each(|labels| row.gauge(labels).set(0.0));
    }
}

/// Sets all counters and histograms of a new model to 0, so that the first count of each kind
/// shows as an increase.
pub fn expect_model(model: &Label) {
    expect(Label::NAME, model.value());
}

/// Sets all counters and histograms of a new device to 0.
pub fn expect_device(device: &DeviceLabel) {
    expect(DeviceLabel::NAME, device.value());
}

fn expect(name: &'static str, value: SharedString) {
    for row in TABLE {
        row.series_of(name, value.clone()).into_iter().for_each(|labels| row.expect(labels));
    }
}
