//! Probes of the device: the driver's free bytes are compared with the ledger, and leases are
//! ordered to shrink or grow.

use std::collections::BTreeMap;

use bursar_budgets::{Account, Bytes, Class, DeviceError, DeviceMemory, Input, LeaseId, LeaseMeter, Memory};

use super::BudgetState;
use crate::{
    budget::{Elastic, Headroom, KvDemand, Lendable, Pressure, Probe, ResizeOrder, Wanting, gpus},
    metric,
};

impl BudgetState {
    /// The regular probe. Measures memory that other processes have taken or returned, repeats
    /// orders that owners have not carried out yet, offers growth, and sets gauges.
    pub(super) fn probe(&mut self) -> Result<(), DeviceError> {
        // A model that is being sized allocates some memory before it leases that memory: graphs
        // during capture, and modules at their first use. Until then, such memory cannot be
        // distinguished from memory of another process. Sizing itself requests a measurement once
        // everything is leased.
        let is_profiling = self.ledger.is_profiling();
        self.lower_overhead();
        let memory = if is_profiling {
            self.probe_gpus()?;
            self.memory()?
        } else {
            self.measure()?
        };
        let Some(memory) = memory else { return Ok(()) };
        let account = *self.ledger.account(Memory::Device);
        if !account.owed().is_zero() {
            let Account { foreign, canary_wanted: canary, total, .. } = account;
            let seen = Pressure { at: self.born.elapsed(), foreign, canary, total };
            let ahead = self.backoff.ahead(seen, self.watch.every);
            self.step(Input::Remind { ahead });
        }
        self.offer_growth();
        self.may_lend = true;
        // Memory that is being returned or is about to be leased does not count as drift.
        let is_drift_measurable = !is_profiling && self.clearing.is_empty() && self.is_settled();
        let drift = self.drift();
        self.drifted = drift.filter(|_| is_drift_measurable).unwrap_or(self.drifted);
        // While drift cannot be computed, its gauge keeps the last value. The gauge is not set at
        // all if the driver does not report memory per process.
        self.set_probe_gauges(memory, drift.map(|_| self.drifted));
        Ok(())
    }

    /// Counts as overhead any memory that this process allocated outside leases while a model was
    /// being sized, such as library kernels loaded at their first use. The caller has leased
    /// everything else that it allocated. Nothing is counted if two models are being sized at once
    /// or memory is being backed or unbacked, because the bytes cannot be attributed then.
    pub(super) fn count_loaded_as_overhead(&mut self) {
        if self.ledger.profiling() == 1 && self.is_settled() {
            let came = self.drift().unwrap_or_default().saturating_sub(self.drifted);
            self.mailbox.books().outside_leases += came;
            self.look_at_overhead();
        }
    }

    /// Counts the memory of captured graphs as overhead when their lease ends, because the driver
    /// keeps that memory in a pool for later graphs. Later probes reduce the overhead when the
    /// driver has freed the memory. Does nothing if the driver does not report memory per process,
    /// because later probes could not reduce the overhead.
    pub(super) fn keep(&mut self, bytes: Bytes) {
        if self.device.process_bytes().is_some() {
            self.mailbox.books().outside_leases += bytes;
            self.look_at_overhead();
        }
    }

    /// Reduces the overhead by memory that this process no longer holds outside leases.
    fn lower_overhead(&mut self) {
        // User code may have leased memory that it has not allocated yet. Such a lease would hide
        // the same number of bytes held outside leases.
        let has_tenants = self.mailbox.leases().iter().any(|lease| matches!(lease.class, Class::External(_)));
        let Some(held) = self.bytes_outside_leases() else { return };
        if self.is_settled() && !has_tenants {
            let mut books = self.mailbox.books();
            books.outside_leases = books.outside_leases.min(held);
            drop(books);
            self.look_at_overhead();
        }
    }

