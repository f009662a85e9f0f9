//! Pure: which sequence holds which slot of recurrent states, and the snapshots that later
//! sequences can resume from.
//!
//! To resume after a prefix, a model with recurrent layers needs the state at the end of the prefix
//! in addition to the prefix's blocks. Snapshots are copies of a state at a multiple of
//! [`SNAPSHOT_TOKENS`], named like the block that ends there. Live states and snapshots share one
//! pool of slots. A snapshot is evicted when its slot is needed, the least recently used first.
//! With a host tier (ADR 15), it is then copied to host memory. The method is that of SGLang's
//! hybrid radix cache (`mamba_radix_cache.py`), except that each sequence has exactly one live
//! slot.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use bursar_kernels::{
    BLOCK_TOKENS,
    ops::{
        copy_blocks::BlockCopy,
        gated_delta::{NO_STATE, SNAPSHOTS},
    },
};
use bursar_model::flow::{PrefixKey, StateSlots};

use super::sequence_id::SequenceId;
use crate::shared::host_slots::HostSlots;

/// Snapshots are taken at multiples of this number of tokens. It is the chunk length of the prefill
/// kernels, which compute the state at these positions anyway.
pub const SNAPSHOT_TOKENS: usize = 64;

/// The last multiple of [`SNAPSHOT_TOKENS`] that is at most `tokens`.
pub fn snapshot_before(tokens: usize) -> usize {
    tokens / SNAPSHOT_TOKENS * SNAPSHOT_TOKENS
}

const _: () = assert!(SNAPSHOT_TOKENS.is_multiple_of(BLOCK_TOKENS), "a snapshot is at the end of a block");

/// Usage of the slots of recurrent states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateUse {
    pub slots: usize,
    /// Slots of running sequences.
    pub live: usize,
    /// Slots of snapshots that a later sequence can resume from.
    pub snapshots: usize,
    /// Snapshots in host memory.
    pub on_host: usize,
}

/// The part of a sequence with a recurrent state that a step runs.
#[derive(Clone, Debug)]
pub struct StateStep {
    /// The known tokens that the step runs. The state already includes the tokens before
    /// them.
    pub tokens: Range<usize>,
    /// Number of known tokens of the sequence.
    pub known: usize,
    /// Whether the sequence has produced tokens, and earlier steps ran all of them except the last.
    pub is_decoding: bool,
    /// Whether drafts follow `tokens`.
    pub verifies: bool,
}

/// The slots of a model's states. Empty for a model without recurrent layers.
#[derive(Clone, Debug)]
pub(super) struct StatePool {
    slots: usize,
    /// Limit of running sequences.
    sequences: usize,
    free: BTreeSet<u32>,
    live: BTreeMap<SequenceId, Live>,
    snapshots: BTreeMap<PrefixKey, Snapshot>,
    /// Snapshots by their last use.
    by_use: BTreeMap<u64, PrefixKey>,
    /// Snapshots in host memory. If it has no slots, evicted snapshots are lost.
    host: HostSlots<PrefixKey>,
    /// Evicted snapshots that must be copied to the host before anything is written to their slots.
    leaving: Vec<(PrefixKey, u32)>,
    clock: u64,
}

/// The state of a running sequence.
#[derive(Clone, Debug)]
struct Live {
    /// The slot of the state after the last step that was planned.
    slot: u32,
    /// The snapshot with which the sequence began.
    began_with: Option<PrefixKey>,
    /// The slot of the snapshot with which the sequence begins, until its first step is
    /// [launched](StatePool::launched). Until then, nothing may be written to that slot.
    resumes_from: Option<u32>,
    /// The slot of the snapshot that a launched step reads. Copies from the host do not wait for
    /// steps, so none may fill this slot before the step has ended.
    reads: Option<u32>,
    /// The snapshot that a copy brings to the slot `resumes_from`, until the copy has ended.
    fetched: Option<PrefixKey>,
    /// Number of tokens of a prefix whose blocks are cached but that has no snapshot. The sequence
    /// takes a snapshot there, because another prompt that shares the prefix may follow.
    junction: Option<usize>,
    /// Snapshots that planned steps take or that are being fetched from the host.
    pending: Vec<PendingSnapshot>,
}

