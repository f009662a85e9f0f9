//! A sequence: its tokens, how many of them are computed, and where its pictures lie.

use std::{borrow::Cow, fmt, ops::Range, sync::Arc};

use bursar_kernels::{
    BLOCK_TOKENS,
    ops::{argmax::NO_CHOICE, embed::PREVIOUS},
};
use bursar_model::{
    flow::{POSITION_AXES, PictureContent, PictureRows, PrefixKey, PrefixKeys},
    sampling::Sampler,
};

use crate::kv::SequenceId;

/// A sequence to admit. One whose work was lost comes again with the tokens it had produced.
#[derive(Clone)]
pub struct NewSequence {
    /// Never used before, but by itself if it was told to come again.
    pub id: SequenceId,
    /// The prompt, and what was produced in an earlier life; at least one.
    pub tokens: Vec<u32>,
    /// One a token.
    pub positions: Vec<[u32; POSITION_AXES]>,
    /// Position of the next token, on all axes.
    pub next_position: u32,
    /// How many of `tokens` were produced.
    pub produced: usize,
    /// Tokens it may produce in all, `produced` included.
    pub tokens_max: usize,
    /// Placeholders and the embeddings that replace them.
    pub pictures: Vec<PicturePlace>,
    /// Names of its whole blocks, as far as they are made already; see [`name_blocks`](NewSequence::name_blocks).
    pub prefix: PrefixKeys,
    /// Shared with the other samples of its prompt, if there are any: their prompt takes its blocks once.
    pub group: Option<u64>,
    /// Log-probabilities of the prompt's tokens are wanted, each with so many of the likeliest.
    pub score_prompt: Option<usize>,
    /// Tokens that end it.
    pub stop_tokens: Arc<[u32]>,
    /// How its tokens are chosen.
    pub sampler: Arc<Sampler>,
    /// What that [reads](Sampler::read_of) of the prompt.
    pub prompt_read: Arc<[u32]>,
}

/// Counts, never the tokens: they are the user's text.
impl fmt::Debug for NewSequence {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NewSequence { id, tokens, produced, tokens_max, .. } = self;
        write!(formatter, "NewSequence({id}, {} tokens, {produced} of {tokens_max} produced)", tokens.len())
    }
}

impl NewSequence {
    /// Names the blocks that have become whole since it was last called. Whoever hands a long prompt over does it
    /// before, so that the scheduler need not.
    pub fn name_blocks(&mut self) {
        if self.tokens.len() / BLOCK_TOKENS > self.prefix.as_slice().len() {
            let pictures: Vec<_> = self.pictures.iter().map(|picture| picture.content.clone()).collect();
            self.prefix.extend(&self.tokens, &self.positions, &pictures);
        }
    }
}

impl NewSequence {
    /// Whether the host must have seen each token before the next can be chosen, so that no step behind the one that
    /// chooses it can be planned meanwhile.
    pub fn must_be_seen(&self) -> bool {
        self.sampler.must_see()
    }
}

/// Where a picture stands in the prompt, and its embeddings in the vision cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PicturePlace {
    /// Which tokens of the prompt, and what they show.
    pub content: PictureContent,
    /// The row of the vision cache that each of them takes.
    pub cache_rows: Arc<[u32]>,
}

/// Why a sequence ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It produced a token that ends it.
    Stop,
    /// It produced all it may.
    Length,
    /// Its logits were not numbers, so that no token could be chosen.
    Broken,
}

/// A sequence in the scheduler.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) spec: NewSequence,
    /// Tokens of the prompt.
    pub(super) prompt: usize,
    /// Tokens whose keys and values are in the cache when the steps under way have run.
    pub(super) cached: usize,
    /// Tokens that steps under way are to choose: how many is known, which is not.
    pub(super) to_come: usize,
    /// The row of its step's choices in which the last of them will stand.
    pub(super) chosen_at: u32,
    /// Tokens whose blocks have been named.
    pub(super) named: usize,
    /// Tokens whose logits have scored the one that follows.
    pub(super) scored: usize,
    /// What others had computed of it has been told.
    pub(super) has_begun: bool,
    /// Forgotten by its caller; it ends with the steps it is in.
    pub(super) cancelled: bool,
    /// Its pictures are held in the vision cache: until the last of them stands in a step.
    pub(super) holds_pictures: bool,
}

