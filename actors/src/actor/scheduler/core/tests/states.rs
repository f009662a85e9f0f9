//! Tests of recurrent states, on a device that keeps, in place of each state, the tokens that the
//! state has seen. A step that resumes from a wrong state, or writes a slot that another part of
//! the step reads, is found at once.

use std::collections::BTreeSet;

use bursar_kernels::ops::{
    copy_blocks::BlockCopy,
    gated_delta::{NO_STATE, SNAPSHOTS},
};
use proptest::prelude::*;

use super::*;
use crate::{
    kv::{Copies, SNAPSHOT_TOKENS, StateUse},
    scheduler::{Drafter, NgramSizes, PromptLookup},
    token_interval::CopyCosts,
};

const STEP_TOKENS: usize = 300;

/// Snapshots that fit in host memory, in stories with a host tier.
const HOST_STATES: usize = 6;

/// A scheduler and the device that runs its steps.
struct Story {
    bed: Bed,
    /// The tokens that the state in each slot has seen.
    slots: Vec<Option<Vec<u32>>>,
    /// The tokens that the latest step chose.
    chosen: Vec<u32>,
    /// All tokens of each sequence.
    tokens: BTreeMap<SequenceId, Vec<u32>>,
    /// The cached tokens with which each sequence began.
    found: BTreeMap<SequenceId, usize>,
    /// The tokens that each snapshot in host memory has seen.
    host: Vec<Option<Vec<u32>>>,
    /// Steps that have run.
    ran: usize,
    /// Copies that have run and were not answered.
    copied: usize,
    /// States that were copied to the host and back.
    moved: [usize; 2],
    /// Drafts that were verified and accepted.
    verified: [usize; 2],
}

impl Story {
    fn new(scheduler: SchedulerCore, slots: usize, running_max: usize) -> Self {
        let mut bed = Bed::of(scheduler.with_states(slots), running_max);
        bed.hears_all = true;
        Story {
            bed,
            slots: vec![None; slots],
            chosen: Vec::new(),
            tokens: BTreeMap::new(),
            found: BTreeMap::new(),
            host: vec![None; HOST_STATES],
            ran: 0,
            copied: 0,
            moved: [0; 2],
            verified: [0; 2],
        }
    }

    /// A pool of `blocks` blocks and `slots` states for at most `sequences` sequences, without
    /// look-ahead.
    fn one_at_a_time(sequences: usize, blocks: usize, slots: usize) -> Self {
        Story::new(SchedulerCore::new(limits(sequences, STEP_TOKENS, blocks)).without_look_ahead(), slots, 1)
    }

    /// Keeps evicted snapshots in host memory. Copying a state takes as long as copying a block.
    fn with_host(mut self) -> Self {
        self.bed.scheduler = self.bed.scheduler.with_host_states(HOST_STATES, 1);
        self
    }

    fn admit(&mut self, id: u64, prompt: &[u32], tokens_max: usize) {
        self.admit_as(id, prompt, tokens_max, SchedulingParams::default());
    }

    fn admit_as(&mut self, id: u64, prompt: &[u32], tokens_max: usize, scheduling_params: SchedulingParams) {
        let spec = NewSequence {
            scheduling_params,
            positions: (0..prompt.len() as u32).map(|at| [at; 3]).collect(),
            tokens: prompt.to_vec(),
            drafter: Drafter::PromptLookup(PromptLookup::new(NgramSizes { min: 1, max: 3 }, 64)),
            ..sequence(id, prompt.len(), tokens_max)
        };
        self.tokens.insert(spec.id, prompt.to_vec());
        self.bed.admit(spec);
        self.note();
    }

    /// Records what the sequences found.
    fn note(&mut self) {
        for effect in self.bed.recorded() {
            if let Effect::Begun(id, tokens) = effect {
                self.found.insert(id, tokens);
            }
        }
    }

