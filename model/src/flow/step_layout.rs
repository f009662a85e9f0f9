//! The packing of a step's index arrays into one array, so that a step needs one upload and a
//! captured step finds each array at a fixed address.

use std::ops::Range;

use bursar_kernels::{
    BLOCK_TOKENS,
    ops::{
        gated_delta::{NO_STATE, SNAPSHOTS},
        rotary_kv_write::NO_SLOT,
    },
};

use super::StepBatch;

/// Each array starts at a multiple of this many u32: 128 bytes, the size of a GPU cache line.
const ALIGNMENT: usize = 32;

/// An array of a step. [`StepBatch`] describes the content of each array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepArray {
    /// `[tokens]`
    Tokens,
    /// `[axes, tokens]`
    Positions,
    /// `[groups, tokens]`
    Slots,
    /// `[sequences + 1]`
    QueryStarts,
    /// `[sequences]`
    ContextLengths,
    /// `[logit_rows + score_rows]`: the rows that sample a token, then the rows that score a token.
    /// Empty if [every row samples](StepLayout::chooses_in_every_row).
    ChosenRows,
    /// `[picture_rows]`
    EmbeddingRows,
    /// `[picture_rows]`
    PictureCacheRows,
    /// `[sequences]`; empty for a model without recurrent states, like the next three arrays.
    StateReads,
    /// `[sequences]`
    StateWrites,
    /// `[sequences, SNAPSHOTS]`
    SnapshotRows,
    /// `[sequences, SNAPSHOTS]`
    SnapshotSlots,
    /// `[groups, sequences, blocks_max]`
    BlockTables,
}

impl StepArray {
    /// All arrays in the order of their offsets. The block tables are last, so that a step that
    /// fills only part of a layout need not upload their unused end.
    pub const ALL: [StepArray; 13] = [
        StepArray::Tokens,
        StepArray::Positions,
        StepArray::Slots,
        StepArray::QueryStarts,
        StepArray::ContextLengths,
        StepArray::ChosenRows,
        StepArray::EmbeddingRows,
        StepArray::PictureCacheRows,
        StepArray::StateReads,
        StepArray::StateWrites,
        StepArray::SnapshotRows,
        StepArray::SnapshotSlots,
        StepArray::BlockTables,
    ];
}

/// Properties of a decoder that determine which arrays its steps read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepFormat {
    /// The model's position axes: [`POSITION_AXES`](super::POSITION_AXES), or 1.
    pub axes: usize,
    /// The model's [cache groups](super::CacheGroups).
    pub groups: usize,
    /// Whether some layers have recurrent states.
    pub has_states: bool,
}

/// The sizes of a step. They determine the offset of each array in the packed list of u32, and
/// the step's kernel launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLayout {
    /// Rows of the step, one per token.
    pub tokens: usize,
    pub sequences: usize,
    pub format: StepFormat,
    /// Columns of the block tables.
    pub blocks_max: usize,
    /// Rows that sample a token.
    pub logit_rows: usize,
    /// Rows that score a token.
    pub score_rows: usize,
    /// Rows whose embedding comes from a picture.
    pub picture_rows: usize,
    /// Number of leading sequences with exactly one row each.
    pub single_rows: usize,
    /// Upper bound on the number of query-key pairs in attention.
    pub query_key_pairs: u64,
}

impl StepLayout {
    /// A layout that `batch` fills exactly, for a model that reads `format`.
    pub fn of(batch: &StepBatch, format: StepFormat) -> Self {
        StepLayout {
            tokens: batch.token_count(),
            sequences: batch.sequence_count(),
            format,
            blocks_max: batch.blocks_max(),
            logit_rows: batch.logit_rows.len(),
            score_rows: batch.score_rows.len(),
            picture_rows: batch.picture_rows.len(),
            single_rows: batch.single_rows(),
            query_key_pairs: batch.query_key_pairs,
        }
    }

    /// A layout for any step in which at most `rows` sequences of at most `context_tokens`
    /// decode one token each.
    pub fn decode(rows: usize, format: StepFormat, context_tokens: usize) -> Self {
        let blocks_max = context_tokens.div_ceil(BLOCK_TOKENS);
        StepLayout {
            tokens: rows,
            sequences: rows,
            format,
            blocks_max,
            logit_rows: rows,
            score_rows: 0,
            picture_rows: 0,
            single_rows: rows,
            query_key_pairs: (rows * blocks_max * BLOCK_TOKENS) as u64,
        }
    }

