//! Index arrays of a step on the device, as views of a single upload.

use bursar_kernels::{
    Tensor,
    ops::{
        attention_paged::PagedSequences,
        gated_delta::{SNAPSHOTS, StateSequences},
    },
};

use crate::flow::{StepArray, StepLayout};

/// The arrays of a step. [`StepBatch`](crate::flow::StepBatch) describes their content.
pub struct StepInputs<'a> {
    /// `[tokens]` u32
    pub tokens: Tensor<'a>,
    /// `[axes, tokens]` u32
    pub positions: Tensor<'a>,
    /// The slots and block tables of each cache group.
    pub groups: Vec<GroupInputs<'a>>,
    /// Rows of the sequences and the slots of their states, for a decoder with recurrent states.
    pub states: Option<StateSequences<'a>>,
    /// `[logit_rows + score_rows]` u32; `None` if every row is chosen, in order.
    pub chosen_rows: Option<Tensor<'a>>,
    /// `[tokens]` u32: see [`AttentionMask::key_ends`](bursar_kernels::ops::attention_paged::AttentionMask::key_ends).
    /// `None` if attention is causal.
    pub key_ends: Option<Tensor<'a>>,
    /// `[picture_rows]` u32
    pub picture_rows: Tensor<'a>,
    /// `[picture_rows]` u32
    pub picture_cache_rows: Tensor<'a>,
}

/// The arrays that the attention layers of one cache group read.
pub struct GroupInputs<'a> {
    /// `[tokens]` u32
    pub slots: Tensor<'a>,
    /// Rows, context lengths and block tables of the sequences.
    pub sequences: PagedSequences<'a>,
}

impl<'a> StepInputs<'a> {
    /// Views of the arrays of the draft head's pass after a step. Only the tokens, and in some layouts
    /// the positions, differ from [`over`](Self::over). The head has no recurrent state.
    ///
    /// # Panics
    /// If `step_arrays` is shorter than the layout, or if the step has pictures.
    pub fn of_drafts(step_arrays: &'a Tensor<'_>, layout: &StepLayout) -> Self {
        assert_eq!(layout.picture_rows, 0, "the draft head needs its own rows of pictures, which the layout lacks");
        let tokens = step_arrays.row_range(layout.place(StepArray::DraftTokens));
        let positions = if layout.has_draft_positions() { StepArray::DraftPositions } else { StepArray::Positions };
        let positions = step_arrays.row_range(layout.place(positions)).into_shape([layout.format.axes, layout.tokens]);
        StepInputs { tokens, positions, states: None, ..StepInputs::over(step_arrays, layout) }
    }

    /// Views of a step's arrays. `step_arrays`, `[words]` u32, is the single upload that has all
    /// arrays, at the offsets of `layout`.
    ///
    /// # Panics
    /// If `step_arrays` is shorter than the layout.
    pub fn over(step_arrays: &'a Tensor<'_>, layout: &StepLayout) -> Self {
        let list = |array| step_arrays.row_range(layout.place(array));
        let of_group = |array, group: usize, length: usize| {
            let first = layout.place(array).start + group * length;
            step_arrays.row_range(first..first + length)
        };
        let group = |group| GroupInputs {
            slots: of_group(StepArray::Slots, group, layout.tokens),
            sequences: PagedSequences {
                query_starts: list(StepArray::QueryStarts),
                context_lengths: list(StepArray::ContextLengths),
                block_tables: of_group(StepArray::BlockTables, group, layout.sequences * layout.blocks_max)
                    .into_shape([layout.sequences, layout.blocks_max]),
                single_rows: layout.single_rows,
                has_linked_rows: layout.has_linked_rows,
                query_key_pairs: layout.query_key_pairs,
            },
        };
        StepInputs {
            tokens: list(StepArray::Tokens),
            positions: list(StepArray::Positions).into_shape([layout.format.axes, layout.tokens]),
            groups: (0..layout.format.groups).map(group).collect(),
            states: layout.format.has_states.then(|| StateSequences {
                query_starts: list(StepArray::StateStarts),
                context_lengths: list(StepArray::StateContexts),
                reads: list(StepArray::StateReads),
                writes: list(StepArray::StateWrites),
                snapshot_rows: list(StepArray::SnapshotRows).into_shape([layout.states.sequences, SNAPSHOTS]),
                snapshot_slots: list(StepArray::SnapshotSlots).into_shape([layout.states.sequences, SNAPSHOTS]),
                single_rows: layout.states.single_rows,
                short_sequences: layout.states.short,
            }),
            chosen_rows: (!layout.chooses_in_every_row()).then(|| list(StepArray::ChosenRows)),
            key_ends: layout.has_key_ends.then(|| list(StepArray::KeyEnds)),
            picture_rows: list(StepArray::EmbeddingRows),
            picture_cache_rows: list(StepArray::PictureCacheRows),
        }
    }
}
