//! Which single limit, lowered how far, would make a model fit: found by planning again, not by guessing.

use bursar_budgets::{Bytes, Knob};
use bursar_kernels::Target;
use bursar_model::{Envelope, Model};

use super::Needs;

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
        knobs.push(Knob::new("free device memory", available, bytes));
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

fn with(envelope: &Envelope, limit: fn(&mut Envelope) -> &mut usize, value: usize) -> Envelope {
    let mut smaller = envelope.clone();
    *limit(&mut smaller) = value;
    smaller.with_pictures_that_fit_a_launch()
}
