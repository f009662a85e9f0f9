//! Pure: the number of KV cache blocks after READY. One change runs at a time. Shrinking takes
//! precedence, and growth is accepted only while no order to shrink is pending.

use crate::profile::shrunk;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Shrink to at most this many blocks.
    GiveUp(usize),
    /// The pool may grow to at most this many blocks.
    MayGrow(usize),
    /// `true` if the scheduler serves, `false` while it is being replaced.
    Serving(bool),
    /// Serving was refused memory and is stopped. Shrink to at most this many blocks,
    /// permanently. If the pool is already this small, shrink by five percent, so that the
    /// refused work finds memory.
    Cap(usize),
    /// Serving is stopped until pending orders are carried out.
    Pause,
    /// The change in progress has ended with this outcome.
    Ended(ResizeOutcome),
}

/// A change to make now. [`Input::Ended`] must follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Have the scheduler give up all but the first `to` blocks, then unback the rest.
    Shrink { to: usize },
    /// Back more blocks, then let the scheduler use them.
    Grow { from: usize, to: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResizeOutcome {
    /// The change is complete.
    Done,
    /// Another process or lease took the memory first. The size is as before.
    Refused,
    /// The scheduler died before it answered, or the engine is being ended. Nothing was unbacked.
    Interrupted,
}

/// The size of the pool, and the change in progress.
#[derive(Clone, Copy, Debug)]
pub struct PoolCore {
    /// Blocks that the serving actors may use. During a shrink, this is already the smaller number.
    blocks: usize,
    /// The smallest number of blocks: enough for one sequence of the full context, or a whole step.
    floor: usize,
    /// The model's share: the blocks at READY, or fewer after a refusal.
    most: usize,
    /// The largest number of blocks, including borrowed memory.
    limit: usize,
    serving: bool,
    /// The smallest ordered size to which the pool has not begun to shrink yet.
    ordered: Option<usize>,
    under_way: Option<Change>,
    /// Whether the change in progress was interrupted and waits for a scheduler.
    interrupted: bool,
    /// `true` while serving waits for the end of the current change and of the ordered change.
    quiet: bool,
}

impl PoolCore {
    /// A pool of `most` blocks that never shrinks below `floor`, and grows up to `limit` with
    /// borrowed memory.
    pub fn new(floor: usize, most: usize, limit: usize) -> Self {
        let (floor, limit) = (floor.min(most), limit.max(most));
        PoolCore {
            blocks: most,
            floor,
            most,
            limit,
            serving: false,
            ordered: None,
            under_way: None,
            interrupted: false,
            quiet: false,
        }
    }

    /// The number of blocks that the serving actors may use.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The model's share of blocks.
    pub fn most(&self) -> usize {
        self.most
    }

    /// The largest number of blocks, including borrowed memory.
    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// The smallest number of blocks.
    pub fn floor(&self) -> usize {
        self.floor
    }

    /// Processes one input. Returns the change that begins or begins again.
    pub fn step(&mut self, input: Input) -> Option<Change> {
        match input {
            Input::GiveUp(to) => {
                self.order(to.max(self.floor));
            }
            Input::MayGrow(to) => {
                let to = to.min(self.limit);
                if self.under_way.is_none() && self.ordered.is_none() && to > self.blocks {
                    self.under_way = Some(Change::Grow { from: self.blocks, to });
                    return self.under_way;
                }
            }
            Input::Serving(serving) => self.serving = serving,
            Input::Cap(most) => {
                assert!(!self.serving, "a pool is capped only while no scheduler serves");
                (self.most, self.quiet) = (most.clamp(self.floor, self.most), true);
                // A model that was refused memory must not borrow memory.
                self.limit = self.most;
                let to = if self.most < self.blocks {
                    self.most
                } else {
                    // Memory was refused even though the pool is already this small.
                    shrunk(self.blocks, 1).max(self.floor)
                };
                self.order(to);
            }
            Input::Pause => {
                assert!(!self.serving, "a pool is paused only while no scheduler serves");
                self.quiet = true;
            }
            Input::Ended(ResizeOutcome::Interrupted) => self.interrupted = true,
            Input::Ended(outcome) => {
                let ended = self.under_way.take();
                if let (Some(Change::Grow { to, .. }), ResizeOutcome::Done) = (ended, outcome) {
                    self.blocks = to;
                    // A cap may have arrived during the change.
                    self.order(self.limit);
                }
            }
        }
        self.next()
    }

    /// Orders a size of at most `to` blocks.
    fn order(&mut self, to: usize) {
        if to < self.blocks {
            self.ordered = Some(self.ordered.map_or(to, |before| before.min(to)));
        }
    }

    fn next(&mut self) -> Option<Change> {
        if !self.serving && !self.quiet {
            return None;
        }
        if self.under_way.is_some() {
            return std::mem::take(&mut self.interrupted).then_some(self.under_way).flatten();
        }
        let Some(to) = self.ordered.take() else {
            self.quiet = false;
            return None;
        };
        // The number is set at once, so that a scheduler that restarts during the change starts
        // with this size.
        self.blocks = to;
        self.under_way = Some(Change::Shrink { to });
        self.under_way
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn serving() -> PoolCore {
        let mut pool = PoolCore::new(16, 100, 100);
        assert_eq!(pool.step(Input::Serving(true)), None);
        pool
    }

    #[test]
    fn a_shrink_order_begins_at_once_and_later_orders_wait() {
        let mut pool = serving();
        assert_eq!(pool.step(Input::GiveUp(60)), Some(Change::Shrink { to: 60 }));
        assert_eq!(pool.blocks(), 60, "a scheduler that starts now gets this many blocks");
        assert_eq!(pool.step(Input::GiveUp(60)), None, "a repeated order has no effect");
        assert_eq!(pool.step(Input::GiveUp(40)), None);
        assert_eq!(pool.step(Input::GiveUp(50)), None, "the smallest order counts");
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Done)), Some(Change::Shrink { to: 40 }));
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Done)), None);
        assert_eq!(pool.blocks(), 40);
    }

    #[test]
    fn no_order_shrinks_below_the_floor() {
        let mut pool = serving();
        assert_eq!(pool.step(Input::GiveUp(0)), Some(Change::Shrink { to: 16 }));
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Done)), None);
        assert_eq!(pool.step(Input::GiveUp(3)), None, "a pool at its floor has no blocks to give up");
    }

    #[test]
    fn a_pool_never_grows_while_shrinking_or_beyond_stressed_blocks() {
        let mut pool = serving();
        assert_eq!(pool.step(Input::MayGrow(200)), None, "the pool already has every stressed block");
        assert_eq!(pool.step(Input::GiveUp(50)), Some(Change::Shrink { to: 50 }));
        assert_eq!(pool.step(Input::MayGrow(80)), None);
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Done)), None, "an offer during a shrink is not remembered");
        assert_eq!(pool.step(Input::MayGrow(200)), Some(Change::Grow { from: 50, to: 100 }));
        assert_eq!(pool.blocks(), 50, "the pool has its old size until the growth is backed");
        assert_eq!(pool.step(Input::GiveUp(40)), None, "an order waits until the growth has ended");
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Refused)), Some(Change::Shrink { to: 40 }));
    }

    #[test]
    fn a_pool_borrows_up_to_its_limit_until_a_cap() {
        let mut pool = PoolCore::new(16, 100, 300);
        pool.step(Input::Serving(true));
        assert_eq!(pool.step(Input::MayGrow(400)), Some(Change::Grow { from: 100, to: 300 }));
        pool.step(Input::Ended(ResizeOutcome::Done));
        assert_eq!((pool.blocks(), pool.most()), (300, 100));
        assert_eq!(pool.step(Input::GiveUp(100)), Some(Change::Shrink { to: 100 }));
        pool.step(Input::Ended(ResizeOutcome::Done));
        assert_eq!(pool.step(Input::MayGrow(200)), Some(Change::Grow { from: 100, to: 200 }));
        pool.step(Input::Serving(false));
        assert_eq!(pool.step(Input::Cap(95)), None);
        assert_eq!(
            pool.step(Input::Ended(ResizeOutcome::Done)),
            Some(Change::Shrink { to: 95 }),
            "the pool grew before the cap"
        );
        assert_eq!((pool.limit(), pool.most()), (95, 95));
    }

    #[test]
    fn an_interrupted_shrink_restarts_with_the_next_scheduler() {
        let mut pool = serving();
        assert_eq!(pool.step(Input::GiveUp(50)), Some(Change::Shrink { to: 50 }));
        // The interruption may be reported before or after the successor starts.
        assert_eq!(pool.step(Input::Serving(false)), None);
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Interrupted)), None);
        assert_eq!(pool.step(Input::Serving(true)), Some(Change::Shrink { to: 50 }));
        assert_eq!(pool.step(Input::Serving(false)), None);
        assert_eq!(pool.step(Input::Serving(true)), None, "the shrink is still under way");
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Interrupted)), Some(Change::Shrink { to: 50 }));
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Done)), None);
    }

    #[test]
    fn a_shrink_order_waits_until_a_scheduler_serves() {
        let mut pool = PoolCore::new(16, 100, 100);
        assert_eq!(pool.step(Input::GiveUp(50)), None);
        assert_eq!(pool.step(Input::Serving(true)), Some(Change::Shrink { to: 50 }));
    }

    #[test]
    fn a_cap_needs_no_scheduler_and_limits_later_growth() {
        let mut pool = serving();
        pool.step(Input::Serving(false));
        assert_eq!(pool.step(Input::Cap(95)), Some(Change::Shrink { to: 95 }));
        assert!(pool.is_quiet(), "a scheduler that starts waits for the shrink");
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Done)), None);
        assert!(!pool.is_quiet());
        pool.step(Input::Serving(true));
        assert_eq!((pool.step(Input::MayGrow(100)), pool.most()), (None, 95));
        // A pool that is already smaller than the cap has nothing to give up.
        assert_eq!(pool.step(Input::GiveUp(40)), Some(Change::Shrink { to: 40 }));
        pool.step(Input::Ended(ResizeOutcome::Done));
        pool.step(Input::Serving(false));
        assert_eq!(
            pool.step(Input::Cap(90)),
            Some(Change::Shrink { to: 38 }),
            "a pool below the cap gives up five percent"
        );
        assert_eq!((pool.step(Input::Ended(ResizeOutcome::Done)), pool.is_quiet()), (None, false));
        pool.step(Input::Serving(true));
        assert_eq!(pool.step(Input::MayGrow(100)), Some(Change::Grow { from: 38, to: 90 }));
        // At the floor there is nothing left to give up, and serving does not wait.
        pool.step(Input::Ended(ResizeOutcome::Done));
        pool.step(Input::GiveUp(0));
        pool.step(Input::Ended(ResizeOutcome::Done));
        pool.step(Input::Serving(false));
        assert_eq!((pool.step(Input::Cap(85)), pool.is_quiet(), pool.blocks()), (None, false, 16));
    }

    #[test]
    fn a_cap_at_the_current_pool_size_removes_five_percent() {
        let mut pool = PoolCore::new(16, 100, 100);
        assert_eq!((pool.step(Input::Cap(80)), pool.most()), (Some(Change::Shrink { to: 80 }), 80));
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Done)), None);
        assert_eq!((pool.step(Input::Cap(80)), pool.most()), (Some(Change::Shrink { to: 76 }), 80));
        assert_eq!(
            (pool.floor(), PoolCore::new(200, 100, 100).floor()),
            (16, 100),
            "the floor is never above the size"
        );
    }

    #[test]
    fn a_cap_waits_for_a_running_change_or_restarts_it() {
        let mut pool = serving();
        pool.step(Input::GiveUp(50));
        pool.step(Input::Ended(ResizeOutcome::Done));
        assert_eq!(pool.step(Input::MayGrow(100)), Some(Change::Grow { from: 50, to: 100 }));
        pool.step(Input::Serving(false));
        assert_eq!((pool.step(Input::Cap(95)), pool.is_quiet()), (None, true));
        assert_eq!(
            pool.step(Input::Ended(ResizeOutcome::Done)),
            Some(Change::Shrink { to: 47 }),
            "50 blocks were too many, so five percent are removed"
        );
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Done)), None);
        pool.step(Input::Serving(true));
        assert_eq!(pool.step(Input::GiveUp(30)), Some(Change::Shrink { to: 30 }));
        pool.step(Input::Serving(false));
        assert_eq!(pool.step(Input::Cap(90)), None);
        assert_eq!(pool.step(Input::Ended(ResizeOutcome::Interrupted)), Some(Change::Shrink { to: 30 }));
        assert_eq!(
            pool.step(Input::Ended(ResizeOutcome::Done)),
            Some(Change::Shrink { to: 28 }),
            "five percent of 30 blocks are removed"
        );
        assert_eq!((pool.step(Input::Ended(ResizeOutcome::Done)), pool.is_quiet()), (None, false));
    }

    #[test]
    fn a_pause_lasts_until_the_pending_shrink_is_done() {
        let mut pool = PoolCore::new(16, 100, 100);
        assert_eq!((pool.step(Input::Pause), pool.is_quiet()), (None, false), "no order was waiting");
        assert_eq!(pool.step(Input::GiveUp(50)), None);
        assert_eq!((pool.step(Input::Pause), pool.is_quiet()), (Some(Change::Shrink { to: 50 }), true));
        assert_eq!((pool.step(Input::Ended(ResizeOutcome::Done)), pool.is_quiet(), pool.most()), (None, false, 100));
    }

    proptest! {
        #[test]
        fn the_pool_changes_once_at_a_time_within_its_bounds(
            inputs in proptest::collection::vec((0u8..9, 0usize..130), 1..60),
        ) {
            let mut pool = PoolCore::new(16, 100, 100);
            // The change that has begun and not ended.
            let mut begun: Option<Change> = None;
            let mut is_serving = false;
            for (kind, blocks) in inputs {
                let input = match (kind, begun) {
                    (0 | 1, _) => Input::GiveUp(blocks),
                    (2, _) => Input::MayGrow(blocks),
                    // No request is admitted while the pool is quiet.
                    (3, _) if pool.is_quiet() => continue,
                    (3, _) => Input::Serving(blocks % 2 == 0),
                    (7 | 8, _) if is_serving => continue,
                    (7, _) => Input::Cap(blocks),
                    (8, _) => Input::Pause,
                    (_, None) => continue,
                    (4, Some(Change::Shrink { .. })) => Input::Ended(ResizeOutcome::Interrupted),
                    (5, Some(Change::Grow { .. })) => Input::Ended(ResizeOutcome::Refused),
                    (_, Some(_)) => Input::Ended(ResizeOutcome::Done),
                };
                if let Input::Serving(serving) = input {
                    is_serving = serving;
                }
                if matches!(input, Input::Ended(_)) {
                    begun = None;
                }
                if let Some(change) = pool.step(input) {
                    prop_assert!(begun.is_none(), "{:?} while {:?}", change, begun);
                    match change {
                        Change::Shrink { to } => prop_assert!((16..100).contains(&to) && pool.blocks() == to),
                        Change::Grow { from, to } => prop_assert!(from == pool.blocks() && from < to && to <= 100),
                    }
                    begun = Some(change);
                }
                prop_assert!((16..=100).contains(&pool.blocks()));
                prop_assert!(!pool.is_quiet() || begun.is_some(), "a quiet pool has a change under way");
            }
        }
    }
}
