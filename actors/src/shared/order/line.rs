//! Pure: a queue of waiting entries, in the order in which they are served.

use std::{collections::BTreeMap, ops::Index};

use super::{
    fairness::{OldestWaiting, PASSES_MAX, Priority},
    tenants::Tenants,
};
use crate::tenant::{Tenant, TenantWeights};

/// A queue of entries by id. A smaller id means an older entry. Entries need not join in the order
/// of their age.
#[derive(Debug)]
pub(crate) struct Line<I, T> {
    waiting: BTreeMap<I, Waiting<T>>,
    turn: OldestWaiting<I>,
    /// The counters of tenants, which also change while entries that left the queue are served.
    pub(crate) tenants: Tenants,
}

#[derive(Debug)]
struct Waiting<T> {
    priority: Priority,
    /// How many entries overtook this entry while it was next and did not fit.
    passed: u32,
    what: T,
}

impl<I: Copy + Ord, T> Line<I, T> {
    /// An empty queue. `weights` divide the service among tenants.
    pub(crate) fn new(weights: TenantWeights) -> Self {
        Line { waiting: BTreeMap::new(), turn: OldestWaiting::default(), tenants: Tenants::new(weights) }
    }

    /// Adds an entry. The counters of the `served` tenants are not forgotten, because entries that
    /// left the queue may still change these counters.
    pub(crate) fn join<'t>(
        &mut self,
        id: I,
        priority: Priority,
        what: T,
        served: impl IntoIterator<Item = &'t Tenant>,
    ) {
        let waiting = || self.waiting.values().map(|waiting| &waiting.priority.tenant);
        self.tenants.arrive(&priority.tenant, waiting());
        self.tenants
            .forget(waiting().chain(served.into_iter().map(|tenant| -> &Tenant { tenant })).chain([&priority.tenant]));
        self.rejoin(id, priority, what);
    }

    /// Adds an entry that was served and then lost its resources. Its tenant was active all the
    /// time, so the tenant's counter is not raised.
    pub(crate) fn rejoin(&mut self, id: I, priority: Priority, what: T) {
        self.waiting.insert(id, Waiting { priority, passed: 0, what });
    }

    /// Removes an entry that was not served.
    pub(crate) fn leave(&mut self, id: I) -> Option<T> {
        self.waiting.remove(&id).map(|waiting| waiting.what)
    }

    /// Removes the entries for which `stays` returns `false`.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(&T) -> bool) {
        self.waiting.retain(|_, waiting| stays(&waiting.what));
    }

    /// The entries that may be served next, in order: the next entry, followed by entries that may
    /// overtake the next entry if it does not fit.
    pub(crate) fn order(&self) -> Vec<I> {
        self.turn
            .order(self.oldest(), self.waiting.iter().map(|(id, waiting)| waiting.priority.place(&self.tenants, *id)))
    }

    pub(crate) fn contains(&self, id: I) -> bool {
        self.waiting.contains_key(&id)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.waiting.values().map(|waiting| &waiting.what)
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The oldest entry, if it must be served now.
    pub(crate) fn must_serve(&self) -> Option<I> {
        self.turn.of(self.oldest())
    }

    /// Whether another entry may be served before `next`, which does not fit. `next` may not be
    /// overtaken if it was served before, or if too many entries have overtaken it already.
    pub(crate) fn may_be_passed(&self, next: I) -> bool {
        let next = &self.waiting[&next];
        !next.priority.had_turn && next.passed < PASSES_MAX
    }

    /// Counts that another entry is served before `next`. `next` must be an entry that
    /// [may be passed](Self::may_be_passed).
    pub(crate) fn pass(&mut self, next: I) {
        self.waiting.get_mut(&next).expect("the entry is waiting").passed += 1;
    }

    /// Removes an entry because it is served, and charges `cost` to its tenant, unless the tenant
    /// was charged before.
    pub(crate) fn serve(&mut self, id: I, cost: Option<usize>) -> T {
        self.turn.count(self.oldest(), id);
        let Waiting { priority, what, .. } = self.waiting.remove(&id).expect("the entry is waiting");
        if let Some(cost) = cost {
            self.tenants.admit(&priority.tenant, cost);
        }
        what
    }

    fn oldest(&self) -> Option<I> {
        self.waiting.first_key_value().map(|(oldest, _)| *oldest)
    }
}

impl<I: Ord, T> Index<I> for Line<I, T> {
    type Output = T;

    fn index(&self, id: I) -> &T {
        &self.waiting[&id].what
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tenant::Tenant;

    fn priority_of(priority: i32, tenant: &str, had_turn: bool) -> Priority {
        Priority { priority, tenant: Tenant::new(tenant), had_turn }
    }

    fn next(line: &mut Line<u32, ()>, cost: usize) -> u32 {
        let next = line.order()[0];
        line.serve(next, Some(cost));
        next
    }

    #[test]
    fn entries_are_ordered_by_priority_earlier_turn_and_tenant_usage() {
        let mut line = Line::new(TenantWeights::default());
        for (id, priority) in [
            (1, priority_of(0, "a", false)),
            (2, priority_of(0, "a", false)),
            (3, priority_of(0, "b", false)),
            (4, priority_of(0, "b", true)),
        ] {
            line.join(id, priority, (), []);
        }
        line.join(5, priority_of(-1, "a", false), (), []);
        let order: Vec<_> = (0..5).map(|_| next(&mut line, 10)).collect();
        assert_eq!(order, [5, 4, 1, 3, 2]);
    }

    #[test]
    fn every_eighth_served_entry_is_the_oldest() {
        let mut line = Line::new(TenantWeights::default());
        (0..30).for_each(|id| line.join(id, priority_of(if id < 2 { 1 } else { 0 }, "", false), (), []));
        let order: Vec<_> = (0..16).map(|_| next(&mut line, 1)).collect();
        assert_eq!((order[7], order[15]), (0, 1));
    }

    proptest! {
        #[test]
        fn no_entry_is_overtaken_more_often_than_the_bound(
            ranks in proptest::collection::vec((-2i32..3, 0usize..3, any::<bool>(), 1usize..9), 1..80),
            capacities in proptest::collection::vec(0usize..9, 1..9),
        ) {
            // An entry fits if `capacity` is at least its size. `capacity` cycles through the given
            // values, and in every 50th iteration any entry fits.
            let mut line = Line::new(TenantWeights::default());
            for (id, (priority, tenant, had_turn, size)) in ranks.iter().enumerate() {
                line.join(id, priority_of(*priority, ["a", "b", "c"][*tenant], *had_turn), *size, []);
            }
            let (mut oldest, mut passed) = (0, 0);
            for moment in 0.. {
                prop_assert!(moment < 100_000, "the run ends");
                let Some(first) = line.oldest() else { break };
                if first != oldest {
                    (oldest, passed) = (first, 0);
                }
                let capacity = if moment % 50 == 0 { 9 } else { capacities[moment % capacities.len()] };
                let order = line.order();
                let fitting = order.iter().copied().find(|id| line[*id] <= capacity);
                let served = fitting.filter(|id| *id == order[0] || line.may_be_passed(order[0]));
                if let Some(id) = served {
                    if id != order[0] {
                        line.pass(order[0]);
                    }
                    line.serve(id, Some(1));
                    passed += u32::from(id != oldest);
                    prop_assert!(passed <= 7 + PASSES_MAX, "{oldest} was passed {passed} times");
                }
            }
        }
    }
}
