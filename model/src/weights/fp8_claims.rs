//! Claims of FP8 weights: elements and scales, which are either in the checkpoint or computed
//! while it is read.

use bursar_budgets::Bytes;
use bursar_kernels::{
    DType, E4m3, FP8_BLOCK, RankShard, Tensor, Weight, WeightScales, ops::fill_random::LARGEST_DEVIATIONS,
};

use super::{
    MadeScales, SpreadScales, WeightError, WeightMap, WeightSource,
    cut::{Cut, whole_units},
    map::{WeightLayout, root},
    scaling::numbers,
};
use crate::{
    checkpoint::{
        Fp8Scheme, QuantizationMethod, RoundedBy, ScaledBy, StoredFp8, TensorInfo, TensorType, WeightFormats,
        random_checkpoint::DEVIATION,
    },
    flow::CacheFormat,
};

/// The scale of activations for a checkpoint without weights, which has no scales either.
const UNKNOWN_SCALE: f32 = 1.0;

/// Matrices that a checkpoint has in one tensor. At most one of the three shares is
/// less than the whole.
#[derive(Clone, Copy)]
pub(super) struct Matrices {
    pub count: RankShard,
    pub rows: RankShard,
    pub columns: RankShard,
    /// Whether the file has the axes of each matrix swapped.
    pub swapped: bool,
}

/// The format in which an FP8 weight is claimed.
#[derive(Clone, Copy)]
pub(super) struct Fp8 {
    scheme: Fp8Scheme,
    /// The suffix of the names of its scales, if the checkpoint has them.
    stored: Option<&'static str>,
}

