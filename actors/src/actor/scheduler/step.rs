//! Pure: planned and running steps, and running copies of blocks.

use std::{collections::VecDeque, time::Duration};

use bursar_kernels::UnseenToken;
use bursar_model::flow::{FurtherDrafts, StepBatch};

use crate::{
    kv::SequenceId,
    token_interval::{CopyCosts, StepWork},
};

#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    pub batch: StepBatch,
    /// The sequence of each part of the batch.
    pub parts: Vec<SequenceId>,
    /// Whether the step runs a sequence that does not decode: its prompt, or tokens that are
    /// recomputed after a preemption.
    pub has_prompts: bool,
    /// The rows of logits of each sequence that chooses tokens, in order.
    pub rows: Vec<ChosenRows>,
    /// The prompt tokens to score, in the order of the scored rows.
    pub scored: Vec<Scored>,
    /// The pictures that the step reads, and the pictures that no later step reads.
    pub shown: PictureUse,
}

/// The sequences whose pictures must stay in the vision cache for a step, and the sequences whose
/// pictures are no longer needed afterward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PictureUse {
    /// Sequences whose pictures the step reads. These pictures must stay until the step has run.
    pub read: Vec<SequenceId>,
    /// Sequences whose pictures no later step reads, unless they lose their blocks.
    pub no_longer_read: Vec<SequenceId>,
}

/// Rows of logits from which tokens of one sequence are chosen: the row of its last token, and the
/// rows of its drafted tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenRows {
    pub sequence: SequenceId,
    /// How many tokens the sequence will have produced before the token of the first row.
    pub position: usize,
    /// The last token before the token of the first row, if the previous step has yet to choose it.
    pub unseen: Option<UnseenToken>,
    /// Draft tokens, one for each row except the last. A row after the first counts only if each
    /// row before it chose its draft token.
    pub drafts: Vec<u32>,
    /// The drafts that the draft head computes after its first draft. `None` if it computes no
    /// further drafts.
    pub further: Option<FurtherDrafts>,
}

impl ChosenRows {
    /// The number of rows.
    pub fn count(&self) -> usize {
        1 + self.drafts.len()
    }
}

/// Prompt tokens whose log-probabilities a step computes.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    pub sequence: SequenceId,
    /// The index of the first scored token.
    pub first: usize,
    pub tokens: Vec<u32>,
    /// How many of the likeliest tokens to report with each scored token.
    pub top: usize,
}

/// The number of tokens of a sequence that a step runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceTokens {
    pub(super) sequence: SequenceId,
    pub(super) tokens: usize,
    /// Drafted tokens that follow.
    pub(super) drafts: usize,
    /// Number of further drafts that the head computes in this step.
    pub(super) further: usize,
}

/// A step that was submitted to the lane and has not ended.
#[derive(Debug)]
pub(super) struct RunningStep {
    pub(super) sequences: Vec<RunningSequence>,
    /// Sequences that ended although this step includes them. Their blocks are released after the
    /// step.
    pub(super) release_after_step: Vec<SequenceId>,
    pub(super) work: StepWork,
    /// Whether pictures are being encoded on the same GPU while the step runs.
    pub(super) pictures: bool,
    /// When the step was submitted.
    pub(super) launched: Duration,
    pub(super) has_prompts: bool,
    /// The number of decoding sequences, and the limit of drafts for each of them.
    pub(super) drafts: (usize, usize),
}

/// A sequence in a running step.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningSequence {
    pub(super) sequence: SequenceId,
    /// Tokens in the sequence's blocks after the step has run, without drafted tokens.
    pub(super) end: usize,
    /// Whether the step chooses the token after `end`.
    pub(super) chooses: bool,
    /// Drafted tokens after `end`.
    pub(super) drafts: usize,
    /// Number of further drafts. Their keys and values follow those of `drafts`.
    pub(super) further: usize,
}

impl RunningStep {
    pub(super) fn has(&self, sequence: SequenceId) -> bool {
        self.sequences.iter().any(|running| running.sequence == sequence)
    }
}

/// Copies of blocks between the device and host memory.
#[derive(Debug, Default)]
pub(super) struct HostCopies {
    /// The copies that were submitted to the lane, the oldest first.
    pub(super) under_way: VecDeque<CopyUnderWay>,
    pub(super) costs: CopyCosts,
    /// Number of blocks that take as long to copy as one state.
    pub(super) state_blocks: usize,
}

#[derive(Debug)]
pub(super) struct CopyUnderWay {
    /// Number of copied blocks. Each state counts as the number of blocks that take as long to
    /// copy.
    pub(super) blocks: usize,
    /// The sequence that this copy fetches blocks for, and the number of tokens in the sequence's
    /// blocks afterward.
    pub(super) fetches: Option<(SequenceId, usize)>,
}
