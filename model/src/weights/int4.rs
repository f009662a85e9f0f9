//! 4-bit weights with one scale per group of columns: how they are claimed and loaded. The integers
//! come from a packed checkpoint and are reordered, or they are rounded from other weights while
//! these are read, or they are random.

use std::ops::Range;

use bursar_budgets::{Address, Bytes};
use bursar_kernels::{DType, QuantizationScheme, RankShard, Weight, WeightScales, int4};
use rayon::prelude::*;

use super::{
    Int4Copy, WeightCopy, WeightError, WeightMap, WeightSource,
    map::WeightLayout,
    rounding::{narrow, widen_all},
};
use crate::checkpoint::{
    DraftProjection, PackedMatrix, PackedScheme, WeightFormats, quantization::unsupported_weight,
    random_tensor::DEVIATION,
};

/// The integer, before its zero point is added, to which the largest magnitude of a group is
/// rounded.
const LARGEST: f32 = 7.0;

/// Standard deviation of integers that are drawn uniformly from 0 to 15.
const RANDOM_DEVIATION: f32 = 4.609_772;

/// The format in which a weight is claimed.
#[derive(Clone, Copy)]
struct Claimed {
    scheme: QuantizationScheme,
    group: usize,
    scale_type: DType,
}

impl WeightMap<'_> {
    /// Claims the given rows of tensors, with the columns `in_features` of each row, as one weight
    /// of 4-bit integers. Returns `None` if the weight is not claimed in this format: see
    /// [`int4_format`](Self::int4_format).
    pub(super) fn in_int4(
        &mut self,
        parts: &[(String, RankShard)],
        in_features: RankShard,
        place: WeightLayout,
    ) -> Result<Option<Weight<'static>>, WeightError> {
        let Some(claimed) = self.int4_format(parts, in_features, place)? else { return Ok(None) };
        self.claim_int4(parts, in_features, place, claimed).map(Some)
    }

    /// Claims a second copy of an output projection that [`vocabulary`](Self::vocabulary) claimed
    /// with the same arguments, rounded to 4-bit integers, if the checkpoint's [`DraftProjection`]
    /// asks for it. A random checkpoint draws the copy independently.
    ///
    /// # Errors
    /// [`WeightError::DraftProjection`], and the errors of `vocabulary`.
    pub fn draft_projection(
        &mut self,
        name: &str,
        vocabulary: RankShard,
        rows: usize,
        hidden: usize,
    ) -> Result<Option<Weight<'static>>, WeightError> {
        let added = self.target.padded_vocabulary(rows) - vocabulary.count;
        let place = WeightLayout { rows: added, ..WeightLayout::default() };
        let claimed = match (self.checkpoint.draft_projection(), self.quantized_copy(name, vocabulary, hidden, added)) {
            (DraftProjection::Decoder, _) | (DraftProjection::Int4IfSupported, Err(_)) => return Ok(None),
            (DraftProjection::Int4, Err(reason)) => {
                return Err(WeightError::DraftProjection { reason, target: self.target.name() });
            }
            (DraftProjection::Int4 | DraftProjection::Int4IfSupported, Ok(claimed)) => claimed,
        };
        let first = self.copies().len();
        let weight = self.claim_int4(&[(name.to_owned(), vocabulary)], hidden.into(), place, claimed)?;
        self.segment.mark_duplicates_from(first);
        Ok(Some(weight))
    }

    /// The format of a second copy of `share` of the rows of the matrix `name`, with `added` rows of
    /// zeros, or the reason why the copy cannot have 4-bit integers.
    fn quantized_copy(
        &self,
        name: &str,
        share: RankShard,
        columns: usize,
        added: usize,
    ) -> Result<Claimed, &'static str> {
        let group = int4::GROUPS.into_iter().find(|group| columns.is_multiple_of(*group));
        let group = group.ok_or("its columns are not whole groups of 32")?;
        let scheme = QuantizationScheme::int4(group, false);
        if self.checkpoint.tensors.is_packed(name) {
            return Err("the checkpoint stores it as packed integers");
        }
        if [share.count, added].iter().any(|rows| !rows.is_multiple_of(int4::BLOCK_ROWS)) {
            return Err("its rows are not whole blocks of 8");
        }
        if !self.target.has_quantized(scheme, [share.count + added, columns]) {
            return Err("the target has no kernels for this format");
        }
        Ok(Claimed { scheme, group, scale_type: self.target.activation() })
    }

    /// Claims a weight in a format of 4-bit integers.
    fn claim_int4(
        &mut self,
        parts: &[(String, RankShard)],
        in_features: RankShard,
        place: WeightLayout,
        Claimed { scheme, group, scale_type }: Claimed,
    ) -> Result<Weight<'static>, WeightError> {
        let (first, rows) = (self.copies().len(), parts.iter().map(|(_, rows)| rows.count).sum());
        let place = WeightLayout { kept: Some(DType::U4), ..place };
        let data = self.stacked(parts, [rows, in_features.count].into(), in_features, place)?;
        let shape @ [_, columns] = [data.rows(), data.columns()];
        let of_data: Vec<_> = self.copies()[first..]
            .iter()
            .map(|copy| (copy.source.name().is_some(), copy.kept.elements(copy.bytes) / columns))
            .collect();
        let mut region = |dtype: DType| -> Vec<Address> {
            self.segment.align();
            let place = |(is_read, rows): &(bool, usize)| {
                let source = if *is_read { WeightSource::Made } else { WeightSource::Zeros };
                let bytes = dtype.bytes(rows * (columns / group));
                self.segment.place(WeightCopy::of(source, dtype, (columns / group, 0), bytes))
            };
            of_data.iter().map(place).collect()
        };
        let scales = region(scale_type);
        let zero_points = scheme.has_zero_points.then(|| region(DType::U8));
        for (at, _) in of_data.iter().enumerate().filter(|(_, (is_read, _))| *is_read) {
            let zero_points = zero_points.as_ref().map(|all| all[at]);
            self.segment.pack(first + at, Int4Copy { scales: scales[at], scale_type, zero_points, group });
        }
        let of_groups = scheme.weights.shape(shape);
        let tensor = |all: &Vec<Address>, dtype| self.segment.tensor(all[0], of_groups, dtype);
        let zero_points = zero_points.as_ref().map(|all| tensor(all, DType::U8));
        let scales = WeightScales::int4(tensor(&scales, scale_type), zero_points, group);
        Ok(Weight { scales: Some(scales), ..Weight::plain(data) })
    }

    /// Bytes of the weights claimed so far that have 4-bit integers, with scales and zero points.
    /// Second copies do not count.
    pub fn int4_bytes(&self) -> Bytes {
        let of_copy = |copy: &WeightCopy| {
            let int4 = copy.int4?;
            let groups = copy.kept.elements(copy.bytes) / int4.group;
            let zero_points = DType::U8.bytes(int4.zero_points.map_or(0, |_| groups));
            Some(copy.bytes + int4.scale_type.bytes(groups) + zero_points)
        };
        self.copies().iter().filter(|copy| !copy.is_duplicate).filter_map(of_copy).sum()
    }

    /// Whether the weight of the projection `name` is claimed as 4-bit integers. The weight is
    /// assumed to consist of whole groups and whole blocks.
    pub(super) fn is_int4(&self, name: &str) -> Result<bool, WeightError> {
        let part = (format!("{name}.weight"), 0.into());
        Ok(self.int4_format(&[part], 0.into(), WeightLayout::default())?.is_some())
    }

    /// The format of a weight of 4-bit integers. `None` if the weight is not quantized, or is
    /// widened while it is read. A packed weight is widened if it has FP4 numbers or integers of 8
    /// bits, if its columns are in another order or are not whole groups, if its rows are not whole
    /// blocks, if its parts have different groups or types of scales or are not all packed, or if
    /// the target or the operation has no kernels. If the user asks for 4-bit integers, weights
    /// whose columns are not whole groups or whose rows are not whole blocks stay unquantized.
    ///
    /// # Errors
    /// The user asks for 4-bit integers, and the target has no kernels for them.
    fn int4_format(
        &self,
        parts: &[(String, RankShard)],
        in_features: RankShard,
        place: WeightLayout,
    ) -> Result<Option<Claimed>, WeightError> {
        if place.is_always_plain || place.is_widened || place.kept.is_some() || self.formats.is_in_draft_model() {
            return Ok(None);
        }
        let (columns, rows) = (in_features.count + place.columns, parts.iter().map(|(_, rows)| rows.count).sum());
        let mut of_parts = parts.iter().map(|(_, rows)| rows.count).chain([place.rows]);
        if !of_parts.all(|rows| rows.is_multiple_of(int4::BLOCK_ROWS)) {
            return Ok(None);
        }
        let is_whole = |group: usize| [columns, in_features.first].iter().all(|at| at.is_multiple_of(group));
        if let WeightFormats::Requested(scheme) = self.formats.formats() {
            let group = int4::GROUPS.into_iter().find(|group| is_whole(*group));
            let (true, true, Some(group)) = (scheme.is_int4(), self.formats.is_in_decoder(), group) else {
                return Ok(None);
            };
            let scheme = QuantizationScheme::int4(group, false);
            self.refuse_unsupported(unsupported_weight(&self.target, scheme, [rows, columns]))?;
            return Ok(Some(Claimed { scheme, group, scale_type: self.target.activation() }));
        }
        let WeightFormats::Packed(packed) = self.formats.formats() else { return Ok(None) };
        let mut found: Option<(usize, DType, bool)> = None;
        for (name, _) in parts {
            let (stored, scale_type) = match self.checkpoint.tensors.random(name, 2) {
                Some((dtype, _)) => (packed.scheme_of(name.trim_end_matches(".weight")), dtype),
                None if !self.checkpoint.tensors.is_packed(name) => return Ok(None),
                None => {
                    let tensor = self.checkpoint.tensor(name)?;
                    (tensor.packed.filter(|matrix| matrix.is_in_order()).map(|it| it.scheme), tensor.dtype.into())
                }
            };
            let Some(group) = stored.filter(is_packable).map(|scheme| scheme.group) else { return Ok(None) };
            // A weight without groups has one scale for each row, which is repeated for each group.
            let group = group.or_else(|| int4::GROUPS.into_iter().find(|group| is_whole(*group)));
            let Some(group) = group.filter(|group| is_whole(*group)) else { return Ok(None) };
            let scale_type = self.target.weight(scale_type);
            let has_zero_points = stored.is_some_and(|scheme| scheme.has_zero_points);
            match &mut found {
                None => found = Some((group, scale_type, has_zero_points)),
                Some(first) if (first.0, first.1) == (group, scale_type) => first.2 |= has_zero_points,
                Some(_) => return Ok(None),
            }
        }
        let claimed = |(group, scale_type, has_zero_points)| Claimed {
            scheme: QuantizationScheme::int4(group, has_zero_points),
            group,
            scale_type,
        };
        Ok(found.map(claimed).filter(|claimed| self.target.has_quantized(claimed.scheme, [rows, columns])))
    }
}

