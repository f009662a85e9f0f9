//! Who is next, and when that is the oldest.

/// So many others may be served before the oldest that waits. Then it is next. Priorities thus keep seven of eight
/// admissions, also beside a long queue of less urgent requests, where an age that makes urgent would end them.
const BEFORE_OLDEST: u32 = 7;

/// Beyond these, so many may be served before one that is next and does not fit yet.
pub(crate) const PASSES_MAX: u32 = 32;

/// How many are looked at for one that fits, when the next does not.
const LOOKED_AT: usize = 8;

/// A place in the order. The least is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueuePosition<I> {
    priority: i32,
    is_new: bool,
    given: u64,
    id: I,
}

impl<I> QueuePosition<I> {
    /// Among equally urgent ones those that had their turn come first, whatever their tenant was `given`, because readers
    /// wait for them.
    pub(crate) fn of(priority: i32, had_turn: bool, given: u64, id: I) -> Self {
        QueuePosition { priority, is_new: !had_turn, given: if had_turn { 0 } else { given }, id }
    }
}

/// The oldest that waits, and how many others were served since it became that.
#[derive(Debug)]
pub(crate) struct OldestWaiting<I> {
    oldest: Option<I>,
    served: u32,
}

impl<I> Default for OldestWaiting<I> {
    fn default() -> Self {
        OldestWaiting { oldest: None, served: 0 }
    }
}

impl<I: Copy + Ord> OldestWaiting<I> {
    /// The oldest that waits, if it is its turn.
    pub(crate) fn of(&self, oldest: Option<I>) -> Option<I> {
        oldest.filter(|_| self.oldest == oldest && self.served >= BEFORE_OLDEST)
    }

    /// Those at these places that may be served next, in order: the one that is next, and some that may pass it if it does
    /// not fit.
    pub(crate) fn order(&self, oldest: Option<I>, places: impl Iterator<Item = QueuePosition<I>>) -> Vec<I> {
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

    /// Counts against the turn of the oldest that `id`, which still waits, is served.
    pub(crate) fn count(&mut self, oldest: Option<I>, id: I) {
        if self.oldest != oldest || oldest == Some(id) {
            *self = OldestWaiting { oldest: oldest.filter(|oldest| *oldest != id), served: 0 };
        }
        self.served += 1;
    }
}