impl Sequence {
    pub(super) fn new(mut spec: NewSequence) -> Self {
        assert_eq!(spec.tokens.len(), spec.positions.len(), "each token has a position");
        assert!(!spec.tokens.is_empty(), "a sequence has at least one token");
        spec.name_blocks();
        let holds_pictures = !spec.pictures.is_empty();
        Sequence {
            prompt: spec.tokens.len() - spec.produced,
            spec,
            cached: 0,
            to_come: 0,
            chosen_at: 0,
            named: 0,
            scored: 0,
            has_begun: false,
            cancelled: false,
            holds_pictures,
        }
    }

    pub(super) fn id(&self) -> SequenceId {
        self.spec.id
    }

    /// Its tokens, those included that steps under way are to choose.
    pub(super) fn tokens(&self) -> usize {
        self.spec.tokens.len() + self.to_come
    }

    /// How many of them it has produced.
    pub(super) fn produced(&self) -> usize {
        self.spec.produced + self.to_come
    }

    /// Tokens that no step has been planned for: one while decoding, more before.
    pub(super) fn pending(&self) -> usize {
        self.tokens() - self.cached
    }

    pub(super) fn is_decoding(&self) -> bool {
        self.pending() == 1 && self.produced() > 0
    }

    /// Tokens it may still produce.
    pub(super) fn remaining(&self) -> usize {
        self.spec.tokens_max.saturating_sub(self.produced())
    }

    /// Whether the steps under way bring it to its end, whatever they choose.
    pub(super) fn is_complete(&self) -> bool {
        self.to_come > 0 && self.remaining() == 0
    }

    /// Whether nothing can be planned of it before the host has seen what the steps under way choose.
    pub(super) fn waits_to_be_seen(&self) -> bool {
        self.to_come > 0 && self.spec.must_be_seen()
    }

    /// The last of its tokens, as a step is fed it, if that is not chosen yet.
    pub(super) fn unseen(&self) -> Option<u32> {
        (self.to_come > 0).then_some(PREVIOUS | self.chosen_at)
    }

    /// Its next `count` tokens with their positions, as a step is fed them: one that is not chosen yet stands in the last
    /// place, as the row of the step before that will choose it.
    pub(super) fn next(&self, count: usize) -> (Cow<'_, [u32]>, Cow<'_, [[u32; POSITION_AXES]]>) {
        assert!(self.to_come <= 1, "{} is planned two steps ahead", self.id());
        let (known, end) = (self.spec.tokens.len(), self.cached + count);
        let stretch = self.cached..end.min(known);
        let (tokens, positions) = (&self.spec.tokens[stretch.clone()], &self.spec.positions[stretch]);
        match self.unseen().filter(|_| end > known) {
            None => (tokens.into(), positions.into()),
            Some(unseen) => (
                [tokens, &[unseen]].concat().into(),
                [positions, &[[self.spec.next_position; POSITION_AXES]]].concat().into(),
            ),
        }
    }

    /// A step has been planned that runs its next `count` tokens, and chooses the one that follows in this row.
    pub(super) fn launch(&mut self, count: usize, chosen_at: Option<u32>) {
        self.cached += count;
        self.scored = self.scored.max(self.cached);
        if let Some(row) = chosen_at {
            self.to_come += 1;
            self.chosen_at = row;
        }
    }