impl WeightMap<'_> {
    /// Sets whether the following claims belong to the decoder. Only the decoder's projections are
    /// quantized at the user's request.
    pub fn set_in_decoder(&mut self, is_in_decoder: bool) {
        self.is_in_decoder = is_in_decoder;
    }

    /// Declares that the model's vision tower is supported only without quantization. If the file
    /// is not available, the tower is assumed to be unquantized.
    pub fn expect_plain_tower(&mut self) {
        self.is_tower_plain = true;
    }

    /// The format in which to claim the weights of modules that are computed as one; `None` if
    /// they are not quantized.
    pub(super) fn scheme_of<'n>(&self, modules: impl IntoIterator<Item = &'n str>) -> Result<Option<Fp8>, WeightError> {
        let found = match &self.formats {
            WeightFormats::Plain => None,
            WeightFormats::Made(scheme) => self.is_in_decoder.then_some(Fp8 { scheme: *scheme, stored: None }),
            WeightFormats::Stored(stored) => {
                let is_plain =
                    |name: &str| stored.plain.has(name) || !self.is_in_decoder && self.is_found_plain(name, stored);
                let (plain, rounded): (Vec<_>, Vec<_>) = modules.into_iter().partition(|name| is_plain(name));
                if let (Some(name), Some(other)) = (rounded.first(), plain.first()) {
                    let (name, other) = ((*name).to_owned(), (*other).to_owned());
                    return Err(WeightError::PartlyQuantized { name, other });
                }
                plain.is_empty().then_some(Fp8 { scheme: stored.scheme, stored: Some(stored.scale) })
            }
        };
        Ok(found)
    }

    /// Whether a module outside the decoder is unquantized although no list names it:
    /// the file has numbers of a wider type than FP8 and no scale. Lists of ModelOpt
    /// before 0.39 do not name the vision tower, and vLLM (0.26, `modelopt.py`) treats
    /// the tower as unquantized. If the file is not available, this is assumed only for
    /// ModelOpt and after [`expect_plain_tower`](Self::expect_plain_tower).
    fn is_found_plain(&self, module: &str, stored: &StoredFp8) -> bool {
        let weight = format!("{module}.weight");
        if self.checkpoint.tensors.random(&weight, 0).is_some() {
            return self.is_tower_plain || stored.method == QuantizationMethod::ModelOpt;
        }
        let is_wide =
            self.has(&weight) && self.checkpoint.tensor(&weight).is_ok_and(|it| it.dtype != TensorType::F8E4M3);
        is_wide && !self.has(&format!("{module}.{}", stored.scale))
    }

    /// Refuses FP8 weights for which the target has no kernels, unless the map is only for a plan.
    fn check_served(&self, data: &Tensor<'_>, fp8: Fp8, height: usize) -> Result<(), WeightError> {
        let block_rows = (fp8.scheme.weights == ScaledBy::Block).then_some(height);
        if self.is_dry() || self.target.has_fp8([data.rows(), data.columns()], block_rows) {
            return Ok(());
        }
        let has_any = self.target.has_fp8([FP8_BLOCK, FP8_BLOCK], None);
        let what = if has_any { "FP8 weights of this shape" } else { "FP8 weights" };
        Err(WeightError::Unserved { what, target: self.target.name() })
    }

    /// Returns the weights of experts. Refuses FP8 weights for which the target has no kernels,
    /// unless the map is only for a plan.
    pub(super) fn served_experts(
        &self,
        experts: usize,
        both: [Weight<'static>; 2],
    ) -> Result<[Weight<'static>; 2], WeightError> {
        let is_served = |weight: &Weight<'_>| {
            let block_rows = match &weight.scales {
                WeightScales::Unquantized => return true,
                WeightScales::Blocks { height, .. } => Some(*height),
                WeightScales::Rows { .. } => None,
            };
            self.target.has_fp8_experts([weight.rows() / experts, weight.columns()], block_rows)
        };
        if self.is_dry() || both.iter().all(is_served) {
            return Ok(both);
        }
        let has_any = self.target.has_fp8_experts([FP8_BLOCK, FP8_BLOCK], None);
        let what = if has_any { "FP8 weights of experts of this shape" } else { "FP8 weights of experts" };
        Err(WeightError::Unserved { what, target: self.target.name() })
    }

    /// The type in which to store a weight that has the type `found` in the file.
    pub(super) fn kept(&self, name: &str, found: DType, fp8: Option<Fp8>) -> Result<DType, WeightError> {
        let is_stored = fp8.is_some_and(|fp8| fp8.stored.is_some());
        match (found == DType::F8E4M3) == is_stored {
            true if fp8.is_some() => Ok(DType::F8E4M3),
            true => Ok(self.target.weight(found)),
            false => Err(self.other_format(name, is_stored, found)),
        }
    }

    /// The error for a tensor that is FP8 and should not be FP8, or that is not FP8 and should be.
    pub(super) fn other_format(&self, name: &str, is_fp8: bool, found: DType) -> WeightError {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let (name, says_fp8) = (name.to_owned(), "quantization_config says that it is FP8");
        match &self.formats {
            _ if is_fp8 => WeightError::Format { name, expected: says_fp8, found },
            WeightFormats::Stored(stored) if !stored.plain.has(module) => WeightError::AlwaysPlain { name, found },
            _ => WeightError::Format { name, expected: "quantization_config says that it is not quantized", found },
        }
    }

    /// Claims `module.weight` of the given modules, each with its number of rows, as one
    /// weight with concatenated rows. Fixed scales of activations are read for `inputs`, which
    /// has at least these modules.
    pub(super) fn weight(
        &mut self,
        modules: &[(String, RankShard)],
        inputs: &[String],
        in_features: RankShard,
        place: WeightLayout,
    ) -> Result<Weight<'static>, WeightError> {
        let parts: Vec<_> = modules.iter().map(|(name, rows)| (format!("{name}.weight"), *rows)).collect();
        let shape = [modules.iter().map(|(_, rows)| rows.count).sum(), in_features.count];
        let scheme =
            if place.is_always_plain { None } else { self.scheme_of(modules.iter().map(|(name, _)| name.as_str()))? };
        let Some(fp8) = scheme else {
            return Ok(Weight::plain(self.stacked(&parts, shape.into(), in_features, place)?));
        };
        let first = self.copies.len();
        let place = WeightLayout { kept: Some(DType::F8E4M3), is_fp8: fp8.stored.is_some(), ..place };
        let data = self.stacked(&parts, shape.into(), in_features, place)?;
        let height = height(fp8, modules.iter().map(|(_, rows)| rows.count + place.rows));
        let across = if fp8.scheme.weights == ScaledBy::Block { data.columns().div_ceil(FP8_BLOCK) } else { 1 };
        self.align();
        let start = self.used;
        let mut copies = self.copies[first..].iter().enumerate().filter(|(_, copy)| copy.source.name().is_some());
        let data_copies: Vec<_> =
            modules.iter().map(|_| first + copies.next().expect("a copy for each part").0).collect();
        for ((module, rows), copy) in modules.iter().zip(data_copies) {
            let one = Matrices { count: 1.into(), rows: *rows, columns: in_features, swapped: false };
            let shape = [rows.count.div_ceil(height), across];
            match (&self.copies[copy].source, fp8.stored) {
                (WeightSource::Random(..), _) => {
                    self.scales(shape, WeightSource::Same(DEVIATION * LARGEST_DEVIATIONS / E4m3::MAX));
                }
                (_, Some(end)) => self.stored_scales(&format!("{module}.{end}"), fp8, one, height)?,
                (_, None) => self.made_scales(copy, fp8, shape, height, rows.count),
            }
            let more = (rows.count + place.rows).div_ceil(height) - shape[0];
            if more > 0 {
                self.scales([more, across], WeightSource::Zeros);
            }
        }
        let names = inputs.iter().map(|name| format!("{name}.input_scale"));
        self.scaled(data, fp8, start, height, names.collect())
    }

    /// Returns the weight for `data`, the matrices of the tensor `name`. That tensor must be
    /// the most recent claim.
    pub(super) fn scaled_matrices(
        &mut self,
        name: &str,
        data: Tensor<'static>,
        fp8: Option<Fp8>,
        matrices: Matrices,
    ) -> Result<Weight<'static>, WeightError> {
        let Some(fp8) = fp8 else { return Ok(Weight::plain(data)) };
        let copy = self.copies.len() - 1;
        let (count, of_each) = (matrices.count.count, matrices.rows.count);
        let height = height(fp8, (0..count).map(|_| of_each));
        let across = if fp8.scheme.weights == ScaledBy::Block { data.columns().div_ceil(FP8_BLOCK) } else { 1 };
        self.align();
        let start = self.used;
        match fp8.stored {
            Some(end) => {
                let [whole, short] = [end, end.trim_start_matches("weight_")].map(|end| format!("{name}_{end}"));
                self.stored_scales(if self.has(&whole) { &whole } else { &short }, fp8, matrices, height)?;
            }
            None => {
                let rows = (count * of_each).div_ceil(height);
                self.made_scales(copy, fp8, [rows, across], height, of_each);
            }
        }
        self.scaled(data, fp8, start, height, vec![format!("{name}_input_scale")])
    }

    /// Returns the weight for `data`. Its scales begin at `start` in the segment.
    fn scaled(
        &mut self,
        data: Tensor<'static>,
        fp8: Fp8,
        start: Bytes,
        height: usize,
        input_scales: Vec<String>,
    ) -> Result<Weight<'static>, WeightError> {
        self.check_served(&data, fp8, height)?;
        let to = self.address(start);
        let scales = match fp8.scheme.weights {
            ScaledBy::Block => {
                let shape = [data.rows().div_ceil(height), data.columns().div_ceil(FP8_BLOCK)];
                WeightScales::Blocks { scales: self.tensor_at(to, shape, DType::F32), height }
            }
            ScaledBy::Row | ScaledBy::Tensor => WeightScales::Rows {
                scales: self.tensor_at(to, [data.rows()], DType::F32),
                activations: match fp8.scheme.activations {
                    RoundedBy::Fixed => Some(self.input_scale(input_scales)?),
                    RoundedBy::Group | RoundedBy::Row => None,
                },
            },
        };
        Ok(Weight { data, scales })
    }

    /// Claims scales `[rows, columns]` with values from `source`.
    fn scales(&mut self, [rows, columns]: [usize; 2], source: WeightSource) {
        self.place(DType::F32.bytes(rows * columns), (columns, 0), DType::F32, source);
    }

    /// Claims scales that are computed while the rows of copy number `copy` are read.
    fn made_scales(&mut self, copy: usize, fp8: Fp8, shape: [usize; 2], height: usize, matrix_rows: usize) {
        let by = fp8.scheme.weights;
        let height = if by == ScaledBy::Tensor { matrix_rows } else { height };
        self.copies[copy].rounded = Some(MadeScales { to: self.address(self.used), by, height });
        self.scales(shape, WeightSource::Made);
    }

    /// Claims the checkpoint's scales `name` of matrices, for blocks of `height` rows.
    fn stored_scales(&mut self, name: &str, fp8: Fp8, of: Matrices, height: usize) -> Result<(), WeightError> {
        let found = self.checkpoint.tensor(name)?;
        let (down, across, times, rows) = match fp8.scheme.weights {
            ScaledBy::Block => {
                let block = (FP8_BLOCK, "blocks with one scale");
                let (down, across) = (whole_units(name, of.rows, block)?, whole_units(name, of.columns, block)?);
                (down, across, FP8_BLOCK / height, of.rows.count.div_ceil(height))
            }
            ScaledBy::Row => (of.rows, 1.into(), 1, of.rows.count),
            ScaledBy::Tensor => (1.into(), 1.into(), of.rows.count, of.rows.count),
        };
        let swapped = of.swapped && fp8.scheme.weights == ScaledBy::Block;
        let [one, other] = if swapped { [across, down] } else { [down, across] };
        check_shape(name, &found, of.count.whole, [one.whole, other.whole])?;
        if found.dtype == TensorType::F8E4M3 {
            let (name, expected) = (name.to_owned(), "it holds scales");
            return Err(WeightError::Format { name, expected, found: DType::F8E4M3 });
        }
        let is_above_zero = fp8.scheme.weights == ScaledBy::Tensor;
        let (count, shape) = (of.count.count, [down.count, across.count]);
        let spread = SpreadScales { count, shape, swapped, times, rows, is_above_zero };
        self.scales([count * rows, across.count], WeightSource::WeightScales(name.to_owned(), spread));
        // A tensor of several matrices is cut between matrices only.
        let lines = if of.count.whole == 1 { one } else { of.count.times(one.whole) };
        if let Some(copy) = self.copies.last_mut() {
            copy.cut = Cut::of(lines, other, &[lines.whole, other.whole]);
        }
        Ok(())
    }

    /// The largest scale of activations among the parts of a GEMM, which is used for all of these
    /// parts, as in vLLM. The scales of all experts are included, even if other ranks hold them, so
    /// that replies do not depend on the number of ranks.
    fn input_scale(&mut self, names: Vec<String>) -> Result<f32, WeightError> {
        let mut largest = 0.0f32;
        for name in names {
            if self.checkpoint.tensors.random(&name, 0).is_some() {
                return Ok(UNKNOWN_SCALE);
            }
            let found = self.checkpoint.tensor(&name)?;
            check_shape(&name, &found, 1, [1, 1])?;
            let value = numbers(&found)[0];
            check_scale(&name, value, ScaleOf::Activations)?;
            largest = largest.max(value);
            self.read.push(name);
        }
        Ok(largest)
    }

    /// Claims the scales of a layer's cached keys and values, `[2, kv_heads.count]` f32, if the
    /// cache is FP8. The scales are from the checkpoint, which has one scale for all heads or one
    /// scale for each head. For a layer without scales, the result is 1, as in vLLM.
    pub fn cache_scales(
        &mut self,
        attention: &str,
        kv_heads: RankShard,
    ) -> Result<Option<Tensor<'static>>, WeightError> {
        if self.checkpoint.cache() != CacheFormat::Fp8 {
            return Ok(None);
        }
        if !self.is_dry() && !self.target.has_fp8_cache() {
            return Err(WeightError::Unserved { what: "FP8 keys and values", target: self.target.name() });
        }
        let names = ["k", "v"].map(|part| {
            [
                format!("{attention}.{part}_scale"),             // of compressed-tensors
                format!("{attention}.{part}_proj.{part}_scale"), // of ModelOpt
                format!("{attention}.{part}_proj.output_scale"), // of both, in early releases
                format!("{attention}.qkv_proj.{part}_scale"),    // of llm-compressor (vLLM's issue 25047)
                format!("{attention}.attn.{part}_scale"),        // the name in vLLM
            ]
        });
        let both = format!("{attention}.kv_scale"); // of AutoFP8 and Quark
        let scales = if names.iter().flatten().any(|name| self.has(name)) {
            let [keys, values] = names;
            self.read.push(both);
            [self.stored_cache_scales(keys, kv_heads)?, self.stored_cache_scales(values, kv_heads)?].concat()
        } else if self.has(&both) {
            vec![self.input_scale(vec![both])?; 2 * kv_heads.count]
        } else {
            vec![1.0; 2 * kv_heads.count]
        };
        Ok(Some(self.constant(&scales).into_shape([2, kv_heads.count])))
    }

    /// The checkpoint's scale of each head, under the name that the checkpoint uses.
    fn stored_cache_scales(&mut self, names: [String; 5], kv_heads: RankShard) -> Result<Vec<f32>, WeightError> {
        let [_, of_modelopt, ..] = &names;
        let name = names.iter().find(|name| self.has(name)).unwrap_or(of_modelopt).clone();
        let found = self.checkpoint.tensor(&name)?;
        let scales = numbers(&found);
        if scales.len() != 1 && scales.len() != kv_heads.whole {
            return Err(WeightError::Shape { name, expected: vec![kv_heads.whole], found: found.shape.to_vec() });
        }
        scales.iter().try_for_each(|scale| check_scale(&name, *scale, ScaleOf::Activations))?;
        self.read.push(name);
        Ok(kv_heads.range().map(|head| scales[head % scales.len()]).collect())
    }

    /// Whether a tensor is a scale of keys or values that is not needed, because the cache is not
    /// FP8 or because the keys and values belong to a vision tower and are not cached.
    pub(super) fn is_unread_cache_scale(&self, name: &str) -> bool {
        const ENDS: [&str; 5] = [".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale", ".kv_scale"];
        let is_unread = self.checkpoint.cache() == CacheFormat::Plain || self.outside.contains(root(name));
        is_unread && ENDS.iter().any(|end| name.ends_with(end))
    }

    /// Refuses values that are not valid scales. Call this after the last claim. It
    /// reads the checkpoint's scales.
    ///
    /// # Errors
    /// [`WeightError::Scale`].
    pub fn refuse_bad_scales(&self) -> Result<(), WeightError> {
        for copy in self.copies() {
            if let WeightSource::WeightScales(name, spread) = &copy.source {
                let found = numbers(&self.checkpoint.tensor(name)?);
                let of = if spread.is_above_zero { ScaleOf::Matrix } else { ScaleOf::Parts };
                found.into_iter().try_for_each(|value| check_scale(name, value, of))?;
            }
        }
        Ok(())
    }
}

