//! Queue of requests for memory, ordered by priority and then by arrival.

use serde::Serialize;

use crate::{Bytes, Hint, Priority, RequestId};

/// A request that waits for memory. `W` describes what was requested, and the queue does not read
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting<W> {
    pub id: RequestId,
    pub priority: Priority,
    /// The number of additional bytes: the size of a new lease, or the growth of an existing lease.
    pub bytes: Bytes,
    pub kind: W,
}

/// A bounded queue, ordered by priority and then by arrival.
///
/// A request that does not fit blocks all requests after it on purpose. A small request never
/// overtakes a large request of the same or a higher priority, so a steady stream of small requests
/// cannot block the large one forever. Within a priority, no request waits forever. A request of a
/// lower priority waits for as long as requests of a higher priority wait.
///
/// ```
/// use bursar_budgets::*;
/// let mut queue = Admission::new(2);
/// let ask = |id, priority, bytes| Waiting { id: RequestId(id), priority, bytes, kind: () };
/// queue.push(ask(1, Priority::External, Bytes(100)))?;
/// queue.push(ask(2, Priority::Serving, Bytes(900)))?;
/// assert!(queue.push(ask(3, Priority::Startup, Bytes(1))).is_err());
/// assert!(queue.pop_fitting(Bytes(500)).is_none()); // request 1 would fit, and is not next
/// assert_eq!(queue.pop_fitting(Bytes(900)).unwrap().id, RequestId(2));
/// # Ok::<(), Overloaded>(())
/// ```
#[derive(Clone, Debug)]
pub struct Admission<W> {
    /// The waiting requests, in the order of service.
    queue: Vec<Waiting<W>>,
    waiting_max: usize,
}

/// The queue is full. The queue is bounded because an unbounded queue would only hide that memory
/// is short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{waiting} requests are already waiting for memory; the limit is {waiting_max}")]
pub struct Overloaded {
    pub waiting: usize,
    pub waiting_max: usize,
}

impl Hint for Overloaded {
    type Text = String;

    fn hint(&self) -> String {
        "ask again later, ask for less, or raise the limit of the queue".into()
    }
}

impl<W> Admission<W> {
    /// An empty queue for up to `waiting_max` requests.
    pub fn new(waiting_max: usize) -> Self {
        Admission { queue: Vec::new(), waiting_max }
    }

    /// Inserts a request after all requests of the same or a higher priority. Returns the number of
    /// requests ahead of it.
    ///
    /// # Errors
    /// [`Overloaded`] if the queue is full.
    pub fn push(&mut self, waiting: Waiting<W>) -> Result<usize, Overloaded> {
        assert!(!self.holds(waiting.id), "{} is already waiting", waiting.id);
        if self.queue.len() >= self.waiting_max {
            return Err(Overloaded { waiting: self.queue.len(), waiting_max: self.waiting_max });
        }
        let ahead = self.ahead_of(waiting.priority);
        self.queue.insert(ahead, waiting);
        Ok(ahead)
    }

    /// The number of requests that would be served before a new request of this priority.
    pub fn ahead_of(&self, priority: Priority) -> usize {
        self.queue.partition_point(|other| other.priority >= priority)
    }

    /// Removes and returns the next request if it fits.
    pub fn pop_fitting(&mut self, available: Bytes) -> Option<Waiting<W>> {
        if self.queue.first()?.bytes > available {
            return None;
        }
        Some(self.queue.remove(0))
    }

    /// Removes and returns all requests for which `leaves` is true, in queue order.
    pub fn withdraw(&mut self, mut leaves: impl FnMut(&Waiting<W>) -> bool) -> Vec<Waiting<W>> {
        self.queue.extract_if(.., |waiting| leaves(waiting)).collect()
    }

    pub fn holds(&self, id: RequestId) -> bool {
        self.queue.iter().any(|waiting| waiting.id == id)
    }

    /// All requests, in the order of service.
    pub fn iter(&self) -> impl Iterator<Item = &Waiting<W>> {
        self.queue.iter()
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}
