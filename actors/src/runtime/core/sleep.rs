//! Models that fall asleep, sleep, wait for room and wake up.
//!
//! ```text
//! Awake ──► FallingAsleep ──► LyingDown ──► Asleep ──► Hungry ──► Waking ──► Awake
//!   ▲             │ busy          ▲  └──── no room ──────▲          │
//!   └─────────────┘               └─────────────────────────────────┘ it did not start
//! ```

use std::{mem, time::Duration};

use super::{
    Effect, Parts, RuntimeCore,
    nap::{Falling, Hungry, Lying, Nap, Next, Seen, Sleepers},
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
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going() && !model.is_let_go()) else {
            return self.answer_sleepers([sleeper], Err(SleepError::Stopped { reason: "it is shutting down".into() }));
        };
        match &mut model.nap {
            Nap::Awake { .. } => {
                let sleepers = Sleepers::one(level, within, sleeper);
                model.nap = Nap::FallingAsleep(Falling { reason: SleepReason::Call, sleepers, wanted: None });
                self.effects.push(Effect::FallAsleep {
                    name,
                    load,
                    level: Some(level),
                    within: Some(within),
                    stayed_busy: 0,
                });
            }
            Nap::Asleep(SleepLevel::Level1) if level == SleepLevel::Level2 => {
                let sleepers = Sleepers::one(level, within, sleeper);
                let next = Next::Sleep(SleepReason::Call, None);
                model.nap = Nap::LyingDown(Lying { sleepers, next, end: None });
                self.effects.push(Effect::LieDown { name, load, level: Some(level) });
            }
            Nap::Asleep(_) => self.answer_sleepers([sleeper], Ok(())),
            Nap::Hungry(hungry) | Nap::Waking(hungry) | Nap::LyingDown(Lying { next: Next::Hunger(hungry), .. }) => {
                hungry.again.join(level, within, sleeper);
            }
            Nap::FallingAsleep(Falling { sleepers, .. }) | Nap::LyingDown(Lying { sleepers, .. }) => {
                sleepers.join(level, within, sleeper);
            }
        }
    }

    fn sleep_all(&mut self, name: &str, load: u64, Sleepers { level, within, each }: Sleepers<P::Sleeper>) {
        each.into_iter().for_each(|sleeper| self.sleep(name.to_owned(), load, (level, within), sleeper));
    }

    pub(super) fn wake(&mut self, name: String, load: u64, reason: WakeReason, now: Duration) {
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going()) else { return };
        match &mut model.nap {
            Nap::FallingAsleep(falling) => drop(falling.wanted.get_or_insert(reason)),
            Nap::LyingDown(Lying { next: Next::Sleep(_, wanted), .. }) => drop(wanted.get_or_insert(reason)),
            Nap::LyingDown(Lying { next: next @ Next::SleepOn, .. }) => {
                *next = Next::Sleep(SleepReason::Call, Some(reason));
            }
            Nap::Asleep(_) => {
                self.hunger(
                    name,
                    Hungry { reason: Some(reason), since: now, was_tried: false, again: Sleepers::none() },
                );
            }
            Nap::LyingDown(_) | Nap::Hungry(_) | Nap::Waking(_) | Nap::Awake { .. } => {}
        }
    }

    /// The model waits for its turn to start.
    pub(super) fn hunger(&mut self, name: String, hungry: Hungry<P::Sleeper>) {
        let Some(model) = self.models.get_mut(&name) else { return };
        let was_tried = hungry.was_tried;
        model.nap = Nap::Hungry(hungry);
        self.effects.push(Effect::ShowWaking { name: name.clone() });
        match was_tried {
            // It keeps its place.
            true => self.hungry.push_front(name),
            false => self.hungry.push_back(name),
        }
        self.feed();
    }

    /// Lets the first of those that wait try to start, once nothing else moves. If it has not fitted, what could make
    /// room is looked for. Where no model makes room for others, none waits for another.
    fn feed(&mut self) {
        if self.lost.is_some() {
            return;
        }
        while let Some(name) = self.hungry.front().cloned() {
            if self.rules.turn.is_some() && self.is_moving() {
                return;
            }
            let model = self.models.get_mut(&name).filter(|model| model.is_going());
            let Some((model, was_tried)) = model.and_then(|model| {
                let was_tried = model.nap.hungry().map(|hungry| hungry.was_tried)?;
                Some((model, was_tried))
            }) else {
                self.hungry.pop_front();
                continue;
            };
            if was_tried {
                return self.effects.push(Effect::Look);
            }
            self.hungry.pop_front();
            let load = model.load;
            model.start_waking();
            let generation = self.take_generation();
            self.effects.push(Effect::Waken { name, load, generation });
        }
    }

    fn is_moving(&self) -> bool {
        self.models.values().any(|model| model.is_going() && model.nap.is_moving())
    }

    /// Requests have ended, or did not in time.
    pub(super) fn drained(&mut self, name: String, load: u64, drained: Result<(), SleepError>, now: Duration) {
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going()) else { return };
        match (mem::replace(&mut model.nap, Nap::Awake { since: now }), drained) {
            (Nap::FallingAsleep(Falling { reason, sleepers, wanted }), Ok(())) => {
                model.stayed_busy = 0;
                model.nap = Nap::LyingDown(Lying { sleepers, next: Next::Sleep(reason, wanted), end: None });
                self.effects.push(Effect::LieDown { name, load, level: None });
            }
            (Nap::FallingAsleep(Falling { reason, sleepers, .. }), Err(error)) => {
                model.stayed_busy += u32::from(reason == SleepReason::Room);
                self.effects.push(Effect::StayAwake { name: name.clone() });
                match reason {
                    SleepReason::Call => self.answer_sleepers(sleepers.each, Err(error)),
                    // They may have more time.
                    SleepReason::Idle | SleepReason::Room => self.sleep_all(&name, load, sleepers),
                }
                self.feed();
            }
            (nap, _) => model.nap = nap,
        }
    }

    /// All device memory of a model is back.
    pub(super) fn fell_asleep(&mut self, name: String, load: u64, level: SleepLevel, now: Duration) {
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going()) else { return };
        let Nap::LyingDown(Lying { sleepers, next, end }) = mem::replace(&mut model.nap, Nap::Asleep(level)) else {
            return;
        };
        if let Some(reason) = end {
            self.answer_sleepers(sleepers.each, Ok(()));
            if let Next::Hunger(hungry) = next {
                self.answer_sleepers(hungry.again.each, Ok(()));
            }
            return self.end(name, reason);
        }
        // Somebody asked for more while it fell asleep.
        if (level, sleepers.level) == (SleepLevel::Level1, SleepLevel::Level2) {
            model.nap = Nap::LyingDown(Lying { sleepers, next, end: None });
            return self.effects.push(Effect::LieDown { name, load, level: Some(SleepLevel::Level2) });
        }
        let (reason, wanted) = match next {
            Next::Hunger(hungry) => return self.hunger(name, hungry),
            Next::Sleep(reason, wanted) => (Some(reason), wanted),
            Next::SleepOn => (None, None),
        };
        self.effects.push(Effect::ShowAsleep { name: name.clone(), level, reason });
        self.answer_sleepers(sleepers.each, Ok(()));
        // What it held is there for the one that waits longest.
        self.try_again();
        match wanted {
            Some(reason) => self
                .hunger(name, Hungry { reason: Some(reason), since: now, was_tried: false, again: Sleepers::none() }),
            None => self.feed(),
        }
    }

    /// A model takes requests.
    pub(super) fn woken(&mut self, name: String, load: u64, now: Duration) {
        let Some(model) = self.of_load(&name, load).filter(|model| model.is_going()) else { return };
        match mem::replace(&mut model.nap, Nap::Awake { since: now }) {
            Nap::Waking(Hungry { reason, since, again, .. }) => {
                let took = now.saturating_sub(since);
                self.effects.push(Effect::ShowAwake { name: name.clone(), reason, took });
                self.sleep_all(&name, load, again);
                self.feed();
            }
            nap => model.nap = nap,
        }
    }

    /// A model did not start. `may_fit` if it would without another.
    pub(super) fn not_woken(&mut self, name: String, may_fit: bool) {
        let may_wait = may_fit && self.rules.turn.is_some();
        let Some(model) = self.models.get_mut(&name).filter(|model| model.is_going()) else { return };
        let load = model.load;
        match mem::replace(&mut model.nap, Nap::Asleep(SleepLevel::Level2)) {
            Nap::Waking(hungry) => self.lie_down_after(name, load, hungry, may_wait),
            // It has been READY, and failed before that was heard.
            nap => {
                let has_engine = nap.has_engine();
                model.nap = nap;
                if has_engine {
                    self.fail_start(name);
                }
            }
        }
    }

    fn lie_down_after(&mut self, name: String, load: u64, hungry: Hungry<P::Sleeper>, may_wait: bool) {
        let Some(model) = self.models.get_mut(&name) else { return };
        let (sleepers, next) = match (may_wait, hungry) {
            (true, hungry) => (Sleepers::none(), Next::Hunger(Hungry { was_tried: true, ..hungry })),
            (false, hungry @ Hungry { reason: None, .. }) => {
                model.nap = Nap::Waking(hungry);
                return self.fail_start(name);
            }
            (false, hungry) => {
                self.effects.push(Effect::TellNotWoken { name: name.clone() });
                (hungry.again, Next::SleepOn)
            }
        };
        model.nap = Nap::LyingDown(Lying { sleepers, next, end: None });
        self.effects.push(Effect::LieDown { name, load, level: None });
    }

    fn fail_start(&mut self, name: String) {
        self.effects.push(Effect::FailStart { name: name.clone() });
        self.end(name, super::NOT_STARTED.to_owned());
    }

    /// Puts models to sleep that have had no request for long, and those that others need the room of.
    pub(super) fn look(&mut self, seen: &[Seen], now: Duration) {
        for Seen { name, idle_for, .. } in seen {
            let is_due = self
                .is_awake(name)
                .is_some_and(|(_, after)| idle_for.zip(after).is_some_and(|(idle_for, after)| idle_for >= after));
            if is_due {
                self.fall_asleep(name.clone(), SleepReason::Idle);
            }
        }
        self.give_up_hunger(seen);
        let Some(turn) = self.rules.turn.filter(|_| !self.hungry.is_empty()) else { return };
        if self.is_moving() {
            return;
        }
        let awake = || seen.iter().filter_map(|seen| self.is_awake(&seen.name).map(|(since, _)| (seen, since)));
        // The one that was used longest ago. If all are busy, the one that has been awake longest has had its turn.
        let idle = awake().filter(|(seen, _)| seen.idle_for.is_some()).max_by_key(|(seen, _)| seen.idle_for);
        let longest = awake().filter(|(_, since)| now.saturating_sub(*since) >= turn).min_by_key(|(_, since)| *since);
        if let Some((victim, _)) = idle.or(longest) {
            return self.fall_asleep(victim.name.clone(), SleepReason::Room);
        }
        let busy: Vec<String> = awake().map(|(seen, _)| seen.name.clone()).collect();
        match busy.is_empty() {
            false => self.effects.push(Effect::LookLater { busy, within: turn }),
            true => self.starve(),
        }
    }

    /// Nothing is left that could make room for the first that waits.
    fn starve(&mut self) {
        let Some(name) = self.hungry.pop_front() else { return };
        let Some(model) = self.models.get_mut(&name) else { return };
        match mem::replace(&mut model.nap, Nap::Asleep(SleepLevel::Level2)) {
            Nap::Hungry(hungry) => {
                let load = model.load;
                self.lie_down_after(name, load, hungry, false);
            }
            nap => model.nap = nap,
        }
    }

    /// Lets those sleep on that callers no longer wait for.
    fn give_up_hunger(&mut self, seen: &[Seen]) {
        for Seen { name, .. } in seen.iter().filter(|seen| !seen.is_awaited) {
            let Some(model) = self.models.get_mut(name).filter(|model| model.is_going()) else { continue };
            match mem::replace(&mut model.nap, Nap::Asleep(SleepLevel::Level2)) {
                Nap::Hungry(hungry) if hungry.reason.is_some() => {
                    let (load, sleepers) = (model.load, hungry.again);
                    model.nap = Nap::LyingDown(Lying { sleepers, next: Next::SleepOn, end: None });
                    self.effects.push(Effect::LieDown { name: name.clone(), load, level: None });
                    self.hungry.retain(|hungry| hungry != name);
                }
                nap => model.nap = nap,
            }
        }
    }

    /// Since when a model is awake that may be put to sleep, and after what time it is idle.
    fn is_awake(&self, name: &str) -> Option<(Duration, Option<Duration>)> {
        let model = self.models.get(name).filter(|model| model.is_going() && !model.is_let_go())?;
        match model.nap {
            Nap::Awake { since } => Some((since, model.sleep_after)),
            _ => None,
        }
    }

    fn fall_asleep(&mut self, name: String, reason: SleepReason) {
        let Some(model) = self.models.get_mut(&name) else { return };
        let (load, stayed_busy) = (model.load, model.stayed_busy);
        model.nap = Nap::FallingAsleep(Falling { reason, sleepers: Sleepers::none(), wanted: None });
        self.effects.push(Effect::FallAsleep { name, load, level: None, within: None, stayed_busy });
    }

    /// Answers those who waited for a model to sleep that ends instead.
    pub(super) fn end_nap(&mut self, name: &str) {
        let Some(model) = self.models.get_mut(name) else { return };
        let sleepers = match mem::replace(&mut model.nap, Nap::Asleep(SleepLevel::Level2)) {
            Nap::LyingDown(Lying { next: Next::Hunger(hungry), .. }) | Nap::Hungry(hungry) | Nap::Waking(hungry) => {
                hungry.again.each
            }
            Nap::FallingAsleep(Falling { sleepers, .. }) | Nap::LyingDown(Lying { sleepers, .. }) => sleepers.each,
            Nap::Awake { .. } | Nap::Asleep(_) => Vec::new(),
        };
        self.answer_sleepers(sleepers, Err(SleepError::Stopped { reason: "it has ended".into() }));
    }

    /// After a model has gone or its device was replaced, there may be room.
    pub(super) fn feed_again(&mut self) {
        self.try_again();
        self.feed();
    }

    fn try_again(&mut self) {
        let hungry = self.models.values_mut().filter_map(|model| model.nap.hungry());
        hungry.for_each(|hungry| hungry.was_tried = false);
    }

    fn answer_sleepers(&mut self, sleepers: impl IntoIterator<Item = P::Sleeper>, outcome: Result<(), SleepError>) {
        let answers = sleepers.into_iter().map(|sleeper| Effect::AnswerSleeper { sleeper, outcome: outcome.clone() });
        self.effects.extend(answers);
    }
}
