//! The scheduler's decisions: pure. Continuous batching (Orca, OSDI'22) with chunked prefill beside decode (Sarathi,
//! arXiv 2308.16369); preemption recomputes.
//!
//! The next step is planned while one is under way (look-ahead of exactly one, as NanoFlow, arXiv 2408.12757, and SGLang's
//! overlap scheduler have it): where a token is still to be chosen, its place in the running step's choices stands for
//! it. A token that turns out to end its sequence makes the sequence's share of the next step wasted. Nobody is
//! preempted for a step that is planned ahead, and no block is given back that a step under way uses.

mod pool;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bursar_kernels::{BLOCK_TOKENS, ops::argmax::NO_CHOICE};
use bursar_model::flow::{SequencePart, StepBatch};

use super::{
    admission::{AnswerLength, SequenceForecast, predicted_peak},
    sequence::{Finish, NewSequence, Sequence},
    step::{ChosenRow, PartUnderWay, Scored, Share, Shown, StepPlan, StepUnderWay},
};
use crate::kv::{Allotment, Demand, Filled, SequenceId, Table};

/// A step is planned ahead if no more than one in so many of the running sequences is left out of it, as the host must
/// see its token first. Such a sequence then has every other step, and the others need not wait for the host, which takes
/// less than a tenth of a step: what is lost is to be less than what is won.
const LEFT_OUT: usize = 16;

/// What a step may hold: the profile record's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences in one step.
    pub sequences: usize,
    /// Tokens in one step.
    pub step_tokens: usize,
    /// Tokens that the blocks can hold together.
    pub kv_tokens: usize,
}

/// What happens to the scheduler.
#[derive(Clone, Debug)]
pub enum Input {
    /// A new sequence waits.
    Admit(Box<NewSequence>),
    /// A caller has gone.
    Cancel(SequenceId),
    /// The answer to [`Effect::Allot`].
    Allotted(Allotment),
    /// The oldest step under way has run: the chosen token of each sequence that wanted one, in the plan's order.
    Stepped(Vec<u32>),
    /// There are to be so many blocks. Fewer are used when the steps under way have run.
    Resize(usize),
    /// The answer to [`Effect::Shrink`]: who has lost its blocks with that.
    Shrunk(Vec<SequenceId>),
    /// The answer to [`Effect::Gather`], a moment later.
    Gathered,
}

/// What the scheduler wants done, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Ask the kv actor for blocks; the answer comes as [`Input::Allotted`].
    Allot(Vec<Demand>),
    /// Run a step behind the one that may be under way; the answer comes as [`Input::Stepped`].
    Run(Box<StepPlan>),
    /// Blocks have become whole: others may take them.
    Name(Vec<Filled>),
    /// So many tokens of a sequence that begins need not be computed. Said once of each.
    Found(SequenceId, usize),
    /// A sequence has a new token.
    Token(SequenceId, u32),
    /// A sequence has ended by itself.
    Finished(SequenceId, Finish),
    /// A sequence has lost its blocks, and let go of its pictures before: it is forgotten here, and comes again under the
    /// same identity when it holds its pictures anew.
    ComeAgain(SequenceId),
    /// Blocks are no longer needed.
    Release(Vec<SequenceId>),
    /// Let the kv actor give up all but so many blocks; the answer comes as [`Input::Shrunk`].
    Shrink(usize),
    /// Let the kv actor have so many blocks.
    Grow(usize),
    /// Say [`Input::Gathered`] in a moment: prompts that came together with one that begins may be on their way.
    Gather,
    /// A [`Input::Resize`] is done: nothing under way names other blocks, and nothing will.
    Resized,
}

