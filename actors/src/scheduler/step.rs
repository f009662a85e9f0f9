//! A step: how much of whom runs in it, as it is planned, and while it is under way.

use bursar_model::flow::StepBatch;

use crate::kv::SequenceId;

/// One step to run.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    /// The arrays.
    pub batch: StepBatch,
    /// The sequence of each part of the batch.
    pub parts: Vec<SequenceId>,
    /// For whom each row of logits chooses.
    pub rows: Vec<ChosenRow>,
    /// Whose tokens the scored rows are followed by, in their order.
    pub scored: Vec<Scored>,
    /// The pictures that it reads, and those that nobody reads behind it.
    pub shown: Shown,
}

/// Whose pictures are wanted in the vision cache, and until when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Sequences whose pictures it reads: they stay until it has run.
    pub read: Vec<SequenceId>,
    /// Sequences that want their pictures in no later step, unless they lose their blocks.
    pub past: Vec<SequenceId>,
}

/// A row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenRow {
    /// Whose next token it chooses.
    pub sequence: SequenceId,
    /// How many tokens that will have produced before this one.
    pub position: usize,
    /// The last of those, as a step is fed it, if the step before is still to choose it.
    pub unseen: Option<u32>,
}

/// Tokens of a prompt whose log-probabilities a step yields.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// Whose prompt.
    pub sequence: SequenceId,
    /// Where the first of them stands.
    pub first: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// How many of the likeliest are wanted beside each.
    pub top: usize,
}

/// How much of a sequence is to run in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    pub(super) sequence: SequenceId,
    pub(super) tokens: usize,
}

/// A step that the lane has been given.
#[derive(Debug)]
pub(super) struct StepUnderWay {
    pub(super) parts: Vec<PartUnderWay>,
    /// Those that ended while it had a share of them: their blocks are used until it has run.
    pub(super) released_behind: Vec<SequenceId>,
}

/// A sequence's share of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartUnderWay {
    pub(super) sequence: SequenceId,
    /// Tokens that are in the sequence's blocks when it has run.
    pub(super) end: usize,
    /// Whether it chooses the token that follows them.
    pub(super) chooses: bool,
}

impl StepUnderWay {
    pub(super) fn has(&self, sequence: SequenceId) -> bool {
        self.parts.iter().any(|part| part.sequence == sequence)
    }
}
