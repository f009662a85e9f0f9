//! Messages of the scheduler actor.

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

/// Messages from chat drivers (one sequence per sample of an accepted request, each with a credit),
/// from the step lane (one answer per step and copy, with at most two steps and six copies running)
/// and from the engine.
pub enum SchedulerMessage {
    Admit(Box<Admission>),
    /// The caller has disconnected, and nothing more is delivered. An unknown sequence is ignored.
    Cancel(SequenceId),
    /// The lane's answer to a step, in the plan's order.
    Stepped(Result<Stepped, LaneError>),
    /// The lane's answer to copies of blocks: how long they took on the device.
    Copied(Result<Duration, LaneError>),
    /// Changes the number of blocks; see [`crate::tree::RESIZE_POOL`]. The engine makes one change
    /// at a time.
    Resize {
        blocks: usize,
        /// Answered when no running or later step uses a block beyond the new number.
        reply: Responder<()>,
    },
    /// More requests of a burst have had time to arrive. The actor sends this to itself, once per
    /// step that began on an idle device.
    Gathered,
    /// Asks how many tokens of a sequence with these prefix keys are cached; see
    /// [`crate::tree::LOOK_UP_PREFIX`]. The blocks may be evicted before the sequence is admitted.
    LookUp {
        /// The keys of the sequence's first blocks.
        prefix: PrefixKeys,
        reply: Responder<usize>,
    },
    /// Asks how the blocks of keys and values are used. Any caller may ask.
    KvUse(Responder<KvUse>),
    /// Sets the gauges again, in case a recorder was installed since. The actor sends this to
    /// itself.
    Show,
    /// Fails the actor on purpose.
    InjectFault(FaultInjection),
}

/// A sequence to admit, with the data that the actor needs and the core's decisions do not.
pub struct Admission {
    pub sequence: NewSequence,
    /// Keeps the rows of the sequence's pictures in the vision cache until no later step reads
    /// them.
    pub pins: Option<Arc<PinnedSet>>,
    /// The channel for deliveries. It must have space for every token, the scores of the prompt,
    /// the number of cached tokens, and the end. A full channel counts as a disconnected caller.
    pub deliveries: mpsc::Sender<Delivery>,
    pub span: Span,
    /// When the sequence's latest token was ready. `None` before the first token.
    pub last_token: Option<Instant>,
}

/// A message to the driver of a sequence.
#[derive(Clone, PartialEq)]
pub enum Delivery {
    /// The sequence begins, and this many of its tokens were found cached.
    Begun(usize),
    /// Scores of prompt tokens. Each token is scored once.
    Scores {
        /// The index of the first scored token.
        first: usize,
        /// The log-probabilities. `None` for a token that could not be scored, for example because
        /// a logit is NaN.
        scores: Vec<Option<LogProbabilities>>,
    },
    /// The next token, and when its step ended. The driver may receive this message late, because
    /// the caller may read the reply slowly.
    Token(Token, Instant),
    /// The sequence has ended for this reason, and was not canceled.
    Finished(Finish),
    /// The sequence has lost its blocks and its pictures, or the cached blocks that should replace
    /// pictures without rows are gone. The driver must admit the sequence again, with all tokens
    /// that it has produced. This is the last delivery of this admission.
    Readmit,
    /// The sequence missed this deadline while it waited, or could no longer meet it. The sequence
    /// has ended.
    Late(Deadline),
    /// The sequence ended because no token could be chosen.
    Broken(Arc<SamplingError>),
}

/// Prints kinds and counts, never the tokens, because they are the user's text.
impl std::fmt::Debug for Delivery {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Delivery::Begun(tokens) => write!(formatter, "Begun({tokens} tokens)"),
            Delivery::Scores { first, scores } => write!(formatter, "Scores({} from {first})", scores.len()),
            Delivery::Token(token, _) => write!(formatter, "Token(at {})", token.position),
            Delivery::Finished(finish) => write!(formatter, "Finished({finish:?})"),
            Delivery::Readmit => write!(formatter, "Readmit"),
            Delivery::Late(deadline) => write!(formatter, "Late({deadline:?})"),
            Delivery::Broken(error) => write!(formatter, "Broken({error})"),
        }
    }
}