/// The scheduler's state.
#[derive(Debug)]
pub struct SchedulerCore {
    limits: Limits,
    /// By age, whether they are new, were preempted or come again.
    waiting: VecDeque<Sequence>,
    /// By age: identities are given in order of arrival.
    running: BTreeMap<SequenceId, Sequence>,
    /// The step that blocks were asked for.
    asked: Option<Vec<Share>>,
    /// The steps that the lane has, the older first: two at most.
    under_way: VecDeque<StepUnderWay>,
    /// Whether steps are planned while others run at all.
    looks_ahead: bool,
    /// The blocks did not suffice for the next step while this one runs: it is planned when this one has ended.
    look_ahead_paused: bool,
    /// The step under way began with a prompt when nothing ran. The one behind it waits a moment for others that were asked
    /// at the same time, or it would be a whole step for one token while they wait for it.
    gathers: bool,
    /// Somebody was preempted for want of blocks: nobody new comes in before a step has run.
    admission_paused: bool,
    /// Fewer blocks are wanted: nothing is planned until the steps under way have run and the blocks are given up.
    shrinking: Option<Shrinking>,
    answers: AnswerLength,
    /// Sequences that had to give their blocks to older ones so far.
    preempted: usize,
}

/// How far a pool is on its way to fewer blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shrinking {
    /// Steps under way may name any block.
    Waits { to: usize },
    /// The kv actor was asked.
    Asked { to: usize },
}

impl SchedulerCore {
    /// An idle scheduler.
    pub fn new(limits: Limits) -> Self {
        assert!(limits.sequences > 0 && limits.step_tokens >= limits.sequences, "each sequence has a token in a step");
        SchedulerCore {
            limits,
            waiting: VecDeque::new(),
            running: BTreeMap::new(),
            asked: None,
            under_way: VecDeque::new(),
            looks_ahead: true,
            look_ahead_paused: false,
            gathers: false,
            admission_paused: false,
            shrinking: None,
            answers: AnswerLength::default(),
            preempted: 0,
        }
    }

    /// Plans each step only when the one before has ended: what comes out must be the same.
    #[must_use]
    pub fn without_look_ahead(mut self) -> Self {
        self.looks_ahead = false;
        self
    }

