//! Pure: the end of leases, and the consequences of any change: the canary, orders to shrink, and
//! waiting requests that can now be served.

use super::{Claim, Effect, Entry, Ledger, Memory, Refusal, RequestKind, State, refuse};
use crate::{Bytes, LeaseId, Owner, Waiting};

impl Ledger {
    pub(super) fn release(&mut self, lease: LeaseId, passed: bool, effects: &mut Vec<Effect>) {
        assert!(lease < self.next_lease, "{lease} was never granted");
        // A dead owner's handle may drop long after its lease was revoked and
        // freed. Ignore that release.
        let Some(entry) = self.leases.get_mut(&lease).filter(|entry| entry.state != State::Revoking) else { return };
        let before = std::mem::replace(&mut entry.state, State::Revoking);
        self.end_growth_and_shrink(lease, before, effects);
        if passed {
            self.free(lease, effects);
        }
    }

    pub(super) fn fence_passed(&mut self, lease: LeaseId, effects: &mut Vec<Effect>) {
        match self.leases.get(&lease).map(|entry| entry.state) {
            Some(State::Revoking) => self.free(lease, effects),
            Some(State::Shrinking { to, request }) => self.set_size(request, lease, to, effects),
            Some(State::Held) | None => {}
        }
    }

    pub(super) fn owner_died(&mut self, owner: Owner, effects: &mut Vec<Effect>) {
        if self.dead.get(&owner.name).is_some_and(|dead| owner.generation <= *dead) {
            return; // The supervisor and the link of the dead actor may both report the death.
        }
        self.dead.insert(owner.name.clone(), owner.generation);
        let reason = || Refusal::OwnerDead { owner: owner.clone() };
        self.withdraw(
            |waiting| matches!(&waiting.kind, RequestKind::New(request) if is_gone(&request.owner, &owner)),
            |_| reason(),
            effects,
        );
        let revoked: Vec<LeaseId> = self.holdings_of(owner.first()..=owner.clone()).map(|holding| holding.id).collect();
        for lease in revoked {
            let entry = self.leases.get_mut(&lease).expect("the lease was collected above");
            let before = std::mem::replace(&mut entry.state, State::Revoking);
            self.end_growth_and_shrink(lease, before, effects);
            if before != State::Revoking {
                effects.push(Effect::Revoking { lease });
            }
        }
        self.clearing.insert(owner);
    }

    /// Refuses the requests to grow or shrink a lease that ends.
    fn end_growth_and_shrink(&mut self, lease: LeaseId, before: State, effects: &mut Vec<Effect>) {
        if let State::Shrinking { request, .. } = before {
            refuse(request, Refusal::NotHeld { lease }, effects);
        }
        self.withdraw_growth(lease, Refusal::NotHeld { lease }, effects);
    }

    pub(super) fn withdraw_growth(&mut self, lease: LeaseId, reason: Refusal, effects: &mut Vec<Effect>) {
        let grows =
            |waiting: &Waiting<RequestKind>| matches!(waiting.kind, RequestKind::Grow { lease: of, .. } if of == lease);
        self.withdraw(grows, |_| reason.clone(), effects);
    }

    pub(super) fn withdraw(
        &mut self,
        leaves: impl Fn(&Waiting<RequestKind>) -> bool,
        reason: impl Fn(&Waiting<RequestKind>) -> Refusal,
        effects: &mut Vec<Effect>,
    ) {
        for memory in [Memory::Device, Memory::Host] {
            for waiting in self.queue_mut(memory).withdraw(&leaves) {
                refuse(waiting.id, reason(&waiting), effects);
            }
        }
    }

    fn free(&mut self, lease: LeaseId, effects: &mut Vec<Effect>) {
        let holding = self.remove(lease);
        effects.push(Effect::Freed { lease, bytes: holding.bytes });
    }

    /// Applies the consequences of a change, in this order: dead owners, the canary, orders
    /// to shrink, waiting requests.
    pub(super) fn settle(&mut self, effects: &mut Vec<Effect>) {
        self.clear_owners(effects);
        self.settle_canary(effects);
        self.settle_deficit(effects);
        for memory in [Memory::Device, Memory::Host] {
            self.refuse_hopeless(memory, effects);
            self.serve_waiting(memory, effects);
        }
    }

    fn clear_owners(&mut self, effects: &mut Vec<Effect>) {
        let cleared: Vec<Owner> = self.clearing.iter().filter(|owner| self.is_released(owner)).cloned().collect();
        for owner in cleared {
            self.clearing.remove(&owner);
            effects.push(Effect::OwnerCleared { owner });
        }
    }

    fn settle_canary(&mut self, effects: &mut Vec<Effect>) {
        let account = &mut self.device;
        let before = account.canary;
        if account.owed().is_zero() {
            account.canary = account.canary_wanted;
        } else if !account.deficit().is_zero() {
            account.canary = Bytes::ZERO;
        }
        let after = account.canary;
        if after < before {
            effects.push(Effect::CanaryGiven { bytes: before - after });
        } else if after > before {
            effects.push(Effect::CanaryTaken { bytes: after - before });
        }
    }

