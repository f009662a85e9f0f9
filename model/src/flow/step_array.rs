//! The arrays that a step uploads.

/// An array of a step. [`StepBatch`](super::StepBatch) describes the content of each array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepArray {
    /// `[tokens]`: codes of the input tokens.
    Tokens,
    /// `[tokens]`: the inputs of the draft head; empty if the layout has none.
    DraftTokens,
    /// `[axes, tokens]`: the position of the token after each row; empty unless the layout
    /// [has them](super::StepLayout::has_draft_positions).
    DraftPositions,
    /// `[axes, tokens]`: the position of each row.
    Positions,
    /// `[groups, tokens]`: the KV cache slot of each row.
    Slots,
    /// `[sequences + 1]`: the rows of each sequence as attention sees it.
    QueryStarts,
    /// `[sequences]`: tokens up to and including the last row.
    ContextLengths,
    /// `[tokens]`: [`StepBatch::key_ends`](super::StepBatch::key_ends); empty if attention is causal.
    KeyEnds,
    /// `[logit_rows + score_rows]`: the rows that sample a token, then the rows that score a token.
    /// Empty if [every row samples](super::StepLayout::chooses_in_every_row).
    ChosenRows,
    /// `[picture_rows]`: rows of the step whose embedding comes from a picture.
    EmbeddingRows,
    /// `[picture_rows]`: the row of the vision cache that each of them reads.
    PictureCacheRows,
    /// `[states + 1]`: the rows of the sequences with a state; empty for a model without recurrent
    /// states, like the next five arrays.
    StateStarts,
    /// `[states]`: tokens up to and including the last row.
    StateContexts,
    /// `[states]`: the slot that each state is read from.
    StateReads,
    /// `[states]`: the slot that each state is written to.
    StateWrites,
    /// `[states, SNAPSHOTS]`
    SnapshotRows,
    /// `[states, SNAPSHOTS]`
    SnapshotSlots,
    /// `[groups, sequences, blocks_max]`
    BlockTables,
}

impl StepArray {
    /// All arrays in the order of their offsets. The block tables are last, so that a step that
    /// fills only part of a layout need not upload their unused end.
    pub const ALL: [StepArray; 18] = [
        StepArray::Tokens,
        StepArray::DraftTokens,
        StepArray::DraftPositions,
        StepArray::Positions,
        StepArray::Slots,
        StepArray::QueryStarts,
        StepArray::ContextLengths,
        StepArray::KeyEnds,
        StepArray::ChosenRows,
        StepArray::EmbeddingRows,
        StepArray::PictureCacheRows,
        StepArray::StateStarts,
        StepArray::StateContexts,
        StepArray::StateReads,
        StepArray::StateWrites,
        StepArray::SnapshotRows,
        StepArray::SnapshotSlots,
        StepArray::BlockTables,
    ];
}
