//! Pure: the elements, scales and zero points of a packed weight.

use std::ops::Range;

use bursar_kernels::E4m3;

use super::scale::ScaleType;
use super::scheme::{PackedFormat, PackedScheme};
use crate::checkpoint::stored::TensorType;

/// A packed weight `[rows, columns]` (output and input features), as stored in the file. The
/// lengths of all parts have been checked. The values of `groups` and scales have not: see
/// [`bad_group`](Self::bad_group) and
/// [`TensorIndex::bad_scale`](crate::checkpoint::TensorIndex::bad_scale).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PackedMatrix<'a> {
    pub scheme: PackedScheme,
    pub shape: [usize; 2],
    /// Little-endian words of 32 bits.
    pub(super) words: &'a [u8],
    pub(super) scale_type: ScaleType,
    pub(super) scales: &'a [u8],
    /// Little-endian f32 values that divide or multiply the scales: one for the weight, or one for
    /// each expert if several experts are stacked along the rows.
    pub(super) factors: Option<&'a [u8]>,
    /// Little-endian words of 32 bits.
    pub(super) zero_points: Option<&'a [u8]>,
    /// The group of each column, i32.
    pub(super) groups: Option<&'a [u8]>,
}

impl<'a> PackedMatrix<'a> {
    /// The words of the packed elements, as in the file.
    pub fn words(&self) -> &'a [u8] {
        self.words
    }

    /// The type to which the packed elements are dequantized.
    pub fn dtype(&self) -> TensorType {
        self.scale_type.elements()
    }

    /// Number of groups of a row.
    pub fn groups(&self) -> usize {
        self.scheme.groups(self.shape[1])
    }

    /// The group of a column.
    pub fn group_of(&self, column: usize) -> usize {
        match self.groups {
            Some(groups) => word(groups, column) as usize,
            None => self.scheme.group.map_or(0, |group| column / group),
        }
    }

    /// The first column after `column` that belongs to another group, at most `end`.
    pub fn group_end(&self, column: usize, end: usize) -> usize {
        let group = self.group_of(column);
        match (self.groups, self.scheme.group) {
            (None, Some(size)) => end.min((group + 1) * size),
            (None, None) => end,
            (Some(_), _) => (column + 1..end).find(|next| self.group_of(*next) != group).unwrap_or(end),
        }
    }

    /// Whether the columns of each group are adjacent, and the groups are in ascending order.
    pub fn is_in_order(&self) -> bool {
        let Some(groups) = self.groups else { return true };
        let group = self.scheme.group.unwrap_or(self.shape[1]);
        (0..self.shape[1]).all(|column| word(groups, column) as usize == column / group)
    }

    /// The first column whose group does not exist, and the number of that group.
    pub fn bad_group(&self) -> Option<(usize, i32)> {
        let groups = self.groups?;
        let mut numbers = (0..self.shape[1]).map(|column| (column, word(groups, column) as i32));
        numbers.find(|(_, group)| usize::try_from(*group).map_or(true, |group| group >= self.groups()))
    }

    /// The scale of a row's group.
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        let at = if self.scheme.format.is_by_row() { row * self.groups() + group } else { group * self.shape[0] + row };
        let stored = self.scale_type.scale(self.scales, at);
        self.factors.map_or(stored, |factors| {
            let factors = factors.as_chunks().0;
            self.scaled(stored, f32::from_le_bytes(factors[row * factors.len() / self.shape[0]]))
        })
    }

    /// A stored scale, multiplied or divided by its factor. Both numbers are f32, as in
    /// compressed-tensors (`_dequantize`) and ModelOpt (`NVFP4QTensor.dequantize`).
    fn scaled(&self, stored: f32, factor: f32) -> f32 {
        if self.scheme.format == PackedFormat::ModelOptNvfp4 { stored * factor } else { stored / factor }
    }

    /// The first scale that is not valid.
    pub(super) fn bad_scale(&self) -> Option<BadScale> {
        let is_bad =
            |factor: &f32| !(*factor > 0.0 && factor.is_finite() && self.scaled(E4m3::MAX, *factor).is_finite());
        let factors = self.factors.into_iter().flat_map(|factors| factors.as_chunks().0);
        if let Some(value) = factors.map(|bytes| f32::from_le_bytes(*bytes)).find(is_bad) {
            return Some(BadScale { is_factor: true, value, expected: "a finite number above 0" });
        }
        let value = self.scale_type.scale(self.scales, self.scale_type.first_bad(self.scales)?);
        let is_fp4 = self.scheme.format.is_fp4();
        Some(BadScale {
            is_factor: false,
            value,
            expected: if is_fp4 { "a finite number without a sign" } else { "a finite number" },
        })
    }

    /// The zero point of a row's group. It is relative to the unsigned integers that
    /// [`integers`](Self::integers) returns.
    pub fn zero_point(&self, row: usize, group: usize) -> i32 {
        let Some(words) = self.zero_points else { return self.scheme.default_zero_point() };
        let (rows, per_word) = (self.shape[0], self.scheme.per_word());
        let at = match self.scheme.format {
            format if format.is_by_row() => row / per_word * self.groups() + group,
            _ => group * rows.div_ceil(per_word) + row / per_word,
        };
        let stored = word(words, at) >> self.scheme.shift(row % per_word) & self.scheme.mask();
        // AutoGPTQ adds one and then masks, so that the stored 15 means 0
        // (`auto_gptq/nn_modules/qlinear/qlinear_cuda.py`).
        let added = u32::from(self.scheme.format == PackedFormat::Gptq);
        ((stored + added) & self.scheme.mask()) as i32
    }

    /// Writes the unsigned integers of a part of the weight, or the codes of its FP4 numbers, to
    /// `out`, row by row.
    ///
    /// # Panics
    /// If `out` does not have one byte for each element of the part.
    pub fn integers(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [u8]) {
        let (width, per_word, mask) = (columns.len(), self.scheme.per_word(), self.scheme.mask());
        assert_eq!(out.len(), rows.len() * width, "the output has one byte for each element");
        let [all_rows, all_columns] = self.shape;
        if self.scheme.format == PackedFormat::Awq {
            let pitch = all_rows.div_ceil(per_word);
            for (at, column) in columns.enumerate() {
                for (packed, of_word) in words_of(&rows, per_word) {
                    let word = word(self.words, column * pitch + packed);
                    for row in of_word {
                        let integer = word >> self.scheme.shift(row % per_word) & mask;
                        out[(row - rows.start) * width + at] = integer as u8;
                    }
                }
            }
            return;
        }
        let pitch = all_columns.div_ceil(per_word);
        for (packed, of_word) in words_of(&columns, per_word) {
            let skipped = self.scheme.bits * (of_word.start - packed * per_word);
            for (below, row) in rows.clone().enumerate() {
                let at = match self.scheme.format {
                    format if format.is_by_row() => row * pitch + packed,
                    _ => packed * all_rows + row,
                };
                let mut word = word(self.words, at) >> skipped;
                let place = below * width + of_word.start - columns.start;
                for out in &mut out[place..][..of_word.len()] {
                    *out = (word & mask) as u8;
                    word = word.wrapping_shr(self.scheme.bits as u32);
                }
            }
        }
    }
}

