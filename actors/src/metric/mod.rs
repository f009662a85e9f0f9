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
mod recorder;
#[cfg(feature = "prometheus")]
mod serve;
mod table;

#[cfg(feature = "prometheus")]
pub use address::{MetricsAddress, NoAddress};
pub use item::{Amount, Counter, Gauge, Histogram, Kind, Recording, Row};
pub use label::{AttemptEnd, DeviceLabel, LabelSet, LabelValue, Permit, Preempted, RequestEnd};
#[cfg(feature = "prometheus")]
pub use serve::{MetricsServer, ServeMetricsError};
pub use table::*;

use std::time::Duration;

use bursar_budgets::{Class, Label, Memory};

use crate::{profile::Phase, tree::Role};

/// How often each actor sets its gauges though nothing happens: a recorder may have been installed since.
pub(crate) const SHOWN_EVERY: Duration = Duration::from_secs(1);

/// Tells the recorder that is installed now what each metric is: its help text and unit. Call it once, when it is there.
pub fn describe() {
    TABLE.iter().for_each(Row::describe);
}

/// The histograms, each with the upper edges of its buckets, in seconds.
///
/// ```
/// let edges = |name| bursar_actors::metric::buckets().find(|(found, _)| *found == name).map(|(_, edges)| edges);
/// assert!(edges("bursar_time_to_first_token_seconds").unwrap().contains(&0.25));
/// assert_eq!(edges("bursar_kv_blocks"), None);
/// ```
pub fn buckets() -> impl Iterator<Item = (&'static str, &'static [f64])> {
    TABLE.iter().filter(|row| row.kind == Kind::Histogram).map(|row| (row.name, row.buckets))
}

/// A model is gone: what its gauges said of it is over. What was counted stays, and so does a plan that was wrong: the
/// model ends by it.
pub fn forget_model(model: &Label) {
    TABLE.iter().filter(|row| row.kind == Kind::Gauge && row.labels == ["model"]).for_each(|row| {
        row.gauge(vec![row.label(0, model.value())]).set(0.0);
    });
    Role::OF_A_MODEL.iter().for_each(|actor| ACTOR_UP.set(&(model.clone(), *actor), 0));
    for permit in Permit::ALL {
        PERMITS.set(&(model.clone(), permit), 0);
        PERMITS_USED.set(&(model.clone(), permit), 0);
    }
}

/// A device is nobody's any more: what its gauges said of it is over, but for what its leases were at most.
pub(crate) fn forget_device<'l>(device: &DeviceLabel, leases: impl Iterator<Item = &'l (Label, Class)>) {
    TABLE.iter().filter(|row| row.kind == Kind::Gauge && row.labels == ["device"]).for_each(|row| {
        row.gauge(vec![row.label(0, device.value())]).set(0.0);
    });
    for (model, class) in leases {
        let labels = (device.clone(), model.clone(), class.clone());
        LEASE_BYTES.set(&labels, 0);
        if class.memory() == Memory::Device {
            LEASE_USED_BYTES.set(&labels, 0);
        }
    }
}

/// A model begins: everything that is counted of it stands at 0, so that the first of each kind shows as a rise.
pub fn expect_model(model: &Label) {
    TABLE.iter().filter(|row| row.kind == Kind::Counter && row.labels == ["model"]).for_each(|row| {
        row.counter(vec![row.label(0, model.value())]).increment(0);
    });
    Phase::ALL.iter().for_each(|phase| OOM_TOTAL.add(&(model.clone(), *phase), 0));
    Role::OF_A_MODEL.iter().for_each(|actor| RESTARTS_TOTAL.add(&(model.clone(), *actor), 0));
    RequestEnd::ALL.iter().for_each(|end| REQUESTS_TOTAL.add(&(model.clone(), *end), 0));
    Preempted::ALL.iter().for_each(|reason| PREEMPTIONS_TOTAL.add(&(model.clone(), *reason), 0));
    AttemptEnd::ALL.iter().for_each(|end| PROFILE_ATTEMPTS_TOTAL.add(&(model.clone(), *end), 0));
}