    /// The range of an array in the packed list, in u32.
    pub fn place(&self, array: StepArray) -> Range<usize> {
        let before = StepArray::ALL.into_iter().take_while(|other| *other != array);
        let first = before.map(|other| self.length(other).next_multiple_of(ALIGNMENT)).sum();
        first..first + self.length(array)
    }

    /// `true` if every row samples a token and no row scores a token, as when all sequences decode.
    pub fn chooses_in_every_row(&self) -> bool {
        // The rows that sample are distinct and in order. If their number equals the number of
        // rows, they are therefore all rows.
        self.logit_rows == self.tokens && self.score_rows == 0
    }

    /// Total length of the packed list, in u32.
    pub fn words(&self) -> usize {
        self.place(StepArray::BlockTables).end
    }

    /// Like [`words`](Self::words), with space for a list of chosen rows even if [every row
    /// samples](Self::chooses_in_every_row). A step that samples in fewer of these rows needs no more.
    pub fn words_with_chosen_rows(&self) -> usize {
        let list = if self.chooses_in_every_row() { self.logit_rows.next_multiple_of(ALIGNMENT) } else { 0 };
        self.words() + list
    }

    fn length(&self, array: StepArray) -> usize {
        match array {
            StepArray::Tokens => self.tokens,
            StepArray::Slots => self.format.groups * self.tokens,
            StepArray::Positions => self.format.axes * self.tokens,
            StepArray::StateReads | StepArray::StateWrites if self.format.has_states => self.sequences,
            StepArray::SnapshotRows | StepArray::SnapshotSlots if self.format.has_states => SNAPSHOTS * self.sequences,
            StepArray::StateReads | StepArray::StateWrites | StepArray::SnapshotRows | StepArray::SnapshotSlots => 0,
            StepArray::QueryStarts => self.sequences + 1,
            StepArray::ContextLengths => self.sequences,
            StepArray::ChosenRows if self.chooses_in_every_row() => 0,
            StepArray::ChosenRows => self.logit_rows + self.score_rows,
            StepArray::EmbeddingRows | StepArray::PictureCacheRows => self.picture_rows,
            StepArray::BlockTables => self.format.groups * self.sequences * self.blocks_max,
        }
    }

    /// Whether `batch` fits this layout: either the batch fills the layout exactly, or both contain
    /// only decoding sequences and the rest of the layout is padding.
    pub fn takes(&self, batch: &StepBatch) -> bool {
        let is_exact = *self == StepLayout::of(batch, self.format);
        let is_decode = *self == StepLayout::decode(self.tokens, self.format, self.blocks_max * BLOCK_TOKENS);
        let fits = batch.token_count() <= self.tokens && batch.blocks_max() <= self.blocks_max;
        is_exact || (is_decode && batch.is_decoding_alone() && fits)
    }

