//! A sequence: its tokens, how many of them are computed, and where its pictures lie.

use std::{ops::Range, sync::Arc};

use bursar_kernels::ops::argmax::NO_CHOICE;
use bursar_model::{
    flow::{POSITION_AXES, PictureRows},
    sampling::Sampler,
};

use crate::kv::SequenceId;

/// A sequence to admit. One whose work was lost comes again with the tokens it had produced.
#[derive(Clone, Debug)]
pub struct NewSequence {
    /// Never used before.
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
    /// Tokens that end it.
    pub stop_tokens: Arc<[u32]>,
    /// How its tokens are chosen.
    pub sampler: Arc<Sampler>,
}

/// Where a picture stands in the prompt, and its embeddings in the vision cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PicturePlace {
    /// Which tokens of the prompt.
    pub tokens: Range<usize>,
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
    /// Tokens whose keys and values are in the cache.
    pub(super) cached: usize,
    /// Forgotten by its caller; it ends with the step it is in.
    pub(super) cancelled: bool,
}

impl Sequence {
    pub(super) fn new(spec: NewSequence) -> Self {
        assert_eq!(spec.tokens.len(), spec.positions.len(), "each token has a position");
        assert!(!spec.tokens.is_empty(), "a sequence has at least one token");
        Sequence { spec, cached: 0, cancelled: false }
    }

    pub(super) fn id(&self) -> SequenceId {
        self.spec.id
    }

    /// Tokens that are not computed yet: one while decoding, more before.
    pub(super) fn pending(&self) -> usize {
        self.spec.tokens.len() - self.cached
    }

    pub(super) fn is_decoding(&self) -> bool {
        self.pending() == 1 && self.spec.produced > 0
    }

    /// Tokens it may still produce.
    pub(super) fn remaining(&self) -> usize {
        self.spec.tokens_max - self.spec.produced
    }

    /// All is to be computed again: its blocks are gone.
    pub(super) fn forget_cache(&mut self) {
        self.cached = 0;
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
            .filter(|picture| !cut(&picture.tokens).is_empty())
            .map(|picture| {
                let tokens = cut(&picture.tokens);
                let rows = tokens.start - picture.tokens.start..tokens.end - picture.tokens.start;
                PictureRows { tokens: tokens.start - start..tokens.end - start, cache_rows: &picture.cache_rows[rows] }
            })
            .collect()
    }
}
