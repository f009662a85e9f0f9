//! Which single knob, set to what, would make a model fit: found by planning again, not by guessing. Pure.

use std::fmt;

use bursar_budgets::{Bytes, Knob};
use bursar_kernels::{BLOCK_TOKENS, Target};
use bursar_model::{Envelope, Model};

use super::{
    KvChoice, Needs, Place, Question, Unsaid,
    forecast::{self, Unfit},
};
use crate::memory::KvMemory;

/// What a knob would be set to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// A number of whatever the knob counts.
    Count(usize),
    /// A size.
    Size(Bytes),
    /// A share, in whole thousandths where it is suggested.
    Share(f64),
}

/// As it is typed.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Count(count) => write!(f, "{count}"),
            Change::Size(bytes) => write!(f, "{}", bytes.0),
            Change::Share(share) => write!(f, "{share}"),
        }
    }
}

/// One knob, and the value that alone would make a plan fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Suggestion {
    /// Its name, as it is set.
    pub knob: &'static str,
    /// Its value now, as the model and its processor have lowered it.
    pub from: Change,
    /// The value nearest to that with which, everything else as it is, the plan fits; none if there is no such value.
    pub to: Option<Change>,
    /// The bytes that this makes room for: what claimants need less, or what there is more. Nothing where a share was
    /// too small and not the room.
    pub frees: Bytes,
}

impl From<&Suggestion> for Knob {
    fn from(suggestion: &Suggestion) -> Knob {
        let shown = |change: Change| match change {
            Change::Size(bytes) => bytes.to_string(),
            change => change.to_string(),
        };
        match suggestion.to {
            Some(to) => Knob::new(suggestion.knob, shown(suggestion.from), shown(to)),
            None => Knob::hopeless(suggestion.knob, shown(suggestion.from)),
        }
    }
}

/// The capacity that would do, and each limit with the largest value that alone would do, where `available` bytes are to be
/// had and keys and values are content with the least; nothing if it fits. For an error of somebody who has no more to go
/// by: whoever knows what its user has said of keys and values asks [`Question::knobs`], and whoever knows the device
/// [`Forecast`](super::Forecast).
pub fn suggestions(model: &Model, target: Target, envelope: &Envelope, page: Bytes, available: Bytes) -> Vec<Knob> {
    let place = Place::of_available(available, page);
    Question { model, target, envelope, kv: KvChoice::default(), place, unsaid: Unsaid::default() }.knobs()
}

impl Question<'_> {
    /// The capacity that would do, and each knob that a model is loaded with, the size of keys and values and their share
    /// among them where they are said, with the value nearest to its own that alone would do. Nothing if it fits.
    pub fn knobs(&self) -> Vec<Knob> {
        let Ok(needs) = Needs::plan(self.model, self.target, self.envelope, self.place.page) else {
            return Vec::new();
        };
        if self.settles(&needs, self.envelope, &self.kv, &self.place).is_ok() {
            return Vec::new();
        }
        let (available, total) = (self.place.available(), self.total(&needs));
        let capacity = match total.to {
            // Of a GPU nobody can say how much it has, only leave more of it free.
            Some(Change::Size(to)) if self.place.is_host => Knob::new("capacity", self.place.total, in_mib(to)),
            Some(_) => Knob::new(FREE, available, available + total.frees),
            None => Knob::hopeless(FREE, available),
        };
        let own = of_model(self, &needs);
        std::iter::once(capacity).chain(own.iter().map(Knob::from)).collect()
    }
}

/// A capacity as it is typed: those that are looked for are whole MiB.
fn in_mib(bytes: Bytes) -> String {
    format!("{}MiB", bytes.0 / Bytes::mib(1).0)
}

/// What an error calls the capacity of a GPU.
const FREE: &str = "free device memory";

/// Each knob for a plan of `needs` that does not fit.
pub(super) fn of(question: &Question<'_>, needs: &Needs) -> Vec<Suggestion> {
    let mut all = vec![question.total(needs)];
    all.extend(question.canary(needs));
    all.extend(of_model(question, needs));
    all
}

/// Those that a model is loaded with.
fn of_model(question: &Question<'_>, needs: &Needs) -> Vec<Suggestion> {
    let limits = LIMITS.iter().map(|limit| question.limit(needs, limit));
    limits.chain(question.fixed(needs)).chain(question.share(needs)).collect()
}

/// A limit of the envelope: its name, and where it stands.
struct Limit {
    name: &'static str,
    of: fn(&mut Envelope) -> &mut usize,
}

