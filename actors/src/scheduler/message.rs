//! What may be said to the scheduler.

use std::sync::Arc;

use bursar_model::{
    error::SamplingError,
    flow::{LogProbabilities, Token},
};
use tokio::{sync::mpsc, time::Instant};
use tracing::Span;

use super::{Finish, NewSequence};
use crate::{
    compute::lane::{LaneError, Stepped},
    kv::SequenceId,
    responder::Responder,
    supervise::FaultInjection,
    vision::PinnedPictures,
};

/// From chat drivers (credit: one accepted request each) and from the step lane (one answer a step, of
/// which two at most are under way).
pub enum SchedulerMessage {
    /// A sequence to run.
    Admit(Admission),
    /// Its caller has gone; nothing more is delivered. Unknown sequences are nobody's loss.
    Cancel(SequenceId),
    /// The lane's answer to a step, in the plan's order.
    Stepped(Result<Stepped, LaneError>),
    /// Use so many blocks from now on; see [`crate::tree::RESIZE_POOL`]. Credit: the engine changes one size at a time.
    Resize {
        /// How many.
        blocks: usize,
        /// No step names another block from now on, and those that did have run.
        reply: Responder<()>,
    },
    /// Prompts that came together are here by now: from itself, once for a step that begins when nothing ran.
    Gathered,
    /// Set the gauges again: from itself, for a recorder that has come since.
    Show,
    /// Die of this.
    InjectFault(FaultInjection),
}

/// A sequence with what the decisions about it need not know.
pub struct Admission {
    /// The sequence.
    pub sequence: NewSequence,
    /// Holds its pictures' rows of the vision cache until no step wants them.
    pub pins: Option<Arc<PinnedPictures>>,
    /// Where tokens go. It must have room for all that the sequence may produce, the scores of its prompt, what was
    /// found, and its end: a full one counts as gone.
    pub deliveries: mpsc::Sender<Delivery>,
    /// The request, as `tracing` knows it.
    pub span: Span,
}

/// What a driver hears of its sequence.
#[derive(Clone, PartialEq)]
pub enum Delivery {
    /// It begins, and so many of its tokens were computed by others.
    Found(usize),
    /// Tokens of the prompt, scored: each once.
    Scores {
        /// Where the first of them stands.
        first: usize,
        /// Their log-probabilities; none where the logits were not numbers.
        scores: Vec<Option<LogProbabilities>>,
    },
    /// The next token, and when its step had ended: the driver may be held up by its caller.
    Token(Token, Instant),
    /// The end.
    Finished(Finish),
    /// It has lost its blocks and its pictures, and is to come again with all that it has produced. The last of this
    /// admission.
    ComeAgain,
    /// The end, as no token could be chosen.
    Broken(Arc<SamplingError>),
}

/// Kinds and counts, never the tokens: they are the user's text.
impl std::fmt::Debug for Delivery {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Delivery::Found(tokens) => write!(formatter, "Found({tokens} tokens)"),
            Delivery::Scores { first, scores } => write!(formatter, "Scores({} from {first})", scores.len()),
            Delivery::Token(token, _) => write!(formatter, "Token(at {})", token.position),
            Delivery::Finished(finish) => write!(formatter, "Finished({finish:?})"),
            Delivery::ComeAgain => write!(formatter, "ComeAgain"),
            Delivery::Broken(error) => write!(formatter, "Broken({error})"),
        }
    }
}
