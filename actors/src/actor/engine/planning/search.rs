//! Pure: search for single knobs with a value that would make a model fit. Each value is checked by
//! planning again, not estimated.

use bursar_budgets::Bytes;
use bursar_kernels::BLOCK_TOKENS;
use bursar_model::{Envelope, Model, checkpoint::WeightQuantization};

use super::{
    Change, Question, Suggestion, TOTAL,
    question::{least_blocks, settle},
    suggestion::QUANTIZATION,
};
use crate::{
    compute::memory::KvMemory,
    engine::{EffectiveLimits, LoadOptions},
    profile::{CONTEXT_TOKENS_LEAST, KvChoice, MemoryRequirements, MemoryState},
};

/// The name of the device's memory if host memory simulates a GPU.
const CAPACITY: &str = "capacity";

/// A limit of the envelope, which is lowered in steps of `step`.
struct Limit {
    knob: &'static str,
    now: u64,
    step: u64,
    /// The smallest value to suggest.
    least: u64,
}

/// The smallest number of tokens per picture to suggest. If a token covers 28 x 28 pixels, this is
/// a picture of 112 x 112 pixels.
const PICTURE_TOKENS_LEAST: u64 = 16;

/// Upper bound in MiB of the search for a capacity, which is more than any device has.
const TOTAL_MIB_MOST: u64 = 1 << 30;

/// The fraction of memory that [`KvShare::expected_of`](crate::profile::KvShare::expected_of) uses
/// on a host device.
const HOST_FRACTION: f64 = 0.9;

impl Question<'_> {
    /// Returns suggestions for a start whose `needs` do not fit.
    pub(super) fn suggestions(&self, inputs: &EffectiveLimits, needs: &MemoryRequirements) -> Vec<Suggestion> {
        let search = Search { question: self, inputs, needs };
        let place = std::iter::once(search.total()).chain(search.canary());
        place.chain(search.reductions()).chain(search.share()).chain(search.quantization()).collect()
    }

    /// Returns suggestions for knobs of the model that reduce its memory requirements.
    pub(super) fn reductions(&self, inputs: &EffectiveLimits, needs: &MemoryRequirements) -> Vec<Suggestion> {
        Search { question: self, inputs, needs }.reductions().collect()
    }
}

struct Search<'s> {
    question: &'s Question<'s>,
    inputs: &'s EffectiveLimits,
    needs: &'s MemoryRequirements,
}