    /// Packs the arrays of `batch` into `words`. The rest of the layout is padding: sequences of
    /// one row and no context, whose keys and values are not written. `words` ends after the last
    /// block table that is read.
    ///
    /// # Panics
    /// If the layout does not [take](Self::takes) the batch, which is a bug in the caller.
    pub fn pack(&self, batch: &StepBatch, words: &mut Vec<u32>) {
        assert!(self.takes(batch), "{self:?} does not take {:?}", StepLayout::of(batch, self.format));
        assert!([0, self.format.groups].contains(&batch.groups), "{} cache groups for {self:?}", batch.groups);
        let (rows, sequences, columns) = (batch.token_count(), batch.sequence_count(), batch.blocks_max());
        words.clear();
        words.resize(self.place(StepArray::BlockTables).start, 0);
        let mut put = |array, with: &[u32]| words[self.place(array)][..with.len()].copy_from_slice(with);
        put(StepArray::QueryStarts, &batch.query_starts);
        put(StepArray::ContextLengths, &batch.context_lengths);
        if !self.chooses_in_every_row() {
            put(StepArray::ChosenRows, &[&batch.logit_rows[..], &batch.score_rows].concat());
        }
        put(StepArray::EmbeddingRows, &batch.picture_rows);
        put(StepArray::PictureCacheRows, &batch.picture_cache_rows);
        if self.format.has_states {
            assert_eq!(batch.state_writes.len(), sequences, "each sequence has a state");
            put(StepArray::StateReads, &batch.state_reads);
            put(StepArray::StateWrites, &batch.state_writes);
            put(StepArray::SnapshotRows, &batch.snapshot_rows);
            put(StepArray::SnapshotSlots, &batch.snapshot_slots);
            words[self.place(StepArray::StateWrites)][sequences..].fill(NO_STATE);
            words[self.place(StepArray::SnapshotSlots)][SNAPSHOTS * sequences..].fill(NO_STATE);
        }
        let tokens = words[self.place(StepArray::Tokens)].iter_mut().zip(&batch.tokens);
        tokens.for_each(|(word, token)| *word = token.code());
        let positions = &mut words[self.place(StepArray::Positions)];
        // A decoder with one position axis uses the first axis, because all axes of a
        // text position are equal.
        for axis in 0..self.format.axes {
            positions[axis * self.tokens..][..rows].copy_from_slice(&batch.positions[axis * rows..][..rows]);
        }
        let slots = &mut words[self.place(StepArray::Slots)];
        slots.fill(NO_SLOT);
        for group in 0..batch.groups {
            slots[group * self.tokens..][..rows].copy_from_slice(&batch.slots[group * rows..][..rows]);
        }
        for row in rows..self.tokens {
            words[self.place(StepArray::QueryStarts).start + row + 1] = row as u32 + 1;
        }
        for (row, table) in batch.block_tables.chunks_exact(columns.max(1)).enumerate() {
            let (group, sequence) = (row / sequences, row % sequences);
            let first = (group * self.sequences + sequence) * self.blocks_max;
            words.resize(self.place(StepArray::BlockTables).start + first, 0);
            words.extend_from_slice(table);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::{BlockTable, EmbeddingRows, SequencePart};

    /// The format of a decoder without recurrent states.
    fn axes(axes: usize) -> StepFormat {
        StepFormat { axes, groups: 1, has_states: false }
    }

    fn decoding(contexts: &[usize]) -> StepBatch {
        decoding_with(contexts, &[(1..9).collect::<Vec<_>>().into()])
    }

    fn decoding_with(contexts: &[usize], tables: &[BlockTable]) -> StepBatch {
        let positions: Vec<_> = contexts.iter().map(|context| [[*context as u32, 70, 80]]).collect();
        let parts = contexts.iter().zip(&positions).map(|(context, position)| SequencePart {
            tokens: &[7],
            unseen: None,
            positions: position,
            cached_tokens: *context,
            tables,
            pictures: &[],
            logit_rows: 1,
            scored: 0..0,
            state: None,
        });
        StepBatch::pack(&parts.collect::<Vec<_>>())
    }

    #[test]
    fn arrays_lie_behind_each_other_and_none_over_another() {
        let layout = StepLayout { score_rows: 3, picture_rows: 5, ..StepLayout::decode(33, axes(3), 100) };
        let places: Vec<_> = StepArray::ALL.into_iter().map(|array| layout.place(array)).collect();
        for pair in places.windows(2) {
            assert!(pair[0].end <= pair[1].start && pair[1].start.is_multiple_of(ALIGNMENT), "{places:?}");
        }
        assert_eq!(places.last().map(|tables| tables.end), Some(layout.words()));
        assert_eq!(places.iter().map(Range::len).sum::<usize>(), 33 * 6 + 34 + 33 + 3 + 5 + 5 + 33 * 7);
    }

    #[test]
    fn a_step_fills_its_own_layout_to_the_last_word() {
        let positions: Vec<_> = (14..19).map(|p| [p, p + 100, p + 200]).collect();
        let batch = StepBatch::pack(&[SequencePart {
            tokens: &[1, 2, 3, 4, 5],
            unseen: None,
            positions: &positions,
            cached_tokens: 14,
            tables: &[vec![9, 4].into()],
            pictures: &[EmbeddingRows { tokens: 1..3, cache_rows: &[40, 7] }],
            logit_rows: 1,
            scored: 1..4,
            state: None,
        }]);
        let (layout, mut words) = (StepLayout::of(&batch, axes(3)), vec![u32::MAX; 3]);
        layout.pack(&batch, &mut words);
        assert_eq!(words.len(), layout.words());
        let found = |array| &words[layout.place(array)];
        assert_eq!(found(StepArray::Tokens), batch.tokens.iter().map(|token| token.code()).collect::<Vec<_>>());
        assert_eq!(found(StepArray::Positions), batch.positions);
        assert_eq!(found(StepArray::Slots), batch.slots);
        assert_eq!(found(StepArray::QueryStarts), batch.query_starts);
        assert_eq!(found(StepArray::ContextLengths), batch.context_lengths);
        assert_eq!(found(StepArray::BlockTables), batch.block_tables);
        assert_eq!(found(StepArray::ChosenRows), [batch.logit_rows, batch.score_rows].concat());
        assert_eq!(found(StepArray::EmbeddingRows), batch.picture_rows);
        assert_eq!(found(StepArray::PictureCacheRows), batch.picture_cache_rows);
        assert_eq!(
            StepLayout { format: axes(1), ..layout }.place(StepArray::Positions).len(),
            5,
            "a model with one position axis takes the first axis"
        );
    }

    #[test]
    fn what_a_bucket_has_too_many_rows_is_padding_that_reads_and_writes_nothing() {
        let (batch, layout) = (decoding(&[20, 40]), StepLayout::decode(4, axes(2), 128));
        assert!(layout.takes(&batch));
        let mut words = Vec::new();
        layout.pack(&batch, &mut words);
        let found = |array| &words[layout.place(array)];
        assert_eq!(found(StepArray::Tokens), [7, 7, 0, 0]);
        assert_eq!(found(StepArray::Positions), [20, 40, 0, 0, 70, 70, 0, 0]);
        assert_eq!(found(StepArray::Slots), [2 * 16 + 4, 3 * 16 + 8, NO_SLOT, NO_SLOT]);
        assert_eq!(found(StepArray::QueryStarts), [0, 1, 2, 3, 4]);
        assert_eq!(found(StepArray::ContextLengths), [21, 41, 0, 0]);
        assert!(found(StepArray::ChosenRows).is_empty(), "all rows are chosen in order, so no list is uploaded");
        let tables = &words[layout.place(StepArray::BlockTables).start..];
        assert_eq!(tables, [1, 2, 0, 0, 0, 0, 0, 0, 1, 2, 3], "the end of the block tables is not uploaded");
        assert!(words.len() < layout.words());
    }

    #[test]
    fn each_cache_group_has_padded_slots_and_tables() {
        let tables = [vec![1, 2].into(), BlockTable { skipped: 1, blocks: vec![5] }];
        let format = StepFormat { groups: 2, ..axes(1) };
        let (batch, layout) = (decoding_with(&[20, 30], &tables), StepLayout::decode(3, format, 48));
        let mut words = Vec::new();
        layout.pack(&batch, &mut words);
        let slots = [2 * 16 + 4, 2 * 16 + 14, NO_SLOT, 5 * 16 + 4, 5 * 16 + 14, NO_SLOT];
        assert_eq!(words[layout.place(StepArray::Slots)], slots);
        let tables = &words[layout.place(StepArray::BlockTables).start..];
        assert_eq!(tables, [1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 5, 0, 0, 5], "the last row of each group is padding");
    }

    #[test]
    fn a_step_without_a_sequence_is_all_padding() {
        let (layout, mut words) = (StepLayout::decode(3, axes(1), 64), Vec::new());
        layout.pack(&StepBatch::pack(&[]), &mut words);
        assert_eq!(words[layout.place(StepArray::ContextLengths)], [0, 0, 0]);
        assert_eq!(words[layout.place(StepArray::QueryStarts)], [0, 1, 2, 3]);
    }

    #[test]
    fn a_bucket_takes_decoding_that_fits_and_nothing_else() {
        let layout = StepLayout::decode(2, axes(3), 64);
        assert!(layout.takes(&decoding(&[63])) && layout.takes(&decoding(&[10, 50])));
        assert!(!layout.takes(&decoding(&[64])), "the layout has no room for a fifth block");
        assert!(!layout.takes(&decoding(&[1, 2, 3])), "the layout has no room for a third row");
        let changes: [fn(&mut StepBatch); 3] =
            [|batch| batch.score_rows.push(0), |batch| batch.picture_rows.push(0), |batch| batch.logit_rows.clear()];
        for change in changes {
            let mut batch = decoding(&[10, 50]);
            change(&mut batch);
            assert!(!layout.takes(&batch), "{batch:?}");
        }
    }

    #[test]
    fn a_bucket_attends_at_most_to_each_rows_whole_context() {
        let layout = StepLayout::decode(3, axes(1), 100);
        assert_eq!((layout.blocks_max, layout.query_key_pairs), (7, 3 * 7 * 16));
    }
}
