//! Pure: a sequence, with its tokens, how many of them are computed, and the positions of its
//! pictures.

use std::{borrow::Cow, fmt, ops::Range, sync::Arc};

use bursar_kernels::{BLOCK_TOKENS, UnseenToken};
use bursar_model::{
    flow::{ContentSpan, EmbeddingRows, NextToken, POSITION_AXES, PrefixKey, PrefixKeys},
    sampling::Sampler,
};

use super::{
    SchedulingParams,
    drafts::{Backoff, Drafter},
};
use crate::{
    deadline::Deadlines,
    kv::{SequenceId, StoredBlock},
};

/// A sequence to admit. A sequence that lost its work is admitted again, with the tokens that it
/// has produced.
#[derive(Clone)]
pub struct NewSequence {
    /// The sequence's id. Ids are unique, except that a sequence keeps its id when it is admitted
    /// again after a [`Readmit`](super::Delivery::Readmit).
    pub id: SequenceId,
    /// The prompt, followed by the tokens produced before this admission. At least one token.
    pub tokens: Vec<u32>,
    /// The position of each token.
    pub positions: Vec<[u32; POSITION_AXES]>,
    /// The position of the next token, on all axes.
    pub next_position: u32,
    /// How many of `tokens` were produced. The produced tokens are at the end of `tokens`.
    pub produced: usize,
    /// The most tokens that the sequence may produce, including `produced`.
    pub tokens_max: usize,
    /// The placeholder tokens of pictures, and the embeddings that replace these tokens.
    pub pictures: Vec<Placeholder>,
    /// Names of the sequence's whole blocks, as far as known; see
    /// [`name_blocks`](NewSequence::name_blocks).
    pub prefix: PrefixKeys,
    pub scheduling_params: SchedulingParams,
    /// A number that all samples of one prompt have in common. With this number, admission counts a
    /// block that several samples share only once.
    pub group: Option<u64>,
    /// How many of the likeliest tokens to report with each prompt token's log-probability. `None`
    /// if the prompt is not scored.
    pub score_prompt: Option<usize>,
    /// Tokens that end the reply.
    pub stop_tokens: Arc<[u32]>,
    pub sampler: Arc<Sampler>,
    /// The prompt tokens that the sampler [reads](Sampler::read_of).
    pub prompt_read: Arc<[u32]>,
    pub drafter: Drafter,
}

/// Prints counts, never the tokens, because they are the user's text.
impl fmt::Debug for NewSequence {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NewSequence { id, tokens, produced, tokens_max, .. } = self;
        write!(formatter, "NewSequence({id}, {} tokens, {produced} of {tokens_max} produced)", tokens.len())
    }
}

impl NewSequence {
    /// Names the blocks that have become whole since the last call. The driver of a long prompt
    /// calls this before it submits the sequence, so that the scheduler need not spend time on it.
    pub fn name_blocks(&mut self) {
        if self.tokens.len() / BLOCK_TOKENS > self.prefix.as_slice().len() {
            let pictures: Vec<_> = self.pictures.iter().map(|picture| picture.content.clone()).collect();
            self.prefix.extend(&self.tokens, &self.positions, &pictures);
        }
    }
}

impl NewSequence {
    /// Whether the host must see each token before the next token can be chosen. If so, no step can
    /// be planned ahead for this sequence.
    pub fn must_be_seen(&self) -> bool {
        self.sampler.must_see()
    }
}

/// A picture's tokens in the prompt, and its embeddings in the vision cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placeholder {
    /// The placeholder tokens of the picture in the prompt, and the picture's content.
    pub content: ContentSpan,
    /// The row of the vision cache for each of these tokens. Empty if cached blocks are expected to
    /// hold the tokens. If these blocks are gone, the driver receives
    /// [`Readmit`](super::Delivery::Readmit).
    pub cache_rows: Arc<[u32]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The sequence produced this token, which ends it.
    Stop(u32),
    /// The sequence produced as many tokens as it may.
    Length,
    /// No token could be chosen, for example because a logit is NaN.
    Broken,
}

