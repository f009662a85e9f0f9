//! The step batch: the input of one decoder pass, with chunks of prompts and decoding
//! sequences in one batch.

use std::ops::Range;

use bursar_kernels::{
    BLOCK_TOKENS, InputToken, UnseenToken,
    ops::gated_delta::{NO_STATE, SNAPSHOTS},
};

use super::BlockTable;

/// Number of prompt rows that are scored at a time, equal to the number of rows that a GPU's
/// sampler processes at once. On an H200, scoring a prompt of 8,000 tokens with the shapes of a 7B
/// model took 227 ms. With 32 rows at a time, it took 34 ms more, because the projection is limited
/// by reading its weights. With more than 64 rows, scoring would need more memory than sampling
/// does.
pub const SCORE_ROWS: usize = 64;

/// Axes of a position: time, height, width. Text tokens advance on all three axes at once.
pub const POSITION_AXES: usize = 3;

/// Maximum rows of a decoding sequence whose rows are processed one by one; see
/// [`StepBatch::short_sequences`]. With more rows, the kernels for prompts are faster, because they
/// read keys and values once for all rows.
pub const SHORT_ROWS: usize = 16;

/// The input of one sequence in a step.
#[derive(Clone, Debug, Default)]
pub struct SequencePart<'a> {
    /// Tokens to run. `tokens` and `unseen` together have at least one token.
    pub tokens: &'a [u32],
    /// One more token after `tokens`. The previous step chooses this token, and the host has not
    /// seen its id.
    pub unseen: Option<UnseenToken>,
    /// Time, height and width of each token, including `unseen`.
    pub positions: &'a [[u32; POSITION_AXES]],
    /// Number of tokens of this sequence before `tokens`. All of them are already in the KV cache.
    pub cached_tokens: usize,
    /// The sequence's KV cache blocks in each cache group, enough for the cached tokens and
    /// the tokens to run.
    pub tables: &'a [BlockTable],
    /// Picture embeddings that replace the embeddings of some of `tokens`.
    pub pictures: &'a [EmbeddingRows<'a>],
    /// The number of last tokens whose logits are returned: 0 in the middle of a prompt, otherwise
    /// 1 and one for each drafted token at the end of `tokens`.
    pub logit_rows: usize,
    /// Number of leading tokens that an earlier step ran as drafts and accepted. This step runs
    /// them again to update the recurrent state.
    pub repeated: usize,
    /// The range of `tokens` to score. The logits of each of these tokens give the log-probability
    /// of the next token.
    pub scored: Range<usize>,
    /// The slots of the sequence's recurrent state, for a model with such layers.
    pub state: Option<StateSlots>,
}

/// The slots of one sequence's recurrent state in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSlots {
    /// The slot with the state after the cached tokens. It is not read if no tokens are cached.
    pub read: u32,
    /// The slot for the state after the step.
    pub write: u32,
    /// Copies of the state inside the step: the number of this step's tokens after which each copy
    /// is taken, at least 1, and its slot.
    pub snapshots: [Option<(u32, u32)>; SNAPSHOTS],
}

impl StateSlots {
    /// A state that stays in one slot.
    pub fn in_place(slot: u32) -> Self {
        StateSlots { read: slot, write: slot, snapshots: [None; SNAPSHOTS] }
    }
}

/// A run of tokens whose embeddings come from the vision cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingRows<'a> {
    /// The range in [`SequencePart::tokens`].
    pub tokens: Range<usize>,
    /// The row of the vision cache for each token of the range.
    pub cache_rows: &'a [u32],
}

/// The token that follows the tokens of a sequence in a step. A draft head reads this token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextToken {
    /// The step chooses the token. The last token of the part has logits.
    Chosen,
    /// A token that a later step runs.
    Known {
        token: u32,
        /// The row of the vision cache for a token of a picture. Without a row, the head reads the
        /// embedding of the placeholder, which only makes its drafts less likely to be accepted.
        cache_row: Option<u32>,
    },
}