    /// Makes the copies that were submitted before the next step. A copy to the host is made after
    /// the steps that were submitted before it. A copy to the device waits for no step.
    fn copy(&mut self) {
        let ran = self.ran;
        let is_due = |(steps, copies): &mut (usize, Copies)| *steps <= ran || copies.states.to_host.is_empty();
        while let Some((_, copies)) = self.bed.copies.pop_front_if(is_due) {
            for BlockCopy { block, slot } in copies.states.to_host.iter().copied() {
                let seen = self.slots[block as usize].clone();
                self.host[slot as usize] = Some(seen.expect("a step has written the state"));
            }
            for BlockCopy { block, slot } in copies.states.to_device.iter().copied() {
                let seen = self.host[slot as usize].clone();
                self.slots[block as usize] = Some(seen.expect("the state was copied to the host before"));
            }
            self.moved[0] += copies.states.to_host.len();
            self.moved[1] += copies.states.to_device.len();
            self.copied += 1;
        }
    }

    /// Answers the oldest copies. Returns `false` if none have run.
    fn answer_copies(&mut self) -> bool {
        self.copy();
        let has_run = self.copied > 0;
        if has_run {
            self.copied -= 1;
            self.bed.give(Input::Copied(10));
        }
        has_run
    }

    /// Runs the oldest submitted step.
    fn run(&mut self) {
        self.copy();
        self.ran += 1;
        let plan = self.bed.running.front().expect("a step is under way").clone();
        let batch = &plan.batch;
        let (mut written, mut read) = (Vec::new(), Vec::new());
        for (part, id) in plan.parts.iter().enumerate() {
            let rows = batch.query_starts[part] as usize..batch.query_starts[part + 1] as usize;
            let (end, count) = (batch.context_lengths[part] as usize, rows.len());
            let mut seen = Vec::new();
            if end > count {
                let slot = batch.state_reads[part];
                read.push((part, slot));
                seen = self.slots[slot as usize].clone().expect("a step has written the state");
            }
            assert_eq!(seen.len(), end - count, "{id} resumes where its blocks end");
            let drafts = plan.rows.iter().find(|rows| rows.sequence == *id).map_or(0, |rows| rows.drafts.len());
            let snapshots = part * SNAPSHOTS..(part + 1) * SNAPSHOTS;
            let snapshots: Vec<(u32, u32)> = snapshots
                .filter(|at| batch.snapshot_slots[*at] != NO_STATE)
                .map(|at| (batch.snapshot_rows[at], batch.snapshot_slots[at]))
                .collect();
            for (row, token) in batch.tokens[rows].iter().enumerate() {
                seen.push(match token {
                    InputToken::Known(token) => *token,
                    InputToken::Unseen(unseen) => self.chosen[unseen.row as usize],
                });
                for (_, slot) in snapshots.iter().filter(|(after, _)| *after == row as u32 + 1) {
                    let is_own = drafts > 0 && row + 1 == count - drafts;
                    assert!(
                        is_own || seen.len().is_multiple_of(SNAPSHOT_TOKENS),
                        "{id} takes a snapshot at {}",
                        seen.len()
                    );
                    written.push((part, *slot, seen.clone()));
                }
            }
            assert!(seen[..end - drafts] == self.tokens[id][..end - drafts], "{id} has seen other tokens than its own");
            match batch.state_writes[part] {
                NO_STATE => assert!(drafts > 0, "the state of {id} is lost"),
                slot => written.push((part, slot, seen)),
            }
        }
        let slots: BTreeSet<u32> = written.iter().map(|(_, slot, _)| *slot).collect();
        assert_eq!(slots.len(), written.len(), "two states are written to one slot");
        for (part, slot) in read {
            let is_overwritten = |(other, to, _): &(usize, u32, Vec<u32>)| *to == slot && *other != part;
            assert!(!written.iter().any(is_overwritten), "a part overwrites the state that another part reads");
        }
        written.into_iter().for_each(|(_, slot, seen)| self.slots[slot as usize] = Some(seen));
        self.chosen.clear();
        let mut accepted = Vec::new();
        for rows in &plan.rows {
            let tokens = self.tokens.get_mut(&rows.sequence).expect("an admitted sequence");
            let known = tokens.len();
            for draft in rows.drafts.iter().map(Some).chain([None]) {
                tokens.push(choice(tokens));
                if draft != tokens.last() {
                    break;
                }
            }
            self.verified[0] += rows.drafts.len();
            self.verified[1] += tokens.len() - known - 1;
            self.chosen.extend(&tokens[known..]);
            // The choices after a rejected draft mean nothing.
            self.chosen.extend(vec![0; rows.count() - (tokens.len() - known)]);
            accepted.push(tokens[known..].iter().copied().map(Some).collect());
        }
        self.bed.running.pop_front();
        self.bed.give(Input::Stepped(accepted));
        self.note();
    }