/// Number of rows of a scale block. Each part of a weight must begin with a block, so the result is
/// the largest power of two, up to 128, that divides the start of every part. Usually all parts
/// have whole blocks of 128 rows.
fn height(fp8: Fp8, parts: impl Iterator<Item = usize>) -> usize {
    if fp8.scheme.weights != ScaledBy::Block {
        return 1;
    }
    let parts: Vec<usize> = parts.collect();
    let begun = parts.len().saturating_sub(1);
    let starts = parts[..begun].iter().scan(0, |start, rows| {
        *start += rows;
        Some(*start)
    });
    starts.fold(FP8_BLOCK, |height, start| height.min(1 << start.trailing_zeros().min(7)))
}

/// Whether a tensor is a scale of queries or of probabilities, which attention in this
/// project does not quantize.
pub(super) fn is_attention_scale(name: &str) -> bool {
    [".q_scale", ".q_proj.output_scale", ".prob_scale", ".prob_output_scale"].iter().any(|end| name.ends_with(end))
}

/// Checks that scales are `count` matrices of `shape`. Axes with one element may be left out.
fn check_shape(name: &str, found: &TensorInfo<'_>, count: usize, shape: [usize; 2]) -> Result<(), WeightError> {
    let inner = |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|extent| *extent != 1).collect() };
    let expected = [count, shape[0], shape[1]];
    if inner(found.shape) == inner(&expected) {
        return Ok(());
    }
    let expected = expected[usize::from(count == 1)..].to_vec();
    Err(WeightError::ScaleShape { name: name.to_owned(), expected, found: found.shape.to_vec() })
}

