//! The scheduler's decisions: pure. Continuous batching (Orca, OSDI'22) with chunked prefill beside decode (Sarathi,
//! arXiv 2308.16369); preemption recomputes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bursar_kernels::{BLOCK_TOKENS, ops::argmax::NO_CHOICE};
use bursar_model::flow::{SequencePart, StepBatch};

use super::{
    admission::{AnswerLength, Outlook, predicted_peak},
    sequence::{Finish, NewSequence, Sequence},
};
use crate::kv::{Allotment, Demand, Filled, SequenceId, Table};

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
    Admit(NewSequence),
    /// A caller has gone.
    Cancel(SequenceId),
    /// The answer to [`Effect::Allot`].
    Allotted(Allotment),
    /// The step has run: the chosen token of each sequence that wanted one, in the plan's order.
    Stepped(Vec<u32>),
}

/// What the scheduler wants done, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Ask the kv actor for blocks; the answer comes as [`Input::Allotted`].
    Allot(Vec<Demand>),
    /// Run a step; the answer comes as [`Input::Stepped`].
    Run(Box<StepPlan>),
    /// Blocks have become whole: others may take them.
    Name(Vec<Filled>),
    /// So many tokens of a sequence that begins need not be computed. Said once of each.
    Found(SequenceId, usize),
    /// A sequence has a new token.
    Token(SequenceId, u32),
    /// A sequence has ended by itself.
    Finished(SequenceId, Finish),
    /// Blocks are no longer needed.
    Release(Vec<SequenceId>),
}

/// One step to run.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    /// The arrays.
    pub batch: StepBatch,
    /// The sequence of each part of the batch.
    pub parts: Vec<SequenceId>,
    /// The sequence of each row of logits.
    pub rows: Vec<SequenceId>,
    /// Whose tokens the scored rows are followed by, in their order.
    pub scored: Vec<Scored>,
}

/// Tokens of a prompt whose log-probabilities a step yields.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// Whose prompt.
    pub sequence: SequenceId,
    /// Where the first of them stands.
    pub first: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// How many of the likeliest are wanted beside each.
    pub top: usize,
}

/// How much of a sequence runs in the step under way.
#[derive(Clone, Copy, Debug)]
struct Share {
    sequence: SequenceId,
    tokens: usize,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Allotting(Vec<Share>),
    Running(Vec<Share>),
}

/// The scheduler's state.
#[derive(Debug)]
pub struct SchedulerCore {
    limits: Limits,
    /// In order of arrival; preempted ones go back to the front.
    waiting: VecDeque<Sequence>,
    /// By age: identities are given in order of arrival.
    running: BTreeMap<SequenceId, Sequence>,
    phase: Phase,
    /// Somebody was preempted for want of blocks: nobody new comes in before a step has run.
    admission_paused: bool,
    answers: AnswerLength,
}

impl SchedulerCore {
    /// An idle scheduler.
    pub fn new(limits: Limits) -> Self {
        assert!(limits.sequences > 0 && limits.step_tokens >= limits.sequences, "each sequence has a token in a step");
        SchedulerCore {
            limits,
            waiting: VecDeque::new(),
            running: BTreeMap::new(),
            phase: Phase::Idle,
            admission_paused: false,
            answers: AnswerLength::default(),
        }
    }

