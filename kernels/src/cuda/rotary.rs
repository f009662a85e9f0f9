//! Launches of rotary position embedding, separate and fused with the write to the KV cache.

use super::{
    arguments::{Argument, Extent, address_or_null, arguments, count},
    contract::rotary::{AXES_MAX, NORMED_HEADS_MAX, THREADS_MAX, VALUES_NORMALIZED, VALUES_OF_KEYS, VALUES_UNCHANGED},
    lane::Cuda,
    quantized_cache::quantized_cache,
};
use crate::{
    KernelError,
    calls::{self, CachedValues, HeadNorm, HeadNorms, PairAxes},
};

/// The position axis of each pair of elements, in the layout of the kernel's parameter.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Sections {
    pairs: [u32; AXES_MAX],
    is_interleaved: u32,
}

impl Argument for Sections {}

impl Sections {
    /// Panics if there are more than `AXES_MAX` axes, which no supported model has.
    fn of(axes: &PairAxes) -> Self {
        assert!(axes.count() <= AXES_MAX, "{} position axes; kernels take at most {AXES_MAX}", axes.count());
        let mut pairs = [0; AXES_MAX];
        match axes {
            PairAxes::Sections(sections) => {
                pairs.iter_mut().zip(sections).for_each(|(pairs, section)| *pairs = count(*section));
            }
            PairAxes::Interleaved(second, third) => (pairs[1], pairs[2]) = (count(*second), count(*third)),
        }
        Sections { pairs, is_interleaved: matches!(axes, PairAxes::Interleaved(..)).into() }
    }
}

/// Returns an extent with one thread block per token and one thread per sixteen elements, but at
/// least 64 and at most `THREADS_MAX` threads.
fn extent(tokens: usize, elements: usize) -> Extent {
    Extent::line(tokens, elements.div_ceil(16).next_multiple_of(32).clamp(64, THREADS_MAX))
}

pub(super) fn rotary(cuda: &Cuda, call: calls::Rotary<'_>) -> Result<(), KernelError> {
    let head_dim = 2 * call.frequencies.rows();
    let arguments = arguments![
        call.x.address(),
        count(call.x.pitch()),
        count(call.heads),
        count(head_dim),
        call.positions.address(),
        count(call.positions.pitch()),
        call.frequencies.address(),
        Sections::of(call.axes),
    ];
    let (entry_point, arguments) = match &call.norm {
        None => (cuda.entry_points().rotary, arguments),
        Some(HeadNorm { weight, weight_offset, epsilon }) => {
            assert!(call.heads <= NORMED_HEADS_MAX, "{} heads to normalize", call.heads);
            let arguments = arguments.with(weight.address()).with(*epsilon).with(*weight_offset);
            (cuda.entry_points().rotary_normed, arguments)
        }
    };
    // SAFETY: the arguments match the kernels' parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(entry_point, extent(call.x.rows(), call.heads * head_dim), arguments) }
}

pub(super) fn rotary_kv_write(cuda: &Cuda, call: calls::RotaryKvWrite<'_>) -> Result<(), KernelError> {
    let shape = call.layer.shape;
    let values = call.norms.map_or(CachedValues::Unchanged, |norms| norms.values);
    let elements = (call.heads + 2 * shape.kv_heads) * shape.head_dim;
    let arguments = arguments![
        call.qkv.address(),
        count(call.qkv.pitch()),
        count(call.heads),
        count(shape.kv_heads),
        count(shape.head_dim),
        count(call.frequencies.rows()),
        call.positions.address(),
        count(call.positions.pitch()),
        call.frequencies.address(),
        Sections::of(call.axes),
        call.slots.address(),
        call.layer.address,
        address_or_null(&call.scales),
        count(call.layer.blocks),
    ];
    let (plain, normed) = match quantized_cache(cuda, "rotary_kv_write", call.layer)? {
        Some(quantized) => (quantized.rotary_kv_write, quantized.rotary_kv_write_normed),
        None => (cuda.entry_points().rotary_kv_write, cuda.entry_points().rotary_kv_write_normed),
    };
    let (entry_point, arguments) = match call.norms {
        None => (plain, arguments),
        Some(HeadNorms { query, key, weight_offset, epsilon, .. }) => {
            let value_heads = if values == CachedValues::Normalized { shape.kv_heads } else { 0 };
            let heads = call.heads + shape.kv_heads + value_heads;
            assert!(
                heads <= NORMED_HEADS_MAX,
                "{heads} heads to normalize; the kernel takes at most {NORMED_HEADS_MAX}"
            );
            let arguments = arguments.with(query.address()).with(key.address()).with(*epsilon);
            let arguments = arguments.with(*weight_offset).with(match values {
                CachedValues::Unchanged => VALUES_UNCHANGED,
                CachedValues::Normalized => VALUES_NORMALIZED,
                CachedValues::NormalizedKeys => VALUES_OF_KEYS,
            });
            (normed, arguments)
        }
    };
    // SAFETY: the arguments match the kernel's parameters, and the op layer has checked the shapes.
    unsafe { cuda.launch(entry_point, extent(call.qkv.rows(), elements), arguments) }
}
