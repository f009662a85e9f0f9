//! Pure: the scheduler's decisions. Continuous batching (Orca, OSDI'22) with chunked prefill in the
//! same steps as decode (Sarathi, arXiv 2308.16369). Preempted sequences are recomputed, or fetched
//! from host memory.
//!
//! The next step is planned while the current step runs. This is look-ahead of exactly one step, as
//! in NanoFlow (arXiv 2408.12757) and SGLang's overlap scheduler. A token that has not been chosen
//! yet is passed to the step as the index of its row in the running step's choices. If that token
//! ends its sequence, the sequence's part of the next step is wasted. No sequence is preempted for
//! a step planned ahead, and no block that a running step uses is released.

mod admit;
mod blocks;
mod chunk;
mod host;
mod input;
mod pool;
mod queue;
mod stepped;

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use bursar_kernels::BLOCK_TOKENS;
use bursar_model::flow::{CacheGroups, DraftPositions, FurtherDrafts, NextToken, SequencePart, StateSlots, StepBatch};

pub use self::input::{Effect, Input};
use super::{
    admission::ReplyLengths,
    draft_limit::DraftLimit,
    drafts::VerifiedDrafts,
    sequence::{Charge, History, NewSequence, Sequence},
    step::{ChosenRows, HostCopies, PictureUse, RunningSequence, RunningStep, Scored, SequenceTokens, StepPlan},
};
use crate::{
    kv::{BlockEvent, KvCore, SequenceId, StateStep, Table},
    order::Line,
    tenant::{Tenant, TenantWeights},
    token_interval::TokenInterval,
};

/// Inverse of the largest fraction of the running sequences that a step planned ahead may leave
/// out. A sequence is left out if the host must see its latest token first, so the sequence takes
/// part only in every other step. In return, the other sequences need not wait for the host. That
/// wait is less than a tenth of a step. The bound keeps the loss below the gain.
const LEFT_OUT: usize = 16;

/// The limits of a step and of the pool: the permits of the profile record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most sequences in a step.
    pub sequences: usize,
    /// The most tokens in a step.
    pub step_tokens: usize,
    /// Maximum number of draft tokens per sequence and step.
    pub draft_tokens: usize,
    /// Tokens that all blocks together can hold at first, before any resize. Each token counts once
    /// in each cache group.
    pub kv_tokens: usize,
}

/// Preemptions so far, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preemptions {
    /// Preemptions because a step lacked blocks.
    pub for_blocks: usize,
    /// Preemptions because a more urgent sequence needed the permit or the blocks.
    pub for_priority: usize,
    /// Preemptions because the pool shrank.
    pub by_shrinks: usize,
}

/// The scheduler's state, including the blocks.
#[derive(Debug)]
pub struct SchedulerCore {
    limits: Limits,
    kv: KvCore,
    /// Waiting sequences, whether new, preempted or admitted again. Ids are assigned in order of
    /// arrival, so a smaller id means an older sequence.
    waiting: Line<SequenceId, Sequence>,
    /// Running sequences, the oldest first.
    running: BTreeMap<SequenceId, Sequence>,
    /// The steps that were submitted to the lane, the oldest first. At most two.
    under_way: VecDeque<RunningStep>,
    /// Whether a step may be planned while another step runs.
    looks_ahead: bool,
    /// `true` if the next step cannot be planned while the current step runs: there are too few
    /// blocks, or sequences must be preempted for an urgent sequence. The next step is planned when
    /// the current step has ended.
    look_ahead_paused: bool,
    /// `true` if the running step began with a prompt on an idle device. The next step then waits a
    /// moment for the other prompts of the burst. Otherwise the next step would run for a single
    /// token while these prompts wait.
    gathers: bool,
    /// `true` if a sequence was preempted for other sequences. No further sequence is then admitted
    /// before a step has run.
    admission_paused: bool,
    /// Whether some sequences wait although there are permits for them.
    lacks_blocks: bool,
    /// The pool must shrink to this many blocks. Nothing is planned until the running steps and
    /// copies have ended, because they may use any block.
    shrinks_to: Option<usize>,
    replies: ReplyLengths,
    /// Errors, in tokens, of the predicted lengths of replies that have ended since the last
    /// [`take_prediction_errors`](Self::take_prediction_errors).
    missed_by: Vec<usize>,
    preemptions: Preemptions,
    /// Drafts verified since the last [`take_verified_drafts`](Self::take_verified_drafts).
    verified: VerifiedDrafts,
    /// Adapts the number of drafts to measured goodput. `None` if each sequence always has as many
    /// as the limits allow.
    draft_limit: Option<DraftLimit>,
    /// When the last step ended.
    stepped_at: Duration,
    /// Tokens of the largest picture, if no step may end within a picture; otherwise 0.
    whole_picture_tokens: usize,
    /// The positions of the draft head's drafts, if each step also runs a draft head.
    draft_head: Option<DraftPositions>,
    /// The draft head's proposals, received just before the end of their step.
    drafted: Vec<Vec<u32>>,
    /// The history of sequences that their drivers will admit again.
    sent_away: BTreeMap<SequenceId, History>,
    /// The time since the scheduler began.
    now: Duration,
    /// The promised token interval. `None` if nothing is promised. Steps are then as large while
    /// replies are in progress as at other times.
    token_interval: Option<TokenInterval>,
    /// Whether pictures are being encoded on the same GPU.
    encodes: bool,
    copies: HostCopies,
}

