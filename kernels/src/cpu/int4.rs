//! Weights of 4-bit integers: dequantization of rows.

use std::{ops::Range, slice};

use half::{bf16, f16};

use super::memory::{host_bytes, start_of};
use crate::{DType, Element, Tensor, Weight, int4};

/// Read access to a weight of 4-bit integers.
pub(super) struct Int4Weight<'a> {
    /// The integers, in blocks.
    words: &'a [u8],
    scales: Scales<'a>,
    zero_points: Option<&'a [u8]>,
    group: usize,
    columns: usize,
}

/// The scales, in the order of [`int4::scale_index`].
enum Scales<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> Int4Weight<'a> {
    /// Returns `None` if the weight does not have 4-bit integers.
    pub(super) fn of(weight: &'a Weight<'_>) -> Option<Self> {
        let scales = weight.scales.as_ref().filter(|_| weight.dtype() == DType::U4)?;
        let factors = &scales.factors;
        // SAFETY: the tensors' creators guarantee that their bytes are valid, the op layer has
        // checked that their rows are contiguous, and nothing writes an operand while the operation
        // runs. The lengths are the lengths of the tensors.
        unsafe {
            Some(Int4Weight {
                words: slice::from_raw_parts(host_bytes(&weight.data), weight.data.bytes().as_usize()),
                scales: match factors.dtype() {
                    DType::F16 => Scales::F16(all_of(factors)),
                    DType::BF16 => Scales::Bf16(all_of(factors)),
                    _ => Scales::F32(all_of(factors)),
                },
                zero_points: scales.zero_points.as_ref().map(|all| all_of(all)),
                group: scales.by.group_columns(weight.columns()),
                columns: weight.columns(),
            })
        }
    }

    /// Dequantizes adjacent rows. `out` has as many elements as the rows.
    pub(super) fn widen(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(self.columns)) {
            let mut words = int4::words(self.words, row, self.columns);
            for (group, out) in out.chunks_exact_mut(self.group).enumerate() {
                let at = int4::scale_index(row, group, self.columns / self.group);
                let zero_point = self.zero_points.map_or(int4::ZERO_POINT, |all| all[at]);
                let (scale, kept) = self.scales.at(at);
                // A group has at least 32 elements but only 16 possible values, so each value is
                // computed once.
                let elements = int4::elements(scale, zero_point, kept);
                let spans = out.as_chunks_mut::<{ int4::SPAN_COLUMNS }>().0;
                spans.iter_mut().zip(&mut words).for_each(|(out, words)| look_up(words, &elements, out));
            }
        }
    }
}

impl Scales<'_> {
    /// Returns the scale at `index`, and the type of the scales.
    fn at(&self, index: usize) -> (f32, DType) {
        match self {
            Scales::F32(all) => (all[index], DType::F32),
            Scales::F16(all) => (all[index].to_f32(), DType::F16),
            Scales::Bf16(all) => (all[index].to_f32(), DType::BF16),
        }
    }
}

/// Returns all elements of a contiguous tensor.
///
/// # Safety
/// The rows of `tensor` must be contiguous, its memory must be valid, and nothing may write it.
unsafe fn all_of<'a, E: Element>(tensor: &'a Tensor<'_>) -> &'a [E] {
    // SAFETY: the caller guarantees that the rows are contiguous, that the memory is valid, and
    // that nothing writes it.
    unsafe { slice::from_raw_parts(start_of(tensor), tensor.rows() * tensor.columns()) }
}

/// Writes the elements of 32 adjacent columns to `out`.
#[inline(always)]
fn look_up(words: [u32; int4::UNITS], elements: &[f32; 16], out: &mut [f32; int4::SPAN_COLUMNS]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        return unsafe { look_up_avx2(words, elements, out) };
    }
    look_up_portable(words, elements, out);
}

fn look_up_portable(words: [u32; int4::UNITS], elements: &[f32; 16], out: &mut [f32; int4::SPAN_COLUMNS]) {
    out.iter_mut().zip(int4::unpack(words)).for_each(|(out, integer)| *out = elements[usize::from(integer & 0xf)]);
}

/// Looks up eight elements at once. Two AVX registers have the 16 values.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn look_up_avx2(words: [u32; int4::UNITS], elements: &[f32; 16], out: &mut [f32; int4::SPAN_COLUMNS]) {
    use std::arch::x86_64::*;
    // SAFETY: each load reads eight of the sixteen elements, and needs no alignment.
    let [low, high] = [0, 8].map(|first| unsafe { _mm256_loadu_ps(elements[first..].as_ptr()) });
    // Each word has two adjacent columns of every eight.
    let [a, b, c, d] = words.map(u32::cast_signed);
    let words = _mm256_setr_epi32(a, a, b, b, c, c, d, d);
    for (pair, out) in out.as_chunks_mut::<{ int4::WORD_COLUMNS }>().0.iter_mut().enumerate() {
        let bits = 4 * pair as i32;
        let bits = _mm256_setr_epi32(bits, bits + 16, bits, bits + 16, bits, bits + 16, bits, bits + 16);
        let places = _mm256_srlv_epi32(words, bits);
        let (of_low, of_high) = (_mm256_permutevar8x32_ps(low, places), _mm256_permutevar8x32_ps(high, places));
        let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(places));
        // SAFETY: the store writes eight numbers, which `out` has, and needs no alignment.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_blendv_ps(of_low, of_high, is_high)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_look_up_elements_agree() {
        let elements = int4::elements(0.37, 5, DType::BF16);
        for seed in 0..64 {
            let words = std::array::from_fn(|at| ((4 * at + seed) as u32).wrapping_mul(0x9e37_79b9));
            let (mut found, mut expected) = ([f32::NAN; 32], [f32::NAN; 32]);
            look_up(words, &elements, &mut found);
            look_up_portable(words, &elements, &mut expected);
            assert_eq!(found, expected);
            assert!(expected.iter().all(|element| elements.contains(element)));
        }
    }
}