    /// Sends the ledger a lower bound of the bytes that other processes hold: the used bytes of the
    /// device minus the bytes of this process. A lease of user code counts as fully used from the
    /// start. Until that code has allocated the memory, the lease hides the same number of foreign
    /// bytes. The driver answers within microseconds, even while memory is being backed. Returns
    /// the driver's numbers, or `None` if the device is lost.
    ///
    /// While memory of this process is being backed or unbacked, the bytes that this process uses
    /// are only known to lie between two values. The larger value is used, and foreign memory is
    /// never assumed to have shrunk.
    pub(super) fn measure(&mut self) -> Result<Option<DeviceMemory>, DeviceError> {
        let Some((memory, foreign)) = self.seen()? else { return Ok(None) };
        self.probe_gpus()?;
        self.step(Input::Foreign(foreign));
        Ok(Some(memory))
    }

    /// Whether other processes hold more than the ledger knows, or leases must still shrink for
    /// them. Always `false` while a model is being sized.
    pub(super) fn is_taken_from(&self) -> Result<bool, DeviceError> {
        let account = self.ledger.account(Memory::Device);
        let has_more = |(_, foreign): (DeviceMemory, Bytes)| foreign > account.foreign || !account.owed().is_zero();
        Ok(!self.ledger.is_profiling() && self.seen()?.is_some_and(has_more))
    }

    /// The driver's numbers, and the bytes that other processes hold. `None` if the device is lost.
    pub(super) fn seen(&self) -> Result<Option<(DeviceMemory, Bytes)>, DeviceError> {
        let is_settled = self.is_settled();
        let before = self.in_use();
        let Some(memory) = self.memory()? else { return Ok(None) };
        let account = self.ledger.account(Memory::Device);
        let foreign = (memory.total - memory.free).saturating_sub(account.overhead + self.ours(&before));
        let foreign = if is_settled && self.is_settled() { foreign } else { foreign.max(account.foreign) };
        Ok(Some((memory, foreign)))
    }

    /// Measures each GPU. While a model is being sized, or memory of this process is being backed
    /// or unbacked, the memory that other processes hold on a GPU cannot be determined, and its
    /// last value is kept.
    fn probe_gpus(&mut self) -> Result<(), DeviceError> {
        let is_settled = self.is_settled();
        let before = self.in_use();
        let outside_leases = self.mailbox.books().outside_leases;
        let mut seen = match gpus::measure(&*self.device, self.ours(&before), outside_leases) {
            Err(error) if error.is_lost() => return Ok(()),
            seen => seen?,
        };
        if self.ledger.is_profiling() || !(is_settled && self.is_settled()) {
            // There are no earlier values at the first measurement, so that measurement is used
            // unchanged.
            let known = self.gpus.iter().map(Some).chain(std::iter::repeat(None));
            let with = |(card, known): (gpus::Gpu, Option<&gpus::Gpu>)| match known {
                Some(known) => card.with_others_of(known),
                None => card,
            };
            seen = seen.into_iter().zip(known).map(with).collect();
        }
        self.mailbox.books().fullest = gpus::fullest(&seen);
        self.gpus = seen;
        Ok(())
    }

    /// Whether no memory of this process is being backed or unbacked.
    fn is_settled(&self) -> bool {
        let books = self.mailbox.books();
        books.watch.is_idle() && !books.meters.values().any(LeaseMeter::is_moving)
    }

    fn memory(&self) -> Result<Option<DeviceMemory>, DeviceError> {
        match self.device.memory() {
            // A lost device has neither free nor foreign memory. The reported loss stops the other
            // actors.
            Err(error) if error.is_lost() => Ok(None),
            memory => memory.map(Some),
        }
    }

    /// Bytes that this process holds outside leases and overhead. The number should be 0. `None` if
    /// the driver does not report memory per process.
    ///
    /// Without the driver's figure (`Device::process_bytes`), drift cannot be distinguished from
    /// foreign memory: both are used memory that the budget has no record of. The ledger counts
    /// drift as foreign in any case, so that all used memory together never exceeds the device
    /// (rule 1 of `docs/rules.md`).
    pub(super) fn drift(&self) -> Option<Bytes> {
        let held = self.bytes_outside_leases()?;
        Some(held.saturating_sub(self.mailbox.books().outside_leases))
    }

    /// Bytes that this process holds outside leases and outside `Device::overhead`: the bytes that
    /// the budget has already counted as overhead, and drift. `None` if the driver does not report
    /// memory per process.
    fn bytes_outside_leases(&self) -> Option<Bytes> {
        let before = self.in_use();
        let ours = self.device.process_bytes()?;
        Some(ours.saturating_sub(self.device.overhead() + self.ours(&before)))
    }