impl Search<'_> {
    fn reductions(&self) -> impl Iterator<Item = Suggestion> {
        self.limits().into_iter().map(|limit| self.limit(&limit)).chain(self.fixed())
    }

    fn suggestion(&self, knob: &'static str, from: Change, to: Option<Change>, frees: Bytes) -> Suggestion {
        Suggestion::new(&self.question.options.names, knob, from, to, frees)
    }

    /// Whether the same inputs fit with another size of the KV cache, or on another device. For a
    /// model with recurrent states, the number of sequences depends on the size of the cache and on
    /// the device, so the inputs are computed again.
    fn settles(&self, kv: &KvChoice, place: &MemoryState) -> bool {
        if self.needs.states.is_none() {
            return settle(self.needs, &self.inputs.envelope, kv, place).is_ok();
        }
        let changed = Question { place: *place, ..*self.question };
        changed.needs_with(kv).is_ok_and(|(inputs, needs)| settle(&needs, &inputs.envelope, kv, place).is_ok())
    }

    /// The memory requirements with one knob changed. `None` if they do not fit.
    fn needs_with(&self, knob: &str, to: Change) -> Option<MemoryRequirements> {
        let options = to.over(self.question.options, knob)?;
        let changed = Question { options: &options, ..*self.question };
        let (inputs, needs) = changed.needs().ok()?;
        changed.kv_blocks(&inputs, &needs).is_ok().then_some(needs)
    }

    /// The minimum memory of a start.
    fn needed(&self, needs: &MemoryRequirements) -> Bytes {
        let blocks = least_blocks(needs, &self.question.options.kv(), self.question.place.page);
        needs.memory_plan_with(blocks).total()
    }

    fn total(&self) -> Suggestion {
        let (place, kv) = (self.question.place, self.question.options.kv());
        let fits = |mib| self.settles(&kv, &MemoryState { total: Bytes::mib(mib), ..place });
        let to = least(place.total / Bytes::mib(1) + 1, TOTAL_MIB_MOST, fits).map(Bytes::mib);
        let frees = to.map_or(Bytes::ZERO, |to| to.saturating_sub(place.total));
        let total = self.suggestion(TOTAL, Change::Size(place.total), to.map(Change::Size), frees);
        // The memory of a host device is a setting of the user, so the suggestion names that
        // setting.
        if place.is_host { Suggestion { name: CAPACITY.to_owned(), ..total } } else { total }
    }

    /// Suggests a smaller canary, if the canary can be smaller.
    fn canary(&self) -> Option<Suggestion> {
        let (place, kv) = (self.question.place, self.question.options.kv());
        let now = place.canary();
        let smaller = now.checked_sub(Bytes(1))? / Bytes::mib(1);
        let fits = |mib| self.settles(&kv, &MemoryState { canary: Some(Bytes::mib(mib)), ..place });
        let to = most(0, smaller, fits).map(Bytes::mib);
        let frees = to.map_or(Bytes::ZERO, |to| now.saturating_sub(to));
        Some(self.suggestion("canary", Change::Size(now), to.map(Change::Size), frees))
    }

    /// The limits that can be lowered. Pictures are limited in the unit that the user set, or in
    /// pixels.
    fn limits(&self) -> Vec<Limit> {
        let Envelope {
            context_tokens, sequences, step_tokens, picture_patches, largest_pictures, launch_patches, ..
        } = self.inputs.envelope;
        let limit = |knob, now: usize, least: usize| Limit { knob, now: now as u64, step: 1, least: least as u64 };
        let whole_picture = self.question.own().family.whole_picture_tokens(picture_patches);
        let mut limits = vec![
            // A step has at least one token per sequence, and a picture that must be whole.
            limit("step_tokens", step_tokens, sequences + whole_picture),
            limit("sequences", sequences, 1),
            limit("context_tokens", context_tokens, CONTEXT_TOKENS_LEAST),
        ];
        let (own, requested) = (self.question.own(), &self.question.options.limits);
        let (Some(step), Some(merge)) = (own.token_pixels(), own.family.merge()) else { return limits };
        let pixels = self.inputs.pictures.as_ref().map_or(0, |pictures| pictures.config().pixel_bounds.max);
        let tokens = requested.picture_pixels_min.map_or(0, |min| min.div_ceil(step)).max(PICTURE_TOKENS_LEAST);
        let patches = merge.patches(tokens as usize);
        limits.push(match requested.picture_patches {
            Some(_) => limit("picture_patches", picture_patches, patches),
            None => Limit { knob: "picture_pixels", now: pixels, step, least: tokens * step },
        });
        limits.push(limit("launch_patches", launch_patches, patches));
        limits.push(limit("pictures", largest_pictures, 1));
        limits
    }

    fn limit(&self, limit: &Limit) -> Suggestion {
        let Limit { knob, now, step, least } = *limit;
        let plan = |steps: u64| self.needs_with(knob, Change::Count(steps * step));
        let to = now.checked_sub(1).and_then(|below| most(least.div_ceil(step), below / step, |n| plan(n).is_some()));
        let less = to.and_then(plan).map_or(Bytes::ZERO, |needs| self.needed(&needs));
        let frees = self.needed(self.needs).saturating_sub(less);
        self.suggestion(knob, Change::Count(now), to.map(|steps| Change::Count(steps * step)), frees)
    }

    /// The suggestion for a fixed size of the KV cache: the largest smaller size that fits. If the
    /// fixed size is too small for one context, the size of one context is suggested.
    fn fixed(&self) -> Option<Suggestion> {
        let (shape, place, kv) = (self.needs.kv_shape, self.question.place, self.question.options.kv());
        let context = (self.needs.context_blocks * BLOCK_TOKENS) as u64;
        let bytes = |tokens: u64| KvMemory::bytes(shape, (tokens as usize).div_ceil(BLOCK_TOKENS), place.page);
        // If the value must grow, only the minimum is tried. If it must shrink, the search finds
        // the largest value that fits.
        let nearest = |now: u64, least: u64, step: u64, fits: &dyn Fn(u64) -> bool| {
            if now < least {
                Some(least.div_ceil(step)).filter(|steps| fits(*steps))
            } else {
                most(least.div_ceil(step), now.saturating_sub(1) / step, fits)
            }
        };
        if let Some(now) = kv.kv_tokens {
            let fits = |tokens: u64| self.settles(&KvChoice { kv_tokens: Some(tokens as usize), ..kv }, &place);
            let to = nearest(now as u64, context, 1, &fits);
            let frees = to.map_or(Bytes::ZERO, |to| bytes(now as u64).saturating_sub(bytes(to)));
            return Some(self.suggestion("kv_tokens", Change::Count(now as u64), to.map(Change::Count), frees));
        }
        let (now, step) = (kv.kv_bytes?, place.page * shape.layers as u64);
        let fits = |steps: u64| self.settles(&KvChoice { kv_bytes: Some(step * steps), ..kv }, &place);
        let to = nearest(now.0, bytes(context).0, step.0, &fits).map(|steps| step * steps);
        let frees = to.map_or(Bytes::ZERO, |to| now.saturating_sub(to));
        Some(self.suggestion("kv_bytes", Change::Size(now), to.map(Change::Size), frees))
    }

    /// Suggests a larger fraction for the KV cache, if a fraction determines its size. If the user
    /// set no fraction, the suggestion replaces the default of a host device.
    fn share(&self) -> Option<Suggestion> {
        let (place, kv) = (self.question.place, self.question.options.kv());
        let (knob, now) = match (kv.device_fraction, kv.memory_fraction) {
            _ if kv.is_pinned() => return None,
            (Some(now), _) => ("device_fraction", now),
            (None, Some(now)) => ("memory_fraction", now),
            (None, None) if place.is_host => ("memory_fraction", HOST_FRACTION),
            (None, None) => return None,
        };
        let share = |thousandths: u64| Some(thousandths as f64 / 1000.0);
        let fits = |thousandths: u64| {
            let changed = match kv.device_fraction {
                Some(_) => KvChoice { device_fraction: share(thousandths), ..kv },
                None => KvChoice { memory_fraction: share(thousandths), ..kv },
            };
            self.settles(&changed, &place)
        };
        let to = least((now * 1000.0) as u64 + 1, 1000, fits).and_then(share);
        Some(self.suggestion(knob, Change::KvShare(now), to.map(Change::KvShare), Bytes::ZERO))
    }

    /// Suggests quantizing the weights of an unquantized checkpoint while they load: to FP8 if that
    /// is enough, because FP8 changes replies less, and otherwise to 4 bits.
    fn quantization(&self) -> Option<Suggestion> {
        let Question { checkpoint, target, model, options, .. } = *self.question;
        let (checkpoint, ranks) = (checkpoint.filter(|_| options.quantization.is_none())?, model.rank().of());
        let mut is_served = false;
        let mut least_bytes = |format: WeightQuantization| {
            let model = &Model::plan_quantized(checkpoint, format, &target, ranks).ok()??;
            is_served = true;
            let options = &LoadOptions { quantization: Some(format), ..options.clone() };
            let changed = Question { model, options, ..*self.question };
            let (inputs, needs) = changed.needs().ok()?;
            changed.kv_blocks(&inputs, &needs).is_ok().then(|| self.needed(&needs))
        };
        let formats = [WeightQuantization::Fp8, WeightQuantization::Int4];
        let found = formats.into_iter().find_map(|format| Some((format, least_bytes(format)?)));
        let frees = found.map_or(Bytes::ZERO, |(_, less)| self.needed(self.needs).saturating_sub(less));
        let to = found.map(|(format, _)| Change::Format(Some(format)));
        is_served.then(|| self.suggestion(QUANTIZATION, Change::Format(None), to, frees))
    }
}

/// The largest value in `low..=high` that fits, found by bisection: if a value fits, all smaller
/// values fit. `None` if `low` does not fit.
fn most(low: u64, high: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    if low > high || !fits(low) {
        return None;
    }
    let (mut good, mut bad) = (low, high + 1);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle) { good = middle } else { bad = middle }
    }
    Some(good)
}

/// The smallest value in `low..=high` that fits, found by bisection: if a value fits, all larger
/// values fit. `None` if `high` does not fit.
fn least(low: u64, high: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    if low > high || !fits(high) {
        return None;
    }
    let (mut bad, mut good) = (low, high);
    while good > bad {
        let middle = bad + (good - bad) / 2;
        if fits(middle) { good = middle } else { bad = middle + 1 }
    }
    Some(good)
}

#[cfg(test)]
mod tests;