#[derive(Clone, Copy, Debug)]
struct PendingSnapshot {
    /// The number of tokens before the snapshot.
    tokens: usize,
    slot: u32,
    is_of_reply: bool,
}

#[derive(Clone, Debug)]
struct Snapshot {
    slot: u32,
    used: u64,
    /// The sequence whose reply contains the snapshot, if the snapshot was taken within a reply and
    /// no sequence has resumed from it.
    of_reply: Option<SequenceId>,
}

impl StatePool {
    /// A pool of `slots` slots for at most `sequences` running sequences.
    pub fn new(slots: usize, sequences: usize) -> Self {
        StatePool {
            slots,
            sequences,
            free: (0..slots as u32).collect(),
            live: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            by_use: BTreeMap::new(),
            host: HostSlots::new(0),
            leaving: Vec::new(),
            clock: 0,
        }
    }

    /// Keeps up to `slots` evicted snapshots in host memory.
    #[must_use]
    pub fn with_host(self, slots: usize) -> Self {
        StatePool { host: HostSlots::new(slots), ..self }
    }

    /// Whether the model has recurrent states.
    pub fn is_there(&self) -> bool {
        self.slots > 0
    }

    pub fn usage(&self) -> StateUse {
        let (live, snapshots, on_host) = (self.live.len(), self.snapshots.len(), self.host.in_use());
        StateUse { slots: self.slots, live, snapshots, on_host }
    }

    /// Whether a sequence can resume after the block `key` without a copy from the host.
    pub fn is_resumable(&self, key: &PrefixKey) -> bool {
        !self.is_there() || self.snapshots.contains_key(key)
    }

    /// Like [`is_resumable`](Self::is_resumable), but also counts snapshots in host memory.
    pub fn is_known(&self, key: &PrefixKey) -> bool {
        self.is_resumable(key) || self.host.holds(key)
    }

    /// Whether a snapshot is only in host memory.
    pub fn is_only_on_host(&self, key: &PrefixKey) -> bool {
        !self.snapshots.contains_key(key) && self.host.holds(key)
    }

    /// Whether a new sequence can get a slot.
    pub fn has_slot_for(&self, resumes_from: Option<&PrefixKey>) -> bool {
        !self.is_there()
            || !self.free.is_empty()
            || self.victim(None).is_some()
            || self.overwritable(resumes_from).is_some()
    }

    /// Gives a new sequence a slot. The sequence begins with the snapshot `resumes_from`, if that
    /// is given, otherwise with an empty state. The snapshot is at the end of the first `resumed`
    /// blocks. The first `cached` blocks of the sequence are in the KV cache.
    ///
    /// # Panics
    /// If no slot is [available](Self::has_slot_for), or if the sequence has a slot already.
    pub fn begin(&mut self, sequence: SequenceId, resumes_from: Option<&PrefixKey>, resumed: usize, cached: usize) {
        if !self.is_there() {
            return;
        }
        let from = resumes_from.map(|key| {
            self.touch(key);
            self.snapshots[key].slot
        });
        // If all other slots are in use, the sequence takes over the slot of its snapshot.
        let slot = self.take(resumes_from).or_else(|| {
            let key = self.overwritable(resumes_from)?;
            self.evict(&key);
            self.free.pop_first()
        });
        let slot = slot.expect("there is a slot for the state");
        let junction = snapshot_before(cached * BLOCK_TOKENS);
        let junction = (junction > resumed * BLOCK_TOKENS).then_some(junction);
        let began_with = resumes_from.copied();
        let live =
            Live { slot, began_with, resumes_from: from, reads: None, fetched: None, junction, pending: Vec::new() };
        assert!(self.live.insert(sequence, live).is_none(), "{sequence} already has a state");
        self.check();
    }