/// The words that contain the integers in `range`, each with its part of the range.
fn words_of(range: &Range<usize>, per_word: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let Range { start, end } = *range;
    let of_word = move |at: usize| (at, start.max(at * per_word)..end.min((at + 1) * per_word));
    (start / per_word..end.div_ceil(per_word)).map(of_word)
}

/// A scale that is not valid.
pub(super) struct BadScale {
    /// Whether `value` is a factor that divides or multiplies other scales.
    pub is_factor: bool,
    pub value: f32,
    /// The requirement, for messages.
    pub expected: &'static str,
}

/// The little-endian 32-bit word with index `at`.
fn word(words: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(words[4 * at..][..4].try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_points_of_gptq_wrap_and_those_of_other_formats_do_not() {
        // Zero points of eight rows, the first in the lowest bits.
        let stored = 0xf0e7_871f_u32.to_le_bytes();
        let zero_points = |format| {
            let scheme = PackedScheme { format, bits: 4, group: None, has_zero_points: true, is_reordered: false };
            let (words, scale_type, factors) = (&[][..], ScaleType::F16, None);
            let weight = PackedMatrix {
                scheme,
                shape: [8, 8],
                words,
                scale_type,
                scales: &[],
                factors,
                zero_points: Some(&stored),
                groups: None,
            };
            (0..8).map(|row| weight.zero_point(row, 0)).collect::<Vec<_>>()
        };
        assert_eq!(zero_points(PackedFormat::GptqV2), [15, 1, 7, 8, 7, 14, 0, 15]);
        assert_eq!(zero_points(PackedFormat::Gptq), [0, 2, 8, 9, 8, 15, 1, 0]);
    }
}
