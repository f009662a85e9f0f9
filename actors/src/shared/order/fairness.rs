//! Pure: the priority of a request, the sort key of an entry in the queue, and the rule that
//! periodically serves the oldest entry.

use super::tenants::Tenants;
use crate::tenant::Tenant;

/// How many other entries may be served while the oldest entry waits. The oldest entry is served
/// after that many others. Priorities therefore decide seven of eight admissions, even with a long
/// queue of less urgent requests. If priority instead rose with age, a long queue of old requests
/// would make priorities useless.
const BEFORE_OLDEST: u32 = 7;

/// How many entries may overtake an entry that is next but does not fit. These entries are in
/// addition to the [`BEFORE_OLDEST`] entries that may be served before the oldest entry.
pub(super) const PASSES_MAX: u32 = 32;

/// How many further entries are tried when the next entry does not fit.
const LOOKED_AT: usize = 8;

/// The properties that decide when a request is served, in addition to its age.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Priority {
    /// Lower is served earlier, as in vLLM.
    pub priority: i32,
    pub tenant: Tenant,
    /// `true` if the request was served before and then lost its resources. Its reader may have
    /// received a part of the reply, and waits for the rest.
    pub had_turn: bool,
}

impl Priority {
    /// The sort key of the request with this id, given the tenants' counters. Among requests of
    /// equal priority, the requests that were served before come first, because readers wait for
    /// the rest of their replies. The tenant's counter is ignored for these requests.
    pub(super) fn place<I>(&self, tenants: &Tenants, id: I) -> QueuePosition<I> {
        let given = if self.had_turn { 0 } else { tenants.counter(&self.tenant) };
        QueuePosition { priority: self.priority, is_new: !self.had_turn, given, id }
    }
}

/// The sort key of an entry. The entry with the smallest key is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueuePosition<I> {
    priority: i32,
    is_new: bool,
    given: u64,
    id: I,
}

/// The oldest waiting entry, and how many other entries were served since it became the oldest.
#[derive(Debug)]
pub(super) struct OldestWaiting<I> {
    oldest: Option<I>,
    served: u32,
}

impl<I> Default for OldestWaiting<I> {
    fn default() -> Self {
        OldestWaiting { oldest: None, served: 0 }
    }
}

impl<I: Copy + Ord> OldestWaiting<I> {
    /// Returns `oldest` if it must be served now, because [`BEFORE_OLDEST`] other entries were
    /// served while it waited.
    pub(super) fn of(&self, oldest: Option<I>) -> Option<I> {
        oldest.filter(|_| self.oldest == oldest && self.served >= BEFORE_OLDEST)
    }

    /// The entries that may be served next, in order: the next entry, followed by entries that may
    /// overtake the next entry if it does not fit.
    pub(super) fn order(&self, oldest: Option<I>, places: impl Iterator<Item = QueuePosition<I>>) -> Vec<I> {
        let mut places: Vec<_> = places.collect();
        if places.len() > LOOKED_AT + 1 {
            places.select_nth_unstable(LOOKED_AT);
            places.truncate(LOOKED_AT + 1);
        }
        places.sort_unstable();
        let mut order: Vec<_> = places.into_iter().map(|place| place.id).collect();
        if let Some(oldest) = self.of(oldest) {
            order.retain(|id| *id != oldest);
            order.insert(0, oldest);
        }
        order
    }

    /// Counts that `id` is served. `id` must still be in the queue.
    pub(super) fn count(&mut self, oldest: Option<I>, id: I) {
        if self.oldest != oldest || oldest == Some(id) {
            *self = OldestWaiting { oldest: oldest.filter(|oldest| *oldest != id), served: 0 };
        }
        self.served += 1;
    }
}
