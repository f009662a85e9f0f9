//! The packing of a step's index arrays into one array, so that a step needs one upload and a
//! captured step finds each array at a fixed address.

use std::ops::Range;

use bursar_kernels::{
    BLOCK_TOKENS, InputToken,
    ops::{
        gated_delta::{NO_STATE, SNAPSHOTS},
        rotary_kv_write::NO_SLOT,
    },
};

use super::{SegmentLayers, StepArray, StepBatch};

/// Each array starts at a multiple of this many u32: 128 bytes, the size of a GPU cache line.
const ALIGNMENT: usize = 32;

/// Properties of a decoder that determine which arrays its steps read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepFormat {
    /// The model's position axes: [`POSITION_AXES`](super::POSITION_AXES), or 1.
    pub axes: usize,
    /// The model's [cache groups](super::CacheGroups).
    pub groups: usize,
    /// Cache groups with full attention, which precede all other groups.
    pub full_groups: usize,
    /// Layers in each segment of a block. A layer divides each cache block into this many layer
    /// blocks.
    pub segment_layers: SegmentLayers,
    /// Whether some layers have recurrent states.
    pub has_states: bool,
    /// Whether tokens of a picture attend to the later tokens of their picture. A step then never
    /// ends within a picture.
    pub whole_pictures: bool,
    /// Replaces the placeholder's id as the input token of picture rows. Only [per-layer
    /// embeddings](crate::blocks::per_layer_embeddings) read it.
    pub picture_input: Option<u32>,
}

/// The sizes of a step. They determine the offset of each array in the packed list of u32, and
/// the step's kernel launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLayout {
    /// Rows of the step, one per token.
    pub tokens: usize,
    /// Number of sequences as attention sees them. Each row of a [short
    /// sequence](StepBatch::short_sequences) counts as a separate sequence.
    pub sequences: usize,
    /// Sequences with a recurrent state.
    pub states: StateCounts,
    pub format: StepFormat,
    /// Columns of the block tables.
    pub blocks_max: usize,
    /// Rows that sample a token.
    pub logit_rows: usize,
    /// Rows that score a token.
    pub score_rows: usize,
    /// Rows whose embedding comes from a picture.
    pub picture_rows: usize,
    /// Number of leading sequences with exactly one row each, as attention sees them.
    pub single_rows: usize,
    /// Whether a sequence may have several rows, each of which is a sequence for attention.
    pub has_linked_rows: bool,
    /// Whether the rows that sample are listed even if every row samples.
    pub lists_rows: bool,
    /// Whether rows attend to later rows of their picture.
    pub has_key_ends: bool,
    /// Whether the layout has inputs of a draft head.
    pub has_drafts: bool,
    /// Upper bound on the number of query-key pairs in attention.
    pub query_key_pairs: u64,
}

/// Numbers of sequences with a recurrent state; 0 for a model without recurrent states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCounts {
    pub sequences: usize,
    /// Leading sequences with exactly one row each.
    pub single_rows: usize,
    /// Leading [short sequences](StepBatch::short_sequences).
    pub short: usize,
}

impl StepFormat {
    /// The format of a text model with one cache group.
    pub const TEXT: StepFormat = StepFormat {
        axes: 1,
        groups: 1,
        full_groups: 1,
        segment_layers: SegmentLayers::ONE,
        has_states: false,
        whole_pictures: false,
        picture_input: None,
    };

    /// Number of layer blocks per cache block in `group`. Block tables and slots in the arrays of a
    /// step use the group's layer-block numbers.
    fn layer_blocks_per_block(&self, group: usize) -> u32 {
        let SegmentLayers { full, windowed } = self.segment_layers;
        (if group < self.full_groups { full } else { windowed }) as u32
    }
}

impl StepLayout {
    /// A layout that `batch` fills exactly, for a model that reads `format`.
    pub fn of(batch: &StepBatch, format: StepFormat) -> Self {
        let (sequences, short) = (batch.sequence_count(), batch.short_sequences);
        let states = StateCounts { sequences, single_rows: batch.single_rows(), short };
        let has_key_ends = format.whole_pictures && !batch.picture_rows.is_empty();
        StepLayout {
            tokens: batch.token_count(),
            sequences: batch.short_rows() + sequences - short,
            states: if format.has_states { states } else { StateCounts::default() },
            format,
            blocks_max: batch.blocks_max(),
            logit_rows: batch.logit_rows.len(),
            score_rows: batch.score_rows.len(),
            picture_rows: batch.picture_rows.len(),
            single_rows: batch.short_rows(),
            has_linked_rows: batch.short_rows() > short,
            lists_rows: false,
            has_key_ends,
            has_drafts: false,
            query_key_pairs: if has_key_ends {
                batch.key_ends.iter().map(|end| u64::from(*end)).sum()
            } else {
                batch.query_key_pairs
            },
        }
    }