    /// Bytes in use by each lease of device memory.
    pub(super) fn in_use(&self) -> BTreeMap<LeaseId, Bytes> {
        let books = self.mailbox.books();
        let used = books.meters.iter().filter_map(|(lease, meter)| {
            let holding = self.ledger.holding(*lease).filter(|holding| holding.class.memory() == Memory::Device)?;
            Some((*lease, meter.used(holding.bytes)))
        });
        used.collect()
    }

    /// Returns the sum of each lease's larger value: bytes in use now, or bytes in use when
    /// `before` was read. Memory that was backed or unbacked in between therefore does not look
    /// like memory of another process.
    fn ours(&self, before: &BTreeMap<LeaseId, Bytes>) -> Bytes {
        self.in_use().iter().map(|(lease, now)| before.get(lease).map_or(*now, |before| *now.max(before))).sum()
    }

    /// Records that the owner of this lease accepts resize orders from now on.
    pub(super) fn resize_orders_accepted(&mut self, lease: LeaseId, elastic: Elastic) {
        // The lease may have been revoked before this note was read.
        if self.ledger.holding(lease).is_some() {
            self.step(Input::Floor { lease, to: elastic.floor });
            self.mailbox.books().elastic.insert(lease, elastic);
            self.step(Input::Remind { ahead: Bytes::ZERO });
        }
    }

    pub(super) fn order(&self, lease: LeaseId, order: ResizeOrder) {
        let orders = self.mailbox.books().elastic.get(&lease).map(|elastic| elastic.orders.clone());
        orders.iter().for_each(|orders| orders(order));
    }

    /// Offers growth to the leases that gave up memory, if that memory has stayed free. The oldest
    /// lease is first.
    fn offer_growth(&mut self) {
        let account = *self.ledger.account(Memory::Device);
        let look = Probe {
            at: self.born.elapsed(),
            available: account.available(),
            is_pressed: self.is_pressed() || self.ledger.waiting_for(Memory::Device) > 0,
        };
        // Memory lent by an idle model is for models whose requests wait, so the lender must not
        // take it back now.
        let is_waiting = self.mailbox.lendable().iter().any(|lease| lease.need == KvDemand::WaitingForBlocks);
        let wanting: Vec<Wanting> = {
            let books = self.mailbox.books();
            let wanting = books.elastic.iter().filter_map(|(lease, elastic)| {
                let Elastic { most, step, .. } = *elastic;
                let bytes = self.ledger.holding(*lease).filter(|_| !(is_waiting && self.lending.lends(*lease)))?.bytes;
                Some(Wanting { lease: *lease, bytes, most, step })
            });
            wanting.collect()
        };
        for offer in self.regrowth.offers(look, &wanting) {
            self.order(offer.lease, ResizeOrder::MayGrow { to: offer.to });
        }
    }

    /// Whether leases must still shrink for another process, part of the canary is missing, or a
    /// model is being sized.
    fn is_pressed(&self) -> bool {
        let account = self.ledger.account(Memory::Device);
        !account.owed().is_zero() || account.canary < account.canary_wanted || self.ledger.is_profiling()
    }

    /// Orders idle models to lend KV cache memory, and borrowers to return it when a lender needs
    /// it.
    pub(super) fn lend(&mut self) {
        let leases = self.mailbox.lendable();
        if leases.is_empty() {
            return;
        }
        let available = self.ledger.account(Memory::Device).available();
        let awaited = self.ledger.awaited(Memory::Device).saturating_sub(available);
        // Models give up memory only if all of them together can satisfy the waiting lease.
        let given = leases.iter().map(Lendable::would_give).sum();
        let awaited = if awaited <= given { awaited } else { Bytes::ZERO };
        let headroom = Headroom { at: self.born.elapsed(), available, awaited, is_pressed: self.is_pressed() };
        for (lease, order) in self.lending.orders(headroom, &leases) {
            self.order(lease, order);
        }
        for Lendable { lease, bytes, share, .. } in leases {
            if let Some(holding) = self.ledger.holding(lease) {
                metric::KV_BORROWED_BYTES.set(&holding.model, bytes.saturating_sub(share));
            }
        }
    }
}