    /// Whether [`begin_from_host`](Self::begin_from_host) would find a slot.
    pub fn has_slot_for_copy(&self) -> bool {
        self.free.iter().any(|slot| !self.is_read(*slot)) || self.victim_for_copy().is_some()
    }

    /// Gives a new sequence a slot. The sequence resumes after `resumed` blocks, from the snapshot
    /// `key`, which is only in host memory. Returns the copy that brings it to the device. No step
    /// may run the sequence before the copy has [ended](Self::fetched).
    ///
    /// # Panics
    /// If no slot is [available](Self::has_slot_for_copy), if the sequence has a slot already, or
    /// if the snapshot is not in host memory.
    pub fn begin_from_host(&mut self, sequence: SequenceId, key: &PrefixKey, resumed: usize) -> BlockCopy {
        self.clock += 1;
        let from = self.host.fetch(key, self.clock).expect("the snapshot is in host memory")[0];
        let slot = self.take_for_copy().expect("there is a slot for the state");
        // If there is a second slot, the snapshot stays on the device, so that other sequences can
        // resume from it. Each of the other sequences that may run must still find a slot.
        let held = self.live.values().map(|live| 1 + live.pending.len()).sum::<usize>() + 2;
        let others = self.sequences.saturating_sub(self.live.len() + 1);
        let snapshot = if held + others <= self.slots { self.take_for_copy() } else { None };
        let of_slot = |slot| PendingSnapshot { tokens: resumed * BLOCK_TOKENS, slot, is_of_reply: false };
        let pending = snapshot.map(of_slot).into_iter().collect();
        let fetched = snapshot.map(|_| *key);
        let began_with = Some(*key);
        let live = Live { slot, began_with, resumes_from: snapshot, reads: None, fetched, junction: None, pending };
        assert!(self.live.insert(sequence, live).is_none(), "{sequence} already has a state");
        self.check();
        BlockCopy { block: snapshot.unwrap_or(slot), slot: from }
    }

    /// Records that the copy for a sequence has ended. Other sequences may resume from the snapshot
    /// from now on.
    pub fn fetched(&mut self, sequence: SequenceId) {
        let Some(live) = self.live.get_mut(&sequence) else { return };
        let (Some(key), Some(slot)) = (live.fetched.take(), live.resumes_from) else { return };
        // If another sequence has computed the same snapshot in the meantime, the fetched snapshot
        // stays pending, and `name` frees its slot.
        if !self.snapshots.contains_key(&key) {
            live.pending.retain(|pending| pending.slot != slot);
            self.publish(key, slot, None);
        }
        self.check();
    }

    /// Makes the snapshot in `slot` available to other sequences.
    fn publish(&mut self, key: PrefixKey, slot: u32, of_reply: Option<SequenceId>) {
        self.clock += 1;
        self.by_use.insert(self.clock, key);
        self.snapshots.insert(key, Snapshot { slot, used: self.clock, of_reply });
    }

    /// The snapshots that running copies bring to the device.
    pub fn coming(&self) -> impl Iterator<Item = &PrefixKey> {
        self.live.values().filter_map(|live| live.fetched.as_ref())
    }

    /// Assigns host slots to the snapshots that were evicted, and returns the copies to make before
    /// anything is written to their slots. Each copy is returned once. The snapshots in `kept` stay
    /// in host memory.
    pub fn take_leaving(&mut self, kept: &[PrefixKey]) -> Vec<BlockCopy> {
        let leaving = std::mem::take(&mut self.leaving);
        self.host.store_blocks(&leaving, kept, &mut self.clock).0
    }

