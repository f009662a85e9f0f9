//! Execution of the ledger's decisions. The mailbox's records, events and metrics are updated
//! before the answer is sent.

use bursar_budgets::{Bytes, Class, Effect, Grant, Input, Lease, LeaseId, Memory, Refusal, Refused, Resized};

use super::{Asked, Asker, BudgetState, ResizeOrder, lease_sums};
use crate::event::{Event, Leased};

impl BudgetState {
    pub(super) fn act(&mut self, effect: Effect) {
        match effect {
            Effect::Granted(grant) => self.granted(&grant),
            Effect::Resized(resized) => self.resized(resized),
            Effect::Refused(refused) => self.refused(refused),
            Effect::Revoking { lease } => self.revoking(lease),
            Effect::Freed { lease, .. } => self.forget(lease),
            Effect::OwnerCleared { .. } => self.answer_cleared(),
            Effect::GateMoved { model, to } => drop(self.mailbox.books().gates.insert(model, to)),
            Effect::GiveUp { lease, to, .. } => self.order(lease, ResizeOrder::GiveUp { to }),
            // The canary is reported after every message, and the other effects need no action
            // here.
            Effect::CanaryGiven { .. }
            | Effect::CanaryTaken { .. }
            | Effect::Deficit { .. }
            | Effect::DeficitOver
            | Effect::Waiting { .. }
            | Effect::GateStuck(_) => {}
        }
    }

    fn granted(&mut self, grant: &Grant) {
        let lease = Lease::issue(grant, self.mailbox.clone());
        self.enter(&lease);
        if lease.class().is_elastic() {
            // Nothing in the lease counts as reclaimable until its owner accepts resize orders.
            self.step(Input::Floor { lease: lease.id(), to: Bytes::MAX });
        }
        match self.asked.remove(&grant.request()) {
            Some(Asked { asker: Asker::Lease(reply), since, .. }) => {
                self.show_wait(lease.class(), since.elapsed());
                reply.answer(Ok(lease));
            }
            // The caller no longer waits. Dropping the lease posts its release note.
            _ => drop(lease),
        }
    }

    /// Adds a new lease to the mailbox's records and reports the lease.
    fn enter(&mut self, lease: &Lease) {
        let holding = lease.holding();
        {
            let mut books = self.mailbox.books();
            books.last_lease = Some(lease.id());
            if holding.class.memory() == Memory::Device {
                books.meters.insert(lease.id(), lease.meter());
            }
        }
        self.leased(lease_sums::line(&holding.model, &holding.class), Bytes::ZERO, holding.bytes);
        self.mailbox.report_lease(&holding, Event::LeaseGranted);
        self.mailbox.leases().insert(lease.id(), holding);
    }

    fn resized(&mut self, resized: Resized) {
        self.enter_size(&resized);
        if let Some(Asked { what, since, asker: Asker::Resize(reply) }) = self.asked.remove(&resized.request()) {
            if resized.to() > resized.from() {
                what.iter().for_each(|(_, class, _)| self.show_wait(class, since.elapsed()));
            }
            reply.answer(Ok(resized));
        }
    }

    /// Records the new size of a lease in the mailbox and reports the resize.
    fn enter_size(&mut self, resized: &Resized) {
        let (from, to) = (resized.from(), resized.to());
        let held = self.mailbox.leases().get_mut(&resized.lease()).map(|mut entry| {
            entry.bytes = to;
            entry.clone()
        });
        let Some(holding) = held else { return };
        self.leased(lease_sums::line(&holding.model, &holding.class), from, to);
        self.mailbox.report_lease(&holding, |Leased { lease, model, class, .. }| Event::LeaseResized {
            lease,
            model,
            class,
            from,
            to,
        });
    }

    fn refused(&mut self, refused: Refused) {
        let Some(Asked { what, asker, .. }) = self.asked.remove(&refused.request) else { return };
        if let Some((model, class, bytes)) = what {
            self.show_refusal(&class, &refused.reason);
            let reason = refused.reason.clone();
            // A request that its caller withdrew does not count as refused.
            if reason != Refusal::Withdrawn {
                self.mailbox.events().record(Event::LeaseRefused { model, class, bytes, reason });
            }
        }
        match asker {
            Asker::Lease(reply) => reply.answer(Err(refused.reason)),
            Asker::Resize(reply) => reply.answer(Err(refused.reason)),
        }
    }

    fn revoking(&mut self, lease: LeaseId) {
        let held = self.mailbox.leases().get(&lease).map(|entry| entry.clone());
        held.iter().for_each(|holding| self.mailbox.report_lease(holding, Event::LeaseRevoked));
        let mut books = self.mailbox.books();
        books.ending.insert(lease);
        books.watch.revoke(lease, self.device.fence_here());
    }

    fn forget(&mut self, lease: LeaseId) {
        if let Some((_, holding)) = self.mailbox.leases().remove(&lease) {
            self.leased(lease_sums::line(&holding.model, &holding.class), holding.bytes, Bytes::ZERO);
            self.mailbox.report_lease(&holding, Event::LeaseFreed);
            if holding.class == Class::Graphs {
                self.keep(holding.bytes);
            }
        }
        let mut books = self.mailbox.books();
        books.ending.remove(&lease);
        books.meters.remove(&lease);
        books.elastic.remove(&lease);
    }
}