impl SchedulerCore {
    pub fn new(limits: Limits) -> Self {
        assert!(
            limits.sequences > 0 && limits.step_tokens >= limits.sequences,
            "a step holds one token of each sequence"
        );
        SchedulerCore {
            kv: KvCore::new(limits.kv_tokens / BLOCK_TOKENS),
            limits,
            waiting: Line::new(TenantWeights::default()),
            running: BTreeMap::new(),
            under_way: VecDeque::new(),
            looks_ahead: true,
            look_ahead_paused: false,
            gathers: false,
            admission_paused: false,
            lacks_blocks: false,
            shrinks_to: None,
            replies: ReplyLengths::default(),
            missed_by: Vec::new(),
            preemptions: Preemptions::default(),
            verified: VerifiedDrafts::default(),
            draft_limit: Some(DraftLimit::new(limits.draft_tokens)),
            stepped_at: Duration::ZERO,
            whole_picture_tokens: 0,
            draft_head: None,
            drafted: Vec::new(),
            sent_away: BTreeMap::new(),
            now: Duration::ZERO,
            token_interval: None,
            encodes: false,
            copies: HostCopies::default(),
        }
    }

    /// Disables look-ahead: each step is planned only after the previous step has ended. The chosen
    /// tokens are the same with and without look-ahead.
    #[must_use]
    pub fn without_look_ahead(mut self) -> Self {
        self.looks_ahead = false;
        self
    }

    /// Limits steps so that the promised token interval is kept. `None` means no promise.
    #[must_use]
    pub fn with_token_interval(mut self, token_interval: Option<TokenInterval>) -> Self {
        self.token_interval = token_interval;
        self
    }

    /// Adds slots for the recurrent states of sequences and for snapshots of them, at least one for
    /// each sequence of the limits.
    #[must_use]
    pub fn with_states(mut self, slots: usize) -> Self {
        assert!(slots == 0 || slots >= self.limits.sequences, "{slots} states are too few for {:?}", self.limits);
        self.kv = self.kv.with_states(slots, self.limits.sequences);
        self
    }

    /// Sets the model's cache groups. The default is one group with full attention.
    #[must_use]
    pub fn with_groups(mut self, groups: CacheGroups) -> Self {
        self.kv = self.kv.with_groups(groups);
        self
    }

    /// Never ends a step within a picture, because its tokens attend to later tokens of the
    /// picture. No picture has more than `tokens` tokens. 0 allows a step to end within a picture.
    #[must_use]
    pub fn with_whole_pictures(mut self, tokens: usize) -> Self {
        let Limits { sequences, step_tokens, .. } = self.limits;
        let is_enough = tokens == 0 || step_tokens >= sequences + tokens;
        assert!(
            is_enough,
            "a step of {step_tokens} tokens lacks space for {sequences} sequences and a picture of {tokens}"
        );
        self.whole_picture_tokens = tokens;
        self
    }

    /// Runs the model's draft head, if it has one, in each step. The head's keys and values are
    /// computed for all tokens, also in steps without drafts. `draft_head` says where further drafts
    /// are.
    #[must_use]
    pub fn with_draft_head(mut self, draft_head: Option<DraftPositions>) -> Self {
        self.draft_head = draft_head;
        self
    }

    /// Always drafts as many tokens as the limits allow, even if fewer would be faster.
    #[must_use]
    pub fn with_fixed_drafts(mut self, are_fixed: bool) -> Self {
        self.draft_limit = self.draft_limit.filter(|_| !are_fixed);
        self
    }

