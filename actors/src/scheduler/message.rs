//! What the scheduler can be told.

use std::{sync::Arc, time::Duration};

use bursar_model::{
    error::SamplingError,
    flow::{LogProbabilities, PrefixKeys, Token},
};
use tokio::{sync::mpsc, time::Instant};
use tracing::Span;

use super::{Finish, NewSequence};
use crate::{
    compute::lane::{LaneError, Stepped},
    deadline::Deadline,
    kv::{KvUse, SequenceId},
    responder::Responder,
    supervise::FaultInjection,
    vision::PinnedSet,
};

/// Messages from chat drivers (credit: one per accepted request), the step lane (one answer per step and copy, at most two
/// steps and six copies running) and the engine.
pub enum SchedulerMessage {
    /// Admits a sequence.
    Admit(Box<Admission>),
    /// The caller has gone, and nothing more is delivered. An unknown sequence is ignored.
    Cancel(SequenceId),
    /// The lane's answer to a step, in the plan's order.
    Stepped(Result<Stepped, LaneError>),
    /// The lane's answer to copies of blocks: how long the device took.
    Copied(Result<Duration, LaneError>),
    /// Changes the number of blocks; see [`crate::tree::RESIZE_POOL`]. Credit: the engine changes one size at a time.
    Resize {
        /// The new number of blocks.
        blocks: usize,
        /// Answered when no running or later step uses another block.
        reply: Responder<()>,
    },
    /// A burst has had time to arrive. The actor sends this to itself, once per step that began on an idle device.
    Gathered,
    /// How many tokens of a sequence with these names blocks hold; see [`crate::tree::LOOK_UP_PREFIX`]. They may be gone
    /// when it is admitted.
    LookUp {
        /// The names of its first blocks.
        prefix: PrefixKeys,
        /// The answer.
        reply: Responder<usize>,
    },
    /// How the blocks of keys and values are used. Anyone may ask.
    KvUse(Responder<KvUse>),
    /// Sets the gauges again. The actor sends this to itself, for a recorder installed since.
    Show,
    /// Fails the actor on purpose.
    InjectFault(FaultInjection),
}

/// A sequence, with what decisions about it do not need.
pub struct Admission {
    /// The sequence.
    pub sequence: NewSequence,
    /// Holds its pictures' rows of the vision cache until no later step reads them.
    pub pins: Option<Arc<PinnedSet>>,
    /// Where tokens are delivered. It must have room for every token, the scores of the prompt, the cached tokens and
    /// the end: a full channel counts as a caller that has gone.
    pub deliveries: mpsc::Sender<Delivery>,
    /// The request's `tracing` span.
    pub span: Span,
    /// When its latest token was ready. None before the first.
    pub last_token: Option<Instant>,
}

/// What a driver receives for its sequence.
#[derive(Clone, PartialEq)]
pub enum Delivery {
    /// The sequence begins, and others have computed this many of its tokens.
    Found(usize),
    /// Scores of prompt tokens. Each token is scored once.
    Scores {
        /// The index of the first scored token.
        first: usize,
        /// The log-probabilities. None where the logits are not numbers.
        scores: Vec<Option<LogProbabilities>>,
    },
    /// The next token, and when its step ended: the driver may be delayed by its caller.
    Token(Token, Instant),
    /// The end.
    Finished(Finish),
    /// The sequence has lost its blocks and its pictures, or found no blocks for pictures without rows. The driver must
    /// admit it again with all that it has produced.
    /// The last delivery of this admission.
    ComeAgain,
    /// The sequence waited and missed this deadline, or could not meet it any more: the end.
    Late(Deadline),
    /// The sequence ended because no token could be chosen.
    Broken(Arc<SamplingError>),
}

/// Shows kinds and counts, never the tokens, because they are the user's text.
impl std::fmt::Debug for Delivery {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Delivery::Found(tokens) => write!(formatter, "Found({tokens} tokens)"),
            Delivery::Scores { first, scores } => write!(formatter, "Scores({} from {first})", scores.len()),
            Delivery::Token(token, _) => write!(formatter, "Token(at {})", token.position),
            Delivery::Finished(finish) => write!(formatter, "Finished({finish:?})"),
            Delivery::ComeAgain => write!(formatter, "ComeAgain"),
            Delivery::Late(deadline) => write!(formatter, "Late({deadline:?})"),
            Delivery::Broken(error) => write!(formatter, "Broken({error})"),
        }
    }
}