    /// A layout for any step of at most `rows` rows in which sequences of at most `context_tokens`
    /// decode one token each, and every row samples.
    pub fn decode(rows: usize, format: StepFormat, context_tokens: usize) -> Self {
        let blocks_max = context_tokens.div_ceil(BLOCK_TOKENS);
        StepLayout {
            tokens: rows,
            sequences: rows,
            states: StateCounts::of_rows(rows, rows, format),
            format,
            blocks_max,
            logit_rows: rows,
            score_rows: 0,
            picture_rows: 0,
            single_rows: rows,
            has_linked_rows: false,
            lists_rows: false,
            has_key_ends: false,
            has_drafts: false,
            query_key_pairs: (rows * blocks_max * BLOCK_TOKENS) as u64,
        }
    }

    /// Like [`decode`](Self::decode), but sequences with a recurrent state may have several rows
    /// each. At most `logit_rows` rows of the step sample.
    pub fn verify(rows: usize, logit_rows: usize, format: StepFormat, context_tokens: usize) -> Self {
        StepLayout {
            states: StateCounts::of_rows(rows, 0, format),
            logit_rows: logit_rows.min(rows),
            has_linked_rows: true,
            lists_rows: true,
            ..StepLayout::decode(rows, format, context_tokens)
        }
    }

    /// The same layout, in which sequences may have drafts if `has_linked_rows` is set. Only for a
    /// model without recurrent states.
    pub fn with_linked_rows(self, has_linked_rows: bool) -> Self {
        StepLayout { has_linked_rows, ..self }
    }

    /// The same layout with the inputs of a draft head, or without them.
    pub fn with_drafts(self, has_drafts: bool) -> Self {
        StepLayout { has_drafts, ..self }
    }

    /// The range of an array in the packed list, in u32.
    pub fn place(&self, array: StepArray) -> Range<usize> {
        let before = StepArray::ALL.into_iter().take_while(|other| *other != array);
        let first = before.map(|other| self.length(other).next_multiple_of(ALIGNMENT)).sum();
        first..first + self.length(array)
    }

    /// `true` if the step needs no list of chosen rows: every row samples a token, no row scores a
    /// token, and [`lists_rows`](Self::lists_rows) is not set.
    pub fn chooses_in_every_row(&self) -> bool {
        // The rows that sample are distinct and in order. If their number equals the number of
        // rows, they are therefore all rows.
        self.logit_rows == self.tokens && self.score_rows == 0 && !self.lists_rows
    }

    /// Total length of the packed list, in u32.
    pub fn words(&self) -> usize {
        self.place(StepArray::BlockTables).end
    }

    /// Like [`words`](Self::words), with space for a list of chosen rows even if [every row
    /// samples](Self::chooses_in_every_row). A step in which fewer rows sample fits too.
    pub fn words_with_chosen_rows(&self) -> usize {
        let list = if self.chooses_in_every_row() { self.logit_rows.next_multiple_of(ALIGNMENT) } else { 0 };
        self.words() + list
    }