    /// Divides the service among tenants by `weights`.
    #[must_use]
    pub fn with_tenants(mut self, weights: TenantWeights) -> Self {
        self.waiting = Line::new(weights);
        self
    }

    /// Processes one input. Returns the actions to take.
    pub fn step(&mut self, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Admit(spec) => self.arrive(*spec),
            Input::Cancel(sequence) => self.cancel(sequence, &mut effects),
            Input::Stepped(tokens) => self.stepped(&tokens, &mut effects),
            Input::Resize(blocks) => self.resize(blocks, &mut effects),
            Input::Gathered => self.gathers = false,
            Input::Drafted(drafted) => {
                self.drafted = drafted;
                return effects;
            }
            Input::Took(micros) => {
                self.learn(micros);
                return effects;
            }
            Input::Encodes(encodes) => {
                self.now_encodes(encodes);
                return effects;
            }
            Input::Now(now) => {
                self.now = self.now.max(now);
                return effects;
            }
            Input::Copied(micros) => self.copied(micros, &mut effects),
        }
        self.shrink_when_idle(&mut effects);
        self.drop_late(&mut effects);
        if self.kv.has_host() && self.shrinks_to.is_none() {
            // Sequences are admitted before a step can be planned for them, so that their blocks
            // are fetched from host memory while other steps run.
            self.admit_what_fits(&mut effects);
            self.fetch(&mut effects);
        }
        while self.may_plan() && self.prepare_step(&mut effects) {}
        self.copy_ahead(&mut effects);
        effects
    }

    /// The numbers of waiting and of running sequences.
    pub fn counts(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// Whether sequences wait for blocks: permits are free, and admission is not paused.
    pub fn lacks_blocks(&self) -> bool {
        self.lacks_blocks
    }

    pub fn preemptions(&self) -> Preemptions {
        self.preemptions
    }

    /// Errors, in tokens, of the predicted lengths of replies that have ended since the last call.
    pub fn take_prediction_errors(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.missed_by)
    }

    /// The drafted tokens that steps have verified since the last call.
    pub fn take_verified_drafts(&mut self) -> VerifiedDrafts {
        std::mem::take(&mut self.verified)
    }

    /// The tokens that were computed since the last call, for each tenant with a weight, and for
    /// all other tenants together as `other`.
    pub fn take_tenants_tokens(&mut self) -> BTreeMap<Tenant, usize> {
        self.waiting.tenants.take_used()
    }

    /// Events of blocks with a prefix key since the last call.
    pub fn take_block_events(&mut self) -> Vec<BlockEvent> {
        self.kv.take_events()
    }

    /// The pool's current capacity in tokens. Each token counts once in each cache group.
    fn kv_tokens(&self) -> usize {
        self.kv.blocks() * BLOCK_TOKENS
    }

    pub fn kv(&self) -> &KvCore {
        &self.kv
    }

    /// Whether a sequence waits or runs.
    pub fn is_known(&self, sequence: SequenceId) -> bool {
        self.running.contains_key(&sequence) || self.waiting.contains(sequence)
    }

    /// A running sequence's specification, with its tokens so far.
    pub fn sequence(&self, sequence: SequenceId) -> Option<&NewSequence> {
        self.running.get(&sequence).map(|sequence| &sequence.spec)
    }

    fn wait(&mut self, sequence: Sequence) {
        self.waiting.rejoin(sequence.id(), sequence.rank(), sequence);
    }

    fn cancel(&mut self, sequence: SequenceId, effects: &mut Vec<Effect>) {
        self.waiting.leave(sequence);
        if let Some(running) = self.running.get_mut(&sequence) {
            if self.under_way.is_empty() && !running.is_fetching {
                self.take_out(sequence);
                self.release(vec![sequence], effects);
            } else {
                running.cancelled = true;
            }
        }
    }

    /// Removes a sequence from the running sequences. If the sequence has not begun, its charge is
    /// refunded to its tenant.
    fn take_out(&mut self, id: SequenceId) -> Option<Sequence> {
        let mut sequence = self.running.remove(&id)?;
        if sequence.history.charge == Charge::Whole {
            self.waiting.tenants.refund(&sequence.spec.scheduling_params.tenant, sequence.prompt);
            sequence.history.charge = Charge::None;
        }
        Some(sequence)
    }

    /// Whether the next step can be planned. While one step runs, nothing may pause look-ahead, and
    /// few sequences may wait until the host sees their tokens. A pending shrink stops planning.
    fn may_plan(&self) -> bool {
        match self.under_way.len() {
            _ if self.shrinks_to.is_some() => false,
            0 => true,
            1 => self.looks_ahead && !self.look_ahead_paused && !self.gathers && self.few_wait_to_be_seen(),
            _ => false,
        }
    }

    /// Whether few enough sequences would be left out of a step planned ahead.
    fn few_wait_to_be_seen(&self) -> bool {
        let drafts_max = self.drafts_each();
        let would_run = self.running.values().filter(|sequence| !sequence.is_over());
        let waiting = would_run.filter(|sequence| sequence.waits_to_be_seen(drafts_max)).count();
        waiting * LEFT_OUT <= self.running.len()
    }

    /// Prepares the next step, or changes the state so that another try may succeed. Returns
    /// `false` if nothing can run.
    fn prepare_step(&mut self, effects: &mut Vec<Effect>) -> bool {
        self.admit_what_fits(effects);
        self.fetch(effects);
        let shares = self.shares();
        // If sequences must be preempted for an urgent sequence, the running step has to end first.
        if shares.is_empty() || self.look_ahead_paused {
            return false;
        }
        match self.take_blocks(shares, effects) {
            // All sequences of the step were sent back to their drivers.
            Some((shares, _)) if shares.is_empty() => {}
            Some((shares, tables)) => self.launch_step(&shares, &tables, effects),
            // Preempt only after the running step, when it is known which sequences have ended.
            None if !self.under_way.is_empty() => self.look_ahead_paused = true,
            // The sequence to preempt may be one whose blocks a copy is still filling. Wait for the
            // copy.
            None if self.is_fetching() => return false,
            None => self.preempt_for_blocks(effects),
        }
        true
    }

    /// Whether a running step of another sequence computes the beginning of this new sequence. The
    /// new sequence then waits for that step, as it would without look-ahead, instead of computing
    /// the same tokens again.
    fn finds_more_soon(&self, sequence: &Sequence) -> bool {
        if sequence.has_begun {
            return false;
        }
        let mut choosing = self.under_way.iter().flat_map(|step| &step.sequences).filter(|one| one.chooses);
        choosing.any(|one| self.running.get(&one.sequence).is_some_and(|other| sequence.begins_as(other, one.end)))
    }

    fn launch_step(&mut self, shares: &[SequenceTokens], tables: &[Table], effects: &mut Vec<Effect>) {
        let plan_states = |share: &SequenceTokens| {
            let sequence = &self.running[&share.sequence];
            let step = StateStep {
                tokens: sequence.next_first()..sequence.cached + share.tokens,
                known: sequence.spec.tokens.len(),
                is_decoding: sequence.is_decoding(),
                verifies: share.drafts > 0,
            };
            self.kv.plan_states(share.sequence, &step)
        };
        let states: Vec<_> = shares.iter().map(plan_states).collect();
        shares.iter().for_each(|share| self.kv.launched(share.sequence));
        self.copy_leaving(effects);
        let plan = self.plan(shares, tables, &states);
        self.gathers = self.looks_ahead && self.under_way.is_empty() && plan.has_prompts;
        self.launch(shares, &plan);
        effects.push(Effect::Run(Box::new(plan)));
        effects.extend(self.gathers.then_some(Effect::Gather));
    }

    fn plan(&self, shares: &[SequenceTokens], tables: &[Table], states: &[Option<StateSlots>]) -> StepPlan {
        let parts: Vec<_> = shares.iter().map(|share| (share, &self.running[&share.sequence])).collect();
        let pictures: Vec<_> = parts.iter().map(|(share, sequence)| sequence.pictures_in_next(share.tokens)).collect();
        let next: Vec<_> = parts.iter().map(|(share, sequence)| sequence.next(share.tokens, share.drafts)).collect();
        let (mut rows, mut scored, mut shown) = (Vec::new(), Vec::new(), PictureUse::default());
        let (mut packed, mut next_tokens) = (Vec::with_capacity(parts.len()), Vec::with_capacity(parts.len()));
        for (place, (share, sequence)) in parts.into_iter().enumerate() {
            let count = share.tokens;
            let chosen = (count == sequence.pending()).then(|| ChosenRows {
                sequence: sequence.id(),
                position: sequence.produced(),
                unseen: sequence.unseen(),
                drafts: sequence.drafts(share.drafts).to_vec(),
                further: (share.further > 0).then(|| FurtherDrafts {
                    count: share.further,
                    index: sequence.tokens(),
                    position: sequence.spec.next_position + sequence.to_come as u32,
                    tables: tables[place].blocks.clone(),
                }),
            });
            let next_token = match (self.draft_head.is_some(), &chosen) {
                (true, None) => sequence.after_next(count),
                (true, Some(_)) | (false, _) => NextToken::Chosen,
            };
            let logit_rows = chosen.as_ref().map_or(0, ChosenRows::count);
            rows.extend(chosen);
            let scored_part = sequence.scored_in_next(count);
            if let (Some(top), false) = (sequence.spec.score_prompt, scored_part.is_empty()) {
                let first = sequence.cached + scored_part.start + 1;
                let tokens = sequence.spec.tokens[first..first + scored_part.len()].to_vec();
                scored.push(Scored { sequence: sequence.id(), first, tokens, top });
            }
            let draft_head_reads = matches!(next_token, NextToken::Known { cache_row: Some(_), .. });
            shown.read.extend((!pictures[place].is_empty() || draft_head_reads).then(|| sequence.id()));
            next_tokens.push(next_token);
            shown.no_longer_read.extend(sequence.is_past_pictures_after(count).then(|| sequence.id()));
            packed.push(SequencePart {
                tokens: &next[place].tokens,
                unseen: next[place].unseen,
                positions: &next[place].positions,
                cached_tokens: sequence.next_first(),
                tables: &tables[place].blocks,
                pictures: &pictures[place],
                logit_rows,
                repeated: if sequence.is_decoding() { sequence.state_lag } else { 0 },
                scored: scored_part,
                state: states[place],
            });
        }
        let has_prompts = shares.iter().any(|share| !self.running[&share.sequence].is_decoding());
        let parts = shares.iter().map(|share| share.sequence).collect();
        let batch = if self.draft_head.is_some() {
            StepBatch::pack_with_drafts(&packed, &next_tokens)
        } else {
            StepBatch::pack(&packed)
        };
        StepPlan { batch, parts, has_prompts, rows, scored, shown }
    }

    /// Records that a step was submitted to the lane.
    fn launch(&mut self, shares: &[SequenceTokens], plan: &StepPlan) {
        let StepPlan { rows, shown, .. } = plan;
        let (work, pictures, launched, has_prompts) = (self.work(shares), self.encodes, self.now, plan.has_prompts);
        let sequences = Vec::with_capacity(shares.len());
        let decoding = self.streams();
        let drafts = (decoding, self.draft_limit.as_ref().map_or(0, |limit| limit.drafts_for(decoding)));
        let mut step =
            RunningStep { sequences, release_after_step: Vec::new(), work, pictures, launched, has_prompts, drafts };
        let (mut rows, mut first_row) = (rows.iter().peekable(), 0);
        for SequenceTokens { sequence: id, tokens, drafts, further } in shares {
            let sequence = self.running.get_mut(id).expect("the sequence has a share of the step");
            let chosen = rows.next_if(|rows| rows.sequence == *id);
            sequence.launch(*tokens, drafts + further, chosen.map(|_| first_row as u32));
            let (end, chooses, drafts, further) = (sequence.cached, chosen.is_some(), *drafts, *further);
            step.sequences.push(RunningSequence { sequence: *id, end, chooses, drafts, further });
            first_row += chosen.map_or(0, ChosenRows::count);
        }
        for unread in &shown.no_longer_read {
            self.running.get_mut(unread).expect("the sequence has a share of the step").holds_pictures = false;
        }
        self.under_way.push_back(step);
    }

    /// Queues a sequence that has lost its blocks, or sends it back to its driver to get its
    /// pictures.
    fn begin_again(&mut self, mut sequence: Sequence, effects: &mut Vec<Effect>) {
        if sequence.can_begin_again() {
            sequence.forget_cache();
            self.wait(sequence);
        } else {
            self.remember(&sequence);
            effects.push(Effect::Readmit(sequence.id()));
        }
    }

    fn release(&mut self, sequences: Vec<SequenceId>, effects: &mut Vec<Effect>) {
        sequences.iter().for_each(|id| self.kv.release(*id));
        effects.extend((!sequences.is_empty()).then_some(Effect::Released(sequences)));
    }
}

#[cfg(test)]
mod tests;