#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) spec: NewSequence,
    pub(super) prompt: usize,
    /// Tokens whose keys and values will be in the cache when the running steps have ended.
    pub(super) cached: usize,
    /// Tokens that running steps will choose. Their number is known, but their ids are not.
    pub(super) to_come: usize,
    /// The row of the step's logits from which the last token in `to_come` is chosen.
    pub(super) chosen_at: u32,
    /// Cached tokens that the recurrent state has not seen: the drafts that the last step accepted.
    /// The next step runs them again.
    pub(super) state_lag: usize,
    /// Draft tokens that continue the known tokens.
    pub(super) drafts: Vec<u32>,
    /// Number of drafts that the running step verifies plus further drafts that it computes. While
    /// this number is above 0, no further step is planned for the sequence.
    pub(super) verifying: usize,
    pub(super) backoff: Backoff,
    /// Tokens in blocks that have been named.
    pub(super) named: usize,
    /// Tokens whose logits have been used to score the following prompt token.
    pub(super) scored: usize,
    /// Whether the number of cached tokens has been reported.
    pub(super) has_begun: bool,
    /// `true` once the caller has disconnected. The sequence ends with its running steps.
    pub(super) cancelled: bool,
    /// `true` while the sequence's blocks are being filled from host memory. No step may use these
    /// blocks, and they are not released.
    pub(super) is_fetching: bool,
    /// Whether the sequence's pictures are still pinned in the vision cache. The pin ends when the
    /// last picture is in a step.
    pub(super) holds_pictures: bool,
    /// The number of tokens up to the end of the last picture without rows. The sequence cannot
    /// begin unless cached blocks hold all of them.
    pub(super) must_find: usize,
    pub(super) history: History,
    /// `true` if the sequence was admitted because it had waited longest. Such a sequence is not
    /// preempted for a more urgent sequence, because it would then have to wait that long again.
    pub(super) has_turn: bool,
    /// The times of the deadlines, on the clock of [`Input::Now`](super::Input::Now).
    pub(super) due: Deadlines,
    /// The total number of tokens that the sequence was expected to produce when it was first
    /// admitted.
    pub(super) expected: Option<usize>,
}

/// Facts about a sequence that are kept when the sequence loses its blocks, even if its driver must
/// admit it again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct History {
    /// How often the sequence lost its blocks to other sequences.
    pub(super) preemptions: u32,
    /// How often the sequence lost its blocks because the pool shrank.
    pub(super) shrinks: u32,
    /// How much of the prompt the tenant has been charged for.
    pub(super) charge: Charge,
}

/// How much of a sequence's prompt its tenant has been charged for. Each computed token is charged
/// once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Charge {
    #[default]
    None,
    /// The whole prompt. The sequence is admitted and has not begun. If it leaves before it begins,
    /// the charge is refunded.
    Whole,
    /// The tokens that were not cached when the sequence began. This charge is final.
    Computed,
}

/// The tokens of a sequence that a step runs.
pub(super) struct NextTokens<'a> {
    pub(super) tokens: Cow<'a, [u32]>,
    /// A further token after `tokens`, which has not been chosen yet.
    pub(super) unseen: Option<UnseenToken>,
    pub(super) positions: Cow<'a, [[u32; POSITION_AXES]]>,
}

impl Sequence {
    pub(super) fn new(mut spec: NewSequence) -> Self {
        assert_eq!(spec.tokens.len(), spec.positions.len(), "each token has a position");
        assert!(!spec.tokens.is_empty(), "a sequence has at least one token");
        spec.name_blocks();
        let holds_pictures = !spec.pictures.is_empty();
        let without_rows = spec.pictures.iter().filter(|picture| picture.cache_rows.is_empty());
        let must_find = without_rows.map(|picture| picture.content.tokens.end).max().unwrap_or(0);
        let backoff = match spec.drafter {
            Drafter::DraftHead => Backoff::of_draft_head(),
            Drafter::PromptLookup(_) | Drafter::None => Backoff::default(),
        };
        Sequence {
            prompt: spec.tokens.len() - spec.produced,
            spec,
            cached: 0,
            to_come: 0,
            chosen_at: 0,
            state_lag: 0,
            drafts: Vec::new(),
            verifying: 0,
            backoff,
            named: 0,
            scored: 0,
            has_begun: false,
            cancelled: false,
            is_fetching: false,
            holds_pictures,
            must_find,
            history: History::default(),
            has_turn: false,
            due: Deadlines::default(),
            expected: None,
        }
    }

    pub(super) fn id(&self) -> SequenceId {
        self.spec.id
    }

    /// The number of the sequence's tokens, including the tokens that running steps will choose.
    pub(super) fn tokens(&self) -> usize {
        self.spec.tokens.len() + self.to_come
    }

