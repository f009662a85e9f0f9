//! Who waits for memory, and who is next: by priority, then first come.

use serde::Serialize;

use crate::{Bytes, Hint, Priority, RequestId};

/// A question that waits for its bytes. `W` is what it will get; the queue does not care.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting<W> {
    /// The question.
    pub id: RequestId,
    /// How urgent.
    pub priority: Priority,
    /// How much more it needs.
    pub bytes: Bytes,
    /// What for.
    pub wish: W,
}

/// A bounded queue by priority, then age.
///
/// The head blocks the rest on purpose: a small ask never overtakes a large one of the same or a higher priority, so that
/// under steady small traffic the large one still gets its turn. Nobody starves inside a priority; a lower priority waits
/// for as long as a higher one does.
///
/// ```
/// use bursar_budgets::*;
/// let mut queue = Admission::new(2);
/// let ask = |id, priority, bytes| Waiting { id: RequestId(id), priority, bytes, wish: () };
/// queue.push(ask(1, Priority::Tenant, Bytes(100)))?;
/// queue.push(ask(2, Priority::Serving, Bytes(900)))?;
/// assert!(queue.push(ask(3, Priority::Startup, Bytes(1))).is_err());
/// assert!(queue.pop_fitting(Bytes(500)).is_none()); // request 1 would fit, and is not next
/// assert_eq!(queue.pop_fitting(Bytes(900)).unwrap().id, RequestId(2));
/// # Ok::<(), Overloaded>(())
/// ```
#[derive(Clone, Debug)]
pub struct Admission<W> {
    /// The next one first.
    queue: Vec<Waiting<W>>,
    waiting_max: usize,
}

/// The queue is full; an unbounded one would only hide that memory is short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{waiting} requests wait for memory already, and at most {waiting_max} may")]
pub struct Overloaded {
    /// How many wait.
    pub waiting: usize,
    /// How many may.
    pub waiting_max: usize,
}

impl Hint for Overloaded {
    type Text = String;

    fn hint(&self) -> String {
        "ask again later, ask for less, or raise the length of the waiting queue".into()
    }
}

impl<W> Admission<W> {
    /// An empty queue of bounded length.
    pub fn new(waiting_max: usize) -> Self {
        Admission { queue: Vec::new(), waiting_max }
    }

    /// Joins behind everybody of the same or a higher priority. Returns how many are ahead.
    ///
    /// # Errors
    /// [`Overloaded`] when the queue is full.
    pub fn push(&mut self, waiting: Waiting<W>) -> Result<usize, Overloaded> {
        assert!(!self.holds(waiting.id), "{} waits already", waiting.id);
        if self.queue.len() >= self.waiting_max {
            return Err(Overloaded { waiting: self.queue.len(), waiting_max: self.waiting_max });
        }
        let ahead = self.ahead_of(waiting.priority);
        self.queue.insert(ahead, waiting);
        Ok(ahead)
    }

    /// How many a newcomer of this priority has to wait for.
    pub fn ahead_of(&self, priority: Priority) -> usize {
        self.queue.partition_point(|other| other.priority >= priority)
    }

    /// The next one, if it fits.
    pub fn pop_fitting(&mut self, available: Bytes) -> Option<Waiting<W>> {
        if self.queue.first()?.bytes > available {
            return None;
        }
        Some(self.queue.remove(0))
    }

    /// Takes out everyone that this is true of, in order.
    pub fn withdraw(&mut self, mut leaves: impl FnMut(&Waiting<W>) -> bool) -> Vec<Waiting<W>> {
        self.queue.extract_if(.., |waiting| leaves(waiting)).collect()
    }

    /// Whether this question waits here.
    pub fn holds(&self, id: RequestId) -> bool {
        self.queue.iter().any(|waiting| waiting.id == id)
    }

    /// Everyone, the next one first.
    pub fn iter(&self) -> impl Iterator<Item = &Waiting<W>> {
        self.queue.iter()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}
