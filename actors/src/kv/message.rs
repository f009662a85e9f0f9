//! What may be asked of the kv actor.

use super::{Allotment, Demand, Filled, KvUse, SequenceId};
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
    /// Blocks that a step has filled, for others to take.
    Name(Vec<Filled>),
    /// Sequences that ended, or were preempted.
    Release(Vec<SequenceId>),
    /// How blocks are used: for gauges and tests.
    Usage(Reply<KvUse>),
    /// Die of this.
    Drill(Drill),
}
