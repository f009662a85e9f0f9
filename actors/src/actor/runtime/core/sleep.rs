//! Transitions of models that go to sleep, sleep, wait for memory and wake up.
//!
//! ```text
//! Awake ──► Draining ──► Releasing ──► Asleep ──► WaitingForMemory ──► Waking ──► Awake
//!   ▲          │ busy        ▲  └── waits for memory ──────▲              │
//!   └──────────┘             └────────────────────────────────────────────┘ did not start
//! ```

use std::{mem, time::Duration};

use super::{
    Effect, Parts, RuntimeCore,
    sleep_state::{Draining, IdleReport, Next, Releasing, SleepState, SleepWaiters, WaitingForMemory},
};
use crate::{
    metric::{SleepReason, WakeReason},
    sleep::{SleepError, SleepLevel},
};

impl<P: Parts> RuntimeCore<P> {
    pub(super) fn sleep(
        &mut self,
        name: String,
        load: u64,
        (level, within): (SleepLevel, Duration),
        sleeper: P::Sleeper,
    ) {
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going() && !model.is_forgotten()) else {
            return self.answer_sleepers([sleeper], Err(SleepError::Stopped { reason: "it is shutting down".into() }));
        };
        match &mut model.sleep_state {
            SleepState::Awake { .. } => {
                let sleepers = SleepWaiters::one(level, within, sleeper);
                model.sleep_state =
                    SleepState::Draining(Draining { reason: SleepReason::Call, sleepers, wanted: None });
                self.effects.push(Effect::BeginSleep {
                    name,
                    load,
                    level: Some(level),
                    within: Some(within),
                    stayed_busy: 0,
                });
            }
            SleepState::Asleep(SleepLevel::Level1) if level == SleepLevel::Level2 => {
                let sleepers = SleepWaiters::one(level, within, sleeper);
                let next = Next::Sleep(SleepReason::Call, None);
                model.sleep_state = SleepState::Releasing(Releasing { sleepers, next, end: None });
                self.effects.push(Effect::ReleaseEngine { name, load, level: Some(level) });
            }
            SleepState::Asleep(_) => self.answer_sleepers([sleeper], Ok(())),
            SleepState::WaitingForMemory(waiting)
            | SleepState::Waking(waiting)
            | SleepState::Releasing(Releasing { next: Next::WaitForMemory(waiting), .. }) => {
                waiting.again.join(level, within, sleeper);
            }
            SleepState::Draining(Draining { sleepers, .. }) | SleepState::Releasing(Releasing { sleepers, .. }) => {
                sleepers.join(level, within, sleeper);
            }
        }
    }

    fn sleep_all(&mut self, name: &str, load: u64, SleepWaiters { level, within, each }: SleepWaiters<P::Sleeper>) {
        each.into_iter().for_each(|sleeper| self.sleep(name.to_owned(), load, (level, within), sleeper));
    }

    pub(super) fn wake(&mut self, name: String, load: u64, reason: WakeReason, now: Duration) {
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going()) else { return };
        match &mut model.sleep_state {
            SleepState::Draining(draining) => drop(draining.wanted.get_or_insert(reason)),
            SleepState::Releasing(Releasing { next: Next::Sleep(_, wanted), .. }) => drop(wanted.get_or_insert(reason)),
            SleepState::Releasing(Releasing { next: next @ Next::StayAsleep, .. }) => {
                *next = Next::Sleep(SleepReason::Call, Some(reason));
            }
            SleepState::Asleep(_) => {
                self.queue_for_memory(
                    name,
                    WaitingForMemory {
                        reason: Some(reason),
                        since: now,
                        was_tried: false,
                        again: SleepWaiters::none(),
                    },
                );
            }
            SleepState::Releasing(_)
            | SleepState::WaitingForMemory(_)
            | SleepState::Waking(_)
            | SleepState::Awake { .. } => {}
        }
    }

    /// Adds the model to the queue of models that wait for their turn to start.
    pub(super) fn queue_for_memory(&mut self, name: String, waiting: WaitingForMemory<P::Sleeper>) {
        let Some(model) = self.models.get_mut(&name) else { return };
        let was_tried = waiting.was_tried;
        model.sleep_state = SleepState::WaitingForMemory(waiting);
        self.effects.push(Effect::ShowWaking { name: name.clone() });
        if was_tried {
            // A model that has already tried to start keeps its position at the front.
            self.waiting.push_front(name);
        } else {
            self.waiting.push_back(name);
        }
        self.admit_waiting();
    }

    /// Lets the first model in the queue try to start, once no other model is in transition. If
    /// that model has already tried and did not fit, requests idle reports to find a model that
    /// could free memory. If `Rules::turn` is not set, models do not free memory for each other and
    /// do not wait for each other.
    fn admit_waiting(&mut self) {
        if self.lost.is_some() {
            return;
        }
        while let Some(name) = self.waiting.front().cloned() {
            if self.rules.turn.is_some() && self.is_in_transition() {
                return;
            }
            let model = self.models.get_mut(&name).filter(|model| model.is_going());
            let Some((model, was_tried)) = model.and_then(|model| {
                let was_tried = model.sleep_state.waiting().map(|waiting| waiting.was_tried)?;
                Some((model, was_tried))
            }) else {
                self.waiting.pop_front();
                continue;
            };
            if was_tried {
                return self.effects.push(Effect::ReportIdle);
            }
            self.waiting.pop_front();
            let load = model.load;
            model.start_waking();
            let generation = self.take_generation();
            self.effects.push(Effect::Wake { name, load, generation });
        }
    }

    fn is_in_transition(&self) -> bool {
        self.models.values().any(|model| model.is_going() && model.sleep_state.is_in_transition())
    }

    /// Called when a model's requests have ended, or have not ended in time.
    pub(super) fn drained(&mut self, name: String, load: u64, drained: Result<(), SleepError>, now: Duration) {
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going()) else { return };
        match (mem::replace(&mut model.sleep_state, SleepState::Awake { since: now }), drained) {
            (SleepState::Draining(Draining { reason, sleepers, wanted }), Ok(())) => {
                model.stayed_busy = 0;
                model.sleep_state =
                    SleepState::Releasing(Releasing { sleepers, next: Next::Sleep(reason, wanted), end: None });
                self.effects.push(Effect::ReleaseEngine { name, load, level: None });
            }
            (SleepState::Draining(Draining { reason, sleepers, .. }), Err(error)) => {
                model.stayed_busy += u32::from(reason == SleepReason::FreeMemory);
                self.effects.push(Effect::StayAwake { name: name.clone() });
                match reason {
                    SleepReason::Call => self.answer_sleepers(sleepers.each, Err(error)),
                    // Callers that joined later may allow the requests more time, so the model
                    // tries again on their behalf.
                    SleepReason::Idle | SleepReason::FreeMemory => self.sleep_all(&name, load, sleepers),
                }
                self.admit_waiting();
            }
            (sleep_state, _) => model.sleep_state = sleep_state,
        }
    }

    /// Called when all device memory of a model is returned.
    pub(super) fn fell_asleep(&mut self, name: String, load: u64, level: SleepLevel, now: Duration) {
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going()) else { return };
        let SleepState::Releasing(Releasing { sleepers, next, end }) =
            mem::replace(&mut model.sleep_state, SleepState::Asleep(level))
        else {
            return;
        };
        if let Some(reason) = end {
            self.answer_sleepers(sleepers.each, Ok(()));
            if let Next::WaitForMemory(waiting) = next {
                self.answer_sleepers(waiting.again.each, Ok(()));
            }
            return self.end(name, reason);
        }
        // A caller asked for level 2 while the model went to sleep at level 1.
        if (level, sleepers.level) == (SleepLevel::Level1, SleepLevel::Level2) {
            model.sleep_state = SleepState::Releasing(Releasing { sleepers, next, end: None });
            return self.effects.push(Effect::ReleaseEngine { name, load, level: Some(SleepLevel::Level2) });
        }
        let (reason, wanted) = match next {
            Next::WaitForMemory(waiting) => return self.queue_for_memory(name, waiting),
            Next::Sleep(reason, wanted) => (Some(reason), wanted),
            Next::StayAsleep => (None, None),
        };
        self.effects.push(Effect::ShowAsleep { name: name.clone(), level, reason });
        self.answer_sleepers(sleepers.each, Ok(()));
        // The memory that the model held is now available to the first model in the queue.
        self.try_again();
        match wanted {
            Some(reason) => self.queue_for_memory(
                name,
                WaitingForMemory { reason: Some(reason), since: now, was_tried: false, again: SleepWaiters::none() },
            ),
            None => self.admit_waiting(),
        }
    }

    /// Called when the engine of a model has become READY.
    pub(super) fn woken(&mut self, name: String, load: u64, now: Duration) {
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going()) else { return };
        match mem::replace(&mut model.sleep_state, SleepState::Awake { since: now }) {
            SleepState::Waking(WaitingForMemory { reason, since, again, .. }) => {
                let took = now.saturating_sub(since);
                self.effects.push(Effect::ShowAwake { name: name.clone(), reason, took });
                self.sleep_all(&name, load, again);
                self.admit_waiting();
            }
            sleep_state => model.sleep_state = sleep_state,
        }
    }

    /// Called when a model did not start. `may_fit` is `true` if the model may fit once other
    /// models have released memory.
    pub(super) fn not_woken(&mut self, name: String, may_fit: bool) {
        let may_wait = may_fit && self.rules.turn.is_some();
        let Some(model) = self.models.get_mut(&name).filter(|model| model.is_going()) else { return };
        let load = model.load;
        match mem::replace(&mut model.sleep_state, SleepState::Asleep(SleepLevel::Level2)) {
            SleepState::Waking(waiting) => self.release_engine_after(name, load, waiting, may_wait),
            // The model became READY and then failed, before the core received `Woken`.
            sleep_state => {
                let has_engine = sleep_state.has_engine();
                model.sleep_state = sleep_state;
                if has_engine {
                    self.fail_start(name);
                }
            }
        }
    }

    fn release_engine_after(&mut self, name: String, load: u64, waiting: WaitingForMemory<P::Sleeper>, may_wait: bool) {
        let Some(model) = self.models.get_mut(&name) else { return };
        let (sleepers, next) = match (may_wait, waiting) {
            (true, waiting) => {
                (SleepWaiters::none(), Next::WaitForMemory(WaitingForMemory { was_tried: true, ..waiting }))
            }
            (false, waiting @ WaitingForMemory { reason: None, .. }) => {
                model.sleep_state = SleepState::Waking(waiting);
                return self.fail_start(name);
            }
            (false, waiting) => {
                self.effects.push(Effect::ReportNotWoken { name: name.clone() });
                (waiting.again, Next::StayAsleep)
            }
        };
        model.sleep_state = SleepState::Releasing(Releasing { sleepers, next, end: None });
        self.effects.push(Effect::ReleaseEngine { name, load, level: None });
    }

    fn fail_start(&mut self, name: String) {
        self.effects.push(Effect::FailStart { name: name.clone() });
        self.end(name, super::NOT_STARTED.to_owned());
    }

    /// Puts models to sleep that are idle, or whose memory other models need.
    pub(super) fn check_idle(&mut self, seen: &[IdleReport], now: Duration) {
        for IdleReport { name, idle_for, .. } in seen {
            let is_due = self
                .is_awake(name)
                .is_some_and(|(_, after)| idle_for.zip(after).is_some_and(|(idle_for, after)| idle_for >= after));
            if is_due {
                self.begin_sleep(name.clone(), SleepReason::Idle);
            }
        }
        self.cancel_unwanted_wakes(seen);
        let Some(turn) = self.rules.turn.filter(|_| !self.waiting.is_empty()) else { return };
        if self.is_in_transition() {
            return;
        }
        let awake = || seen.iter().filter_map(|seen| self.is_awake(&seen.name).map(|(since, _)| (seen, since)));
        // Choose the model that was used least recently. If all models have requests, choose the
        // model that has been awake longest, unless it has been awake for less than `turn`.
        let idle = awake().filter(|(seen, _)| seen.idle_for.is_some()).max_by_key(|(seen, _)| seen.idle_for);
        let longest = awake().filter(|(_, since)| now.saturating_sub(*since) >= turn).min_by_key(|(_, since)| *since);
        if let Some((victim, _)) = idle.or(longest) {
            return self.begin_sleep(victim.name.clone(), SleepReason::FreeMemory);
        }
        let busy: Vec<String> = awake().map(|(seen, _)| seen.name.clone()).collect();
        if busy.is_empty() {
            self.refuse_first_waiting()
        } else {
            self.effects.push(Effect::ReportIdleLater { busy, within: turn })
        }
    }

    /// Refuses the first model in the queue, because no other model could free memory for it.
    fn refuse_first_waiting(&mut self) {
        let Some(name) = self.waiting.pop_front() else { return };
        let Some(model) = self.models.get_mut(&name) else { return };
        match mem::replace(&mut model.sleep_state, SleepState::Asleep(SleepLevel::Level2)) {
            SleepState::WaitingForMemory(waiting) => {
                let load = model.load;
                self.release_engine_after(name, load, waiting, false);
            }
            sleep_state => model.sleep_state = sleep_state,
        }
    }

    /// Cancels the wakes of models for which no caller waits any more, so that they stay asleep.
    fn cancel_unwanted_wakes(&mut self, seen: &[IdleReport]) {
        for IdleReport { name, .. } in seen.iter().filter(|seen| !seen.is_awaited) {
            let Some(model) = self.models.get_mut(name).filter(|model| model.is_going()) else { continue };
            match mem::replace(&mut model.sleep_state, SleepState::Asleep(SleepLevel::Level2)) {
                SleepState::WaitingForMemory(waiting) if waiting.reason.is_some() => {
                    let (load, sleepers) = (model.load, waiting.again);
                    model.sleep_state =
                        SleepState::Releasing(Releasing { sleepers, next: Next::StayAsleep, end: None });
                    self.effects.push(Effect::ReleaseEngine { name: name.clone(), load, level: None });
                    self.waiting.retain(|waiting| waiting != name);
                }
                sleep_state => model.sleep_state = sleep_state,
            }
        }
    }

    /// If a model may be put to sleep now, returns the time at which it became awake and the idle
    /// time after which it is put to sleep. Otherwise returns `None`.
    fn is_awake(&self, name: &str) -> Option<(Duration, Option<Duration>)> {
        let model = self.models.get(name).filter(|model| model.is_going() && !model.is_forgotten())?;
        match model.sleep_state {
            SleepState::Awake { since } => Some((since, model.sleep_after)),
            _ => None,
        }
    }

    fn begin_sleep(&mut self, name: String, reason: SleepReason) {
        let Some(model) = self.models.get_mut(&name) else { return };
        let (load, stayed_busy) = (model.load, model.stayed_busy);
        model.sleep_state = SleepState::Draining(Draining { reason, sleepers: SleepWaiters::none(), wanted: None });
        self.effects.push(Effect::BeginSleep { name, load, level: None, within: None, stayed_busy });
    }

    /// Answers callers that waited for the model to sleep, because the model ends instead.
    pub(super) fn end_sleep_state(&mut self, name: &str) {
        let Some(model) = self.models.get_mut(name) else { return };
        let sleepers = match mem::replace(&mut model.sleep_state, SleepState::Asleep(SleepLevel::Level2)) {
            SleepState::Releasing(Releasing { next: Next::WaitForMemory(waiting), .. })
            | SleepState::WaitingForMemory(waiting)
            | SleepState::Waking(waiting) => waiting.again.each,
            SleepState::Draining(Draining { sleepers, .. }) | SleepState::Releasing(Releasing { sleepers, .. }) => {
                sleepers.each
            }
            SleepState::Awake { .. } | SleepState::Asleep(_) => Vec::new(),
        };
        self.answer_sleepers(sleepers, Err(SleepError::Stopped { reason: "it has ended".into() }));
    }

    /// Lets waiting models try again, because memory may be free after a model has ended or the
    /// device was replaced.
    pub(super) fn admit_waiting_again(&mut self) {
        self.try_again();
        self.admit_waiting();
    }

    fn try_again(&mut self) {
        let waiting = self.models.values_mut().filter_map(|model| model.sleep_state.waiting());
        waiting.for_each(|waiting| waiting.was_tried = false);
    }

    fn answer_sleepers(&mut self, sleepers: impl IntoIterator<Item = P::Sleeper>, outcome: Result<(), SleepError>) {
        let answers = sleepers.into_iter().map(|sleeper| Effect::AnswerSleeper { sleeper, outcome: outcome.clone() });
        self.effects.extend(answers);
    }
}
