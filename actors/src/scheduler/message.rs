//! What may be said to the scheduler.

use tokio::sync::mpsc;

use super::{Finish, NewSequence};
use crate::{kv::SequenceId, lane::LaneError, supervise::Drill, vision::PinnedPictures};

/// From chat drivers (credit: one accepted request each) and from the step lane (one answer a step).
pub enum SchedulerMessage {
    /// A sequence to run.
    Admit(Admission),
    /// Its caller has gone; nothing more is delivered. Unknown sequences are nobody's loss.
    Cancel(SequenceId),
    /// The lane's answer to a step: the tokens chosen, in the plan's order.
    Stepped(Result<Vec<u32>, LaneError>),
    /// Die of this.
    Drill(Drill),
}

/// A sequence with what the decisions about it need not know.
pub struct Admission {
    /// The sequence.
    pub sequence: NewSequence,
    /// Holds its pictures' rows of the vision cache until it ends.
    pub pins: Option<PinnedPictures>,
    /// Where tokens go. It must have room for all the sequence may produce and its end: a full one counts as gone.
    pub deliveries: mpsc::Sender<Delivery>,
}

/// What a driver hears of its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The next token.
    Token(u32),
    /// The end.
    Finished(Finish),
}