/// Inputs of a draft head for the rows of a step: for each row, the token after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftInputs {
    /// `[tokens]`. The token after a row with logits is the token that the step chooses there:
    /// [`UnseenToken::row`] is the row's index in [`StepBatch::logit_rows`].
    pub tokens: Vec<InputToken>,
    /// Rows whose next token belongs to a picture.
    pub picture_rows: Vec<u32>,
    /// The row of the vision cache for each of `picture_rows`.
    pub picture_cache_rows: Vec<u32>,
}

/// The arrays of one step, before they are packed for upload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// `[tokens]`: the input token of each row.
    pub tokens: Vec<InputToken>,
    /// `[3, tokens]`: the position of each row along time, height and width.
    pub positions: Vec<u32>,
    /// Number of cache groups. 0 for a batch without sequences.
    pub groups: usize,
    /// `[groups, tokens]`: the KV cache slot for each token's keys and values.
    pub slots: Vec<u32>,
    /// `[sequences + 1]`: the first row of each sequence, and the number of rows.
    pub query_starts: Vec<u32>,
    /// `[sequences]`: tokens of each sequence up to and including its last row.
    pub context_lengths: Vec<u32>,
    /// `[groups, sequences, blocks_max]`. Blocks before a window and padding are zeros that no
    /// kernel reads.
    pub block_tables: Vec<u32>,
    /// Rows of `tokens` whose logits are returned, in order: the last rows of each sequence that
    /// chooses tokens.
    pub logit_rows: Vec<u32>,
    /// Rows of `tokens` whose logits score the next token, any number per sequence, in the
    /// order of the parts.
    pub score_rows: Vec<u32>,
    /// Rows of `tokens` whose embedding comes from a picture.
    pub picture_rows: Vec<u32>,
    /// The row of the vision cache for each of `picture_rows`.
    pub picture_cache_rows: Vec<u32>,
    /// `[sequences]`, or empty for a model without recurrent states: the slot that each sequence's
    /// state is read from.
    pub state_reads: Vec<u32>,
    /// `[sequences]` or empty: the slot that each sequence's state is written to.
    pub state_writes: Vec<u32>,
    /// `[sequences, SNAPSHOTS]` or empty: the number of rows after which a snapshot is taken.
    pub snapshot_rows: Vec<u32>,
    /// `[sequences, SNAPSHOTS]` or empty: the slot of each snapshot, or `NO_STATE`.
    pub snapshot_slots: Vec<u32>,
    /// `[tokens]`: for each row, the index in its sequence after the part of its picture that is in
    /// this step, or after its own token if it is text. Attention uses these key ends in a model
    /// with [`whole_pictures`](super::StepFormat::whole_pictures).
    pub key_ends: Vec<u32>,
    /// Number of query-key pairs in causal attention.
    pub query_key_pairs: u64,
    /// Number of leading sequences that have one row, or that decode with at most [`SHORT_ROWS`]
    /// rows. Attention treats each of their rows as a sequence with one row, and recurrent states
    /// are updated token by token. The results are then the same as if each token were decoded in a
    /// separate step. If the step also has a longer sequence, this number includes only sequences
    /// that have one row. No block table is then repeated, so the block tables of the step need no
    /// more memory than in the worst cases.
    pub short_sequences: usize,
    /// Inputs of the draft head's pass after this step. `None` if the model was loaded without its
    /// draft head.
    pub drafts: Option<DraftInputs>,
}

