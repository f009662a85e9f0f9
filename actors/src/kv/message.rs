//! What the kv actor can be asked.

use tracing::Span;

use super::{Allotment, Demand, Filled, KvUse, SequenceId};
use crate::{responder::Responder, supervise::FaultInjection};

/// Messages from the scheduler; anyone may ask for `Usage`. Credit: one `Allot` at a time, because a scheduler prepares
/// one step at a time.
#[derive(Debug)]
pub enum KvMessage {
    /// Asks for the next step's blocks; see [`crate::tree::ALLOT_BLOCKS`].
    Allot {
        /// In order of precedence.
        demands: Vec<Demand>,
        /// The request spans of sequences without blocks.
        spans: Vec<(SequenceId, Span)>,
        /// The demands that were met.
        reply: Responder<Allotment>,
    },
    /// Blocks that a step has filled, which others may share now.
    Name(Vec<Filled>),
    /// Sequences that ended or were preempted.
    Release(Vec<SequenceId>),
    /// Gives up all but the first `to` blocks; see [`crate::tree::SHRINK_BLOCKS`].
    Shrink {
        /// The number of blocks that stay.
        to: usize,
        /// The sequences that lost their blocks. They hold nothing any more.
        reply: Responder<Vec<SequenceId>>,
    },
    /// Grows the pool to this many blocks.
    Grow(usize),
    /// How blocks are used, for gauges and tests.
    Usage(Responder<KvUse>),
    /// Sets the gauges again. The actor sends this to itself, for a recorder installed since.
    Show,
    /// Fails the actor on purpose.
    InjectFault(FaultInjection),
}
