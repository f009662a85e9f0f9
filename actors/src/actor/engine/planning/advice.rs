//! Suggestions for an attempt that was refused memory.

use bursar_budgets::Bytes;
use bursar_kernels::BLOCK_TOKENS;

use super::{Change, Question, Suggestion, question::least_blocks};
use crate::{
    compute::memory::KvMemory,
    profile::{MemoryState, shrunk},
};

/// Returns suggestions for an attempt with `target_tokens` of KV cache that was refused memory: a
/// smaller KV cache, and lower limits. A suggested value would have freed the `missing` bytes. A
/// suggestion for a knob that cannot help has no value.
///
/// `capacity` is all memory that the model could lease now, if known. If other processes use so
/// much memory that no number of tokens fits, only lower limits are suggested. Knobs that would
/// claim more of the device are left out.
pub(crate) fn advice(
    question: &Question<'_>,
    target_tokens: usize,
    missing: Bytes,
    capacity: Option<Bytes>,
) -> Vec<Suggestion> {
    let Ok((inputs, needs)) = question.needs() else { return Vec::new() };
    let (kv, page) = (question.options.kv(), question.place.page);
    let least = needs.memory_plan_with(least_blocks(&needs, &kv, page)).total();
    let available = least.saturating_sub(missing).min(capacity.unwrap_or(Bytes::MAX));
    // If the user set a fraction, it applied to the memory that was available during the attempt.
    // For a suggestion, the smallest KV cache is enough, so the fraction is ignored.
    let options = question.options.clone().with_all_memory();
    let place = MemoryState { is_host: question.place.is_host, ..MemoryState::of_available(available, page) };
    let scarce = Question { options: &options, place, ..*question };
    let limits = scarce.reductions(&inputs, &needs);
    if kv.is_pinned() {
        return limits;
    }
    // The suggested number of tokens is a multiple of the block size. It is at least five percent
    // below the target, because more memory requests may follow the refused one.
    let blocks = target_tokens / BLOCK_TOKENS;
    let block = needs.kv_shape.block_bytes() * needs.kv_shape.layers as u64;
    let by_bytes = blocks.saturating_sub(missing.div_ceil(block.max(Bytes(1))) as usize);
    let by_capacity = capacity.map_or(usize::MAX, |capacity| match (capacity + needs.probe()).checked_sub(least) {
        Some(left) if left >= needs.probe() => KvMemory::blocks_in(needs.kv_shape, left, page),
        _ => 0,
    });
    let tokens = shrunk(blocks, 1).min(by_bytes).min(by_capacity) * BLOCK_TOKENS;
    let to = (tokens / BLOCK_TOKENS >= needs.context_blocks).then_some(Change::Count(tokens as u64));
    let names = &question.options.names;
    let frees = block * (blocks - (tokens / BLOCK_TOKENS).min(blocks)) as u64;
    let kv = Suggestion::new(names, "kv_tokens", Change::Count(target_tokens as u64), to, frees);
    std::iter::once(kv).chain(limits).collect()
}

#[cfg(test)]
mod tests {
    use bursar_kernels::Target;
    use bursar_model::{Model, checkpoint::Checkpoint, demo};

    use super::*;
    use crate::engine::LoadOptions;

    #[test]
    fn a_smaller_kv_cache_is_suggested_if_it_would_fit() {
        let (target, page) = (Target::Cpu { threads: 2 }, Bytes::mib(2));
        let checkpoint = Checkpoint::open(demo::checkpoint()).expect("the checkpoint opens");
        let model = Model::plan(&checkpoint, &target).expect("the model can be planned");
        let place = MemoryState { is_host: true, ..MemoryState::of_available(Bytes::ZERO, page) };
        let pictures = checkpoint.image_processor.as_ref();
        let asked = |options: &LoadOptions, capacity| {
            let question = Question { model: &model, pictures, checkpoint: None, target, options, place };
            let least = question.needs().expect("the requirements can be planned").1.memory_plan().total();
            (advice(&question, 1 << 20, Bytes::mib(4), capacity), least)
        };
        let kv = |knobs: &[Suggestion]| {
            let kv = knobs.iter().find(|knob| knob.knob.starts_with("kv_")).expect("the advice names the knob");
            kv.to
        };
        let sized = LoadOptions::small();
        let (_, least) = asked(&sized, None);
        for capacity in [None, Some(least), Some(least * 8)] {
            assert!(kv(&asked(&sized, capacity).0).is_some(), "{capacity:?}");
        }
        // No limit can be lowered far enough either: the weights by themselves need more memory.
        let (knobs, _) = asked(&sized, Some(Bytes::mib(4)));
        assert!(knobs.len() > 1 && knobs.iter().all(|knob| knob.to.is_none()), "{knobs:?}");
        assert!(kv(&asked(&sized, Some(least - page)).0).is_none());
        // A fixed size is suggested in the unit in which the user set it, and fits the available
        // memory.
        for (pinned, name) in [
            (LoadOptions { kv_tokens: Some(1 << 20), ..sized.clone() }, "kv_tokens"),
            (LoadOptions { kv_bytes: Some(Bytes::gib(2)), ..sized.clone() }, "kv_bytes"),
        ] {
            let capacity = least + Bytes::mib(64);
            let (knobs, _) = asked(&pinned, Some(capacity));
            let named = knobs.iter().find(|knob| knob.knob == name).expect("the advice names the knob");
            let changed = named.over(&pinned).expect("the knob has a value");
            let place = MemoryState { total: capacity, ..place };
            let question = Question { model: &model, pictures, checkpoint: None, target, options: &changed, place };
            let (inputs, needs) = question.needs().expect("the requirements can be planned");
            question.settled(&inputs, &needs).unwrap_or_else(|unfit| panic!("{name}: {unfit}"));
        }
    }
}
