//! Memory of each GPU of a device: bytes of this process and of other processes.

use bursar_budgets::{Bytes, Device, DeviceError, DeviceMemory, GpuLine};

use crate::metric::{self, DeviceLabel, GroupLabel};

/// One GPU: a single device, or the device of one rank of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gpu {
    label: DeviceLabel,
    /// Total and free bytes, as reported by the driver.
    memory: DeviceMemory,
    /// Memory that this process holds for itself, such as the driver's context. No lease can use
    /// it.
    overhead: Bytes,
    /// Bytes that leases of this process use on this GPU. The number is the same on every GPU of a
    /// group.
    backed: Bytes,
    foreign: Bytes,
    /// `None` if the driver does not report memory per process.
    drift: Option<Bytes>,
}

/// Measures each GPU of `device`. `ours` is the number of bytes that leases of this process use on
/// each GPU. `outside_leases` is the number of bytes that this process is known to hold outside
/// leases and the device's own overhead. If that number differs between GPUs, `outside_leases` is
/// the largest of the numbers.
///
/// # Errors
/// Any error of the device.
pub(super) fn measure(device: &dyn Device, ours: Bytes, outside_leases: Bytes) -> Result<Vec<Gpu>, DeviceError> {
    let look = |(card, label): (&dyn Device, String)| {
        let memory = card.memory()?;
        let beyond = card.process_bytes().map(|held| held.saturating_sub(card.overhead() + ours));
        let known = beyond.unwrap_or_default().min(outside_leases);
        let overhead = card.overhead() + known;
        Ok(Gpu {
            label: DeviceLabel::named(label),
            memory,
            overhead,
            backed: ours,
            foreign: (memory.total - memory.free).saturating_sub(overhead + ours),
            drift: beyond.map(|beyond| beyond - known),
        })
    };
    let labels = device.card_labels().into_iter();
    match device.ranks() {
        [] => std::iter::once(device).zip(labels).map(look).collect(),
        ranks => ranks.iter().map(|rank| &**rank).zip(labels).map(look).collect(),
    }
}

/// The label of the [fullest](GpuLine::fullest_of) of these GPUs. `None` if other processes and
/// overhead leave the same number of bytes on all of them.
pub(super) fn fullest(gpus: &[Gpu]) -> Option<DeviceLabel> {
    let lines: Vec<_> = gpus.iter().map(Gpu::line).collect();
    GpuLine::fullest_of(&lines).map(|card| DeviceLabel::named(card.device.clone()))
}

impl Gpu {
    /// Returns this measurement with the foreign memory and drift of `before`.
    pub(super) fn with_others_of(self, before: &Gpu) -> Gpu {
        Gpu { foreign: before.foreign, drift: before.drift, ..self }
    }

    pub(super) fn line(&self) -> GpuLine {
        let Gpu { label, memory, overhead, foreign, .. } = self;
        let device = label.as_str().to_owned();
        GpuLine { device, total: memory.total, overhead: *overhead, foreign: *foreign }
    }

    /// Sets the gauges of this GPU of `group`.
    pub(super) fn show(&self, group: &DeviceLabel) {
        let labels = (GroupLabel(group.clone()), self.label.clone());
        metric::CARD_TOTAL_BYTES.set(&labels, self.memory.total);
        metric::CARD_FREE_BYTES.set(&labels, self.memory.free);
        metric::CARD_OVERHEAD_BYTES.set(&labels, self.overhead);
        metric::CARD_BACKED_BYTES.set(&labels, self.backed);
        metric::CARD_FOREIGN_BYTES.set(&labels, self.foreign);
        self.drift.into_iter().for_each(|drift| metric::CARD_DRIFT_BYTES.set(&labels, drift));
    }
}

#[cfg(test)]
mod tests {
    use bursar_budgets::testing::HostControl;
    use std::sync::Arc;

    use bursar_budgets::{DeviceGroup, HostConfig, HostDevice};

    use super::*;

    const MIB: fn(u64) -> Bytes = Bytes::mib;

    fn host() -> Arc<HostDevice> {
        Arc::new(HostDevice::new(HostConfig::small(MIB(16))).expect("small pages"))
    }

    #[test]
    fn every_byte_of_each_card_has_one_reason() {
        let ranks = [host(), host(), host()];
        let group = DeviceGroup::of(ranks.iter().map(|rank| rank.clone() as _).collect(), "host:3")
            .expect("the devices are alike");
        let start = group.reserve(MIB(16)).expect("addresses");
        group.back(start, MIB(4)).expect("memory");
        ranks[0].drifts(MIB(3));
        ranks[1].overhead_grows(MIB(2));
        ranks[2].foreign_takes(MIB(5));
        let gpus = measure(&group, MIB(4), MIB(1)).expect("the devices answer");
        let found = gpus.iter().map(|card| (card.label.as_str(), card.overhead, card.foreign, card.drift));
        let expected = [
            ("host#0", MIB(1), MIB(2), Some(MIB(2))),
            ("host#1", MIB(2), MIB(0), Some(MIB(0))),
            ("host#2", MIB(0), MIB(5), Some(MIB(0))),
        ];
        assert_eq!(
            found.collect::<Vec<_>>(),
            expected,
            "drift, the memory beyond `outside_leases`, also counts as foreign"
        );
        for Gpu { memory, overhead, backed, foreign, .. } in &gpus {
            assert_eq!(memory.free + *overhead + *backed + *foreign, memory.total);
        }
        assert_eq!(fullest(&gpus), Some(DeviceLabel::named("host#2".into())));
    }

    #[test]
    fn equally_full_cards_have_no_fullest_card() {
        let ranks = [host(), host()];
        let group = DeviceGroup::of(ranks.iter().map(|rank| rank.clone() as _).collect(), "host:2")
            .expect("the devices are alike");
        let gpus = || measure(&group, Bytes::ZERO, Bytes::ZERO).expect("the devices answer");
        assert_eq!(fullest(&gpus()), None);
        assert_eq!(
            fullest(&measure(&*host(), Bytes::ZERO, Bytes::ZERO).expect("the device answers")),
            None,
            "a single device has no fullest rank"
        );
        ranks[1].foreign_takes(MIB(1));
        assert_eq!(fullest(&gpus()), Some(DeviceLabel::named("host#1".into())));
    }
}