    /// Tokens that the sequence has produced, including the tokens that running steps will choose.
    pub(super) fn produced(&self) -> usize {
        self.spec.produced + self.to_come
    }

    /// Tokens that no step has been planned for: one while decoding, more before that.
    pub(super) fn pending(&self) -> usize {
        self.tokens() - self.cached
    }

    /// The index of the first token that the next step runs.
    pub(super) fn next_first(&self) -> usize {
        self.cached - self.state_lag
    }

    pub(super) fn is_decoding(&self) -> bool {
        self.pending() == 1 && self.produced() > 0
    }

    /// Tokens that the sequence may still produce.
    pub(super) fn remaining(&self) -> usize {
        self.spec.tokens_max.saturating_sub(self.produced())
    }

    /// Whether the running steps end the sequence, whatever they choose.
    pub(super) fn is_complete(&self) -> bool {
        self.to_come > 0 && self.remaining() == 0
    }

    /// Whether no further step is planned for the sequence, because the running steps end it or
    /// its caller has disconnected.
    pub(super) fn is_over(&self) -> bool {
        self.is_complete() || self.cancelled
    }

    /// Whether nothing more can be planned for the sequence until the host has seen the choices of
    /// the running steps. Drafts can follow only known tokens, so a sequence waits if drafts are
    /// expected for its next step. `drafts_max` limits their number.
    pub(super) fn waits_to_be_seen(&self, drafts_max: usize) -> bool {
        self.to_come > 0 && (self.must_be_seen(drafts_max) || self.verifying > 0)
    }

    /// Whether the sequence takes part only in every other step, because the host must see its
    /// tokens first.
    pub(super) fn must_be_seen(&self, drafts_max: usize) -> bool {
        let expects_drafts = match self.spec.drafter {
            // Each step proposes drafts.
            Drafter::DraftHead => drafts_max > 0 && self.remaining() > 1 && !self.backoff.withholds_next(),
            Drafter::PromptLookup(_) | Drafter::None => self.drafts_within(drafts_max) > 0,
        };
        self.spec.must_be_seen() || expects_drafts
    }

    /// The number of tokens that are drafted for the sequence's next step, at most `drafts_max`.
    /// The last token that the sequence may produce is never drafted, because a step chooses one
    /// token more than it has drafts.
    pub(super) fn drafts_within(&self, drafts_max: usize) -> usize {
        drafts_max.min(self.drafts.len()).min(self.remaining().saturating_sub(1))
    }

    /// The number of drafts that the draft head computes in a step after its first draft. The step
    /// runs the sequence's next `tokens` tokens and verifies `drafts` drafts. The drafts that the
    /// head computes can be verified by the next step.
    pub(super) fn further_drafts(&self, tokens: usize, drafts: usize, further_max: usize) -> usize {
        let is_head = matches!(self.spec.drafter, Drafter::DraftHead);
        if !is_head || tokens < self.pending() || self.backoff.withholds_next() {
            return 0;
        }
        // The step chooses a token after the accepted drafts. The last token of a reply is never
        // drafted.
        further_max.min(self.remaining().saturating_sub(drafts + 3))
    }

    /// The first `count` drafted tokens.
    pub(super) fn drafts(&self, count: usize) -> &[u32] {
        &self.drafts[..count]
    }

    /// Drafts up to `drafts_max` tokens that are expected after the known tokens. `verified` is the
    /// number of drafts that the last step verified and the number that it accepted. `proposed` are
    /// the drafts of the model's draft head.
    pub(super) fn draft(&mut self, drafts_max: usize, verified: Option<(usize, usize)>, proposed: Vec<u32>) {
        self.drafts.clear();
        if drafts_max == 0 {
            return;
        }
        let spec = &mut self.spec;
        if let Drafter::PromptLookup(lookup) = &mut spec.drafter {
            lookup.extend(&spec.tokens);
        }
        if self.backoff.allows(verified) {
            let pictures = &spec.pictures;
            let is_text = |token: usize| !pictures.iter().any(|picture| picture.content.tokens.contains(&token));
            self.drafts = match &spec.drafter {
                Drafter::None => return,
                Drafter::PromptLookup(lookup) => lookup.draft(&spec.tokens, drafts_max, is_text),
                Drafter::DraftHead => proposed,
            };
            self.drafts.truncate(drafts_max);
            if !self.drafts.is_empty() {
                let produced = &spec.tokens[spec.tokens.len() - spec.produced..];
                self.drafts.truncate(spec.sampler.allowed_prefix_len(produced, &self.drafts));
            }
        }
    }