    fn run_all(&mut self) {
        while !self.bed.running.is_empty() || self.bed.scheduler.is_copying() {
            if !self.answer_copies() {
                self.run();
            }
        }
    }

    /// Admits one sequence that produces one token, and runs it to its end. Returns the number of
    /// its tokens that were found cached.
    fn ask(&mut self, id: u64, prompt: &[u32]) -> usize {
        self.admit(id, prompt, 1);
        self.run_all();
        self.found[&SequenceId(id)]
    }

    fn usage(&self) -> StateUse {
        self.bed.scheduler.kv().state_usage()
    }
}

/// The token after `tokens`: usually the last token's successor in a cycle of ten, so that drafts
/// are accepted, and otherwise a token that depends on all of `tokens`.
fn choice(tokens: &[u32]) -> u32 {
    let sum = tokens.iter().fold(7, |sum: u32, token| sum.wrapping_mul(31) ^ token);
    if sum.is_multiple_of(5) { sum % 50 + 1 } else { tokens[tokens.len() - 1] % 10 + 1 }
}

/// A prompt of `tokens` tokens. Prompts of different names differ in every token.
fn prompt(name: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|at| name * 10_000 + at).collect()
}

/// A prompt that begins with `shared`.
fn after(shared: &[u32], name: u32, tokens: usize) -> Vec<u32> {
    [shared, &prompt(name, tokens)].concat()
}

#[test]
fn the_same_prompt_resumes_at_its_last_snapshot() {
    let mut story = Story::one_at_a_time(4, 64, 8);
    for (name, tokens, resumed) in [(1, 200, 192), (2, 193, 192), (3, 192, 128), (4, 65, 64), (5, 64, 0), (6, 1, 0)] {
        let prompt = prompt(name, tokens);
        assert_eq!(story.ask(u64::from(name) * 10, &prompt), 0, "the first prompt of {tokens} tokens");
        // A snapshot at the very end would be useless, because the last token's logits are needed.
        assert_eq!(story.ask(u64::from(name) * 10 + 1, &prompt), resumed, "the second prompt of {tokens} tokens");
    }
}

#[test]
fn a_conversation_resumes_at_the_end_of_its_last_prompt() {
    let mut story = Story::one_at_a_time(4, 128, 8);
    let mut chat = prompt(1, 150);
    let mut resumed = Vec::new();
    for turn in 0..4 {
        resumed.push(story.ask(turn + 1, &chat));
        chat = after(&chat, 20 + turn as u32, 70);
    }
    assert_eq!(resumed, [0, 128, 192, 256]);
}

#[test]
fn the_next_turn_resumes_within_the_last_reply() {
    let mut story = Story::one_at_a_time(2, 256, 8);
    let mut chat = prompt(1, 150);
    let mut resumed = Vec::new();
    for turn in 1..=4 {
        story.admit(turn, &chat, 200);
        story.run_all();
        resumed.push(story.found[&SequenceId(turn)]);
        chat = after(&story.tokens[&SequenceId(turn)], 20 + turn as u32, 30);
    }
    // The first turn has a prompt of 150 tokens and a reply of 200. Each later turn adds a prompt
    // of 30 and a reply of 200. The last token of a reply is never computed.
    assert_eq!(resumed, [0, 320, 576, 768]);
    // Each turn leaves the last snapshot of its reply. Two prompts also leave a snapshot, after 128
    // and 832 tokens. The other two prompts resume where they would take a snapshot.
    assert_eq!(story.usage().snapshots, 6);
}

#[test]
fn replies_take_no_snapshots_while_many_sequences_run() {
    let mut story = Story::one_at_a_time(6, 256, 8);
    let system = prompt(1, 140);
    for id in 1..=3 {
        story.ask(id, &after(&system, 100 + id as u32, 10));
    }
    (11..=15).for_each(|id| story.admit(id, &prompt(id as u32, 10), 250));
    story.run_all();
    assert_eq!(story.ask(4, &after(&system, 104, 10)), 128, "the common beginning was not evicted");
}

