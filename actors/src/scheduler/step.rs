//! A step, as it is planned and while it runs.

use bursar_kernels::UnseenToken;
use bursar_model::flow::StepBatch;

use crate::{kv::SequenceId, pace::StepWork};

/// A step to run.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    /// The arrays that the model reads.
    pub batch: StepBatch,
    /// The sequence of each part of the batch.
    pub parts: Vec<SequenceId>,
    /// The sequence and position of each row of logits.
    pub rows: Vec<ChosenRow>,
    /// The prompt tokens to score, in the order of the scored rows.
    pub scored: Vec<Scored>,
    /// The pictures that it reads, and those that no later step reads.
    pub shown: Shown,
}

/// Which sequences' pictures must stay in the vision cache, and until when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Sequences whose pictures it reads. They must stay until it has run.
    pub read: Vec<SequenceId>,
    /// Sequences whose pictures no later step reads, unless they lose their blocks.
    pub past: Vec<SequenceId>,
}

/// A row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenRow {
    /// The sequence whose next token it chooses.
    pub sequence: SequenceId,
    /// How many tokens the sequence will have produced before this one.
    pub position: usize,
    /// The last of those, if the previous step has yet to choose it.
    pub unseen: Option<UnseenToken>,
}

/// Prompt tokens whose log-probabilities a step computes.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The sequence of the prompt.
    pub sequence: SequenceId,
    /// The index of the first scored token.
    pub first: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// How many of the likeliest tokens to report beside each.
    pub top: usize,
}

/// How many tokens of a sequence a step runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceTokens {
    pub(super) sequence: SequenceId,
    pub(super) tokens: usize,
}

/// A step that the lane has.
#[derive(Debug)]
pub(super) struct StepUnderWay {
    pub(super) parts: Vec<PartUnderWay>,
    /// Sequences that ended while this step includes them. Their blocks are released after it.
    pub(super) released_behind: Vec<SequenceId>,
    /// What it computes.
    pub(super) work: StepWork,
    /// Whether pictures are encoded on the same card while it runs.
    pub(super) pictures: bool,
}

/// A sequence's share of a running step.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartUnderWay {
    pub(super) sequence: SequenceId,
    /// Tokens in the sequence's blocks when the step has run.
    pub(super) end: usize,
    /// Whether it chooses the token that follows them.
    pub(super) chooses: bool,
}

impl StepUnderWay {
    pub(super) fn has(&self, sequence: SequenceId) -> bool {
        self.parts.iter().any(|part| part.sequence == sequence)
    }
}