    /// The sequence's last token, if the running step has yet to choose it.
    pub(super) fn unseen(&self) -> Option<UnseenToken> {
        (self.to_come > 0).then_some(UnseenToken { row: self.chosen_at })
    }

    /// The tokens that the next step runs, with their positions: accepted drafts that the recurrent
    /// state has not seen, the next `count` tokens, and the first `drafts` drafted tokens. A token
    /// that is still to be chosen comes last.
    pub(super) fn next(&self, count: usize, drafts: usize) -> NextTokens<'_> {
        assert!(self.to_come <= 1, "{} is planned at most two steps ahead", self.id());
        let (known, end) = (self.spec.tokens.len(), self.cached + count);
        let range = self.next_first()..end.min(known);
        let (tokens, positions) = (&self.spec.tokens[range.clone()], &self.spec.positions[range]);
        // A step that chooses a token runs all known tokens, so the next step runs only the chosen
        // token.
        let unseen = self.unseen();
        assert!(drafts == 0 || unseen.is_none(), "drafts of {} follow known tokens", self.id());
        let further = drafts + usize::from(unseen.is_some());
        if further == 0 {
            return NextTokens { tokens: tokens.into(), unseen, positions: positions.into() };
        }
        let next = self.spec.next_position;
        let further = (next..next + further as u32).map(|position| [position; POSITION_AXES]);
        let positions = positions.iter().copied().chain(further).collect();
        NextTokens { tokens: [tokens, self.drafts(drafts)].concat().into(), unseen, positions }
    }

    /// The token after the next `count` tokens.
    pub(super) fn after_next(&self, count: usize) -> NextToken {
        let index = self.cached + count;
        let Some(token) = self.spec.tokens.get(index) else { return NextToken::Chosen };
        let picture = self.spec.pictures.iter().find(|picture| picture.content.tokens.contains(&index));
        let cache_row = picture.and_then(|picture| picture.cache_rows.get(index - picture.content.tokens.start));
        NextToken::Known { token: *token, cache_row: cache_row.copied() }
    }

    /// Records a planned step that runs the sequence's next `count` tokens, and that writes keys
    /// and values of up to `drafts` drafts. If the step chooses a token for the sequence,
    /// `chosen_at` is the row of the logits for that token.
    pub(super) fn launch(&mut self, count: usize, drafts: usize, chosen_at: Option<u32>) {
        self.cached += count;
        self.state_lag = 0;
        self.verifying = drafts;
        self.scored = self.scored.max(self.cached);
        if let Some(row) = chosen_at {
            self.to_come += 1;
            self.chosen_at = row;
        }
    }

    /// Names of the cached blocks that the sequence may share. At least one token is left to
    /// compute, because its logits are needed. A prompt whose tokens are all scored shares no
    /// blocks.
    pub(super) fn takeable(&self) -> &[PrefixKey] {
        let blocks = match (self.cached, self.spec.score_prompt) {
            (0, None) => (self.spec.tokens.len() - 1) / BLOCK_TOKENS,
            _ => 0,
        };
        &self.spec.prefix.as_slice()[..blocks]
    }

    /// The blocks that may be named once a token was chosen after `end` tokens: the index of the
    /// first block, and the names. Until a token is chosen, the computed values might be NaN.
    pub(super) fn filled(&self, end: usize) -> (usize, &[PrefixKey]) {
        let first = self.named / BLOCK_TOKENS;
        (first, &self.spec.prefix.as_slice()[first..end / BLOCK_TOKENS])
    }

    /// The content of the sequence's whole block with this index.
    pub(super) fn block(&self, place: usize) -> StoredBlock {
        let (keys, range) = (self.spec.prefix.as_slice(), place * BLOCK_TOKENS..(place + 1) * BLOCK_TOKENS);
        let contents = self.spec.pictures.iter().map(|picture| &picture.content);
        let is_in = |picture: &&ContentSpan| picture.tokens.start < range.end && picture.tokens.end > range.start;
        StoredBlock {
            key: keys[place],
            parent: place.checked_sub(1).map(|before| keys[before]),
            first_token: range.start,
            pictures: contents.filter(is_in).cloned().collect(),
            tokens: self.spec.tokens[range].into(),
            salt: self.spec.prefix.salt().cloned(),
        }
    }

    /// Whether the sequence can share blocks that `other` fills with its first `end` tokens, and
    /// that are not available yet.
    pub(super) fn begins_as(&self, other: &Sequence, end: usize) -> bool {
        let (first, keys) = other.filled(end);
        let wanted = self.takeable().get(first);
        // A name covers everything before its block, so comparing the first name is enough.
        wanted.is_some_and(|wanted| keys.first() == Some(wanted))
    }

    /// Prompt tokens in whole blocks, which all samples of one prompt share.
    pub(super) fn shared_tokens(&self) -> usize {
        (self.prompt - 1) / BLOCK_TOKENS * BLOCK_TOKENS
    }

    /// The range, within the next `count` tokens, of the tokens whose logits score the following
    /// prompt token. No token is scored twice, even if it is computed again.
    pub(super) fn scored_in_next(&self, count: usize) -> Range<usize> {
        if self.spec.score_prompt.is_none() {
            return 0..0;
        }
        let end = (self.prompt - 1).min(self.cached + count).saturating_sub(self.cached);
        self.scored.saturating_sub(self.cached).min(end)..end
    }

    /// Whether the sequence's pictures are no longer needed after its next `count` tokens.
    pub(super) fn is_past_pictures_after(&self, count: usize) -> bool {
        let end = self.spec.pictures.iter().map(|picture| picture.content.tokens.end).max();
        self.holds_pictures && end.is_some_and(|end| self.cached + count >= end)
    }

    /// Whether the sequence can be recomputed from its beginning without requesting its pictures
    /// again.
    pub(super) fn can_begin_again(&self) -> bool {
        self.spec.pictures.is_empty() || self.holds_pictures && self.must_find == 0
    }

    /// Forgets the sequence's blocks, so that everything must be recomputed. No running step may
    /// include the sequence.
    pub(super) fn forget_cache(&mut self) {
        assert_eq!(self.to_come, 0, "{} has no token left to choose", self.id());
        (self.cached, self.state_lag, self.named) = (0, 0, 0);
    }

    /// Records the end of a step that chose tokens of the sequence. `has_drafts` is `true` if the
    /// step verified or computed drafts.
    pub(super) fn chose(&mut self, has_drafts: bool) {
        self.to_come -= 1;
        if has_drafts {
            self.verifying = 0;
        }
    }

    /// Adds the next token. Returns how the sequence has ended, if it has.
    pub(super) fn push(&mut self, token: u32) -> Option<Finish> {
        let spec = &mut self.spec;
        spec.tokens.push(token);
        spec.positions.push([spec.next_position; POSITION_AXES]);
        spec.next_position += 1;
        spec.produced += 1;
        spec.name_blocks();
        if spec.stop_tokens.contains(&token) {
            return Some(Finish::Stop(token));
        }
        (spec.produced >= spec.tokens_max).then_some(Finish::Length)
    }

    /// The picture that a chunk of the next `count` tokens would cut, as a range of tokens relative
    /// to the next token. The range starts at 0 if the picture has already begun.
    fn cut_picture(&self, count: usize) -> Option<Range<usize>> {
        let end = self.cached + count;
        let cut = |picture: &&Placeholder| picture.content.tokens.start < end && end < picture.content.tokens.end;
        let Range { start, end } = self.spec.pictures.iter().find(cut)?.content.tokens.clone();
        Some(start.saturating_sub(self.cached)..end - self.cached)
    }

    /// The longest chunk of at most `count` tokens that cuts no picture. May be 0.
    pub(super) fn whole_pictures_within(&self, count: usize) -> usize {
        self.cut_picture(count).map_or(count, |picture| picture.start)
    }

    /// The shortest chunk of at least `count` tokens that cuts no picture.
    pub(super) fn whole_pictures_from(&self, count: usize) -> usize {
        self.cut_picture(count).map_or(count, |picture| picture.end)
    }

    /// The pictures with tokens among the next `count` tokens, cut to that range.
    pub(super) fn pictures_in_next(&self, count: usize) -> Vec<EmbeddingRows<'_>> {
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
                EmbeddingRows {
                    tokens: tokens.start - start..tokens.end - start,
                    cache_rows: &picture.cache_rows[rows],
                }
            })
            .collect()
    }
}
