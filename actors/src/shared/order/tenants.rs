//! Pure: fairness among tenants. Each tenant has a virtual token counter ("Fairness in Serving
//! Large Language Models", OSDI'24, arXiv 2401.00588). Charges are divided by the tenant's weight.
//! The tenant with the smallest counter is next.

use std::collections::{BTreeMap, BTreeSet};

use crate::tenant::{Tenant, TenantWeights};

/// The charge for a prompt token, before weights.
const PROMPT: u64 = 1;
/// The charge for a reply token, before weights: twice that of a prompt token, as in the paper.
const REPLY: u64 = 2;

/// Counter units per charged token of a tenant with weight 1. A token still costs one whole unit at
/// the largest weight.
const PARTS: u64 = TenantWeights::WEIGHT_MAX as u64;

/// How many counters are kept. If there are more, idle tenants are forgotten.
const REMEMBERED: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct Tenants {
    weights: TenantWeights,
    counters: BTreeMap<Tenant, u64>,
    /// The counter that the last served tenant had before it was served.
    last: u64,
    /// Tokens computed since the last [`take_used`](Tenants::take_used), if any
    /// tenant has a weight.
    used: BTreeMap<Tenant, usize>,
}

impl Tenants {
    pub(crate) fn new(weights: TenantWeights) -> Self {
        Tenants { weights, ..Tenants::default() }
    }

    /// The tenant's counter. The tenant with the smallest counter is next.
    pub(crate) fn counter(&self, tenant: &Tenant) -> u64 {
        // With a single tenant the counter decides nothing, so the lookup for
        // each sequence is skipped.
        if self.counters.len() < 2 { 0 } else { self.counters.get(tenant).copied().unwrap_or(0) }
    }