    fn settle_deficit(&mut self, effects: &mut Vec<Effect>) {
        let short_by = self.device.deficit();
        if short_by == self.announced_deficit {
            return;
        }
        self.announced_deficit = short_by;
        if short_by.is_zero() {
            return effects.push(Effect::DeficitOver);
        }
        let (uncovered, mut orders) = self.orders(short_by);
        effects.push(Effect::Deficit { short_by, uncovered });
        effects.append(&mut orders);
    }

    /// Repeats the orders to shrink that are needed until rule 1 holds, the canary is whole and
    /// `ahead` more bytes are free. A deficit is announced before the orders.
    pub(super) fn remind(&self, ahead: Bytes, effects: &mut Vec<Effect>) {
        let (short_by, owed) = (self.device.deficit(), self.device.owed());
        if owed.is_zero() {
            return;
        }
        let wanted = owed.saturating_add(ahead);
        let (uncovered, mut orders) = self.orders(wanted);
        if !short_by.is_zero() {
            // Memory that leases give up covers the deficit first, and then the canary.
            effects.push(Effect::Deficit { short_by, uncovered: uncovered.saturating_sub(wanted - short_by) });
        }
        effects.append(&mut orders);
    }

    /// Chooses leases to shrink until `short_by` bytes will be free. Returns the bytes that no
    /// lease can give up, and the orders to shrink.
    fn orders(&self, short_by: Bytes) -> (Bytes, Vec<Effect>) {
        let on_its_way: Bytes = self
            .entries()
            .map(|entry| match entry.state {
                _ if entry.holding.class.memory() != Memory::Device => Bytes::ZERO,
                State::Held => Bytes::ZERO,
                State::Shrinking { to, .. } => entry.holding.bytes - to,
                State::Revoking => entry.holding.bytes,
            })
            .sum();
        let mut uncovered = short_by.saturating_sub(on_its_way);
        // Shrink cheap classes first. Within a class, shrink the youngest lease first, because it
        // has the least to lose.
        let mut elastic: Vec<_> = self
            .entries()
            .filter(|entry| entry.state == State::Held)
            .filter_map(|entry| Some((entry.holding.class.gives_up_rank()?, std::cmp::Reverse(entry.holding.id))))
            .collect();
        elastic.sort_unstable();
        let mut orders = Vec::new();
        for (_, std::cmp::Reverse(lease)) in elastic {
            let Entry { holding, floor, .. } = &self.leases[&lease];
            let less = uncovered.min(holding.bytes.saturating_sub(*floor));
            if !less.is_zero() {
                uncovered -= less;
                let (owner, class, to) = (holding.owner.clone(), holding.class.clone(), holding.bytes - less);
                orders.push(Effect::GiveUp { lease, owner, class, to });
            }
        }
        (uncovered, orders)
    }

    /// Refuses waiting requests that can never be met. The reason is either that the request's
    /// gate has closed, or that overhead and the canary have grown so much that the request would
    /// block the queue forever.
    fn refuse_hopeless(&mut self, memory: Memory, effects: &mut Vec<Effect>) {
        let attainable = self.account(memory).attainable();
        let hopeless: Vec<_> = self
            .queue(memory)
            .iter()
            .filter_map(|waiting| {
                let size = waiting.kind.size();
                let reason = match size.checked_sub(attainable).filter(|short_by| !short_by.is_zero()) {
                    Some(short_by) => Refusal::TooLarge { asked: size, attainable, short_by },
                    None => self.check_waiting(waiting).err()?,
                };
                Some((waiting.id, reason))
            })
            .collect();
        for (id, reason) in hopeless {
            self.withdraw(|waiting| waiting.id == id, |_| reason.clone(), effects);
        }
    }

    fn check_waiting(&self, waiting: &Waiting<RequestKind>) -> Result<(), Refusal> {
        let (owner, class, model) = match &waiting.kind {
            RequestKind::New(request) => (&request.owner, &request.class, &request.model),
            RequestKind::Grow { lease, .. } => {
                let holding = &self.leases[lease].holding;
                (&holding.owner, &holding.class, &holding.model)
            }
        };
        self.check_gate(Claim { owner, class, model, more: waiting.bytes })
    }

    fn serve_waiting(&mut self, memory: Memory, effects: &mut Vec<Effect>) {
        loop {
            let available = self.account(memory).available();
            let Some(waiting) = self.queue_mut(memory).pop_fitting(available) else { return };
            // A grant made earlier in this loop may have used up the claimant's reservation.
            match self.check_waiting(&waiting) {
                Ok(()) => self.fulfil(waiting, effects),
                Err(reason) => refuse(waiting.id, reason, effects),
            }
        }
    }
}

/// Whether the death of `dead` implies that `owner` is dead too: both have the same name, and
/// `owner` has the same or an earlier generation.
fn is_gone(owner: &Owner, dead: &Owner) -> bool {
    owner.name == dead.name && owner.generation <= dead.generation
}
