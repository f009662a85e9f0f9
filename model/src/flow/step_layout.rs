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
    /// Whether a row of the draft head's pass has the position of the token after it.
    pub has_draft_positions: bool,
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
        has_draft_positions: false,
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

    /// Whether the layout has separate positions for the draft head.
    pub fn has_draft_positions(&self) -> bool {
        self.has_drafts && self.format.has_draft_positions
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
            StepArray::DraftPositions if self.has_draft_positions() => self.format.axes * self.tokens,
            StepArray::DraftPositions => 0,
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
        // A decoder with one position axis uses the first axis, because all axes of a
        // text position are equal.
        for axis in 0..self.format.axes {
            let of_rows = &batch.positions[axis * rows..][..rows];
            words[self.place(StepArray::Positions)][axis * self.tokens..][..rows].copy_from_slice(of_rows);
            if self.has_draft_positions() {
                let of_drafts = &mut words[self.place(StepArray::DraftPositions)][axis * self.tokens..][..rows];
                of_drafts.iter_mut().zip(of_rows).for_each(|(next, position)| *next = position + 1);
            }
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
mod tests;