    /// Registers that a request of `tenant` arrives while requests of the `waiting` tenants wait. A
    /// tenant that had no waiting request gets no credit for the time without requests: its counter
    /// rises to the smallest counter of the waiting tenants or, if no tenant waits, to the counter
    /// that the last served tenant had.
    pub(crate) fn arrive<'t>(&mut self, tenant: &Tenant, waiting: impl Iterator<Item = &'t Tenant> + Clone) {
        let is_new = !waiting.clone().any(|other| other == tenant);
        let least = waiting.map(|other| self.counters.get(other).copied().unwrap_or(0)).min();
        let counter = self.counters.entry(tenant.clone()).or_default();
        if is_new {
            *counter = (*counter).max(least.unwrap_or(self.last));
        }
    }

    /// If there are too many tenants, forgets the tenants with the smallest counters. Tenants in
    /// `active` are never forgotten.
    pub(crate) fn forget<'t>(&mut self, active: impl Iterator<Item = &'t Tenant>) {
        if self.counters.len() <= REMEMBERED {
            return;
        }
        let active: BTreeSet<&Tenant> = active.collect();
        let idle = self.counters.iter().filter(|(tenant, _)| !active.contains(tenant));
        let mut idle: Vec<_> = idle.map(|(tenant, counter)| (*counter, tenant.clone())).collect();
        idle.sort_unstable();
        let too_many = self.counters.len() - REMEMBERED;
        idle.into_iter().take(too_many).for_each(|(_, tenant)| _ = self.counters.remove(&tenant));
    }

    /// Charges a tenant for a served entry. `prompt` is the number of prompt tokens, of patches to
    /// encode, or of bytes of pixels to decode. Each queue uses one of these units.
    pub(crate) fn admit(&mut self, tenant: &Tenant, prompt: usize) {
        self.last = self.counters.get(tenant).copied().unwrap_or(0);
        *self.counters.entry(tenant.clone()).or_default() += self.cost(tenant, PROMPT * prompt as u64);
    }

    /// Refunds a sequence that left before any of its prompt was computed.
    pub(crate) fn refund(&mut self, tenant: &Tenant, prompt: usize) {
        self.give_back(tenant, prompt);
    }

    /// Refunds the `found` cached tokens of a prompt, and counts the remaining tokens as used.
    pub(crate) fn find(&mut self, tenant: &Tenant, prompt: usize, found: usize) {
        self.give_back(tenant, found);
        self.count(tenant, prompt - found);
    }

    fn give_back(&mut self, tenant: &Tenant, prompt: usize) {
        let cost = self.cost(tenant, PROMPT * prompt as u64);
        if let Some(counter) = self.counters.get_mut(tenant) {
            *counter = counter.saturating_sub(cost);
        }
    }

    /// Charges a tenant for one computed token of a reply.
    pub(crate) fn token(&mut self, tenant: &Tenant) {
        let cost = self.cost(tenant, REPLY);
        if let Some(counter) = self.counters.get_mut(tenant) {
            *counter += cost;
        }
        self.count(tenant, 1);
    }

    fn cost(&self, tenant: &Tenant, tokens: u64) -> u64 {
        tokens * PARTS / u64::from(self.weights.weight(tenant))
    }

    fn count(&mut self, tenant: &Tenant, tokens: usize) {
        if let Some(counted) = self.weights.counted(tenant) {
            *self.used.entry(counted).or_default() += tokens;
        }
    }

    /// Returns the tokens of prompts and replies that were computed since the last call, by tenant.
    pub(crate) fn take_used(&mut self) -> BTreeMap<Tenant, usize> {
        std::mem::take(&mut self.used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returning_tenant_gains_no_credit_and_keeps_its_debt() {
        let mut tenants = Tenants::default();
        let [busy, calm, new] = ["busy", "calm", "new"].map(Tenant::new);
        tenants.arrive(&busy, std::iter::empty());
        tenants.arrive(&calm, std::iter::empty());
        (0..9).for_each(|_| tenants.admit(&busy, 100));
        assert_eq!((tenants.counter(&busy), tenants.counter(&calm)), (900 * PARTS, 0));
        tenants.arrive(&calm, [&busy].into_iter());
        assert_eq!(
            tenants.counter(&calm),
            900 * PARTS,
            "a returning tenant starts at the lowest counter of the waiting tenants"
        );
        tenants.admit(&calm, 10);
        tenants.arrive(&new, std::iter::empty());
        assert_eq!(
            tenants.counter(&new),
            900 * PARTS,
            "without waiting tenants, a new tenant starts at the counter of the last admission"
        );
        tenants.arrive(&calm, [&new].into_iter());
        assert_eq!(tenants.counter(&calm), 910 * PARTS);
        tenants.arrive(&new, [&calm, &new].into_iter());
        assert_eq!(tenants.counter(&new), 900 * PARTS, "the counter of a waiting tenant does not change");
    }

    #[test]
    fn charges_are_divided_by_weight_and_exclude_cached_tokens() {
        let mut tenants = Tenants::new(TenantWeights::of([("gold", 4)]).expect("the weights are valid"));
        let [gold, free] = ["gold", "free"].map(Tenant::new);
        for tenant in [&gold, &free] {
            tenants.arrive(tenant, std::iter::empty());
            tenants.admit(tenant, 100);
            tenants.find(tenant, 100, 60);
            tenants.token(tenant);
        }
        assert_eq!((tenants.counter(&gold) * 4, tenants.counter(&free)), (42 * PARTS, 42 * PARTS));
        let used = tenants.take_used();
        assert_eq!(
            used.iter().map(|(tenant, tokens)| (tenant.as_str(), *tokens)).collect::<Vec<_>>(),
            [("gold", 41), ("other", 41)]
        );
        assert!(tenants.take_used().is_empty());
    }

    #[test]
    fn idle_tenants_are_forgotten_beyond_a_limit_unlike_active_ones() {
        let mut tenants = Tenants::default();
        let names: Vec<_> = (0..3000).map(|number| Tenant::new(number.to_string())).collect();
        for (number, tenant) in names.iter().enumerate() {
            tenants.arrive(tenant, std::iter::empty());
            tenants.admit(tenant, number);
            tenants.forget([&names[0]].into_iter());
        }
        assert_eq!(tenants.counters.len(), REMEMBERED);
        assert!(tenants.counters.contains_key(&names[0]) && tenants.counters.contains_key(&names[2999]));
    }
}