#[test]
fn a_common_prefix_is_resumed_from_the_third_prompt_on() {
    let mut story = Story::one_at_a_time(4, 256, 8);
    let system = prompt(1, 140);
    let ask = |story: &mut Story, id: u32| story.ask(u64::from(id), &after(&system, 100 + id, 200));
    assert_eq!(ask(&mut story, 1), 0);
    // The second prompt diverges from the first after 140 tokens. It takes the snapshot there.
    assert_eq!(ask(&mut story, 2), 0);
    assert_eq!((ask(&mut story, 3), ask(&mut story, 4)), (128, 128));
}

#[test]
fn chunked_prompts_take_snapshots_for_any_chunk_size() {
    for step_tokens in [17, 64, 70, 100] {
        let scheduler = SchedulerCore::new(limits(2, step_tokens, 64)).without_look_ahead();
        let mut story = Story::new(scheduler, 6, 1);
        assert_eq!(story.ask(1, &prompt(1, 333)), 0);
        assert_eq!(story.ask(2, &prompt(1, 333)), 320, "steps of {step_tokens} tokens");
    }
}

#[test]
fn a_full_pool_evicts_the_least_recently_used_snapshot() {
    let mut story = Story::one_at_a_time(2, 256, 4);
    for name in 1..=3 {
        story.ask(u64::from(name), &prompt(name, 100));
    }
    assert_eq!(story.usage(), StateUse { slots: 4, live: 0, snapshots: 3, on_host: 0 });
    assert_eq!(story.ask(11, &prompt(1, 100)), 64, "the first snapshot becomes the most recently used");
    // Two more snapshots need one more slot than is free.
    story.ask(4, &prompt(4, 100));
    story.ask(5, &prompt(5, 100));
    assert_eq!(story.ask(12, &prompt(1, 100)), 64);
    assert_eq!(story.ask(13, &prompt(2, 100)), 0, "the second snapshot was the least recently used");
}

#[test]
fn running_sequences_may_take_every_state_slot() {
    // As many slots as sequences, so that no snapshot is left while all of them run.
    let mut story = Story::one_at_a_time(3, 256, 3);
    story.ask(1, &prompt(1, 100));
    (2..=4).for_each(|id| story.admit(id, &prompt(1, 100), 5));
    story.run();
    story.run();
    assert_eq!(story.usage().live, 3, "the last sequence took the slot of the snapshot");
    story.run_all();
    assert_eq!(story.usage().live, 0);
}

#[test]
fn a_snapshot_is_dropped_with_its_evicted_block() {
    let mut story = Story::one_at_a_time(2, 20, 6);
    assert_eq!(story.ask(1, &prompt(1, 200)), 0);
    assert_eq!(story.usage().snapshots, 1);
    assert_eq!(story.ask(2, &prompt(2, 300)), 0);
    assert_eq!(story.ask(3, &prompt(1, 200)), 0, "the blocks of the snapshot were evicted");
    assert!(story.usage().snapshots <= 2, "{:?}", story.usage());
}

#[test]
fn an_evicted_snapshot_is_copied_back_from_the_host() {
    let scheduler = SchedulerCore::new(limits(2, STEP_TOKENS, 256)).without_look_ahead();
    let mut story = Story::new(scheduler.with_host(64, CopyCosts::default()), 3, 1).with_host();
    for name in 1..=5 {
        assert_eq!(story.ask(u64::from(name), &prompt(name, 100)), 0);
    }
    assert_eq!(story.usage(), StateUse { slots: 3, live: 0, snapshots: 2, on_host: 3 });
    assert_eq!(
        story.ask(11, &prompt(1, 100)),
        64,
        "the blocks are on the device, and the state is fetched from the host"
    );
    assert_eq!(story.moved[1], 1);
    assert_eq!(story.ask(12, &prompt(1, 100)), 64, "the snapshot is on the device again");
    assert_eq!(story.moved[1], 1, "the state is not copied a second time");
}

