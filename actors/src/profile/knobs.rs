//! Which single limit, lowered how far, would make a model fit: found by planning again, not by guessing.

use bursar_budgets::{Bytes, Knob};
use bursar_kernels::{BLOCK_TOKENS, Target};
use bursar_model::{Envelope, Model};

use super::{Needs, shrunk};

/// A limit of the envelope: its name, and where it stands.
type Limit = (&'static str, fn(&mut Envelope) -> &mut usize);

const LIMITS: [Limit; 6] = [
    ("step_tokens", |envelope| &mut envelope.step_tokens),
    ("sequences", |envelope| &mut envelope.sequences),
    ("context_tokens", |envelope| &mut envelope.context_tokens),
    ("launch_patches", |envelope| &mut envelope.launch_patches),
    ("picture_patches", |envelope| &mut envelope.picture_patches),
    ("pictures", |envelope| &mut envelope.pictures),
];

/// The capacity that would do, and each limit with the first of its halves that alone would do.
pub(super) fn knobs(model: &Model, target: Target, envelope: &Envelope, page: Bytes, available: Bytes) -> Vec<Knob> {
    let needed = |envelope: &Envelope| {
        let needs = Needs::plan(model, target, envelope, page).ok()?;
        Some(needs.memory_plan().total())
    };
    let mut knobs = Vec::new();
    if let Some(bytes) = needed(envelope) {
        knobs.push(Knob::new(FREE, available, bytes));
    }
    for (name, limit) in LIMITS {
        let now = *limit(&mut envelope.clone());
        let halves = std::iter::successors(Some(now / 2), |value| Some(value / 2)).take_while(|value| *value > 0);
        let fitting = halves
            .map(|value| with(envelope, limit, value))
            .find(|smaller| smaller.check().is_ok() && needed(smaller).is_some_and(|bytes| bytes <= available));
        knobs.push(match fitting {
            Some(mut smaller) => Knob::new(name, now, *limit(&mut smaller)),
            None => Knob::hopeless(name, now),
        });
    }
    knobs
}

/// What would have freed `missing` bytes, which an attempt with `target_tokens` of keys and values was refused: fewer of
/// those, or a lower limit.
pub(crate) fn advice(
    model: &Model,
    target: Target,
    envelope: &Envelope,
    page: Bytes,
    target_tokens: usize,
    missing: Bytes,
) -> Vec<Knob> {
    let Ok(needs) = Needs::plan(model, target, envelope, page) else { return Vec::new() };
    // Whole blocks, and five per cent less at least: what was refused may be the least of what will be asked for.
    let by_share = shrunk(target_tokens / BLOCK_TOKENS, 1);
    let block = needs.kv_shape.block_bytes() * needs.kv_shape.layers as u64;
    let by_bytes = (target_tokens / BLOCK_TOKENS).saturating_sub(missing.0.div_ceil(block.0.max(1)) as usize);
    let tokens = by_share.min(by_bytes) * BLOCK_TOKENS;
    let kv = match tokens >= envelope.context_tokens {
        true => Knob::new("kv_tokens", target_tokens, tokens),
        false => Knob::hopeless("kv_tokens", target_tokens),
    };
    let available = needs.memory_plan().total().saturating_sub(missing);
    let limits = knobs(model, target, envelope, page, available);
    std::iter::once(kv).chain(limits.into_iter().filter(|knob| knob.name != FREE)).collect()
}

/// What the device would have to have free: no limit of the user's.
const FREE: &str = "free device memory";

fn with(envelope: &Envelope, limit: fn(&mut Envelope) -> &mut usize, value: usize) -> Envelope {
    let mut smaller = envelope.clone();
    *limit(&mut smaller) = value;
    smaller.with_pictures_that_fit_a_launch()
}
