//! What may be asked of the kv actor.

use tracing::Span;

use super::{Allotment, Demand, Filled, KvUse, SequenceId};
use crate::{responder::Responder, supervise::FaultInjection};

/// From the scheduler only. Credit: one `Allot` at a time, as a scheduler has one step in preparation.
#[derive(Debug)]
pub enum KvMessage {
    /// Blocks for the next step; see [`crate::tree::ALLOT_BLOCKS`].
    Allot {
        /// In order of precedence.
        demands: Vec<Demand>,
        /// The requests of those that hold nothing yet, as `tracing` knows them.
        spans: Vec<(SequenceId, Span)>,
        /// Those that were met.
        reply: Responder<Allotment>,
    },
    /// Blocks that a step has filled, for others to take.
    Name(Vec<Filled>),
    /// Sequences that ended, or were preempted.
    Release(Vec<SequenceId>),
    /// Only the first `to` blocks stay; see [`crate::tree::SHRINK_BLOCKS`].
    Shrink {
        /// How many.
        to: usize,
        /// Whose blocks were among the others: they hold nothing any more.
        reply: Responder<Vec<SequenceId>>,
    },
    /// There are so many blocks now.
    Grow(usize),
    /// How blocks are used: for gauges and tests.
    Usage(Responder<KvUse>),
    /// Set the gauges again: from itself, for a recorder that has come since.
    Show,
    /// Die of this.
    InjectFault(FaultInjection),
}
