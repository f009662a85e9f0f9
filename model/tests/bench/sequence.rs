//! A sequence with its prompt and its answer.

use std::ops::Range;

use bursar_kernels::BLOCK_TOKENS;
use bursar_model::flow::{
    BlockTable, CacheGroups, EmbeddingRows, FurtherDrafts, NextToken, PromptLayout, SequencePart, StateSlots,
};

/// Maximum tokens of an answer in a test.
const ANSWER_TOKENS: usize = 40;

/// A prompt, the answer so far, and the number of tokens of both that are in the cache.
pub struct Sequence {
    pub layout: PromptLayout,
    tokens: Vec<u32>,
    positions: Vec<[u32; 3]>,
    picture_rows: Vec<Vec<u32>>,
    groups: CacheGroups,
    tables: Vec<BlockTable>,
    /// Blocks before the sliding windows, which no step reads any more.
    released: Vec<u32>,
    state: Option<u32>,
    /// Whether no chunk may end within a picture.
    whole_pictures: bool,
    cached: usize,
}

/// The tokens of a sequence that run in one step.
pub struct SequenceChunk<'a> {
    sequence: &'a mut Sequence,
    count: usize,
    /// Number of tokens at the end of the chunk that have logits.
    logit_rows: usize,
    /// Number of tokens at the end of the chunk that are scored.
    scored: usize,
}

impl Sequence {
    pub fn blocks_for(prompt_tokens: usize) -> usize {
        (prompt_tokens + ANSWER_TOKENS).div_ceil(BLOCK_TOKENS)
    }

    /// A sequence at the start of its prompt. `blocks` are divided among the cache groups.
    pub fn new(
        layout: PromptLayout,
        picture_rows: Vec<Vec<u32>>,
        groups: &CacheGroups,
        blocks: &[u32],
        state: Option<u32>,
    ) -> Self {
        let (tokens, positions) = (layout.tokens.clone(), layout.positions.clone());
        let tables = blocks.chunks(blocks.len() / groups.count()).map(|blocks| blocks.to_vec().into()).collect();
        let (groups, released) = (groups.clone(), Vec::new());
        let whole_pictures = false;
        Sequence { layout, tokens, positions, picture_rows, groups, tables, released, state, whole_pictures, cached: 0 }
    }

    /// The same sequence. With `whole_pictures`, chunks that would end within a picture include all
    /// of the picture.
    pub fn with_whole_pictures(self, whole_pictures: bool) -> Self {
        Sequence { whole_pictures, ..self }
    }

    /// The blocks and the slot of the state.
    pub fn into_memory(self) -> (Vec<u32>, Option<u32>) {
        let held = self.tables.into_iter().flat_map(|table| table.blocks);
        (held.chain(self.released).collect(), self.state)
    }

    /// Tokens of the prompt that are not in the cache yet.
    pub fn prompt_left(&self) -> usize {
        self.layout.tokens.len().saturating_sub(self.cached)
    }

    pub fn answer(&self) -> &[u32] {
        &self.tokens[self.layout.tokens.len()..]
    }

    pub fn push(&mut self, token: u32) {
        self.positions.push([self.layout.next_position + self.answer().len() as u32; 3]);
        self.tokens.push(token);
    }

    /// The next `count` tokens, or more to the end of a picture that must be whole, with the logits
    /// of the last token.
    pub fn next_chunk(&mut self, count: usize) -> SequenceChunk<'_> {
        let end = self.cached + count;
        let is_cut = |tokens: &Range<usize>| self.whole_pictures && tokens.start < end && end < tokens.end;
        let cut = self.layout.pictures.iter().map(|span| &span.tokens).find(|tokens| is_cut(tokens));
        let count = cut.map_or(count, |tokens| tokens.end - self.cached);
        SequenceChunk { sequence: self, count, logit_rows: 1, scored: 0 }
    }
}

impl SequenceChunk<'_> {
    /// The same chunk without logits, as in the middle of a prompt.
    pub fn without_logits(self) -> Self {
        SequenceChunk { logit_rows: 0, ..self }
    }

    /// The same chunk with the logits of token `at` and of all tokens after it. Also returns the
    /// number of these logits.
    pub fn with_logits_from(self, at: usize) -> (Self, usize) {
        let logit_rows = self.count - at;
        (SequenceChunk { logit_rows, ..self }, logit_rows)
    }

    /// The same chunk with the logits of all its tokens, as in a step that verifies drafts.
    pub fn verified(self) -> Self {
        SequenceChunk { logit_rows: self.count, ..self }
    }

    /// The same chunk with all its tokens scored.
    pub fn scored(self) -> Self {
        SequenceChunk { scored: self.count, ..self }
    }

    /// The same chunk with its last `rows` tokens scored.
    pub fn scored_last(self, rows: usize) -> Self {
        assert!(rows <= self.count);
        SequenceChunk { scored: rows, ..self }
    }

    pub fn token_count(&self) -> usize {
        self.count
    }

    fn chunk(&self) -> Range<usize> {
        self.sequence.cached..self.sequence.cached + self.count
    }

    /// The parts of pictures that are in the chunk.
    pub(super) fn pictures(&self) -> Vec<EmbeddingRows<'_>> {
        let chunk = self.chunk();
        let shown = self.sequence.layout.pictures.iter().filter_map(|span| {
            let shown = span.tokens.start.max(chunk.start)..span.tokens.end.min(chunk.end);
            let rows = &self.sequence.picture_rows[span.picture];
            (!shown.is_empty()).then(|| EmbeddingRows {
                tokens: shown.start - chunk.start..shown.end - chunk.start,
                cache_rows: &rows[shown.start - span.tokens.start..shown.end - span.tokens.start],
            })
        });
        shown.collect()
    }

    pub(super) fn part<'s>(&'s self, pictures: &'s [EmbeddingRows<'s>]) -> SequencePart<'s> {
        SequencePart {
            tokens: &self.sequence.tokens[self.chunk()],
            unseen: None,
            positions: &self.sequence.positions[self.chunk()],
            cached_tokens: self.sequence.cached,
            tables: &self.sequence.tables,
            pictures,
            logit_rows: self.logit_rows,
            repeated: 0,
            scored: self.count - self.scored..self.count,
            state: self.sequence.state.map(StateSlots::in_place),
        }
    }

    /// The token after the chunk.
    pub(super) fn next(&self) -> NextToken {
        let at = self.chunk().end;
        let Some(token) = self.sequence.tokens.get(at) else { return NextToken::Chosen };
        let span = self.sequence.layout.pictures.iter().find(|span| span.tokens.contains(&at));
        let row = span.map(|span| self.sequence.picture_rows[span.picture][at - span.tokens.start]);
        NextToken::Known { token: *token, cache_row: row }
    }

    /// The position of the row that is `draft` rows after the chunk's last row.
    /// The place of `count` drafts after the first, if the chunk's last row chooses a token.
    pub(super) fn further_drafts(&self, count: usize) -> FurtherDrafts {
        let end = self.chunk().end;
        let [position, ..] = self.sequence.positions[end - 1];
        FurtherDrafts { count, index: end, position: position + 1, tables: self.sequence.tables.clone() }
    }

    pub(super) fn advance(&mut self) {
        let Sequence { groups, tables, released, cached, .. } = &mut *self.sequence;
        *cached += self.count;
        for (group, table) in tables.iter_mut().enumerate() {
            let before = groups.first_read(group, *cached) - table.skipped;
            released.extend(table.blocks.drain(..before));
            table.skipped += before;
        }
    }
}