/// Whether a packed weight may stay packed in memory.
fn is_packable(scheme: &PackedScheme) -> bool {
    let is_group = |group: usize| int4::GROUPS.contains(&group);
    scheme.is_int4() && !scheme.is_reordered && scheme.group.is_none_or(is_group)
}

/// Adjacent rows of a weight of 4-bit integers, in the layout that kernels read.
#[derive(Default)]
pub(super) struct Int4Rows {
    pub words: Vec<u8>,
    pub scales: Vec<u8>,
    /// Empty if the weight has no zero points.
    pub zero_points: Vec<u8>,
}

/// The buffers for one row. The integers are not packed yet, and the scales are not in blocks yet.
struct RowPlaces<'a> {
    integers: &'a mut [u8],
    scales: &'a mut [u8],
    zero_points: &'a mut [u8],
}

impl Int4Rows {
    /// Returns `count` rows of `columns` columns, each filled by `row`, which receives the row's
    /// index in `0..count`. The rows are whole blocks.
    fn fill(count: usize, columns: usize, copy: &Int4Copy, row: impl Fn(usize, RowPlaces<'_>) + Sync) -> Self {
        let groups = columns / copy.group;
        let of_zero_points = if copy.zero_points.is_some() { groups } else { 0 };
        let mut all = Int4Rows {
            words: vec![0; count * columns / 2],
            scales: vec![0; count * groups * copy.scale_type.size()],
            zero_points: vec![0; count * of_zero_points],
        };
        let of_scales = groups * copy.scale_type.size();
        let zero_points: Vec<_> = match of_zero_points {
            0 => (0..count / int4::BLOCK_ROWS).map(|_| &mut [][..]).collect(),
            groups => all.zero_points.chunks_exact_mut(int4::BLOCK_ROWS * groups).collect(),
        };
        let blocks = all.words.par_chunks_exact_mut(int4::BLOCK_ROWS * columns / 2);
        let blocks = blocks.zip(all.scales.par_chunks_exact_mut(int4::BLOCK_ROWS * of_scales)).zip(zero_points);
        blocks.enumerate().for_each(|(block, ((words, all_scales), all_zero_points))| {
            let mut integers = vec![int4::ZERO_POINT; int4::BLOCK_ROWS * columns];
            let (mut scales, mut zero_points) = (vec![0; of_scales], vec![0; of_zero_points]);
            for (at, integers) in integers.chunks_exact_mut(columns).enumerate() {
                let places = RowPlaces { integers, scales: &mut scales, zero_points: &mut zero_points };
                row(block * int4::BLOCK_ROWS + at, places);
                place_row(&scales, at, copy.scale_type.size(), all_scales);
                place_row(&zero_points, at, 1, all_zero_points);
            }
            int4::pack(&integers, columns, words);
        });
        all
    }

    /// Returns a part of a packed weight. The rows are followed by zeros up to `columns` columns.
    pub(super) fn of_packed(
        matrix: &PackedMatrix<'_>,
        rows: Range<usize>,
        read: Range<usize>,
        columns: usize,
        copy: &Int4Copy,
    ) -> Self {
        // Adjacent words of some formats belong to adjacent rows, so the integers of all rows are
        // read first.
        let mut integers = vec![0; rows.len() * read.len()];
        let blocks = integers.par_chunks_mut(ROWS_AT_ONCE * read.len()).enumerate();
        blocks.for_each(|(at, integers)| {
            let first = rows.start + at * ROWS_AT_ONCE;
            matrix.integers(first..first + integers.len() / read.len(), read.clone(), integers);
        });
        Int4Rows::fill(rows.len(), columns, copy, |at, places| {
            let whole = places.integers;
            whole[..read.len()].copy_from_slice(&integers[at * read.len()..][..read.len()]);
            let mut scales = vec![0.0; columns / copy.group];
            for (group, scale) in scales.iter_mut().enumerate() {
                let first = group * copy.group;
                if first >= read.len() {
                    continue;
                }
                let stored = matrix.group_of(read.start + first);
                *scale = matrix.scale(rows.start + at, stored);
                let zero_point = matrix.zero_point(rows.start + at, stored) as u8;
                if let Some(place) = places.zero_points.get_mut(group) {
                    *place = zero_point;
                }
                // Added columns of the last group are zeros.
                let end = (first + copy.group).min(columns);
                whole[read.len().min(end)..end].fill(zero_point);
            }
            narrow(&scales, places.scales, copy.scale_type);
        })
    }

    /// Rounds rows of `read` numbers of type `found`: in each group, the largest magnitude becomes
    /// 7. The rows are followed by zeros up to `columns` columns.
    pub(super) fn quantized(bytes: &[u8], (found, read): (DType, usize), columns: usize, copy: &Int4Copy) -> Self {
        let row_bytes = read * found.size();
        Int4Rows::fill(bytes.len() / row_bytes, columns, copy, |at, places| {
            let mut wide = vec![0.0; columns];
            widen_all(&bytes[at * row_bytes..][..row_bytes], found, &mut wide[..read]);
            let scale_bytes = copy.scale_type.size();
            let groups = wide.chunks_exact(copy.group).zip(places.integers.chunks_exact_mut(copy.group));
            for ((wide, integers), place) in groups.zip(places.scales.chunks_exact_mut(scale_bytes)) {
                narrow(&[scale_of(wide)], place, copy.scale_type);
                let mut scale = [0.0];
                widen_all(place, copy.scale_type, &mut scale);
                if scale[0] > 0.0 {
                    let integer = |number: f32| (number / scale[0]).round().clamp(-LARGEST - 1.0, LARGEST);
                    let zero_point = f32::from(int4::ZERO_POINT);
                    integers
                        .iter_mut()
                        .zip(wide)
                        .for_each(|(out, number)| *out = (integer(*number) + zero_point) as u8);
                }
            }
            places.zero_points.fill(int4::ZERO_POINT);
        })
    }

    /// Draws `rows` rows of random integers. `first` is the index of the first element in the whole
    /// matrix, whose rows have `pitch` elements.
    pub(super) fn random(
        seed: u64,
        (first, pitch): (u64, usize),
        rows: usize,
        columns: usize,
        copy: &Int4Copy,
    ) -> Self {
        Int4Rows::fill(rows, columns, copy, |at, places| {
            let start = (first + (at * pitch) as u64) / int4::WORD_COLUMNS as u64;
            for (word, place) in (start..).zip(places.integers.as_chunks_mut::<{ int4::WORD_COLUMNS }>().0) {
                let bits = drawn(seed, word) as u32;
                *place = std::array::from_fn(|at| (bits >> (4 * at) & 0xf) as u8);
            }
            let scales = vec![DEVIATION / RANDOM_DEVIATION; columns / copy.group];
            narrow(&scales, places.scales, copy.scale_type);
            places.zero_points.fill(int4::ZERO_POINT);
        })
    }
}

/// Copies the values of a row's groups, of `size` bytes each, to their places in a block's values.
fn place_row(values: &[u8], row: usize, size: usize, block: &mut [u8]) {
    for (group, value) in values.chunks_exact(size).enumerate() {
        let at = int4::scale_index(row, group, values.len() / size) * size;
        block[at..at + size].copy_from_slice(value);
    }
}

/// Rows whose packed integers one thread reads at a time.
const ROWS_AT_ONCE: usize = 64;

/// The scale of a group of numbers. The result is NaN if a number is not finite.
fn scale_of(group: &[f32]) -> f32 {
    let largest = group.iter().fold(0f32, |largest, number| largest.max(number.abs()));
    if group.iter().all(|number| number.is_finite()) { largest / LARGEST } else { f32::NAN }
}

/// Random bits of word number `at` (SplitMix64, Steele et al. 2014).
fn drawn(seed: u64, at: u64) -> u64 {
    let mut bits = seed.wrapping_add((at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::checkpoint::TensorIndex;

    /// The elements of packed rows as bytes of the type of the scales.
    fn elements(rows: &Int4Rows, columns: usize, copy: &Int4Copy) -> Vec<u8> {
        let mut scales = vec![0.0; rows.scales.len() / copy.scale_type.size()];
        widen_all(&rows.scales, copy.scale_type, &mut scales);
        let row = |row: usize| int4::words(&rows.words, row, columns).flat_map(int4::unpack);
        let integers: Vec<u8> = (0..rows.words.len() * 2 / columns).flat_map(row).collect();
        let mut out = Vec::new();
        let groups = columns / copy.group;
        for (at, group) in integers.chunks_exact(copy.group).enumerate() {
            let at = int4::scale_index(at / groups, at % groups, groups);
            let zero_point = rows.zero_points.get(at).copied().unwrap_or(int4::ZERO_POINT);
            let values = int4::elements(scales[at], zero_point, copy.scale_type);
            let wide: Vec<f32> = group.iter().map(|integer| values[usize::from(*integer)]).collect();
            let mut narrowed = vec![0; wide.len() * copy.scale_type.size()];
            narrow(&wide, &mut narrowed, copy.scale_type);
            out.extend(narrowed);
        }
        assert_eq!(out.len(), rows.words.len() / (columns / 2) * columns * copy.scale_type.size());
        out
    }

    /// `tests/golden/recording/packed_weights.py` generates the weights and their values.
    #[test]
    fn weights_that_stay_packed_have_the_recorded_values_to_the_bit() {
        let mut count = 0;
        for folder in ["awq", "gptq", "gptq_v2", "compressed_tensors"] {
            let index = TensorIndex::recorded(&format!("packed/{folder}"));
            let content = TensorIndex::recorded_values(&format!("packed/{folder}"));
            let recorded = SafeTensors::deserialize(&content).expect("safetensors");
            for name in index.names() {
                let found = index.tensor(name).expect("the weight");
                let matrix = found.packed.expect("the weight is packed");
                if !is_packable(&matrix.scheme) || !matrix.is_in_order() {
                    continue;
                }
                let recorded = recorded.tensor(name).expect("values");
                let (&[rows, read], size) = (found.shape, found.dtype.bytes()) else { panic!("a matrix") };
                let group = matrix.scheme.group.unwrap_or(32);
                let columns = read.next_multiple_of(group) + group;
                let copy = Int4Copy {
                    scales: Address(0),
                    scale_type: found.dtype.into(),
                    zero_points: matrix.scheme.has_zero_points.then_some(Address(0)),
                    group,
                };
                let blocks = rows / int4::BLOCK_ROWS * int4::BLOCK_ROWS;
                for (part, first) in [(0..blocks, 0), (rows - blocks..rows, group)] {
                    if first >= read || part.is_empty() {
                        continue;
                    }
                    let packed = Int4Rows::of_packed(&matrix, part.clone(), first..read, columns, &copy);
                    let all = elements(&packed, columns, &copy);
                    for (row, all) in part.zip(all.chunks_exact(columns * size)) {
                        let (values, added) = all.split_at((read - first) * size);
                        assert!(
                            values == &recorded.data()[(row * read + first) * size..][..values.len()],
                            "{folder}: {name}"
                        );
                        let mut zeros = vec![1.0; added.len() / size];
                        widen_all(added, copy.scale_type, &mut zeros);
                        assert!(zeros.iter().all(|zero| *zero == 0.0), "{folder}: {name}: added columns are zeros");
                    }
                }
                count += 1;
            }
        }
        assert!(count >= 8, "{count} weights stay packed");
    }

    const COPY: Int4Copy = Int4Copy { scales: Address(0), scale_type: DType::BF16, zero_points: None, group: 32 };

    #[test]
    fn quantized_numbers_are_within_half_a_step_of_their_group() {
        let (read, columns) = (80, 96);
        let number = |at: usize| {
            ((at * 7919 % 4001) as f32 / 2000.0 - 1.0) * if (at / 32).is_multiple_of(5) { 0.0 } else { 3.0 }
        };
        let numbers: Vec<f32> = (0..16 * read).map(number).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let rows = Int4Rows::quantized(&bytes, (DType::F32, read), columns, &COPY);
        let mut found = vec![f32::NAN; 16 * columns];
        widen_all(&elements(&rows, columns, &COPY), DType::BF16, &mut found);
        for (found, numbers) in found.chunks_exact(columns).zip(numbers.chunks_exact(read)) {
            for (at, found) in found.iter().enumerate() {
                let group = &numbers[(at / 32 * 32).min(read)..read.min(at / 32 * 32 + 32)];
                let largest = group.iter().fold(0f32, |largest, number| largest.max(number.abs()));
                let number = numbers.get(at).copied().unwrap_or(0.0);
                // The scale and the element have eight bits of mantissa.
                assert!((found - number).abs() <= largest / 14.0 * 1.02 + largest / 128.0, "{found} for {number}");
            }
        }
        let bad = [f32::INFINITY].into_iter().chain([1.0; 16 * 32 - 1]);
        let bad: Vec<u8> = bad.flat_map(f32::to_le_bytes).collect();
        let rows = Int4Rows::quantized(&bad, (DType::F32, 32), 32, &COPY);
        assert!(half::bf16::from_le_bytes([rows.scales[0], rows.scales[1]]).is_nan(), "an infinity is not hidden");
    }

    #[test]
    fn a_part_of_random_integers_is_that_part_of_the_whole() {
        let whole = Int4Rows::random(7, (0, 128), 48, 128, &COPY);
        let part = Int4Rows::random(7, (16 * 128 + 64, 128), 16, 64, &COPY);
        let row = |all: &Int4Rows, row: usize, columns: usize| -> Vec<u8> {
            int4::words(&all.words, row, columns).flat_map(int4::unpack).collect()
        };
        for at in 0..16 {
            assert_eq!(row(&part, at, 64), row(&whole, at + 16, 128)[64..]);
        }
        let integers: Vec<u8> = (0..48).flat_map(|at| row(&whole, at, 128)).collect();
        let mean = integers.iter().map(|integer| f32::from(*integer)).sum::<f32>() / integers.len() as f32;
        assert!((mean - 7.5).abs() < 0.5, "{mean}");
        assert_ne!(whole.words, Int4Rows::random(8, (0, 128), 48, 128, &COPY).words);
    }
}