    fn length(&self, array: StepArray) -> usize {
        match array {
            StepArray::Tokens => self.tokens,
            StepArray::DraftTokens => usize::from(self.has_drafts) * self.tokens,
            StepArray::KeyEnds => usize::from(self.has_key_ends) * self.tokens,
            StepArray::Slots => self.format.groups * self.tokens,
            StepArray::Positions => self.format.axes * self.tokens,
            StepArray::StateStarts => self.states.sequences + usize::from(self.format.has_states),
            StepArray::StateContexts | StepArray::StateReads | StepArray::StateWrites => self.states.sequences,
            StepArray::SnapshotRows | StepArray::SnapshotSlots => SNAPSHOTS * self.states.sequences,
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
        *self == StepLayout::of(batch, self.format) || (self.is_padded() && self.takes_decoding(batch))
    }

    /// Whether this is a layout of [`decode`](Self::decode) or [`verify`](Self::verify).
    fn is_padded(&self) -> bool {
        let (rows, context) = (self.tokens, self.blocks_max * BLOCK_TOKENS);
        let of_rows = if self.lists_rows {
            StepLayout::verify(rows, self.logit_rows, self.format, context)
        } else {
            StepLayout::decode(rows, self.format, context).with_linked_rows(self.has_linked_rows)
        };
        *self == of_rows.with_drafts(self.has_drafts)
    }

    fn takes_decoding(&self, batch: &StepBatch) -> bool {
        let (rows, chosen) = (batch.token_count(), batch.logit_rows.len());
        let are_single = self.states.single_rows == 0 || batch.single_rows() == batch.sequence_count();
        // A batch without rows fits any layout. Graph captures upload such a batch.
        batch.is_decoding_alone()
            && (rows == 0 || batch.drafts.is_some() == self.has_drafts)
            && rows <= self.tokens
            && batch.blocks_max() <= self.blocks_max
            && chosen <= self.logit_rows
            && (self.lists_rows || chosen == rows)
            && (self.has_linked_rows || batch.short_rows() == batch.short_sequences)
            && are_single
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
        if !self.chooses_in_every_row() {
            put(StepArray::ChosenRows, &[&batch.logit_rows[..], &batch.score_rows].concat());
        }
        if self.has_key_ends {
            put(StepArray::KeyEnds, &batch.key_ends);
        }
        put(StepArray::EmbeddingRows, &batch.picture_rows);
        put(StepArray::PictureCacheRows, &batch.picture_cache_rows);
        if self.format.has_states {
            assert_eq!(batch.state_writes.len(), sequences, "each sequence has a state");
            put(StepArray::StateStarts, &batch.query_starts);
            put(StepArray::StateContexts, &batch.context_lengths);
            put(StepArray::StateReads, &batch.state_reads);
            put(StepArray::StateWrites, &batch.state_writes);
            put(StepArray::SnapshotRows, &batch.snapshot_rows);
            put(StepArray::SnapshotSlots, &batch.snapshot_slots);
            words[self.place(StepArray::StateWrites)][sequences..].fill(NO_STATE);
            words[self.place(StepArray::SnapshotSlots)][SNAPSHOTS * sequences..].fill(NO_STATE);
            // If every sequence of the layout has one row, each padding sequence also has one row.
            // Otherwise, the first padding sequence gets all padding rows.
            let are_single = self.states.single_rows == self.states.sequences;
            let starts = &mut words[self.place(StepArray::StateStarts)];
            for (sequence, start) in starts.iter_mut().enumerate().skip(sequences + 1) {
                *start = if are_single { sequence } else { self.tokens } as u32;
            }
        }
        let tokens = words[self.place(StepArray::Tokens)].iter_mut().zip(&batch.tokens);
        tokens.for_each(|(word, token)| *word = token.code());
        if let Some(token) = self.format.picture_input {
            let tokens = &mut words[self.place(StepArray::Tokens)];
            batch.picture_rows.iter().for_each(|row| tokens[*row as usize] = InputToken::Known(token).code());
        }
        let drafts = batch.drafts.iter().flat_map(|drafts| &drafts.tokens);
        let inputs = words[self.place(StepArray::DraftTokens)].iter_mut().zip(drafts);
        inputs.for_each(|(word, token)| *word = token.code());
        let positions = &mut words[self.place(StepArray::Positions)];
        // A decoder with one position axis uses the first axis, because all axes of a
        // text position are equal.
        for axis in 0..self.format.axes {
            positions[axis * self.tokens..][..rows].copy_from_slice(&batch.positions[axis * rows..][..rows]);
        }
        let slots = &mut words[self.place(StepArray::Slots)];
        slots.fill(NO_SLOT);
        for group in 0..batch.groups {
            let times = self.format.layer_blocks_per_block(group);
            let of_group = slots[group * self.tokens..].iter_mut().zip(&batch.slots[group * rows..][..rows]);
            of_group.for_each(|(to, slot)| *to = layer_slot(*slot, times));
        }
        let (starts, contexts) = (self.place(StepArray::QueryStarts), self.place(StepArray::ContextLengths));
        let mut used = 0;
        for AttentionSequence { end, context, .. } in attention_sequences(batch) {
            used += 1;
            words[starts.start + used] = end;
            words[contexts.start + used - 1] = context;
            if self.has_key_ends {
                // A row that attention treats as a separate sequence cannot see later tokens.
                let last = &mut words[self.place(StepArray::KeyEnds)][end as usize - 1];
                *last = context.min(*last);
            }
        }
        for padding in used..self.sequences {
            words[starts.start + padding + 1] = words[starts.start + padding] + 1;
        }
        for group in 0..batch.groups {
            for (row, AttentionSequence { sequence, .. }) in attention_sequences(batch).enumerate() {
                let first = (group * self.sequences + row) * self.blocks_max;
                words.resize(self.place(StepArray::BlockTables).start + first, 0);
                let table = &batch.block_tables[(group * sequences + sequence) * columns..][..columns];
                words.extend(table.iter().map(|block| block * self.format.layer_blocks_per_block(group)));
            }
        }
    }
}

impl StateCounts {
    /// Counts for at most `rows` short sequences, of which the first `single_rows` have one row.
    fn of_rows(rows: usize, single_rows: usize, format: StepFormat) -> Self {
        let counts = StateCounts { sequences: rows, single_rows, short: rows };
        if format.has_states { counts } else { StateCounts::default() }
    }
}

/// Converts a cache slot to a slot in a layer's own numbering. The layer divides each cache block
/// into `blocks_per_block` smaller blocks and uses the first of them.
fn layer_slot(slot: u32, blocks_per_block: u32) -> u32 {
    let block_tokens = BLOCK_TOKENS as u32;
    slot / block_tokens * blocks_per_block * block_tokens + slot % block_tokens
}

/// Rows of a batch that attention treats as one sequence.
struct AttentionSequence {
    /// The index of the batch's sequence.
    sequence: usize,
    /// The row after the last row.
    end: u32,
    /// Tokens up to and including the last row.
    context: u32,
}

/// Each row of the short sequences, and then the other sequences.
fn attention_sequences(batch: &StepBatch) -> impl Iterator<Item = AttentionSequence> {
    batch.query_starts.windows(2).zip(&batch.context_lengths).enumerate().flat_map(|(sequence, (rows, context))| {
        let (start, end) = (rows[0], rows[1]);
        let first_end = if sequence < batch.short_sequences { start + 1 } else { end };
        (first_end..=end).map(move |row| AttentionSequence { sequence, end: row, context: context - (end - row) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::{BlockTable, EmbeddingRows, SequencePart, StateSlots};

    /// The format of a decoder without recurrent states.
    fn axes(axes: usize) -> StepFormat {
        StepFormat { axes, ..StepFormat::TEXT }
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
            repeated: 0,
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
            repeated: 0,
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

    /// A decoding sequence that runs `repeated` tokens again and has `logit_rows` rows of logits.
    fn verifying<'a>(
        tokens: &'a [u32],
        positions: &'a [[u32; 3]],
        repeated: usize,
        tables: &'a [BlockTable],
        slot: u32,
    ) -> SequencePart<'a> {
        SequencePart {
            tokens,
            positions,
            cached_tokens: 20,
            tables,
            logit_rows: tokens.len() - repeated,
            repeated,
            state: Some(StateSlots::in_place(slot)),
            ..SequencePart::default()
        }
    }

    #[test]
    fn attention_treats_each_row_of_a_short_sequence_as_a_sequence() {
        let (tables, positions) = ([vec![1, 2].into()], [[20; 3], [21; 3], [22; 3]]);
        let prompt = [BlockTable::from(vec![3])];
        let parts = [
            verifying(&[7, 8, 9], &positions, 1, &tables, 4),
            verifying(&[6], &positions[..1], 0, &tables, 5),
            SequencePart {
                cached_tokens: 0,
                logit_rows: 0,
                tables: &prompt,
                ..verifying(&[1, 2], &positions[..2], 0, &tables, 6)
            },
        ];
        let format = StepFormat { has_states: true, ..axes(1) };
        let batch = StepBatch::pack(&parts[..2]);
        let (layout, mut words) = (StepLayout::of(&batch, format), Vec::new());
        assert_eq!((layout.sequences, layout.single_rows, layout.has_linked_rows), (4, 4, true));
        assert_eq!(layout.states, StateCounts { sequences: 2, single_rows: 0, short: 2 });
        layout.pack(&batch, &mut words);
        let found = |array| &words[layout.place(array)];
        assert_eq!(found(StepArray::QueryStarts), [0, 1, 2, 3, 4]);
        assert_eq!(found(StepArray::ContextLengths), [21, 22, 23, 21]);
        assert_eq!(found(StepArray::BlockTables), [1, 2, 1, 2, 1, 2, 1, 2]);
        assert_eq!((found(StepArray::StateStarts), found(StepArray::StateContexts)), (&[0, 3, 4][..], &[23, 21][..]));
        assert_eq!(found(StepArray::ChosenRows), [1, 2, 3]);

        // In a step with a prompt, the tables are not repeated, so that they need no more memory.
        let batch = StepBatch::pack(&parts);
        let layout = StepLayout::of(&batch, format);
        assert_eq!((layout.sequences, layout.single_rows, layout.has_linked_rows), (3, 0, false));
        layout.pack(&batch, &mut words);
        assert_eq!(words[layout.place(StepArray::BlockTables)], [1, 2, 1, 2, 3, 0]);
        assert!(!StepLayout::verify(8, 8, format, 32).takes(&batch), "the step has a prompt");
    }

    #[test]
    fn a_padded_step_verifies_drafts_of_sequences_with_states() {
        let (tables, positions) = ([vec![1, 2].into()], [[20; 3], [21; 3], [22; 3]]);
        let batch = StepBatch::pack(&[
            verifying(&[6], &positions[..1], 0, &tables, 5),
            verifying(&[7, 8, 9], &positions, 1, &tables, 4),
        ]);
        let format = StepFormat { has_states: true, ..axes(1) };
        assert!(!StepLayout::decode(8, format, 32).takes(&batch), "a state is updated by several rows");
        assert!(!StepLayout::verify(8, 2, format, 32).takes(&batch), "the step has three rows of logits");
        let layout = StepLayout::verify(8, 5, format, 32);
        assert!(layout.takes(&batch));
        assert!(!layout.with_drafts(true).takes(&batch), "the batch has no inputs of a draft head");
        let mut words = Vec::new();
        layout.pack(&batch, &mut words);
        let found = |array| &words[layout.place(array)];
        assert_eq!(found(StepArray::QueryStarts), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(found(StepArray::ContextLengths), [21, 21, 22, 23, 0, 0, 0, 0]);
        assert_eq!(found(StepArray::StateStarts), [0, 1, 4, 8, 8, 8, 8, 8, 8]);
        assert_eq!(found(StepArray::StateContexts), [21, 23, 0, 0, 0, 0, 0, 0]);
        assert_eq!(found(StepArray::StateWrites)[..3], [5, 4, NO_STATE]);
        assert_eq!(found(StepArray::ChosenRows), [0, 2, 3, 0, 0]);
        let single = StepLayout::decode(4, format, 32);
        single.pack(&StepBatch::pack(&[verifying(&[6], &positions[..1], 0, &tables, 5)]), &mut words);
        assert_eq!(words[single.place(StepArray::StateStarts)], [0, 1, 2, 3, 4], "each row of padding is a sequence");
    }

    #[test]
    fn each_cache_group_has_padded_slots_and_tables() {
        let tables = [vec![1, 2].into(), BlockTable { skipped: 1, blocks: vec![5] }];
        let format = StepFormat { groups: 2, full_groups: 2, ..axes(1) };
        let (batch, layout) = (decoding_with(&[20, 30], &tables), StepLayout::decode(3, format, 48));
        let mut words = Vec::new();
        layout.pack(&batch, &mut words);
        let slots = [2 * 16 + 4, 2 * 16 + 14, NO_SLOT, 5 * 16 + 4, 5 * 16 + 14, NO_SLOT];
        assert_eq!(words[layout.place(StepArray::Slots)], slots);
        let tables = &words[layout.place(StepArray::BlockTables).start..];
        assert_eq!(tables, [1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 5, 0, 0, 5], "the last row of each group is padding");
    }

    #[test]
    fn block_numbers_are_scaled_per_group() {
        let tables = [vec![1, 2].into(), vec![3, 5].into()];
        let segment_layers = SegmentLayers { full: 4, windowed: 3 };
        let format = StepFormat { groups: 2, segment_layers, ..axes(1) };
        let (batch, mut words) = (decoding_with(&[20], &tables), Vec::new());
        let layout = StepLayout::of(&batch, format);
        layout.pack(&batch, &mut words);
        assert_eq!(words[layout.place(StepArray::Slots)], [8 * 16 + 4, 15 * 16 + 4]);
        assert_eq!(words[layout.place(StepArray::BlockTables)], [4, 8, 9, 15]);
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
        assert!(!layout.takes(&decoding(&[64])), "the layout cannot hold a fifth block");
        assert!(!layout.takes(&decoding(&[1, 2, 3])), "the layout cannot hold a third row");
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
