//! What may be asked of the kv actor.

use super::{Allotment, Demand, SequenceId};
use crate::{reply::Reply, supervise::Drill};

/// From the scheduler only. Credit: one `Allot` at a time, as a scheduler has one step in preparation.
#[derive(Debug)]
pub enum KvMessage {
    /// Blocks for the next step; see [`crate::tree::ALLOT_BLOCKS`].
    Allot {
        /// In order of precedence.
        demands: Vec<Demand>,
        /// Those that were met.
        reply: Reply<Allotment>,
    },
    /// Sequences that ended, or were preempted.
    Release(Vec<SequenceId>),
    /// Blocks that are free, and all blocks: for gauges and tests.
    Count(Reply<(usize, usize)>),
    /// Die of this.
    Drill(Drill),
}
