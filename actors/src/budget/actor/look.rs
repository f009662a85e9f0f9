//! The watcher: what the driver says is free, held against the ledger, and what follows from it.

use std::collections::BTreeMap;

use bursar_budgets::{Account, Bytes, Class, DeviceError, DeviceMemory, Input, LeaseId, LeaseMeter, Memory};

use super::BudgetState;
use crate::budget::{Elastic, Look, Order, Pressure, Wanting};

impl BudgetState {
    /// Once in a while: what other processes have taken or given back, orders that are not obeyed yet, what may grow, and
    /// the gauges.
    pub(super) fn look(&mut self) -> Result<(), DeviceError> {
        // While a model is sized, what it has taken and not leased yet (graphs as they are captured, modules as they are
        // loaded) cannot be told from another process, and sizing looks for itself when it settles.
        let is_profiling = self.ledger.is_profiling();
        self.let_go();
        let memory = match is_profiling {
            true => self.memory()?,
            false => self.measure()?,
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
        // What is on its way home, or is leased in a moment, is none.
        let is_calm = !is_profiling && self.clearing.is_empty() && self.is_settled();
        let drift = self.drift();
        self.drifted = drift.filter(|_| is_calm).unwrap_or(self.drifted);
        // Where the driver tells, it is shown also while it cannot be told: what it was before.
        self.show_look(memory, drift.map(|_| self.drifted));
        Ok(())
    }

    /// What came to be held beside leases while a model was sized is overhead from now on: kernels that libraries load when
    /// they are first used, and no one place in a program sees. Whoever asks for this has leased all that it has taken; of
    /// two models that are sized at once nobody knows.
    pub(super) fn adopt_what_was_loaded(&mut self) {
        if self.ledger.profiling() == 1 && self.is_settled() {
            let came = self.drift().unwrap_or_default().saturating_sub(self.drifted);
            self.mailbox.books().beside += came;
            self.look_at_overhead();
        }
    }

    /// What captured graphs took goes back to a pool of the driver's, where the next ones find it: it is overhead, as far
    /// as looks find that it is still held.
    pub(super) fn keep(&mut self, bytes: Bytes) {
        if self.device.process_bytes().is_some() {
            self.mailbox.books().beside += bytes;
            self.look_at_overhead();
        }
    }

    /// What is held beside leases no longer is no overhead either.
    fn let_go(&mut self) {
        // A tenant may have leased what it has not taken yet: that would hide as much.
        let has_tenants = self.mailbox.leases().iter().any(|lease| matches!(lease.class, Class::Tenant(_)));
        let Some(held) = self.beside() else { return };
        if self.is_settled() && !has_tenants {
            let mut books = self.mailbox.books();
            books.beside = books.beside.min(held);
            drop(books);
            self.look_at_overhead();
        }
    }

    /// What other processes hold at least: what is used and is none of ours. A lease that pays for something without
    /// addresses (a tenant's own allocations) hides as much of it until that is taken. The driver answers within
    /// microseconds, also while others back. Gives what it says; none if the device is lost.
    ///
    /// While the device takes or gives memory of ours, what is in use is somewhere between two numbers, and the larger
    /// is believed; so what others hold is not believed to have become less.
    pub(super) fn measure(&mut self) -> Result<Option<DeviceMemory>, DeviceError> {
        let Some((memory, foreign)) = self.seen()? else { return Ok(None) };
        self.step(Input::Foreign(foreign));
        Ok(Some(memory))
    }

    /// What the driver says, and what of it others hold.
    pub(super) fn seen(&self) -> Result<Option<(DeviceMemory, Bytes)>, DeviceError> {
        let is_settled = self.is_settled();
        let before = self.in_use();
        let Some(memory) = self.memory()? else { return Ok(None) };
        let account = self.ledger.account(Memory::Device);
        let foreign = (memory.total - memory.free).saturating_sub(account.overhead + self.ours(&before));
        let foreign = if is_settled && self.is_settled() { foreign } else { foreign.max(account.foreign) };
        Ok(Some((memory, foreign)))
    }

    /// Whether the device is asked for no memory of ours and is given none.
    fn is_settled(&self) -> bool {
        let books = self.mailbox.books();
        books.watch.is_idle() && !books.meters.values().any(LeaseMeter::is_moving)
    }

    fn memory(&self) -> Result<Option<DeviceMemory>, DeviceError> {
        match self.device.memory() {
            // Nothing is free on it and nothing is foreign; whoever is told of the loss ends what is left.
            Err(error) if error.is_lost() => Ok(None),
            memory => memory.map(Some),
        }
    }

    /// What our process holds beside leases and overhead, if the driver tells processes apart: it has to be nothing.
    ///
    /// Without the driver's word (`Device::process_bytes`) drift cannot be told from foreign: both are used and neither is
    /// ours by the books. For the ledger it is foreign in any case, so that rule 1 is true of it too.
    pub(super) fn drift(&self) -> Option<Bytes> {
        let held = self.beside()?;
        Some(held.saturating_sub(self.mailbox.books().beside))
    }

    /// What our process holds beside leases and what the device counts as overhead, whether it is known why or not.
    fn beside(&self) -> Option<Bytes> {
        let before = self.in_use();
        let ours = self.device.process_bytes()?;
        Some(ours.saturating_sub(self.device.overhead() + self.ours(&before)))
    }

    /// What is in use of each device lease.
    pub(super) fn in_use(&self) -> BTreeMap<LeaseId, Bytes> {
        let books = self.mailbox.books();
        let used = books.meters.iter().filter_map(|(lease, meter)| {
            let holding = self.ledger.holding(*lease).filter(|holding| holding.class.memory() == Memory::Device)?;
            Some((*lease, meter.used(holding.bytes)))
        });
        used.collect()
    }

    /// What our leases used at most since `before` was read. Whoever backs or unbacks meanwhile must not look like
    /// another process.
    fn ours(&self, before: &BTreeMap<LeaseId, Bytes>) -> Bytes {
        self.in_use().iter().map(|(lease, now)| before.get(lease).map_or(*now, |before| *now.max(before))).sum()
    }

    /// An owner obeys from now on.
    pub(super) fn obeyed(&mut self, lease: LeaseId, elastic: Elastic) {
        // One that is revoked meanwhile has no use for it.
        if self.ledger.holding(lease).is_some() {
            self.step(Input::Floor { lease, to: elastic.floor });
            self.mailbox.books().elastic.insert(lease, elastic);
            self.step(Input::Remind { ahead: Bytes::ZERO });
        }
    }

    pub(super) fn order(&self, lease: LeaseId, order: Order) {
        let orders = self.mailbox.books().elastic.get(&lease).map(|elastic| elastic.orders.clone());
        orders.iter().for_each(|orders| orders(order));
    }

    /// What has stayed free goes back to those who gave it up, the eldest lease first.
    fn offer_growth(&mut self) {
        let account = *self.ledger.account(Memory::Device);
        let look = Look {
            at: self.born.elapsed(),
            available: account.available(),
            is_pressed: !account.owed().is_zero()
                || account.canary < account.canary_wanted
                || self.ledger.waiting_for(Memory::Device) > 0
                || self.ledger.is_profiling(),
        };
        let wanting: Vec<Wanting> = {
            let books = self.mailbox.books();
            let wanting = books.elastic.iter().filter_map(|(lease, elastic)| {
                let Elastic { most, step, .. } = *elastic;
                let bytes = self.ledger.holding(*lease)?.bytes;
                Some(Wanting { lease: *lease, bytes, most, step })
            });
            wanting.collect()
        };
        for offer in self.regrowth.look(look, &wanting) {
            self.order(offer.lease, Order::MayGrow { to: offer.to });
        }
    }
}