    /// Names of the blocks that it may take from others. One token is left to compute, as its logits are wanted; a
    /// prompt whose every token is to be scored takes none.
    pub(super) fn takeable(&self) -> &[PrefixKey] {
        let blocks = match (self.cached, self.spec.score_prompt) {
            (0, None) => (self.spec.tokens.len() - 1) / BLOCK_TOKENS,
            _ => 0,
        };
        &self.spec.prefix.as_slice()[..blocks]
    }

    /// The blocks that may be named once a token could be chosen after `end` tokens: the first of them, and their names.
    /// Until then nobody knows that what was computed are numbers.
    pub(super) fn filled(&self, end: usize) -> (usize, &[PrefixKey]) {
        let first = self.named / BLOCK_TOKENS;
        (first, &self.spec.prefix.as_slice()[first..end / BLOCK_TOKENS])
    }

    /// Whether it will be able to take blocks that `other` fills with its first `end` tokens, and can not yet.
    pub(super) fn begins_as(&self, other: &Sequence, end: usize) -> bool {
        let (first, keys) = other.filled(end);
        let wanted = self.takeable().get(first);
        // A name covers all that stands before, so that the first is enough.
        wanted.is_some_and(|wanted| keys.first() == Some(wanted))
    }

    /// Tokens of the prompt in whole blocks: what all samples of one prompt share.
    pub(super) fn shared_tokens(&self) -> usize {
        (self.prompt - 1) / BLOCK_TOKENS * BLOCK_TOKENS
    }

    /// Which of the next `count` tokens are followed by one of the prompt that is to be scored. None is scored twice,
    /// even if it is computed again.
    pub(super) fn scored_in_next(&self, count: usize) -> Range<usize> {
        if self.spec.score_prompt.is_none() {
            return 0..0;
        }
        let end = (self.prompt - 1).min(self.cached + count).saturating_sub(self.cached);
        self.scored.saturating_sub(self.cached).min(end)..end
    }

    /// Whether its next `count` tokens are the last for which it holds its pictures.
    pub(super) fn is_past_pictures_after(&self, count: usize) -> bool {
        let end = self.spec.pictures.iter().map(|picture| picture.content.tokens.end).max();
        self.holds_pictures && end.is_some_and(|end| self.cached + count >= end)
    }

    /// Whether it could be computed from its beginning without asking for its pictures again.
    pub(super) fn can_begin_again(&self) -> bool {
        self.holds_pictures || self.spec.pictures.is_empty()
    }

    /// All is to be computed again: its blocks are gone. No step that it is in is under way.
    pub(super) fn forget_cache(&mut self) {
        assert_eq!(self.to_come, 0, "{} is still to be chosen for", self.id());
        self.cached = 0;
        self.named = 0;
    }

    /// Takes the token that follows; says whether the sequence has ended.
    pub(super) fn push(&mut self, token: u32) -> Option<Finish> {
        if token == NO_CHOICE {
            return Some(Finish::Broken);
        }
        let spec = &mut self.spec;
        spec.tokens.push(token);
        spec.positions.push([spec.next_position; POSITION_AXES]);
        spec.next_position += 1;
        spec.produced += 1;
        spec.name_blocks();
        if spec.stop_tokens.contains(&token) {
            return Some(Finish::Stop);
        }
        (spec.produced >= spec.tokens_max).then_some(Finish::Length)
    }

    /// The pictures that have tokens in the next `count` tokens, cut to them.
    pub(super) fn pictures_in_next(&self, count: usize) -> Vec<PictureRows<'_>> {
        let (start, end) = (self.cached, self.cached + count);
        let cut = |place: &Range<usize>| place.start.max(start)..place.end.min(end);
        self.spec
            .pictures
            .iter()
            .filter(|picture| !cut(&picture.content.tokens).is_empty())
            .map(|picture| {
                let first = picture.content.tokens.start;
                let tokens = cut(&picture.content.tokens);
                let rows = tokens.start - first..tokens.end - first;
                PictureRows { tokens: tokens.start - start..tokens.end - start, cache_rows: &picture.cache_rows[rows] }
            })
            .collect()
    }
}
