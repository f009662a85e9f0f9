//! What would have helped an attempt that was refused memory.

use bursar_budgets::{Bytes, Knob};
use bursar_kernels::{BLOCK_TOKENS, Target};
use bursar_model::{Envelope, Model};

use super::{Needs, shrunk, suggestions};

/// What would have freed `missing` bytes, which an attempt with `target_tokens` of keys and values was refused: fewer of
/// those, or a lower limit. `room` is all that the model could have by now, if that is known: where a neighbour holds so
/// much that no keys and values are few enough, only limits are left.
pub(crate) fn advice(
    model: &Model,
    target: Target,
    envelope: &Envelope,
    page: Bytes,
    target_tokens: usize,
    missing: Bytes,
    room: Option<Bytes>,
) -> Vec<Knob> {
    let Ok(needs) = Needs::plan(model, target, envelope, page) else { return Vec::new() };
    // Whole blocks, and five per cent less at least: what was refused may be the least of what will be asked for.
    let blocks = target_tokens / BLOCK_TOKENS;
    let block = needs.kv_shape.block_bytes() * needs.kv_shape.layers as u64;
    let by_bytes = blocks.saturating_sub(missing.0.div_ceil(block.0.max(1)) as usize);
    let tokens = shrunk(blocks, 1).min(by_bytes) * BLOCK_TOKENS;
    let least = needs.memory_plan().total();
    let fits = room.is_none_or(|room| room >= least);
    let kv = match fits && tokens >= envelope.context_tokens {
        true => Knob::new("kv_tokens", target_tokens, tokens),
        false => Knob::hopeless("kv_tokens", target_tokens),
    };
    // Of what there is to be had nobody can set more.
    let available = least.saturating_sub(missing);
    let available = room.map_or(available, |room| room.min(available));
    let limits = suggestions(model, target, envelope, page, available).into_iter().skip(1);
    std::iter::once(kv).chain(limits).collect()
}

#[cfg(test)]
mod tests {
    use bursar_model::{checkpoint::Checkpoint, demo};

    use super::*;

    #[test]
    fn fewer_keys_and_values_help_unless_a_neighbour_leaves_too_little_for_the_least() {
        let (target, envelope, page) = (Target::Cpu { threads: 2 }, Envelope::small(), Bytes::mib(2));
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("it opens");
        let model = Model::plan(&checkpoint, &target).expect("it is whole");
        let least = Needs::plan(&model, target, &envelope, page).expect("it can be planned").memory_plan().total();
        let asked = |room| advice(&model, target, &envelope, page, 1 << 20, Bytes::mib(4), room);
        let kv = |knobs: Vec<Knob>| knobs.into_iter().find(|knob| knob.name == "kv_tokens").expect("it is named");
        for room in [None, Some(least), Some(least * 8)] {
            assert!(kv(asked(room)).would_fit.is_some(), "{room:?}");
        }
        // No limits are low enough either: the weights alone are more.
        let knobs = asked(Some(Bytes::mib(4)));
        assert!(knobs.len() > 1 && knobs.iter().all(|knob| knob.would_fit.is_none()), "{knobs:?}");
        assert!(kv(asked(Some(least - page))).would_fit.is_none());
    }
}