const LIMITS: [Limit; 6] = [
    Limit { name: "step_tokens", of: |envelope| &mut envelope.step_tokens },
    Limit { name: "sequences", of: |envelope| &mut envelope.sequences },
    Limit { name: "context_tokens", of: |envelope| &mut envelope.context_tokens },
    Limit { name: "launch_patches", of: |envelope| &mut envelope.launch_patches },
    Limit { name: "picture_patches", of: |envelope| &mut envelope.picture_patches },
    Limit { name: "pictures", of: |envelope| &mut envelope.pictures },
];

impl Limit {
    fn now(&self, envelope: &Envelope) -> usize {
        *(self.of)(&mut envelope.clone())
    }

    fn set(&self, envelope: &Envelope, value: usize, unsaid: &Unsaid) -> Envelope {
        let mut changed = envelope.clone();
        *(self.of)(&mut changed) = value;
        // What was raised for it comes down with it.
        let lowered = |now: usize, expected: Option<usize>| expected.map_or(now, |least| now.min(least.max(value)));
        match self.name {
            "sequences" => changed.step_tokens = lowered(changed.step_tokens, unsaid.step_tokens),
            "picture_patches" => changed.launch_patches = lowered(changed.launch_patches, unsaid.launch_patches),
            _ => {}
        }
        changed.with_pictures_that_fit_a_launch()
    }
}

/// The capacity is looked for in whole MiB, and below what any device has.
const TOTAL_MIB_MOST: u64 = 1 << 30;

