//! The queue for memory: by priority, then first come, first served.

use serde::Serialize;

use crate::{Bytes, Hint, Priority, RequestId};

/// A request that waits for its bytes. The queue does not look at `W`, what the request will get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting<W> {
    /// The request's number.
    pub id: RequestId,
    /// Its priority.
    pub priority: Priority,
    /// How many more bytes it needs.
    pub bytes: Bytes,
    /// What it will get.
    pub wish: W,
}

/// A bounded queue by priority, then age.
///
/// The head blocks the rest on purpose. A small request never overtakes a large one of the same or a higher priority,
/// so the large one gets its turn even under steady small traffic. Within a priority none starves; a lower priority
/// waits as long as a higher one does.
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
    /// The next one comes first.
    queue: Vec<Waiting<W>>,
    waiting_max: usize,
}

/// The queue is full. An unbounded queue would only hide that memory is short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{waiting} requests are already waiting for memory; the limit is {waiting_max}")]
pub struct Overloaded {
    /// How many requests wait.
    pub waiting: usize,
    /// How many may wait.
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

    /// Joins after all requests of the same or a higher priority. Returns how many are ahead.
    ///
    /// # Errors
    /// [`Overloaded`] if the queue is full.
    pub fn push(&mut self, waiting: Waiting<W>) -> Result<usize, Overloaded> {
        assert!(!self.holds(waiting.id), "{} waits already", waiting.id);
        if self.queue.len() >= self.waiting_max {
            return Err(Overloaded { waiting: self.queue.len(), waiting_max: self.waiting_max });
        }
        let ahead = self.ahead_of(waiting.priority);
        self.queue.insert(ahead, waiting);
        Ok(ahead)
    }

    /// How many requests a new one of this priority would wait for.
    pub fn ahead_of(&self, priority: Priority) -> usize {
        self.queue.partition_point(|other| other.priority >= priority)
    }

    /// Takes out the next request if it fits.
    pub fn pop_fitting(&mut self, available: Bytes) -> Option<Waiting<W>> {
        if self.queue.first()?.bytes > available {
            return None;
        }
        Some(self.queue.remove(0))
    }

    /// Takes out all requests for which `leaves` is true, in order.
    pub fn withdraw(&mut self, mut leaves: impl FnMut(&Waiting<W>) -> bool) -> Vec<Waiting<W>> {
        self.queue.extract_if(.., |waiting| leaves(waiting)).collect()
    }

    /// Whether this request waits here.
    pub fn holds(&self, id: RequestId) -> bool {
        self.queue.iter().any(|waiting| waiting.id == id)
    }

    /// All requests, the next one first.
    pub fn iter(&self) -> impl Iterator<Item = &Waiting<W>> {
        self.queue.iter()
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}