    /// The slots for a planned step. The step takes a snapshot at the junction (the end of a prefix
    /// whose blocks are cached but that has no snapshot) and before the last known token, if there
    /// are slots. A decoding step takes a snapshot every [`SNAPSHOT_TOKENS`] tokens, for the next
    /// turn of the conversation, if replies may take a slot. A step that verifies drafts leaves the
    /// state as it is before the drafts, because it is not known yet which drafts are accepted.
    /// Returns `None` for a model without recurrent states.
    pub fn plan_step(&mut self, sequence: SequenceId, step: &StateStep) -> Option<StateSlots> {
        let live = self.live.get(&sequence)?;
        let (own, read) = (live.slot, live.resumes_from.unwrap_or(live.slot));
        let StateStep { tokens: Range { start: first, end }, known, .. } = *step;
        let is_of_reply = step.is_decoding || first + 1 >= known;
        let wanted = if is_of_reply {
            [Some(snapshot_before(end)), None]
        } else {
            [live.junction, Some(snapshot_before(known - 1))]
        };
        let mut slots = StateSlots { read, write: own, snapshots: [None; SNAPSHOTS] };
        for (tokens, to) in wanted.into_iter().flatten().zip(&mut slots.snapshots) {
            let is_planned = self.live[&sequence].pending.iter().any(|pending| pending.tokens == tokens);
            if tokens <= first || tokens > end || is_planned {
                continue;
            }
            let slot = if is_of_reply { self.take_for_reply() } else { self.take(None) };
            let Some(slot) = slot else { break };
            let live = self.live.get_mut(&sequence).expect("the sequence has a live state");
            live.pending.push(PendingSnapshot { tokens, slot, is_of_reply });
            *to = Some(((tokens - first) as u32, slot));
        }
        if step.verifies {
            assert!(is_of_reply, "drafts follow the known tokens of a reply");
            slots.write = NO_STATE;
            slots.snapshots[1] = Some(((end - first) as u32, own));
        }
        self.check();
        Some(slots)
    }

    /// Records that all parts of a step with this sequence are planned. From now on the sequence
    /// continues with its own slot, and its snapshot may be overwritten, because later steps run
    /// after this one.
    pub fn launched(&mut self, sequence: SequenceId) {
        if let Some(live) = self.live.get_mut(&sequence) {
            live.reads = live.resumes_from.take().or(live.reads);
        }
    }

    /// Makes the snapshots within the first `end` tokens of a sequence available to other
    /// sequences. Each snapshot gets the key of the block that ends there. `keys` has the keys of
    /// all whole blocks in these tokens.
    pub fn name(&mut self, sequence: SequenceId, end: usize, keys: &[PrefixKey]) {
        let Some(live) = self.live.get_mut(&sequence) else { return };
        live.reads = None;
        let named: Vec<_> = live.pending.extract_if(.., |pending| pending.tokens <= end).collect();
        for PendingSnapshot { tokens, slot, is_of_reply } in named {
            let key = keys[tokens / BLOCK_TOKENS - 1];
            if self.snapshots.contains_key(&key) {
                self.touch(&key);
                self.free.insert(slot);
                continue;
            }
            let of_reply = is_of_reply.then_some(sequence);
            let is_older = |snapshot: &Snapshot| is_of_reply && snapshot.of_reply == of_reply;
            let older = self.snapshots.iter().find(|(_, snapshot)| is_older(snapshot)).map(|(older, _)| *older);
            older.and_then(|older| self.remove(&older));
            self.publish(key, slot, of_reply);
        }
        self.check();
    }

    /// Frees the slots of a sequence that has ended or lost its blocks. Snapshots that are named
    /// stay.
    pub fn release(&mut self, sequence: SequenceId) {
        if let Some(live) = self.live.remove(&sequence) {
            self.free.insert(live.slot);
            self.free.extend(live.pending.into_iter().map(|pending| pending.slot));
        }
        self.check();
    }

    /// Drops the snapshot at the end of a block whose content is lost, because no sequence can
    /// resume there any more. No sequence is about to begin with the snapshot, because such a
    /// sequence would hold the block.
    pub fn forget(&mut self, key: &PrefixKey) {
        self.evict(key);
        self.leaving.retain(|(leaving, _)| leaving != key);
        self.host.remove(key);
    }