#[test]
fn a_snapshot_and_its_blocks_are_copied_back_together() {
    let scheduler = SchedulerCore::new(limits(2, STEP_TOKENS, 20)).without_look_ahead();
    let mut story = Story::new(scheduler.with_host(64, CopyCosts::default()), 2, 1).with_host();
    assert_eq!(story.ask(1, &prompt(1, 200)), 0);
    assert_eq!(story.ask(2, &prompt(2, 300)), 0, "the second prompt evicts the blocks and the snapshot of the first");
    assert_eq!(story.ask(3, &prompt(1, 200)), 192);
    assert_eq!(story.moved[1], 1);
}

#[test]
fn a_snapshot_in_host_memory_is_dropped_with_its_blocks() {
    let scheduler = SchedulerCore::new(limits(2, STEP_TOKENS, 20)).without_look_ahead();
    // Host memory for fewer blocks than a prompt has.
    let mut story = Story::new(scheduler.with_host(4, CopyCosts::default()), 2, 1).with_host();
    for name in 1..=3 {
        assert_eq!(story.ask(u64::from(name), &prompt(name, 250)), 0);
    }
    assert_eq!(story.ask(4, &prompt(1, 250)), 0, "the last blocks of the first prompt are lost");
    assert!(story.usage().on_host <= 1, "{:?}", story.usage());
}

#[test]
fn a_preempted_sequence_resumes_from_a_snapshot() {
    // One permit, so that the second, more urgent sequence preempts the first.
    let mut story = Story::one_at_a_time(1, 64, 4);
    let admit = |story: &mut Story, id: u64, priority: i32, prompt: &[u32]| {
        let scheduling_params = SchedulingParams { priority, ..SchedulingParams::default() };
        story.admit_as(id, prompt, 60, scheduling_params);
    };
    admit(&mut story, 1, 1, &prompt(1, 150));
    (0..11).for_each(|_| story.run());
    admit(&mut story, 2, 0, &prompt(2, 150));
    let mut resumed = None;
    while !story.bed.running.is_empty() {
        let plan = story.bed.running.front().expect("a step");
        let count = plan.batch.token_count();
        if plan.parts == [SequenceId(1)] && count > 1 {
            resumed = Some((plan.batch.context_lengths[0] as usize, count));
        }
        story.run();
    }
    assert_eq!(story.bed.scheduler.preemptions().for_priority, 1);
    // The prompt and the reply before the preemption are 161 tokens or a few more. The sequence
    // resumes from the snapshot after 128 of them.
    let (end, count) = resumed.expect("the first sequence begins again");
    assert!(end >= 161 && end - count == 128, "{count} tokens of {end} are computed");
    assert!(story.tokens.values().all(|tokens| tokens.len() == 210));
    story.bed.assert_all_returned();
}

#[test]
fn a_cancelled_sequence_keeps_its_slot_until_its_last_step_ends() {
    let mut story = Story::new(SchedulerCore::new(limits(2, STEP_TOKENS, 64)), 4, 2);
    story.admit(1, &prompt(1, 1), 2);
    assert_eq!(story.bed.running.len(), 2, "the second step was planned ahead");
    story.bed.cancel(1);
    story.run();
    assert_eq!((story.bed.scheduler.counts(), story.usage().live), ((0, 0), 1), "the second step writes the slot");
    story.run();
    assert_eq!(story.usage().live, 0);
}

#[test]
fn a_reply_with_drafts_is_the_same_and_takes_fewer_steps() {
    let reply = |draft_tokens| {
        let limits = Limits { draft_tokens, ..limits(1, STEP_TOKENS, 64) };
        let mut story = Story::new(SchedulerCore::new(limits).without_look_ahead(), 6, 1);
        story.admit(1, &prompt(1, 40), 300);
        story.run_all();
        let resumed = story.ask(2, &story.tokens[&SequenceId(1)].clone());
        (story.tokens[&SequenceId(1)].clone(), story.ran, story.verified, resumed)
    };
    let (expected, steps, verified, resumed) = reply(0);
    assert_eq!((expected.len(), steps, verified, resumed), (340, 301, [0; 2], 320));
    let (tokens, fewer, [drafted, accepted], resumed) = reply(4);
    assert_eq!(tokens, expected);
    assert_eq!(fewer, steps - accepted, "each accepted draft saves a step");
    assert!(accepted > 100 && drafted - accepted > 100, "{accepted} of {drafted}");
    assert_eq!(resumed, 320, "the reply has the same snapshots as without drafts");
}