impl Question<'_> {
    /// Blocks of keys and values that a start of `needs` settles on.
    fn settles(&self, needs: &Needs, envelope: &Envelope, kv: &KvChoice, place: &Place) -> Result<usize, Unfit> {
        forecast::settle(needs, envelope, kv, place)
    }

    /// What a start needs at least: its claims, and keys and values of the size that was fixed.
    fn needed(&self, needs: &Needs) -> Bytes {
        let pinned = self.kv.pinned_tokens(needs.kv_shape, self.place.page).unwrap_or(0);
        let blocks = pinned.div_ceil(BLOCK_TOKENS).max(needs.probe_blocks);
        needs.memory_plan_with(blocks).total()
    }

    fn total(&self, needs: &Needs) -> Suggestion {
        let place = |mib| Place { total: Bytes::mib(mib), ..self.place };
        let fits = |mib| self.settles(needs, self.envelope, &self.kv, &place(mib)).is_ok();
        let now = self.place.total;
        let to = least(now.0 / Bytes::mib(1).0 + 1, TOTAL_MIB_MOST, fits).map(Bytes::mib);
        let frees = to.map_or(Bytes::ZERO, |to| to.saturating_sub(now));
        Suggestion { knob: "total", from: Change::Size(now), to: to.map(Change::Size), frees }
    }

    /// A smaller canary, if there is one.
    fn canary(&self, needs: &Needs) -> Option<Suggestion> {
        let now = self.place.canary();
        let smaller = now.0.checked_sub(1)? / Bytes::mib(1).0;
        let place = |mib| Place { canary: Some(Bytes::mib(mib)), ..self.place };
        let fits = |mib| self.settles(needs, self.envelope, &self.kv, &place(mib)).is_ok();
        let to = most(0, smaller, fits).map(Bytes::mib);
        let frees = to.map_or(Bytes::ZERO, |to| now.saturating_sub(to));
        Some(Suggestion { knob: "canary", from: Change::Size(now), to: to.map(Change::Size), frees })
    }

    /// A limit, lowered.
    fn limit(&self, needs: &Needs, limit: &Limit) -> Suggestion {
        let now = limit.now(self.envelope);
        let plan = |value| {
            let envelope = limit.set(self.envelope, value, &self.unsaid);
            envelope.check().ok()?;
            let needs = Needs::plan(self.model, self.target, &envelope, self.place.page).ok()?;
            Some((envelope, needs))
        };
        let fits = |value: u64| {
            plan(value as usize)
                .is_some_and(|(envelope, needs)| self.settles(&needs, &envelope, &self.kv, &self.place).is_ok())
        };
        // None has less than one, and a step has a token for each sequence.
        let floor = if limit.name == "step_tokens" { self.envelope.sequences } else { limit.floor() };
        let to = (now > floor).then(|| most(floor as u64, now as u64 - 1, fits)).flatten().map(|value| value as usize);
        let needed = to.and_then(plan).map(|(_, needs)| self.needed(&needs));
        let frees = needed.map_or(Bytes::ZERO, |less| self.needed(needs).saturating_sub(less));
        Suggestion { knob: limit.name, from: Change::Count(now), to: to.map(Change::Count), frees }
    }

    /// A size of keys and values that was fixed: the largest below it that fits, or where it is too small for a context,
    /// the context.
    fn fixed(&self, needs: &Needs) -> Option<Suggestion> {
        let (shape, page) = (needs.kv_shape, self.place.page);
        let fits = |kv: KvChoice| self.settles(needs, self.envelope, &kv, &self.place).is_ok();
        let context = self.envelope.context_tokens.next_multiple_of(BLOCK_TOKENS);
        let (knob, from, to, frees) = if let Some(now) = self.kv.kv_tokens {
            let fits = |tokens: u64| fits(KvChoice { kv_tokens: Some(tokens as usize), ..self.kv });
            let to = match now < context {
                true => Some(context as u64).filter(|tokens| fits(*tokens)),
                false => most(context as u64, now as u64 - 1, fits),
            };
            let frees = to.map_or(Bytes::ZERO, |to| {
                let bytes = |tokens: usize| KvMemory::bytes(shape, tokens.div_ceil(BLOCK_TOKENS), page);
                bytes(now).saturating_sub(bytes(to as usize))
            });
            ("kv_tokens", Change::Count(now), to.map(|to| Change::Count(to as usize)), frees)
        } else {
            let now = self.kv.kv_bytes?;
            let least = KvMemory::bytes(shape, context / BLOCK_TOKENS, page);
            let step = page * shape.layers as u64;
            let fits = |steps: u64| fits(KvChoice { kv_bytes: Some(step * steps), ..self.kv });
            let (first, last) = (least.0 / step.0, now.0.saturating_sub(1) / step.0);
            let to = match now < least {
                true => Some(first).filter(|steps| fits(*steps)),
                false => most(first, last, fits),
            };
            let to = to.map(|steps| step * steps);
            let frees = to.map_or(Bytes::ZERO, |to| now.saturating_sub(to));
            ("kv_bytes", Change::Size(now), to.map(Change::Size), frees)
        };
        Some(Suggestion { knob, from, to, frees })
    }

    /// A larger share for keys and values, where a share is what they have. A share that nobody has said is a host's.
    fn share(&self, needs: &Needs) -> Option<Suggestion> {
        if self.kv.pinned_tokens(needs.kv_shape, self.place.page).is_some() {
            return None;
        }
        let (knob, now) = match (self.kv.device_fraction, self.kv.memory_fraction) {
            (Some(now), _) => ("device_fraction", now),
            (None, Some(now)) => ("memory_fraction", now),
            (None, None) if self.place.is_host => ("memory_fraction", HOST_FRACTION),
            (None, None) => return None,
        };
        let with = |thousandths: u64| {
            let share = Some(thousandths as f64 / 1000.0);
            match self.kv.device_fraction {
                Some(_) => KvChoice { device_fraction: share, ..self.kv },
                None => KvChoice { memory_fraction: share, ..self.kv },
            }
        };
        let fits = |thousandths| self.settles(needs, self.envelope, &with(thousandths), &self.place).is_ok();
        let to = least((now * 1000.0) as u64 + 1, 1000, fits).map(|thousandths| thousandths as f64 / 1000.0);
        Some(Suggestion { knob, from: Change::Share(now), to: to.map(Change::Share), frees: Bytes::ZERO })
    }
}

/// A shorter context than a chat's template, a question and a word of a reply is of no use to anybody.
const CONTEXT_TOKENS_LEAST: usize = 64;

/// As [`Share::expected_of`](super::Share::expected_of) a host device.
const HOST_FRACTION: f64 = 0.9;

impl Limit {
    fn floor(&self) -> usize {
        match self.name {
            "context_tokens" => CONTEXT_TOKENS_LEAST,
            "launch_patches" | "picture_patches" => 4,
            _ => 1,
        }
    }
}

/// The largest of `low..=high` that fits, where what fits stays fitting as it gets less. What is given fits in any case.
fn most(low: u64, high: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    if low > high || !fits(low) {
        return None;
    }
    let (mut good, mut bad) = (low, high + 1);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        match fits(middle) {
            true => good = middle,
            false => bad = middle,
        }
    }
    Some(good)
}

/// The least of `low..=high` that fits, where what fits stays fitting as it gets more. What is given fits in any case.
fn least(low: u64, high: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    if low > high || !fits(high) {
        return None;
    }
    let (mut bad, mut good) = (low, high);
    while good > bad {
        let middle = bad + (good - bad) / 2;
        match fits(middle) {
            true => good = middle,
            false => bad = middle + 1,
        }
    }
    Some(good)
}

#[cfg(test)]
mod tests;