    /// Frees the slot of a snapshot, if it has one. With a host tier, the snapshot is queued to be
    /// copied to the host.
    fn evict(&mut self, key: &PrefixKey) {
        if let Some(slot) = self.remove(key)
            && self.host.is_there()
        {
            self.leaving.push((*key, slot));
        }
    }

    /// Frees the slot of a snapshot and returns it. `None` if no slot has this snapshot.
    fn remove(&mut self, key: &PrefixKey) -> Option<u32> {
        let Snapshot { slot, used, .. } = self.snapshots.remove(key)?;
        self.by_use.remove(&used);
        self.free.insert(slot);
        Some(slot)
    }

    fn touch(&mut self, key: &PrefixKey) {
        self.clock += 1;
        let snapshot = self.snapshots.get_mut(key).expect("the snapshot is known");
        snapshot.of_reply = None;
        self.by_use.remove(&snapshot.used);
        snapshot.used = self.clock;
        self.by_use.insert(self.clock, *key);
    }

    /// A free slot, or the slot of the least recently used snapshot that may be evicted.
    fn take(&mut self, kept: Option<&PrefixKey>) -> Option<u32> {
        if self.free.is_empty() {
            let victim = self.victim(kept)?;
            self.evict(&victim);
        }
        self.free.pop_first()
    }

    /// A slot for a snapshot within a reply. Replies take at most a third of the slots, and only
    /// while at most a third are live: otherwise the replies of many sequences would soon evict a
    /// common system prompt. A pending snapshot counts, because the reply's previous snapshot keeps
    /// its slot until the pending one is named. A snapshot with which a running sequence began is
    /// not evicted, although it may be the least recently used.
    fn take_for_reply(&mut self) -> Option<u32> {
        let most = self.slots / 3;
        if self.live.len() > most {
            return None;
        }
        let pending = self.live.values().flat_map(|live| &live.pending).filter(|pending| pending.is_of_reply).count();
        let of_replies = || self.snapshots.iter().filter(|(_, snapshot)| snapshot.of_reply.is_some());
        if pending + of_replies().count() >= most {
            let oldest = of_replies().min_by_key(|(_, snapshot)| snapshot.used).map(|(key, _)| *key)?;
            self.evict(&oldest);
        }
        if self.free.is_empty() {
            let is_in_use = |key: &PrefixKey| self.live.values().any(|live| live.began_with == Some(*key));
            let may_go = |key: &&PrefixKey| !is_in_use(key) && !self.is_about_to_be_read(key);
            let victim = *self.by_use.values().find(may_go)?;
            self.evict(&victim);
        }
        self.free.pop_first()
    }

    /// A slot for a copy from the host. Like [`take`](Self::take), but never returns a slot that a
    /// launched step reads.
    fn take_for_copy(&mut self) -> Option<u32> {
        let free = self.free.iter().find(|slot| !self.is_read(**slot)).copied();
        let slot = match free {
            Some(slot) => slot,
            None => {
                let victim = self.victim_for_copy()?;
                let slot = self.snapshots[&victim].slot;
                self.evict(&victim);
                slot
            }
        };
        self.free.remove(&slot);
        Some(slot)
    }

    fn victim_for_copy(&self) -> Option<PrefixKey> {
        let may_go = |key: &&PrefixKey| !self.is_about_to_be_read(key) && !self.is_read(self.snapshots[*key].slot);
        self.by_use.values().find(may_go).copied()
    }

    /// Whether a launched step reads a slot.
    fn is_read(&self, slot: u32) -> bool {
        self.live.values().any(|live| live.reads == Some(slot))
    }

    /// The least recently used snapshot, other than `kept`, with which no sequence is about to
    /// begin.
    fn victim(&self, kept: Option<&PrefixKey>) -> Option<PrefixKey> {
        self.by_use.values().find(|key| Some(*key) != kept && !self.is_about_to_be_read(key)).copied()
    }

