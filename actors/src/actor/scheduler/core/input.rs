//! Inputs and effects of the scheduler's core.

use std::time::Duration;

use crate::{
    deadline::Deadline,
    kv::{Copies, SequenceId},
    scheduler::{Finish, NewSequence, StepPlan},
};

/// An event for the scheduler.
#[derive(Clone, Debug)]
pub enum Input {
    /// A sequence that is new or admitted again is queued.
    Admit(Box<NewSequence>),
    /// The caller of this sequence has disconnected.
    Cancel(SequenceId),
    /// The oldest running step has ended. The value has the tokens of each sequence for which the
    /// step chooses, in the plan's order: one token, and one more for each accepted draft. A token
    /// is `None` if no token could be chosen, for example because a logit is NaN.
    Stepped(Vec<Vec<Option<u32>>>),
    /// The draft head's proposals for each sequence for which the step chooses. They continue the
    /// tokens of the next [`Input::Stepped`].
    Drafted(Vec<Vec<u32>>),
    /// The pool must change to this many blocks. A smaller size takes effect when the running steps
    /// and copies have ended.
    Resize(usize),
    /// The delay that [`Effect::Gather`] started has passed.
    Gathered,
    /// The oldest running step took this many µs. The step's [`Input::Stepped`] follows.
    Took(u64),
    /// Whether pictures are being encoded on the same GPU.
    Encodes(bool),
    /// The time since the scheduler began. The time never decreases.
    Now(Duration),
    /// The oldest copies have ended, after this many µs.
    Copied(u64),
}

/// An action for the scheduler actor, which performs the actions in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Run a step after the step that may still be running. The answer arrives as
    /// [`Input::Stepped`].
    Run(Box<StepPlan>),
    /// Copy blocks, after earlier copies and before later steps. The answer arrives as
    /// [`Input::Copied`].
    Copy(Box<Copies>),
    /// These sequences wait without blocks, because the next step lacks this many blocks.
    LacksBlocks(Vec<SequenceId>, usize),
    /// A sequence begins, and this many of its tokens are cached. Sent at most once per
    /// [`Input::Admit`].
    Begun(SequenceId, usize),
    /// A sequence has a new token.
    Token(SequenceId, u32),
    /// A sequence has ended for this reason, and was not canceled.
    Finished(SequenceId, Finish),
    /// A sequence has lost its blocks, after it had released its pictures. The scheduler forgets
    /// the sequence. When the driver has the pictures again, it admits the sequence again under the
    /// same id.
    Readmit(SequenceId),
    /// A sequence that waits or has not begun has missed this deadline, or could no longer meet it.
    /// The scheduler forgets the sequence.
    Late(SequenceId, Deadline),
    /// These sequences hold no blocks any more.
    Released(Vec<SequenceId>),
    /// Send [`Input::Gathered`] after a short delay, because more prompts of the same burst may
    /// arrive.
    Gather,
    /// An [`Input::Resize`] is complete: no running or later step uses a block beyond the new size.
    Resized,
}