#[test]
fn repeated_accepted_drafts_fit_in_the_smallest_steps() {
    let limits = Limits { draft_tokens: 8, ..limits(4, 12, 64) };
    let mut story = Story::new(SchedulerCore::new(limits), 4, 2);
    (1..=4).for_each(|id| story.admit(id, &prompt(id as u32, 5), 200));
    while story.bed.scheduler.counts() != (0, 0) {
        assert!(story.bed.running.iter().all(|step| step.batch.token_count() <= 12));
        story.run();
    }
    assert!(story.tokens.values().all(|tokens| tokens.len() == 205) && story.verified[1] > 50, "{:?}", story.verified);
}

/// An event of a random history.
#[derive(Clone, Debug)]
enum Event {
    /// A prompt that begins with some tokens of a common beginning.
    Admit {
        shared: usize,
        more: usize,
        reply: usize,
    },
    Cancel(usize),
    Run,
    Resize(usize),
    Copied,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => (0usize..3, 0usize..200, 1usize..200, 1usize..30).prop_map(|(name, shared, more, reply)| {
            Event::Admit { shared: name * 1000 + shared, more, reply }
        }),
        1 => (0usize..40).prop_map(Event::Cancel),
        12 => Just(Event::Run),
        // The longest sequence has 427 tokens, which are 27 blocks.
        1 => (27usize..64).prop_map(Event::Resize),
        6 => Just(Event::Copied),
    ];
    prop::collection::vec(event, 1..120)
}

/// Plays a random history and then runs all sequences to their end.
fn play(events: &[Event], scheduler: SchedulerCore, slots: usize, running_max: usize) {
    play_story(events, Story::new(scheduler, slots, running_max));
}

/// Like [`play`], with snapshots in host memory.
fn play_with_host(events: &[Event], scheduler: SchedulerCore, slots: usize, running_max: usize) {
    play_story(events, Story::new(scheduler, slots, running_max).with_host());
}

fn play_story(events: &[Event], mut story: Story) {
    let mut ids = 0;
    for event in events {
        match event {
            Event::Admit { shared, more, reply } => {
                ids += 1;
                let common = prompt(900 + (shared / 1000) as u32, shared % 1000);
                story.admit(ids, &after(&common, ids as u32, *more), *reply);
            }
            Event::Cancel(id) => drop(story.bed.cancel(*id as u64)),
            Event::Run if !story.bed.running.is_empty() => story.run(),
            Event::Run => {}
            Event::Resize(blocks) => drop(story.bed.give(Input::Resize(*blocks))),
            Event::Copied => drop(story.answer_copies()),
        }
        story.note();
    }
    while story.bed.scheduler.counts() != (0, 0) {
        if !story.answer_copies() {
            story.run();
        }
        story.note();
    }
    // A canceled sequence keeps its slot until the step that was planned ahead has ended.
    while !story.bed.running.is_empty() {
        story.run();
    }
    assert_eq!(story.usage().live, 0, "no sequence is left, so no slot is live");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_step_resumes_from_the_state_of_its_sequences_tokens(events in events(), spare in 0usize..6) {
        let scheduler = || SchedulerCore::new(limits(4, 150, 64));
        play(&events, scheduler().without_look_ahead(), 4 + spare, 1);
        play(&events, scheduler(), 4 + spare, 2);
        play(&events, scheduler().with_host(40, CopyCosts::default()), 4 + spare, 2);
        let host = |scheduler: SchedulerCore| scheduler.with_host(40, CopyCosts::default());
        play_with_host(&events, host(scheduler().without_look_ahead()), 4 + spare, 1);
        play_with_host(&events, host(scheduler()), 4 + spare, 2);
    }

    #[test]
    fn accepted_drafts_run_again_before_the_state_is_kept(events in events(), spare in 0usize..6, draft_tokens in 1usize..6) {
        let scheduler = || SchedulerCore::new(Limits { draft_tokens, ..limits(4, 150, 64) });
        play(&events, scheduler().without_look_ahead(), 4 + spare, 1);
        play(&events, scheduler(), 4 + spare, 2);
        play_with_host(&events, scheduler().with_host(40, CopyCosts::default()), 4 + spare, 2);
    }
}