/// The kind of numbers that a scale belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScaleOf {
    /// Blocks or output channels of weights. Some of them may have only zeros.
    Parts,
    Matrix,
    /// Activations, keys or values, which are divided by the scale.
    Activations,
}

/// Refuses a number that is not a valid scale. The largest E4M3 number times a scale must be finite
/// in f32. A scale that activations are divided by must be a normal number, because the quotients
/// would otherwise become infinite.
fn check_scale(name: &str, value: f32, of: ScaleOf) -> Result<(), WeightError> {
    let is_scale = value.is_finite() && (value > 0.0 || value == 0.0 && of == ScaleOf::Parts);
    let expected = match of {
        ScaleOf::Parts if !is_scale => "a number of at least 0",
        _ if !is_scale => "a number above 0",
        _ if !(value * E4m3::MAX).is_finite() => "a number that fits f32 when multiplied by 448",
        ScaleOf::Activations if value < f32::MIN_POSITIVE => "at least 1.18e-38, the smallest normal number",
        _ => return Ok(()),
    };
    Err(WeightError::Scale { name: name.to_owned(), value, expected })
}

/// The scales of `found` in the order of the weight's blocks.
pub(crate) fn spread(found: &TensorInfo<'_>, how: SpreadScales) -> Vec<f32> {
    let (all, [down, across]) = (numbers(found), how.shape);
    let mut out = Vec::with_capacity(how.count * how.rows * across);
    for matrix in all.chunks_exact(down * across) {
        for row in 0..how.rows {
            let row = row / how.times;
            let at = |column: usize| if how.swapped { column * down + row } else { row * across + column };
            out.extend((0..across).map(|column| matrix[at(column)]));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_high_as_the_places_where_parts_begin_allow() {
        let fp8 = Fp8 { scheme: Fp8Scheme::BLOCK, stored: None };
        for (parts, expected) in [
            (&[300][..], 128),
            (&[512, 128, 128], 128),
            (&[256, 320, 77], 64),
            (&[64, 16, 16], 16),
            (&[9, 9], 1),
            (&[768; 200], 128),
        ] {
            assert_eq!(height(fp8, parts.iter().copied()), expected, "{parts:?}");
        }
        assert_eq!(height(Fp8 { scheme: Fp8Scheme::CHANNEL, stored: None }, [256, 256].into_iter()), 1);
    }
}
