//! Weights of 4-bit integers: dequantization of rows.

use std::{ops::Range, slice};

use half::{bf16, f16};

use super::memory::{Rows, host_bytes};
use crate::{DType, Weight, int4};

/// Read access to a weight of 4-bit integers.
pub(super) struct Int4Weight<'a> {
    /// The integers, in blocks.
    words: &'a [u8],
    scales: Scales<'a>,
    zero_points: Option<Rows<'a, u8>>,
    group: usize,
    columns: usize,
}

enum Scales<'a> {
    F32(Rows<'a, f32>),
    F16(Rows<'a, f16>),
    Bf16(Rows<'a, bf16>),
}

impl<'a> Int4Weight<'a> {
    /// Returns `None` if the weight does not have 4-bit integers.
    pub(super) fn of(weight: &'a Weight<'_>) -> Option<Self> {
        let scales = weight.scales.as_ref().filter(|_| weight.dtype() == DType::U4)?;
        let bytes = weight.data.bytes().as_usize();
        // SAFETY: the tensor's creator guarantees that its bytes are valid, the op layer has
        // checked that its rows are contiguous, and nothing writes an operand while the operation
        // runs.
        let words = unsafe { slice::from_raw_parts(host_bytes(&weight.data), bytes) };
        let factors = &scales.factors;
        Some(Int4Weight {
            words,
            scales: match factors.dtype() {
                DType::F16 => Scales::F16(Rows::of(factors)),
                DType::BF16 => Scales::Bf16(Rows::of(factors)),
                _ => Scales::F32(Rows::of(factors)),
            },
            zero_points: scales.zero_points.as_ref().map(Rows::of),
            group: scales.by.group_columns(weight.columns()),
            columns: weight.columns(),
        })
    }

    /// Dequantizes adjacent rows. `out` has as many elements as the rows.
    pub(super) fn widen(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(self.columns)) {
            let mut units = int4::units(self.words, row, self.columns);
            for (group, out) in out.chunks_exact_mut(self.group).enumerate() {
                let zero_point = self.zero_points.as_ref().map_or(int4::ZERO_POINT, |all| all.row(row)[group]);
                let (scale, kept) = self.scales.at(row, group);
                // A group has at least 32 elements but only 16 possible values, so each value is
                // computed once.
                let elements = int4::elements(scale, zero_point, kept);
                let strips = out.as_chunks_mut::<{ int4::STRIP_COLUMNS }>().0;
                strips.iter_mut().zip(&mut units).for_each(|(out, unit)| look_up(unit, &elements, out));
            }
        }
    }
}

impl Scales<'_> {
    /// Returns a scale and its type.
    fn at(&self, row: usize, group: usize) -> (f32, DType) {
        match self {
            Scales::F32(all) => (all.row(row)[group], DType::F32),
            Scales::F16(all) => (all.row(row)[group].to_f32(), DType::F16),
            Scales::Bf16(all) => (all.row(row)[group].to_f32(), DType::BF16),
        }
    }
}

/// Writes the element of each integer of a unit to `out`.
#[inline(always)]
fn look_up(unit: &[u8; 16], elements: &[f32; 16], out: &mut [f32; int4::STRIP_COLUMNS]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        return unsafe { look_up_avx2(unit, elements, out) };
    }
    look_up_portable(unit, elements, out);
}

fn look_up_portable(unit: &[u8; 16], elements: &[f32; 16], out: &mut [f32; int4::STRIP_COLUMNS]) {
    out.iter_mut().zip(int4::unpack(unit)).for_each(|(out, integer)| *out = elements[usize::from(integer & 0xf)]);
}

/// Looks up eight elements at once. Two AVX registers have the 16 values.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn look_up_avx2(unit: &[u8; 16], elements: &[f32; 16], out: &mut [f32; int4::STRIP_COLUMNS]) {
    use std::arch::x86_64::*;
    // SAFETY: each load reads eight of the sixteen elements, and needs no alignment.
    let [low, high] = [0, 8].map(|first| unsafe { _mm256_loadu_ps(elements[first..].as_ptr()) });
    let bits = int4::WORD_BITS.map(u32::cast_signed);
    let bits = _mm256_setr_epi32(bits[0], bits[1], bits[2], bits[3], bits[4], bits[5], bits[6], bits[7]);
    for (word, out) in unit.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<{ int4::WORD_COLUMNS }>().0) {
        let places = _mm256_srlv_epi32(_mm256_set1_epi32(i32::from_le_bytes(*word)), bits);
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
            let unit = std::array::from_fn(|at| ((at + seed) * 151 % 256) as u8);
            let (mut found, mut expected) = ([f32::NAN; 32], [f32::NAN; 32]);
            look_up(&unit, &elements, &mut found);
            look_up_portable(&unit, &elements, &mut expected);
            assert_eq!(found, expected);
            assert!(expected.iter().all(|element| elements.contains(element)));
        }
    }
}