    /// Takes one input, gives what is to be done.
    pub fn step(&mut self, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Admit(spec) => self.wait(Sequence::new(*spec)),
            Input::Cancel(sequence) => self.cancel(sequence, &mut effects),
            Input::Allotted(allotment) => self.allotted(allotment, &mut effects),
            Input::Stepped(tokens) => self.stepped(&tokens, &mut effects),
            Input::Resize(blocks) => self.resize(blocks, &mut effects),
            Input::Shrunk(holders) => self.shrunk(&holders, &mut effects),
            Input::Gathered => self.gathers = false,
        }
        self.shrink_when_idle(&mut effects);
        if self.asked.is_none() && self.may_plan() {
            self.start(&mut effects);
        }
        effects
    }

    /// Sequences that wait, and that run.
    pub fn counts(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// Sequences that had to give their blocks to older ones, so far.
    pub fn preempted(&self) -> usize {
        self.preempted
    }

    /// Whether a sequence waits or runs.
    pub fn is_known(&self, sequence: SequenceId) -> bool {
        self.running.contains_key(&sequence) || self.waiting.iter().any(|waiting| waiting.id() == sequence)
    }

    /// A running sequence's specification, tokens so far included.
    pub fn sequence(&self, sequence: SequenceId) -> Option<&NewSequence> {
        self.running.get(&sequence).map(|sequence| &sequence.spec)
    }

    /// Behind the older ones: who was there before gets on before.
    fn wait(&mut self, sequence: Sequence) {
        let place = self.waiting.partition_point(|waiting| waiting.id() < sequence.id());
        self.waiting.insert(place, sequence);
    }

    fn cancel(&mut self, sequence: SequenceId, effects: &mut Vec<Effect>) {
        self.waiting.retain(|waiting| waiting.id() != sequence);
        if let Some(running) = self.running.get_mut(&sequence) {
            if self.asked.is_none() && self.under_way.is_empty() {
                self.running.remove(&sequence);
                effects.push(Effect::Release(vec![sequence]));
            } else {
                running.cancelled = true;
            }
        }
    }

    /// Whether the next step can be planned: behind none, or behind one whose tokens hardly anybody on the host needs for
    /// it.
    fn may_plan(&self) -> bool {
        match self.under_way.len() {
            _ if self.shrinking.is_some() => false,
            0 => true,
            1 => self.looks_ahead && !self.look_ahead_paused && !self.gathers && self.few_wait_to_be_seen(),
            _ => false,
        }
    }

    /// Whether those who would be left out of a step that is planned ahead are few enough.
    fn few_wait_to_be_seen(&self) -> bool {
        let would_run = self.running.values().filter(|sequence| !sequence.is_complete());
        let waiting = would_run.filter(|sequence| sequence.waits_to_be_seen()).count();
        waiting * LEFT_OUT <= self.running.len()
    }

    /// Admits whom the pool has room for, and asks for the next step's blocks.
    fn start(&mut self, effects: &mut Vec<Effect>) {
        while !self.admission_paused && self.running.len() < self.limits.sequences && self.fits_next() {
            let sequence = self.waiting.pop_front().expect("fits_next has seen it");
            self.running.insert(sequence.id(), sequence);
        }
        let shares = self.shares();
        if !shares.is_empty() {
            self.ask(shares, effects);
        }
    }

    /// Asks for the blocks that `shares` need.
    fn ask(&mut self, shares: Vec<Share>, effects: &mut Vec<Effect>) {
        let demands = shares
            .iter()
            .map(|share| {
                let sequence = &self.running[&share.sequence];
                Demand {
                    sequence: share.sequence,
                    held: sequence.cached,
                    more: share.tokens,
                    tokens: sequence.tokens(),
                    prefix: sequence.takeable().to_vec(),
                }
            })
            .collect();
        self.asked = Some(shares);
        effects.push(Effect::Allot(demands));
    }

    /// Whether the pool would hold the first waiting sequence beside those that run. Alone it always may: it was
    /// refused at the door if the empty pool could not hold it.
    fn fits_next(&self) -> bool {
        let Some(next) = self.waiting.front() else { return false };
        if self.running.is_empty() {
            return true;
        }
        let held: usize = self.running.values().map(|s| s.cached.next_multiple_of(BLOCK_TOKENS)).sum();
        let busy = held * 2 > self.limits.kv_tokens;
        let mut groups = BTreeSet::new();
        let mut forecasts: Vec<SequenceForecast> = self
            .running
            .values()
            .chain([next])
            .map(|sequence| {
                // A prompt of several samples takes its whole blocks once.
                let is_counted = sequence.spec.group.is_some_and(|group| !groups.insert(group));
                SequenceForecast {
                    held: sequence.tokens() - if is_counted { sequence.shared_tokens() } else { 0 },
                    to_come: self.answers.expected(sequence.produced(), sequence.remaining(), busy),
                }
            })
            .collect();
        predicted_peak(&mut forecasts, BLOCK_TOKENS) <= self.limits.kv_tokens
    }

    /// One token for each decoding sequence, then chunks of prompts, oldest first, up to the step's tokens.
    fn shares(&self) -> Vec<Share> {
        let mut left = self.limits.step_tokens;
        let runs = |sequence: &&Sequence| {
            !sequence.is_complete() && !sequence.waits_to_be_seen() && !self.finds_more_soon(sequence)
        };
        let (decoding, prefilling): (Vec<_>, Vec<_>) =
            self.running.values().filter(runs).partition(|s| s.is_decoding());
        let mut shares = Vec::new();
        for sequence in decoding.into_iter().chain(prefilling) {
            let tokens = sequence.pending().min(left);
            if tokens > 0 {
                left -= tokens;
                shares.push(Share { sequence: sequence.id(), tokens });
            }
        }
        shares
    }

    /// Whether the step under way computes what a new sequence begins with: it waits for that one step, as it would
    /// without look-ahead, rather than compute the same again.
    fn finds_more_soon(&self, sequence: &Sequence) -> bool {
        if sequence.has_begun {
            return false;
        }
        let parts = self.under_way.iter().flat_map(|step| &step.parts).filter(|part| part.chooses);
        parts
            .filter_map(|part| Some((self.running.get(&part.sequence)?, part.end)))
            .any(|(other, end)| sequence.begins_as(other, end))
    }

    fn allotted(&mut self, allotment: Allotment, effects: &mut Vec<Effect>) {
        let mut shares = self.asked.take().expect("blocks came without being asked for");
        let asked: usize = shares.iter().map(|share| share.tokens).sum();
        for (share, table) in shares.iter_mut().zip(&allotment.tables) {
            self.take_found(share, table, effects);
        }
        if allotment.short_by > 0 {
            if !self.under_way.is_empty() {
                // Whom to preempt is decided when it is known who has ended.
                self.look_ahead_paused = true;
            } else if !self.drop_cancelled(effects) {
                self.preempt_youngest(effects);
            }
            return;
        }
        let left: usize = shares.iter().map(|share| share.tokens).sum();
        if left < asked {
            // What was found leaves the step room for more. Each sequence finds once, so this comes to an end.
            let more = self.shares();
            if more.iter().map(|share| share.tokens).sum::<usize>() > left {
                return self.ask(more, effects);
            }
        }
        let plan = self.plan(&shares, &allotment.tables);
        self.gathers = self.looks_ahead && self.under_way.is_empty() && !plan.batch.is_decoding_alone();
        self.launch(&shares, &plan);
        effects.push(Effect::Run(Box::new(plan)));
        effects.extend(self.gathers.then_some(Effect::Gather));
    }

    /// Packs the step.
    fn plan(&self, shares: &[Share], tables: &[Table]) -> StepPlan {
        let parts: Vec<_> = shares.iter().map(|share| (share.tokens, &self.running[&share.sequence])).collect();
        let pictures: Vec<_> = parts.iter().map(|(count, sequence)| sequence.pictures_in_next(*count)).collect();
        let next: Vec<_> = parts.iter().map(|(count, sequence)| sequence.next(*count)).collect();
        let (mut rows, mut scored, mut shown) = (Vec::new(), Vec::new(), Shown::default());
        let mut packed = Vec::with_capacity(parts.len());
        for (place, (count, sequence)) in parts.into_iter().enumerate() {
            let wants_logits = count == sequence.pending();
            rows.extend(wants_logits.then(|| ChosenRow {
                sequence: sequence.id(),
                position: sequence.produced(),
                unseen: sequence.unseen(),
            }));
            let scored_part = sequence.scored_in_next(count);
            if let (Some(top), false) = (sequence.spec.score_prompt, scored_part.is_empty()) {
                let first = sequence.cached + scored_part.start + 1;
                let tokens = sequence.spec.tokens[first..first + scored_part.len()].to_vec();
                scored.push(Scored { sequence: sequence.id(), first, tokens, top });
            }
            shown.read.extend((!pictures[place].is_empty()).then(|| sequence.id()));
            shown.past.extend(sequence.is_past_pictures_after(count).then(|| sequence.id()));
            packed.push(SequencePart {
                tokens: &next[place].0,
                positions: &next[place].1,
                cached_tokens: sequence.cached,
                blocks: &tables[place].blocks,
                pictures: &pictures[place],
                wants_logits,
                scored: scored_part,
            });
        }
        let parts = shares.iter().map(|share| share.sequence).collect();
        StepPlan { batch: StepBatch::pack(&packed), parts, rows, scored, shown }
    }

    /// The step is the lane's now.
    fn launch(&mut self, shares: &[Share], plan: &StepPlan) {
        let StepPlan { rows, shown, .. } = plan;
        let mut step = StepUnderWay { parts: Vec::with_capacity(shares.len()), released_behind: Vec::new() };
        let mut next_row = 0;
        for Share { sequence: id, tokens } in shares {
            let sequence = self.running.get_mut(id).expect("a sequence stays while its blocks are asked for");
            let chooses = rows.get(next_row).is_some_and(|row| row.sequence == *id);
            sequence.launch(*tokens, chooses.then_some(next_row as u32));
            step.parts.push(PartUnderWay { sequence: *id, end: sequence.cached, chooses });
            next_row += usize::from(chooses);
        }
        for past in &shown.past {
            self.running.get_mut(past).expect("it has a share").holds_pictures = false;
        }
        self.under_way.push_back(step);
    }

    /// What others have computed of a sequence's beginning need not be computed again.
    fn take_found(&mut self, share: &mut Share, table: &Table, effects: &mut Vec<Effect>) {
        assert_eq!(table.sequence, share.sequence, "the allotment answers the demands in order");
        let sequence = self.running.get_mut(&share.sequence).expect("a sequence stays while its blocks are asked for");
        if table.held > sequence.cached {
            sequence.cached = table.held;
            sequence.named = table.held;
            share.tokens = share.tokens.min(sequence.pending());
        }
        if !sequence.has_begun {
            sequence.has_begun = true;
            effects.push(Effect::Found(share.sequence, table.held));
        }
    }

    /// Nobody is preempted while somebody holds blocks that no caller waits for. Whether there was one.
    fn drop_cancelled(&mut self, effects: &mut Vec<Effect>) -> bool {
        let cancelled: Vec<_> = self.running.values().filter(|s| s.cancelled).map(Sequence::id).collect();
        cancelled.iter().for_each(|id| drop(self.running.remove(id)));
        let any = !cancelled.is_empty();
        if any {
            effects.push(Effect::Release(cancelled));
        }
        any
    }

    /// The youngest gives its blocks back and is computed again later, so that the oldest always gets on. Its pictures may
    /// have made room for others since it read them: nobody here can get them back, but its driver can.
    fn preempt_youngest(&mut self, effects: &mut Vec<Effect>) {
        let (id, youngest) = self.running.pop_last().expect("blocks were asked for somebody");
        assert!(!self.running.is_empty(), "{id} alone does not fit the pool; it should have been refused at the door");
        self.admission_paused = true;
        self.preempted += 1;
        self.begin_again(youngest, effects);
        effects.push(Effect::Release(vec![id]));
    }

    /// One that has lost its blocks waits for others, or its driver brings it again with its pictures.
    fn begin_again(&mut self, mut sequence: Sequence, effects: &mut Vec<Effect>) {
        if sequence.can_begin_again() {
            sequence.forget_cache();
            self.wait(sequence);
        } else {
            effects.push(Effect::ComeAgain(sequence.id()));
        }
    }

    fn stepped(&mut self, tokens: &[u32], effects: &mut Vec<Effect>) {
        assert!(self.asked.is_none(), "a step came back while blocks are asked for");
        let step = self.under_way.pop_front().expect("a step came back that was not under way");
        (self.admission_paused, self.look_ahead_paused) = (false, false);
        let mut tokens = tokens.iter();
        let (mut ended, mut filled) = (Vec::new(), Vec::new());
        for PartUnderWay { sequence: id, end, chooses } in step.parts {
            let chosen = chooses.then(|| *tokens.next().expect("a token for each row of logits"));
            // One that has ended meanwhile: its share is wasted.
            let Some(sequence) = self.running.get_mut(&id) else { continue };
            sequence.to_come -= usize::from(chooses);
            if chosen.is_some_and(|token| token != NO_CHOICE) {
                let (first, keys) = sequence.filled(end);
                if !keys.is_empty() {
                    filled.push(Filled { sequence: id, first, keys: keys.to_vec() });
                }
                sequence.named = end;
            }
            if sequence.cancelled {
                ended.push(id);
                continue;
            }
            let Some(token) = chosen else { continue };
            let finish = sequence.push(token);
            if matches!(finish, None | Some(Finish::Length)) {
                effects.push(Effect::Token(id, token));
            }
            if let Some(finish) = finish {
                self.answers.record(sequence.spec.produced);
                effects.push(Effect::Finished(id, finish));
                ended.push(id);
            }
        }
        // Cancelled while the step ran, but not part of it.
        let cancelled = self.running.values().filter(|sequence| sequence.cancelled).map(Sequence::id);
        let cancelled: Vec<_> = cancelled.filter(|id| !ended.contains(id)).collect();
        ended.extend(cancelled);
        if !filled.is_empty() {
            effects.push(Effect::Name(filled));
        }
        ended.iter().for_each(|id| drop(self.running.remove(id)));
        let mut released = step.released_behind;
        for id in ended {
            match self.under_way.front_mut().filter(|next| next.has(id)) {
                Some(next) => next.released_behind.push(id),
                None => released.push(id),
            }
        }
        if !released.is_empty() {
            effects.push(Effect::Release(released));
        }
    }
}

#[cfg(test)]
mod tests;