impl StepBatch {
    /// Packs `parts`, in order.
    ///
    /// # Panics
    /// If a part has no tokens or too few blocks, or if the parts have different numbers of block
    /// tables, which is a bug in the caller.
    pub fn pack(parts: &[SequencePart<'_>]) -> Self {
        let blocks_max = parts.iter().map(|part| part.blocks_needed()).max().unwrap_or(0);
        let groups = parts.first().map_or(0, |part| part.tables.len());
        let mut batch = StepBatch { groups, query_starts: vec![0], ..StepBatch::default() };
        for part in parts {
            assert_eq!(part.tables.len(), groups, "each sequence has a block table for each cache group");
            batch.push(part);
        }
        for group in 0..groups {
            parts.iter().for_each(|part| batch.push_table(part, &part.tables[group], blocks_max));
        }
        let positions: Vec<_> = parts.iter().flat_map(|part| part.positions).collect();
        let are_short = parts.iter().all(SequencePart::is_short);
        let is_short = |part: &&SequencePart<'_>| are_short || part.token_count() == 1;
        batch.short_sequences = parts.iter().take_while(is_short).count();
        let states = batch.state_reads.len();
        assert!(states == 0 || states == parts.len(), "{states} of {} sequences have a state", parts.len());
        batch.positions = (0..POSITION_AXES).flat_map(|axis| positions.iter().map(move |p| p[axis])).collect();
        batch
    }

    /// Packs `parts` like [`pack`](Self::pack), with the inputs of a draft head. `next` has the
    /// token after each part.
    ///
    /// # Panics
    /// See [`pack`](Self::pack). Also if `next` and `parts` differ in length, or if a token that
    /// only the device knows follows a row without logits.
    pub fn pack_with_drafts(parts: &[SequencePart<'_>], next: &[NextToken]) -> Self {
        assert_eq!(parts.len(), next.len(), "each part has a next token");
        let mut inputs = DraftInputs::default();
        let mut logit_rows = 0;
        for (part, next) in parts.iter().zip(next) {
            inputs.push(part, *next, logit_rows);
            logit_rows += part.logit_rows;
        }
        StepBatch { drafts: Some(inputs), ..StepBatch::pack(parts) }
    }

    /// The batch of the draft head's pass after this step. The batch has the same rows, and the
    /// input of each row is the token after that row. The batch has no scores and no recurrent
    /// states.
    ///
    /// # Panics
    /// If the batch was packed without inputs of a draft head.
    pub fn draft_pass(&self) -> StepBatch {
        let DraftInputs { tokens, picture_rows, picture_cache_rows } = self.drafts.clone().expect("inputs of drafts");
        StepBatch {
            tokens,
            picture_rows,
            picture_cache_rows,
            drafts: None,
            positions: self.positions.clone(),
            groups: self.groups,
            slots: self.slots.clone(),
            query_starts: self.query_starts.clone(),
            context_lengths: self.context_lengths.clone(),
            block_tables: self.block_tables.clone(),
            logit_rows: self.logit_rows.clone(),
            key_ends: self.key_ends.clone(),
            query_key_pairs: self.query_key_pairs,
            short_sequences: self.short_sequences,
            ..StepBatch::default()
        }
    }

    /// Like [`draft_pass`](Self::draft_pass), but with only the rows that have logits. Each row has the
    /// position of the token after it. Pictures are left out.
    ///
    /// # Panics
    /// If the batch was packed without inputs of a draft head.
    pub fn draft_pass_of_logit_rows(&self) -> StepBatch {
        let (drafts, rows) = (self.drafts.as_ref().expect("inputs of drafts"), &self.logit_rows);
        let (tokens, columns) = (self.token_count(), self.blocks_max());
        let of_rows = |values: &[u32]| rows.iter().map(|row| values[*row as usize]).collect::<Vec<_>>();
        let of_each = |values: &[u32]| values.chunks_exact(tokens.max(1)).flat_map(of_rows).collect::<Vec<_>>();
        // The logit rows of a sequence are its last rows, so the context does not change.
        let before = |end: u32| rows.partition_point(|row| *row < end);
        let count = |bounds: &[u32]| before(bounds[1]) - before(bounds[0]);
        let counts: Vec<_> = self.query_starts.windows(2).map(count).collect();
        let kept: Vec<_> = (0..self.sequence_count()).filter(|sequence| counts[*sequence] > 0).collect();
        let mut query_starts = vec![0];
        kept.iter()
            .for_each(|sequence| query_starts.push(query_starts[query_starts.len() - 1] + counts[*sequence] as u32));
        let are_short = counts.iter().all(|count| *count <= SHORT_ROWS);
        let is_short = |sequence: &&usize| are_short || counts[**sequence] == 1;
        let table =
            |(group, sequence)| &self.block_tables[(group * self.sequence_count() + sequence) * columns..][..columns];
        let tables = (0..self.groups).flat_map(|group| kept.iter().map(move |sequence| (group, *sequence)));
        StepBatch {
            tokens: rows.iter().map(|row| drafts.tokens[*row as usize]).collect(),
            positions: of_each(&self.positions).into_iter().map(|position| position + 1).collect(),
            groups: self.groups,
            slots: of_each(&self.slots),
            context_lengths: kept.iter().map(|sequence| self.context_lengths[*sequence]).collect(),
            block_tables: tables.flat_map(table).copied().collect(),
            logit_rows: (0..rows.len() as u32).collect(),
            key_ends: of_rows(&self.key_ends),
            query_key_pairs: of_rows(&self.key_ends).into_iter().map(u64::from).sum(),
            short_sequences: kept.iter().take_while(is_short).count(),
            query_starts,
            ..StepBatch::default()
        }
    }

    /// The same batch without pictures.
    pub fn without_pictures(self) -> StepBatch {
        StepBatch { picture_rows: Vec::new(), picture_cache_rows: Vec::new(), ..self }
    }

    fn push(&mut self, part: &SequencePart<'_>) {
        let (first_row, count, cached) = (self.tokens.len(), part.token_count(), part.cached_tokens);
        assert!(count > 0, "a part has at least one token");
        assert_eq!(count, part.positions.len(), "each token has a position");
        self.tokens.extend(part.tokens.iter().copied().map(InputToken::Known));
        self.tokens.extend(part.unseen.map(InputToken::Unseen));
        self.query_starts.push((first_row + count) as u32);
        self.context_lengths.push((cached + count) as u32);
        self.query_key_pairs += (cached + 1..=cached + count).sum::<usize>() as u64;
        self.key_ends.extend((cached + 1..=cached + count).map(|end| end as u32));
        assert!(part.logit_rows <= count, "{} rows of logits exceed the part's {count} tokens", part.logit_rows);
        self.logit_rows.extend((count - part.logit_rows..count).map(|token| (first_row + token) as u32));
        if let Some(StateSlots { read, write, snapshots }) = part.state {
            self.state_reads.push(read);
            self.state_writes.push(write);
            self.snapshot_rows.extend(snapshots.map(|snapshot| snapshot.map_or(0, |(rows, _)| rows)));
            self.snapshot_slots.extend(snapshots.map(|snapshot| snapshot.map_or(NO_STATE, |(_, slot)| slot)));
        }
        assert!(part.scored.end <= count, "scored tokens {:?} exceed the part's {count} tokens", part.scored);
        self.score_rows.extend(part.scored.clone().map(|token| (first_row + token) as u32));
        for picture in part.pictures {
            assert!(
                picture.tokens.end <= count,
                "picture tokens {:?} exceed the part's {count} tokens",
                picture.tokens
            );
            assert_eq!(picture.tokens.len(), picture.cache_rows.len(), "each picture token has an embedding");
            let of_picture = first_row + picture.tokens.start..first_row + picture.tokens.end;
            self.key_ends[of_picture].fill((cached + picture.tokens.end) as u32);
            self.picture_rows.extend(picture.tokens.clone().map(|token| (first_row + token) as u32));
            self.picture_cache_rows.extend_from_slice(picture.cache_rows);
        }
    }

    /// Appends a sequence's slots and its row of the block tables.
    fn push_table(&mut self, part: &SequencePart<'_>, table: &BlockTable, blocks_max: usize) {
        let (cached, needed) = (part.cached_tokens, part.blocks_needed());
        let end = cached + part.token_count();
        assert!(needed <= table.end(), "{} blocks for {end} tokens", table.end());
        self.slots.extend((cached..end).map(|token| table.slot(token)));
        self.block_tables.extend(std::iter::repeat_n(0, table.skipped));
        self.block_tables.extend_from_slice(&table.blocks[..needed - table.skipped]);
        self.block_tables.extend(std::iter::repeat_n(0, blocks_max - needed));
    }

    pub fn token_count(&self) -> usize {
        self.tokens.len()
    }

    pub fn sequence_count(&self) -> usize {
        self.context_lengths.len()
    }

    /// Number of leading sequences with exactly one token each, as decoding sequences without
    /// drafts have.
    pub fn single_rows(&self) -> usize {
        self.query_starts.windows(2).take_while(|bounds| bounds[1] - bounds[0] == 1).count()
    }

    /// Rows of the [short sequences](Self::short_sequences).
    pub fn short_rows(&self) -> usize {
        self.query_starts.get(self.short_sequences).map_or(0, |row| *row as usize)
    }

    /// `true` if all sequences are [short](Self::short_sequences) and sample tokens, without scores
    /// and pictures. Only such steps can replay a captured CUDA graph.
    pub fn is_decoding_alone(&self) -> bool {
        let samples = |rows: &[u32]| self.logit_rows.binary_search(&(rows[1] - 1)).is_ok();
        let is_plain = self.score_rows.is_empty() && self.picture_rows.is_empty();
        is_plain && self.short_sequences == self.sequence_count() && self.query_starts.windows(2).all(samples)
    }

    /// Columns of the block tables.
    pub fn blocks_max(&self) -> usize {
        self.block_tables.len().checked_div(self.groups * self.sequence_count()).unwrap_or(0)
    }
}

impl DraftInputs {
    /// Appends the rows of `part`, which follow `logit_rows` rows with logits.
    fn push(&mut self, part: &SequencePart<'_>, next: NextToken, logit_rows: usize) {
        let (first_row, count) = (self.tokens.len(), part.token_count());
        let without_logits = count - part.logit_rows;
        let chosen = |row: usize| {
            assert!(row >= without_logits, "the token after row {row} of a part is unknown, and the row has no logits");
            InputToken::Unseen(UnseenToken { row: (logit_rows + row - without_logits) as u32 })
        };
        let known = |row: usize| part.tokens.get(row + 1).map(|token| InputToken::Known(*token));
        let inner =
            (0..count - 1).map(|row| known(row).filter(|_| row < without_logits).unwrap_or_else(|| chosen(row)));
        self.tokens.extend(inner);
        self.tokens.push(match next {
            NextToken::Chosen => chosen(count - 1),
            NextToken::Known { token, .. } => InputToken::Known(token),
        });
        for picture in part.pictures {
            let shown = picture.tokens.clone().zip(picture.cache_rows).filter(|(token, _)| *token > 0);
            for (token, cache_row) in shown {
                self.picture_rows.push((first_row + token - 1) as u32);
                self.picture_cache_rows.push(*cache_row);
            }
        }
        if let NextToken::Known { cache_row: Some(cache_row), .. } = next {
            self.picture_rows.push((first_row + count - 1) as u32);
            self.picture_cache_rows.push(cache_row);
        }
    }
}

impl SequencePart<'_> {
    fn token_count(&self) -> usize {
        self.tokens.len() + usize::from(self.unseen.is_some())
    }

    /// See [`StepBatch::short_sequences`].
    fn is_short(&self) -> bool {
        let count = self.token_count();
        let decodes = self.logit_rows > 0 && count == self.repeated + self.logit_rows;
        count == 1 || (decodes && count <= SHORT_ROWS)
    }

    fn blocks_needed(&self) -> usize {
        (self.cached_tokens + self.token_count()).div_ceil(BLOCK_TOKENS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positions(range: Range<u32>) -> Vec<[u32; 3]> {
        range.map(|p| [p, p + 100, p + 200]).collect()
    }

    #[test]
    fn a_chunk_of_a_prompt_and_a_decoding_token_share_a_step() {
        let chunk = positions(14..19);
        let one = positions(7..8);
        let batch = StepBatch::pack(&[
            SequencePart {
                tokens: &[1, 2, 3, 4, 5],
                unseen: None,
                positions: &chunk,
                cached_tokens: 14,
                tables: &[vec![9, 4, 8].into()],
                pictures: &[EmbeddingRows { tokens: 1..3, cache_rows: &[40, 7] }],
                logit_rows: 0,
                repeated: 0,
                scored: 1..4,
                state: None,
            },
            SequencePart {
                tokens: &[6],
                unseen: None,
                positions: &one,
                cached_tokens: 7,
                tables: &[vec![2].into()],
                pictures: &[],
                logit_rows: 1,
                repeated: 0,
                scored: 0..0,
                state: None,
            },
        ]);
        assert_eq!(batch.slots, [9 * 16 + 14, 9 * 16 + 15, 4 * 16, 4 * 16 + 1, 4 * 16 + 2, 2 * 16 + 7]);
        assert_eq!(batch.query_starts, [0, 5, 6]);
        assert_eq!(batch.context_lengths, [19, 8]);
        assert_eq!(batch.block_tables, [9, 4, 2, 0], "the unused third block is not uploaded, the short row is padded");
        assert_eq!((batch.logit_rows, batch.score_rows), (vec![5], vec![1, 2, 3]));
        assert_eq!((batch.picture_rows, batch.picture_cache_rows), (vec![1, 2], vec![40, 7]));
        assert_eq!(batch.positions[..7], [14, 15, 16, 17, 18, 7, 114]);
        assert_eq!(batch.query_key_pairs, 15 + 16 + 17 + 18 + 19 + 8);
        assert_eq!(batch.key_ends, [15, 17, 17, 18, 19, 8], "both tokens of the picture see the picture");
    }

    #[test]
    #[should_panic(expected = "1 blocks for 17 tokens")]
    fn too_few_blocks_are_caught_before_the_device_sees_them() {
        let positions = positions(16..17);
        StepBatch::pack(&[SequencePart {
            tokens: &[1],
            unseen: None,
            positions: &positions,
            cached_tokens: 16,
            tables: &[vec![0].into()],
            pictures: &[],
            logit_rows: 1,
            repeated: 0,
            scored: 0..0,
            state: None,
        }]);
    }

    #[test]
    fn each_group_has_slots_and_tables_without_the_blocks_before_its_window() {
        let (chunk, one) = (positions(30..34), positions(40..41));
        let tables = [vec![1, 2, 3].into(), BlockTable { skipped: 1, blocks: vec![8, 9] }];
        let short = [vec![4, 5, 6].into(), BlockTable { skipped: 2, blocks: vec![7] }];
        let batch = StepBatch::pack(&[
            SequencePart { tokens: &[1; 4], positions: &chunk, cached_tokens: 30, tables: &tables, ..decoding(&[]) },
            SequencePart { positions: &one, cached_tokens: 40, tables: &short, ..decoding(&[]) },
        ]);
        assert_eq!((batch.groups, batch.blocks_max()), (2, 3));
        assert_eq!(batch.slots[..5], [2 * 16 + 14, 2 * 16 + 15, 3 * 16, 3 * 16 + 1, 6 * 16 + 8]);
        assert_eq!(batch.slots[5..], [8 * 16 + 14, 8 * 16 + 15, 9 * 16, 9 * 16 + 1, 7 * 16 + 8]);
        assert_eq!(batch.block_tables, [1, 2, 3, 4, 5, 6, 0, 8, 9, 0, 0, 7]);
    }

    /// A sequence that decodes one token and samples the next one.
    fn decoding(tables: &[BlockTable]) -> SequencePart<'_> {
        SequencePart {
            tokens: &[5],
            unseen: None,
            positions: &[[7; 3]],
            cached_tokens: 7,
            tables,
            pictures: &[],
            logit_rows: 1,
            repeated: 0,
            scored: 0..0,
            state: None,
        }
    }

    #[test]
    fn the_draft_head_reads_the_token_after_each_row() {
        let tables = [vec![2].into()];
        let chunk = SequencePart {
            tokens: &[10, 11, 12, 13],
            positions: &positions(0..4),
            pictures: &[
                EmbeddingRows { tokens: 0..1, cache_rows: &[5] },
                EmbeddingRows { tokens: 2..4, cache_rows: &[6, 7] },
            ],
            cached_tokens: 0,
            logit_rows: 0,
            ..decoding(&tables)
        };
        let verified =
            SequencePart { tokens: &[20, 21], positions: &positions(7..9), logit_rows: 2, ..decoding(&tables) };
        let unseen = SequencePart { tokens: &[], unseen: Some(UnseenToken { row: 9 }), ..decoding(&tables) };
        let border = NextToken::Known { token: 14, cache_row: Some(8) };
        let batch = StepBatch::pack_with_drafts(
            &[chunk.clone(), verified, unseen],
            &[border, NextToken::Chosen, NextToken::Chosen],
        );
        let chosen = |row| InputToken::Unseen(UnseenToken { row });
        let known = InputToken::Known;
        let drafts = batch.draft_pass();
        assert_eq!(drafts.tokens, [known(11), known(12), known(13), known(14), chosen(0), chosen(1), chosen(2)]);
        assert_eq!(drafts.picture_rows, [1, 2, 3], "the first token of the chunk follows a row of an earlier chunk");
        assert_eq!(drafts.picture_cache_rows, [6, 7, 8]);
        assert_eq!((&drafts.slots, &drafts.positions), (&batch.slots, &batch.positions));
        assert_eq!((&drafts.logit_rows, drafts.score_rows.len()), (&batch.logit_rows, 0));
        let text = NextToken::Known { token: 14, cache_row: None };
        let batch = StepBatch::pack_with_drafts(&[chunk], &[text]);
        assert_eq!(batch.draft_pass().picture_rows, [1, 2]);
    }

    #[test]
    #[should_panic(expected = "the token after row 0 of a part is unknown")]
    fn a_row_without_logits_needs_a_known_next_token() {
        let tables = [vec![2].into()];
        StepBatch::pack_with_drafts(&[SequencePart { logit_rows: 0, ..decoding(&tables) }], &[NextToken::Chosen]);
    }

    #[test]
    fn a_step_is_decoding_alone_if_each_sequence_only_chooses() {
        let tables = [vec![2].into()];
        let decoding = || decoding(&tables);
        let chunk = SequencePart { tokens: &[5, 6], positions: &[[7; 3]; 2], ..decoding() };
        let pictures = [EmbeddingRows { tokens: 0..1, cache_rows: &[3] }];
        let alone = |part| StepBatch::pack(&[decoding(), part, decoding()]).is_decoding_alone();
        assert!(alone(decoding()) && StepBatch::pack(&[]).is_decoding_alone());
        assert!(!alone(chunk), "a chunk of a prompt is not a lone decoding token");
        assert!(
            !alone(SequencePart { logit_rows: 0, ..decoding() }),
            "a token in the middle of a prompt is not a lone decoding token"
        );
        assert!(!alone(SequencePart { scored: 0..1, ..decoding() }), "a scored token is not a lone decoding token");
        assert!(
            !alone(SequencePart { pictures: &pictures, ..decoding() }),
            "a picture token is not a lone decoding token"
        );
    }

    #[test]
    fn a_batch_counts_tokens_sequences_and_leading_single_rows() {
        let tables = [vec![2, 3].into()];
        let decoding = || decoding(&tables);
        let chunk = SequencePart { tokens: &[5, 6], positions: &[[7; 3]; 2], cached_tokens: 15, ..decoding() };
        let batch = StepBatch::pack(&[decoding(), decoding(), chunk, decoding()]);
        let counts = (batch.token_count(), batch.sequence_count(), batch.single_rows(), batch.blocks_max());
        assert_eq!(counts, (5, 4, 2, 2));
        assert_eq!(StepBatch::pack(&[]).blocks_max(), 0);
    }
}
