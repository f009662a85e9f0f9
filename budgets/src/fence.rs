//! Fences: points in the work of a device's lanes. Memory is reclaimed only after the device has
//! passed the fence that follows its last use.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering::SeqCst},
};

/// The counts of a lane's issued and finished work. A lane is an ordered stream: work finishes in
/// the order in which it was issued. Clones share the counts.
///
/// ```
/// use bursar_budgets::Timeline;
/// let lane = Timeline::new();
/// let step = lane.issue();
/// let fence = lane.fence_here();
/// assert!(!fence.is_passed());
/// lane.complete(step);
/// assert!(fence.is_passed());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Timeline(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    issued: AtomicU64,
    completed: AtomicU64,
    /// A counter that is odd while a test or drill holds fences back. Each hold has
    /// a different odd number.
    hold: AtomicU64,
    /// The completed count when the hold began. Fences up to this count had passed by then, and
    /// stay passed during the hold.
    completed_at_hold: AtomicU64,
}

/// One piece of issued work.
#[must_use = "work that is never completed holds back every later fence of its lane"]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The point after all work that was issued before the fence was made. A passed fence stays passed.
#[derive(Clone, Debug, Default)]
#[must_use = "a fence does nothing unless a caller waits for it"]
pub struct Fence(Vec<Mark>);

#[derive(Clone, Debug)]
struct Mark {
    timeline: Timeline,
    /// The last ticket that the fence waits for.
    behind: u64,
    /// The value of [`Counts::hold`] when the fence was made. If the value is odd, the fence was
    /// made during that hold and does not pass until the hold ends, even if the fence waits for no
    /// work.
    hold: u64,
}

impl Timeline {
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts one piece of work as issued to the device.
    pub fn issue(&self) -> Ticket {
        Ticket(self.0.issued.fetch_add(1, SeqCst) + 1)
    }

    /// Counts this work and all earlier work of the lane as finished.
    pub fn complete(&self, ticket: Ticket) {
        let issued = self.0.issued.load(SeqCst);
        assert!(ticket.0 <= issued, "ticket {} is not of this timeline, which has issued {issued}", ticket.0);
        self.0.completed.fetch_max(ticket.0, SeqCst);
    }

    /// Counts all issued work as finished. Call this if a lane died with work in progress, after
    /// synchronizing the device. Otherwise the dead lane's fences would never pass.
    pub fn settle(&self) {
        self.0.completed.fetch_max(self.0.issued.load(SeqCst), SeqCst);
    }

    /// A fence after all work issued so far on this lane.
    pub fn fence_here(&self) -> Fence {
        let mark = Mark { timeline: self.clone(), behind: self.0.issued.load(SeqCst), hold: self.0.hold.load(SeqCst) };
        if mark.is_passed() { Fence::passed() } else { Fence(vec![mark]) }
    }

    /// Injects a fault: fences that have not passed yet do not pass until [`Timeline::let_pass`].
    pub fn hold(&self) {
        if !self.is_held() {
            self.0.completed_at_hold.store(self.0.completed.load(SeqCst), SeqCst);
            self.0.hold.fetch_add(1, SeqCst);
        }
    }

    /// Lets fences pass that [`Timeline::hold`] has kept from passing.
    pub fn let_pass(&self) {
        if self.is_held() {
            self.0.hold.fetch_add(1, SeqCst);
        }
    }

    fn is_held(&self) -> bool {
        self.0.hold.load(SeqCst) % 2 == 1
    }

    fn is_idle(&self) -> bool {
        self.0.completed.load(SeqCst) == self.0.issued.load(SeqCst)
    }
}

impl Mark {
    fn is_passed(&self) -> bool {
        let counts = &self.timeline.0;
        let hold = counts.hold.load(SeqCst);
        if hold % 2 == 1 {
            return self.hold != hold && self.behind <= counts.completed_at_hold.load(SeqCst);
        }
        self.behind <= counts.completed.load(SeqCst)
    }
}

impl Fence {
    /// A fence that waits for nothing.
    pub fn passed() -> Self {
        Default::default()
    }

    /// Whether the device has passed the fence. Never blocks.
    pub fn is_passed(&self) -> bool {
        self.0.iter().all(Mark::is_passed)
    }

    /// A fence that passes once both fences have passed, for memory that two lanes use.
    pub fn and(mut self, other: Fence) -> Fence {
        self.0.extend(other.0.into_iter().filter(|mark| !mark.is_passed()));
        self
    }
}

/// The timelines of all lanes of one device. A [`crate::Device`] uses them to determine whether any
/// lane still uses a piece of memory.
#[derive(Debug, Default)]
pub struct Timelines(Mutex<Lanes>);

#[derive(Debug, Default)]
struct Lanes {
    open: Vec<Timeline>,
    held: bool,
}

impl Timelines {
    /// Adds a lane and returns its timeline.
    pub fn open(&self) -> Timeline {
        let mut lanes = self.lock();
        // Remove lanes whose other handles were dropped and whose work is finished. They
        // cannot delay later fences.
        lanes.open.retain(|lane| Arc::strong_count(&lane.0) > 1 || !lane.is_idle());
        let lane = Timeline::new();
        if lanes.held {
            lane.hold();
        }
        lanes.open.push(lane.clone());
        lane
    }

    /// A fence after all work issued so far on every lane.
    pub fn fence_here(&self) -> Fence {
        self.lock().open.iter().map(Timeline::fence_here).fold(Fence::passed(), Fence::and)
    }

    /// Injects a fault: fences that have not passed yet, and fences of lanes opened later, do not
    /// pass until [`Timelines::let_pass`].
    pub fn hold(&self) {
        let mut lanes = self.lock();
        lanes.held = true;
        lanes.open.iter().for_each(Timeline::hold);
    }

    /// Lets fences pass that [`Timelines::hold`] has kept from passing.
    pub fn let_pass(&self) {
        let mut lanes = self.lock();
        lanes.held = false;
        lanes.open.iter().for_each(Timeline::let_pass);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Lanes> {
        // No code that runs under this lock can panic half-way, so a poisoned lock still
        // guards a valid list.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_timeline_is_kept_until_its_work_is_done() {
        let timelines = Timelines::default();
        let (idle, busy, lives) = (timelines.open(), timelines.open(), timelines.open());
        let _never = busy.issue();
        let step = lives.issue();
        drop((idle, busy));
        let _fourth = timelines.open();
        assert_eq!(timelines.lock().open.len(), 3, "the closed timeline without work is forgotten");
        lives.complete(step);
        assert!(!timelines.fence_here().is_passed(), "the closed timeline with work is not forgotten");
    }

    #[test]
    fn joined_fences_drop_marks_that_have_passed() {
        let (one, other) = (Timeline::new(), Timeline::new());
        let (step, _never) = (one.issue(), other.issue());
        let (early, late) = (one.fence_here(), other.fence_here());
        one.complete(step);
        assert_eq!(late.clone().and(early).0.len(), 1);
        assert!(!Fence::passed().and(late).is_passed());
    }
}