    /// Takes one input, gives what is to be done.
    pub fn step(&mut self, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Admit(spec) => self.waiting.push_back(Sequence::new(spec)),
            Input::Cancel(sequence) => self.cancel(sequence, &mut effects),
            Input::Allotted(allotment) => self.allotted(allotment, &mut effects),
            Input::Stepped(tokens) => self.stepped(&tokens, &mut effects),
        }
        if matches!(self.phase, Phase::Idle) {
            self.start(&mut effects);
        }
        effects
    }

    /// Sequences that wait, and that run.
    pub fn counts(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// Whether a sequence waits or runs.
    pub fn is_known(&self, sequence: SequenceId) -> bool {
        self.running.contains_key(&sequence) || self.waiting.iter().any(|waiting| waiting.id() == sequence)
    }

    /// A running sequence's specification, tokens so far included.
    pub fn sequence(&self, sequence: SequenceId) -> Option<&NewSequence> {
        self.running.get(&sequence).map(|sequence| &sequence.spec)
    }

    fn cancel(&mut self, sequence: SequenceId, effects: &mut Vec<Effect>) {
        self.waiting.retain(|waiting| waiting.id() != sequence);
        if let Some(running) = self.running.get_mut(&sequence) {
            if matches!(self.phase, Phase::Idle) {
                self.running.remove(&sequence);
                effects.push(Effect::Release(vec![sequence]));
            } else {
                running.cancelled = true;
            }
        }
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
                    tokens: sequence.spec.tokens.len(),
                    prefix: sequence.takeable().to_vec(),
                }
            })
            .collect();
        self.phase = Phase::Allotting(shares);
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
        let mut outlooks: Vec<Outlook> = self
            .running
            .values()
            .chain([next])
            .map(|sequence| {
                // A prompt of several samples takes its whole blocks once.
                let is_counted = sequence.spec.group.is_some_and(|group| !groups.insert(group));
                Outlook {
                    held: sequence.spec.tokens.len() - if is_counted { sequence.shared_tokens() } else { 0 },
                    to_come: self.answers.expected(sequence.spec.produced, sequence.remaining(), busy),
                }
            })
            .collect();
        predicted_peak(&mut outlooks, BLOCK_TOKENS) <= self.limits.kv_tokens
    }

    /// One token for each decoding sequence, then chunks of prompts, oldest first, up to the step's tokens.
    fn shares(&self) -> Vec<Share> {
        let mut left = self.limits.step_tokens;
        let (decoding, prefilling): (Vec<_>, Vec<_>) = self.running.values().partition(|s| s.is_decoding());
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

    fn allotted(&mut self, allotment: Allotment, effects: &mut Vec<Effect>) {
        let Phase::Allotting(mut shares) = std::mem::replace(&mut self.phase, Phase::Idle) else {
            panic!("blocks came without being asked for");
        };
        let asked: usize = shares.iter().map(|share| share.tokens).sum();
        for (share, table) in shares.iter_mut().zip(&allotment.tables) {
            self.take_found(share, table, effects);
        }
        if allotment.short_by > 0 {
            if !self.drop_cancelled(effects) {
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
        let parts: Vec<_> = shares.iter().map(|share| (share, &self.running[&share.sequence])).collect();
        let pictures: Vec<_> = parts.iter().map(|(share, s)| s.pictures_in_next(share.tokens)).collect();
        let (mut rows, mut scored) = (Vec::new(), Vec::new());
        let parts: Vec<SequencePart<'_>> = parts
            .iter()
            .zip(&allotment.tables)
            .zip(&pictures)
            .map(|(((share, sequence), table), pictures)| {
                let next = sequence.cached..sequence.cached + share.tokens;
                let wants_logits = share.tokens == sequence.pending();
                rows.extend(wants_logits.then_some(share.sequence));
                let scored_part = sequence.scored_in_next(share.tokens);
                if let (Some(top), false) = (sequence.spec.score_prompt, scored_part.is_empty()) {
                    let first = next.start + scored_part.start + 1;
                    let tokens = sequence.spec.tokens[first..first + scored_part.len()].to_vec();
                    scored.push(Scored { sequence: share.sequence, first, tokens, top });
                }
                SequencePart {
                    tokens: &sequence.spec.tokens[next.clone()],
                    positions: &sequence.spec.positions[next],
                    cached_tokens: sequence.cached,
                    blocks: &table.blocks,
                    pictures,
                    wants_logits,
                    scored: scored_part,
                }
            })
            .collect();
        let batch = StepBatch::pack(&parts);
        let parts = shares.iter().map(|share| share.sequence).collect();
        effects.push(Effect::Run(Box::new(StepPlan { batch, parts, rows, scored })));
        self.phase = Phase::Running(shares);
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

    /// The youngest gives its blocks back and is computed again later, so that the oldest always gets on.
    fn preempt_youngest(&mut self, effects: &mut Vec<Effect>) {
        let (id, mut youngest) = self.running.pop_last().expect("blocks were asked for somebody");
        assert!(!self.running.is_empty(), "{id} alone does not fit the pool; it should have been refused at the door");
        effects.push(Effect::Release(vec![id]));
        self.admission_paused = true;
        youngest.forget_cache();
        self.waiting.push_front(youngest);
    }

    fn stepped(&mut self, tokens: &[u32], effects: &mut Vec<Effect>) {
        let Phase::Running(shares) = std::mem::replace(&mut self.phase, Phase::Idle) else {
            panic!("a step came back that was not under way");
        };
        self.admission_paused = false;
        let mut tokens = tokens.iter();
        let (mut ended, mut filled) = (Vec::new(), Vec::new());
        for share in shares {
            let sequence = self.running.get_mut(&share.sequence).expect("a sequence stays while its step runs");
            sequence.cached += share.tokens;
            sequence.scored = sequence.scored.max(sequence.cached);
            let chosen = match sequence.pending() {
                0 => Some(*tokens.next().expect("a token for each row of logits")),
                _ => None,
            };
            if chosen.is_some_and(|token| token != NO_CHOICE) {
                let (first, keys) = sequence.name_filled();
                if !keys.is_empty() {
                    filled.push(Filled { sequence: share.sequence, first, keys: keys.to_vec() });
                }
            }
            if sequence.cancelled {
                ended.push(share.sequence);
                continue;
            }
            let Some(token) = chosen else { continue };
            let finish = sequence.push(token);
            if matches!(finish, None | Some(Finish::Length)) {
                effects.push(Effect::Token(share.sequence, token));
            }
            if let Some(finish) = finish {
                self.answers.record(sequence.spec.produced);
                effects.push(Effect::Finished(share.sequence, finish));
                ended.push(share.sequence);
            }
        }
        // Cancelled while the step ran, but not part of it.
        ended.extend(
            self.running
                .values()
                .filter(|s| s.cancelled && !ended.contains(&s.id()))
                .map(Sequence::id)
                .collect::<Vec<_>>(),
        );
        if !filled.is_empty() {
            effects.push(Effect::Name(filled));
        }
        if !ended.is_empty() {
            ended.iter().for_each(|id| drop(self.running.remove(id)));
            effects.push(Effect::Release(ended));
        }
    }
}

#[cfg(test)]
mod tests;
