//! Pure: the end of a step: the tokens that it chose, and its drafted tokens.

use super::{Effect, SchedulerCore, Sequence};
use crate::{
    kv::BlockEvent,
    scheduler::{
        Finish,
        step::{RunningSequence, SequenceTokens},
    },
};

impl SchedulerCore {
    pub(super) fn stepped(&mut self, tokens: &[Vec<Option<u32>>], effects: &mut Vec<Effect>) {
        let step = self.under_way.pop_front().expect("only a step under way can end");
        (self.admission_paused, self.look_ahead_paused) = (false, false);
        let began = std::mem::replace(&mut self.stepped_at, self.now);
        // A step submitted after the previous step ended is not measured, because the interval
        // would include idle time. Pictures that are encoded at the same time slow steps down, too.
        let is_measured = !step.has_prompts && !step.pictures && step.launched <= began;
        if let Some(limit) = self.draft_limit.as_mut().filter(|_| is_measured) {
            let each = tokens.iter().map(Vec::len).sum::<usize>() as f64 / step.sequences.len() as f64;
            limit.learn(step.drafts, each, (self.now - began).as_micros() as u64);
        }
        let drafts_max = self.drafts_each();
        let mut tokens = tokens.iter();
        let mut drafted = std::mem::take(&mut self.drafted).into_iter();
        let mut ended = Vec::new();
        for running in step.sequences {
            let chosen = running.chooses.then(|| tokens.next().expect("each sequence that chooses has tokens"));
            let proposed = chosen.and_then(|_| drafted.next()).unwrap_or_default();
            // The sequence has ended in the meantime, so its part of the step was wasted.
            if !self.running.contains_key(&running.sequence) {
                continue;
            }
            let finish = match chosen {
                Some(chosen) => self.chose(running, chosen, (proposed, drafts_max), effects),
                None => {
                    self.kv.release_skipped(running.sequence, running.end);
                    None
                }
            };
            let sequence = &self.running[&running.sequence];
            if let Some(finish) = finish {
                let produced = sequence.spec.produced;
                self.replies.record(sequence.spec.tokens_max, produced);
                self.missed_by.extend(sequence.expected.map(|expected| expected.abs_diff(produced)));
                effects.push(Effect::Finished(running.sequence, finish));
            }
            ended.extend((finish.is_some() || sequence.cancelled).then_some(running.sequence));
        }
        // Sequences that were canceled during the step and were not part of the step.
        let cancelled = self.running.values().filter(|s| s.cancelled && !s.is_fetching).map(Sequence::id);
        let cancelled: Vec<_> = cancelled.filter(|id| !ended.contains(id)).collect();
        ended.extend(cancelled);
        ended.iter().for_each(|id| drop(self.take_out(*id)));
        let mut released = step.release_after_step;
        for id in ended {
            match self.under_way.front_mut().filter(|next| next.has(id)) {
                Some(next) => next.release_after_step.push(id),
                None => released.push(id),
            }
        }
        self.release(released, effects);
    }

    /// Records the tokens that a step chose for a sequence: one, and one more for each accepted
    /// draft. `proposed` are the drafts that continue these tokens. At most `drafts_max` of the
    /// drafts are used. Returns how the sequence has ended, if it has.
    fn chose(
        &mut self,
        running: RunningSequence,
        chosen: &[Option<u32>],
        (proposed, drafts_max): (Vec<u32>, usize),
        effects: &mut Vec<Effect>,
    ) -> Option<Finish> {
        let id = running.sequence;
        let sequence = self.running.get_mut(&id).expect("the sequence was looked up before");
        let has_drafts = running.drafts + running.further > 0;
        sequence.chose(has_drafts);
        let (mut finish, mut pushed) = (None, 0);
        let wanted = if sequence.cancelled { &[][..] } else { chosen };
        for token in wanted {
            let Some(token) = *token else {
                finish = Some(Finish::Broken);
                break;
            };
            self.waiting.tenants.token(&sequence.spec.scheduling_params.tenant);
            finish = sequence.push(token);
            pushed += 1;
            if !matches!(finish, Some(Finish::Stop(_))) {
                effects.push(Effect::Token(id, token));
            }
            if finish.is_some() {
                break;
            }
        }
        // The keys and values of the accepted drafts are in the cache. The last token is not.
        let accepted = usize::saturating_sub(pushed, 1);
        sequence.cached += accepted;
        // A recurrent state cannot be truncated like the cache. The step therefore saved the state
        // as it was before the drafts, and the next step runs the accepted drafts again. The blocks
        // of those drafts are named only after the next step has run the drafts, so that no
        // sequence reads a block that is still being written.
        let end = if self.kv.has_states() {
            sequence.state_lag = accepted;
            running.end
        } else {
            running.end + accepted
        };
        if let Some(Some(_)) = chosen.first() {
            let (first, keys) = sequence.filled(end);
            for place in self.kv.name(id, first, keys) {
                self.kv.push_event(BlockEvent::Stored(sequence.block(place).into()));
            }
            self.kv.name_snapshots(id, end, sequence.spec.prefix.as_slice());
            sequence.named = end;
        }
        // The next step, which may be running, begins after these tokens.
        self.kv.release_skipped(id, end);
        let verified = (running.drafts > 0).then(|| (running.drafts, chosen.len() - 1));
        if has_drafts {
            assert!(!self.under_way.iter().any(|step| step.has(id)), "a step under way may use the blocks of drafts");
            self.kv.truncate(id, sequence.spec.tokens.len());
        }
        if let Some((drafted, accepted)) = verified {
            self.verified.count(drafted, accepted);
        }
        if finish.is_none() {
            sequence.draft(drafts_max, verified, proposed);
        }
        finish
    }

    /// Removes the drafts from a step, because there are too few blocks for them. No sequence
    /// loses its blocks for the drafts of another sequence.
    pub(super) fn give_up_drafts(&mut self, shares: &mut [SequenceTokens]) {
        for share in shares.iter_mut().filter(|share| share.drafts + share.further > 0) {
            (share.drafts, share.further) = (0, 0);
            self.kv.truncate(share.sequence, self.running[&share.sequence].tokens());
        }
    }
}
