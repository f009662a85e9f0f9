//! Gauges of the device, of its ledger, and of leases by model and class.

use std::{cmp::Ordering, collections::BTreeMap, time::Duration};

use bursar_budgets::{Bytes, Class, DeviceMemory, Label, Memory, Refusal};

use tokio::time::Instant;

use super::{BudgetState, Shown};
use crate::{
    budget::lease_sums::{Line, Sum, line},
    event::Event,
    metric,
};

impl BudgetState {
    fn to_show(&self) -> Shown {
        let (device, host) = (self.ledger.account(Memory::Device), self.ledger.account(Memory::Host));
        Shown {
            overhead: device.overhead,
            foreign: device.foreign,
            owed: device.owed(),
            deficit: device.deficit(),
            canary: device.canary,
            canary_wanted: device.canary_wanted,
            host_total: host.total,
            host_leased: host.granted,
            waiting: self.ledger.waiting_for(Memory::Device) + self.ledger.waiting_for(Memory::Host),
        }
    }

    /// Reports how much of the canary was given up or taken back since the last report, by this
    /// actor or a predecessor.
    pub(super) fn report_canary(&self) {
        let canary = self.ledger.account(Memory::Device).canary;
        let before = std::mem::replace(&mut self.mailbox.books().canary_reported, canary);
        match canary.cmp(&before) {
            Ordering::Less => {
                metric::CANARY_GIVEN_TOTAL.add(&self.name, 1);
                let card = self.mailbox.fullest_gpu();
                self.mailbox.events().record(Event::CanaryGiven { bytes: before - canary, card });
            }
            Ordering::Equal => {}
            Ordering::Greater => self.mailbox.events().record(Event::CanaryTaken { bytes: canary - before }),
        }
    }

    /// Reports changes of the canary, and sets the ledger's gauges if any of them has changed.
    pub(super) fn show_changes(&mut self) {
        self.report_canary();
        let shown = self.to_show();
        if self.shown.replace(shown) != Some(shown) {
            self.show_ledger(shown);
        }
    }

    /// Sets the gauges of the driver's numbers. At most once a second, and whenever a caller
    /// requests a measurement, this function also sets all other gauges, because a metrics recorder
    /// may have been installed since. The limit matters while another process takes memory, because
    /// probes are then more frequent.
    pub(super) fn set_probe_gauges(&mut self, memory: DeviceMemory, drift: Option<Bytes>) {
        let device = &self.name;
        metric::DEVICE_TOTAL_BYTES.set(device, memory.total);
        metric::DEVICE_FREE_BYTES.set(device, memory.free);
        drift.into_iter().for_each(|drift| metric::DRIFT_BYTES.set(device, drift));
        self.gpus.iter().for_each(|card| card.show(device));
        if self.all_shown.is_none_or(|at| at.elapsed() >= metric::SHOWN_EVERY) {
            self.all_shown = Some(Instant::now());
            self.show_all();
        }
    }

    fn show_all(&mut self) {
        let device = &self.name;
        metric::expect_device(device);
        let shown = self.to_show();
        self.shown = Some(shown);
        self.show_ledger(shown);
        let mut used: BTreeMap<Line, Bytes> = BTreeMap::new();
        for (lease, bytes) in self.in_use() {
            let holding = self.ledger.holding(lease).expect("each lease with bytes in use is in the ledger");
            *used.entry(line(&holding.model, &holding.class)).or_default() += bytes;
        }
        for (line, sum) in self.mailbox.books().sums.live_lines() {
            self.show_line(line, sum);
            if line.1.memory() == Memory::Device {
                let used = used.get(line).copied().unwrap_or_default();
                metric::LEASE_USED_BYTES.set(&self.labels(line), used);
            }
        }
    }

    fn show_ledger(&self, shown: Shown) {
        let device = &self.name;
        metric::OVERHEAD_BYTES.set(device, shown.overhead);
        metric::FOREIGN_BYTES.set(device, shown.foreign);
        // Bytes that leases must still give up before all leases and the canary fit next to other
        // processes. Alert if this value stays above 0.
        metric::OWED_BYTES.set(device, shown.owed);
        metric::DEFICIT_BYTES.set(device, shown.deficit);
        metric::CANARY_BYTES.set(device, shown.canary);
        metric::CANARY_WANTED_BYTES.set(device, shown.canary_wanted);
        metric::HOST_TOTAL_BYTES.set(device, shown.host_total);
        metric::HOST_LEASED_BYTES.set(device, shown.host_leased);
        metric::LEASES_WAITING.set(device, shown.waiting);
    }

    fn labels(&self, (model, class): &Line) -> (metric::DeviceLabel, Label, Class) {
        (self.name.clone(), model.clone(), class.clone())
    }

    fn show_line(&self, line: &Line, sum: Sum) {
        let labels = self.labels(line);
        metric::LEASE_BYTES.set(&labels, sum.bytes);
        metric::LEASE_PEAK_BYTES.set(&labels, sum.peak);
        if sum.bytes.is_zero() && line.1.memory() == Memory::Device {
            metric::LEASE_USED_BYTES.set(&labels, Bytes::ZERO);
        }
    }

    /// Updates the sum of this line for a lease that changed from `from` bytes to `to`.
    pub(super) fn leased(&self, line: Line, from: Bytes, to: Bytes) {
        let sum = self.mailbox.books().sums.change(line.clone(), from, to);
        self.show_line(&line, sum);
    }

    pub(super) fn show_wait(&self, class: &Class, waited: Duration) {
        metric::LEASE_WAIT_SECONDS.record(&(self.name.clone(), class.clone()), waited);
    }

    pub(super) fn show_refusal(&self, class: &Class, reason: &Refusal) {
        metric::LEASES_REFUSED_TOTAL.add(&(self.name.clone(), class.clone(), reason.clone()), 1);
    }
}
