//! What would have helped an attempt that was refused memory.

use bursar_budgets::{Bytes, Knob};
use bursar_kernels::{BLOCK_TOKENS, Target};
use bursar_model::{Envelope, Model};

use super::{Needs, shrunk, suggestions};

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
    let blocks = target_tokens / BLOCK_TOKENS;
    let block = needs.kv_shape.block_bytes() * needs.kv_shape.layers as u64;
    let by_bytes = blocks.saturating_sub(missing.0.div_ceil(block.0.max(1)) as usize);
    let tokens = shrunk(blocks, 1).min(by_bytes) * BLOCK_TOKENS;
    let kv = match tokens >= envelope.context_tokens {
        true => Knob::new("kv_tokens", target_tokens, tokens),
        false => Knob::hopeless("kv_tokens", target_tokens),
    };
    // Of what there is to be had nobody can set more.
    let available = needs.memory_plan().total().saturating_sub(missing);
    let limits = suggestions(model, target, envelope, page, available).into_iter().skip(1);
    std::iter::once(kv).chain(limits).collect()
}