    /// The snapshot `key`, if it is on the device and the sequence that resumes from it may
    /// overwrite it.
    fn overwritable(&self, key: Option<&PrefixKey>) -> Option<PrefixKey> {
        key.filter(|key| self.snapshots.contains_key(key) && !self.is_about_to_be_read(key)).copied()
    }

    fn is_about_to_be_read(&self, key: &PrefixKey) -> bool {
        let slot = self.snapshots[key].slot;
        self.live.values().any(|live| live.resumes_from == Some(slot))
    }

    /// Checks that each slot is free, live or a snapshot, exactly once.
    fn check(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let of_live =
            self.live.values().flat_map(|live| live.pending.iter().map(|pending| pending.slot).chain([live.slot]));
        let all: Vec<u32> = of_live.chain(self.snapshots.values().map(|it| it.slot)).chain(self.free.clone()).collect();
        let distinct: BTreeSet<u32> = all.iter().copied().collect();
        assert!(all.len() == self.slots && distinct.len() == all.len(), "slots were lost or counted twice: {self:?}");
    }
}

#[cfg(test)]
mod tests {
    use bursar_model::flow::PrefixKeys;

    use super::*;

    /// Keys of the blocks of a sequence of `tokens` tokens. All sequences have the same first 64
    /// tokens.
    fn keys(name: u32, tokens: usize) -> Vec<PrefixKey> {
        let ids: Vec<u32> = (0..tokens).map(|at| if at < SNAPSHOT_TOKENS { 0 } else { name }).collect();
        let mut keys = PrefixKeys::default();
        keys.extend(&ids, &vec![[0; 3]; tokens], &[]);
        keys.as_slice().to_vec()
    }

    #[test]
    fn replies_in_lockstep_do_not_evict_the_common_system_prompt() {
        for replies in [6, 8] {
            let slots = 3 * replies;
            let mut states = StatePool::new(slots, replies);
            let ids = || (1..=replies as u64).map(SequenceId);
            let system = keys(0, SNAPSHOT_TOKENS)[SNAPSHOT_TOKENS / BLOCK_TOKENS - 1];
            let blocks = SNAPSHOT_TOKENS / BLOCK_TOKENS;
            // A first prompt leaves the snapshot at the end of the system prompt, and all replies
            // resume from it.
            let first = SequenceId(0);
            states.begin(first, None, 0, 0);
            let step = |first, end| StateStep { tokens: first..end, known: end, is_decoding: false, verifies: false };
            states.plan_step(first, &step(0, SNAPSHOT_TOKENS + 1));
            states.name(first, SNAPSHOT_TOKENS, &keys(0, SNAPSHOT_TOKENS));
            states.release(first);
            ids().for_each(|id| states.begin(id, Some(&system), blocks, blocks));
            ids().for_each(|id| states.launched(id));
            // Each prompt has a snapshot at its end, which was used more recently than the snapshot
            // of the system prompt.
            let prompt = 2 * SNAPSHOT_TOKENS + 1;
            ids().for_each(|id| _ = states.plan_step(id, &step(SNAPSHOT_TOKENS, prompt)));
            ids().for_each(|id| states.name(id, prompt, &keys(id.0 as u32, prompt)));
            for round in 3..9 {
                let end = round * SNAPSHOT_TOKENS;
                for id in ids() {
                    states.plan_step(id, &step(end - 1, end));
                }
                let pending = states.live.values().map(|live| live.pending.len()).sum::<usize>();
                let published = states.snapshots.values().filter(|snapshot| snapshot.of_reply.is_some()).count();
                assert!(pending + published <= slots / 3, "{replies} replies: {pending} and {published} snapshots");
                ids().for_each(|id| states.name(id, end, &keys(id.0 as u32, end)));
                assert!(states.is_resumable(&system), "{replies} replies of {end} tokens");
                let last = |id: SequenceId| keys(id.0 as u32, end)[end / BLOCK_TOKENS - 1];
                assert!(ids().all(|id| states.is_resumable(&last(id))), "each reply has its last snapshot");
            }
        }
    }
}
