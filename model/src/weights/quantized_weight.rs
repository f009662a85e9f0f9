//! Claims of quantized weights: elements and scales. The scales are either in the checkpoint or
//! computed while the weights are read.

use bursar_budgets::Address;
use bursar_kernels::{DType, Quantization, RankShard, ScaledBy, Tensor, Weight, WeightScales};

use super::{
    ComputedScales, SpreadScales, WeightCopy, WeightError, WeightMap, WeightSource,
    cut::{Cut, whole_units},
    map::WeightLayout,
    module_formats::Quantized,
    quantized_numbers::{RANDOM_SCALE, ScaleOf, check_scale},
    scaling::numbers,
};
use crate::checkpoint::{PackedMatrix, TensorInfo, quantization::unsupported_weight};

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

impl WeightMap<'_> {
    /// Claims `module.weight` of the given modules, each with its number of rows, as one weight
    /// with concatenated rows. `inputs` names the modules whose fixed activation scales are read:
    /// the modules in `modules`, and possibly others.
    pub(super) fn weight(
        &mut self,
        modules: &[(String, RankShard)],
        inputs: &[String],
        in_features: RankShard,
        place: WeightLayout,
    ) -> Result<Weight<'static>, WeightError> {
        let parts: Vec<_> = modules.iter().map(|(name, rows)| (format!("{name}.weight"), *rows)).collect();
        let shape = [modules.iter().map(|(_, rows)| rows.count).sum(), in_features.count];
        let names = modules.iter().map(|(name, _)| name.as_str());
        let quantized = if place.is_always_plain { None } else { self.formats.of(names)? };
        if let Some(weight) = self.in_int4(&parts, in_features, place)? {
            return Ok(weight);
        }
        // A weight of a 4-bit scheme that `in_int4` did not claim is not quantized: it has no whole
        // groups or blocks, or its operation has no kernels for 4-bit integers.
        let quantized = quantized.filter(|quantized| !quantized.scheme.is_int4());
        let Some(quantized) = quantized else {
            if !place.is_always_plain
                && place.kept.is_none()
                && let Some(weight) = self.in_blocks(&parts, in_features, place.rows)?
            {
                return Ok(weight);
            }
            return Ok(Weight::plain(self.stacked(&parts, shape.into(), in_features, place)?));
        };
        let (first, scheme) = (self.copies().len(), quantized.scheme);
        let place =
            WeightLayout { kept: Some(scheme.elements), is_stored_quantized: quantized.stored.is_some(), ..place };
        let data = self.stacked(&parts, shape.into(), in_features, place)?;
        let height = scheme.fused_block_rows(modules.iter().map(|(_, rows)| rows.count + place.rows));
        let across = scheme.weights.scales_of_row(data.columns());
        self.segment.align();
        let start = self.segment.end();
        let mut copies = self.copies()[first..].iter().enumerate().filter(|(_, copy)| copy.source.name().is_some());
        let data_copies: Vec<_> =
            modules.iter().map(|_| first + copies.next().expect("each part has a copy").0).collect();
        for ((module, rows), copy) in modules.iter().zip(data_copies) {
            let one = Matrices { count: 1.into(), rows: *rows, columns: in_features, swapped: false };
            let shape = [rows.count.div_ceil(height), across];
            match (&self.copies()[copy].source, quantized.stored) {
                (WeightSource::Random(..), _) => {
                    self.scales(shape, WeightSource::Same(RANDOM_SCALE), None);
                }
                (_, Some(end)) => self.stored_scales(&format!("{module}.{end}"), quantized, one, height)?,
                (_, None) => self.made_scales(copy, quantized, shape, height, rows.count),
            }
            let more = (rows.count + place.rows).div_ceil(height) - shape[0];
            if more > 0 {
                self.scales([more, across], WeightSource::Zeros, None);
            }
        }
        let names = inputs.iter().map(|name| format!("{name}.input_scale"));
        self.scaled(data, quantized, start, height, names.collect())
    }

    /// Returns the weight for `data`, the matrices of the tensor `name`. That tensor must be
    /// the most recent claim.
    pub(super) fn scaled_matrices(
        &mut self,
        name: &str,
        data: Tensor<'static>,
        quantized: Option<Quantized>,
        matrices: Matrices,
    ) -> Result<Weight<'static>, WeightError> {
        let Some(quantized) = quantized else { return Ok(Weight::plain(data)) };
        let copy = self.copies().len() - 1;
        let (count, of_each) = (matrices.count.count, matrices.rows.count);
        let height = quantized.scheme.fused_block_rows((0..count).map(|_| of_each));
        let across = quantized.scheme.weights.scales_of_row(data.columns());
        self.segment.align();
        let start = self.segment.end();
        match quantized.stored {
            Some(end) => {
                let [whole, short] = [end, end.trim_start_matches("weight_")].map(|end| format!("{name}_{end}"));
                self.stored_scales(if self.has(&whole) { &whole } else { &short }, quantized, matrices, height)?;
            }
            None => {
                let rows = (count * of_each).div_ceil(height);
                self.made_scales(copy, quantized, [rows, across], height, of_each);
            }
        }
        self.scaled(data, quantized, start, height, vec![format!("{name}_input_scale")])
    }

    /// Returns the weight with the elements `data` and the scales that begin at `start` in the
    /// segment.
    fn scaled(
        &mut self,
        data: Tensor<'static>,
        quantized: Quantized,
        start: Address,
        height: usize,
        input_scales: Vec<String>,
    ) -> Result<Weight<'static>, WeightError> {
        let (scheme, shape) = (quantized.scheme.in_memory(height), [data.rows(), data.columns()]);
        self.refuse_unsupported(unsupported_weight(&self.target, scheme, shape))?;
        let factors = self.segment.tensor(start, scheme.weights.shape(shape), DType::F32);
        let is_fixed = scheme.activations == Some(Quantization::Fixed(()));
        let input_scale = if is_fixed { self.input_scale(input_scales)? } else { UNKNOWN_SCALE };
        let activations = scheme.activations.map(|quantized| quantized.map(|()| input_scale));
        let scales = Some(WeightScales { factors, zero_points: None, by: scheme.weights, activations });
        Ok(Weight { scales, ..Weight::plain(data) })
    }

    /// Claims scales `[rows, columns]` with values from `source`, of which `cut` is read.
    fn scales(&mut self, [rows, columns]: [usize; 2], source: WeightSource, cut: Option<Cut>) {
        let copy = WeightCopy::of(source, DType::F32, (columns, 0), DType::F32.bytes(rows * columns));
        self.segment.place(WeightCopy { cut, ..copy });
    }

    /// Claims scales that are computed while the rows of copy number `copy` are read.
    fn made_scales(&mut self, copy: usize, quantized: Quantized, shape: [usize; 2], height: usize, matrix_rows: usize) {
        let by = quantized.scheme.weights;
        let height = if by == ScaledBy::Tensor { matrix_rows } else { height };
        self.segment.quantize(copy, ComputedScales { to: self.segment.end(), by, height });
        self.scales(shape, WeightSource::Made, None);
    }

    /// Claims the checkpoint's tensor `name`, which has the scales of matrices. The claimed memory
    /// has one scale for each block of `height` rows.
    fn stored_scales(
        &mut self,
        name: &str,
        quantized: Quantized,
        of: Matrices,
        height: usize,
    ) -> Result<(), WeightError> {
        let found = self.checkpoint.tensor(name)?;
        let (down, across, times, rows) = match quantized.scheme.weights {
            ScaledBy::Block { rows, columns } => {
                let units = |of, extent| whole_units(name, of, (extent, "blocks with one scale"));
                let (down, across) = (units(of.rows, rows)?, units(of.columns, columns)?);
                (down, across, rows / height, of.rows.count.div_ceil(height))
            }
            ScaledBy::Row => (of.rows, 1.into(), 1, of.rows.count),
            ScaledBy::Tensor => (1.into(), 1.into(), of.rows.count, of.rows.count),
        };
        let swapped = of.swapped && quantized.scheme.weights.block_rows().is_some();
        let [one, other] = if swapped { [across, down] } else { [down, across] };
        check_shape(name, &found, of.count.whole, [one.whole, other.whole])?;
        let dtype = DType::from(found.dtype);
        if dtype.needs_scales() {
            let (name, expected, found) = (name.to_owned(), "it holds scales", dtype);
            return Err(WeightError::Format { name, expected, found });
        }
        let is_above_zero = quantized.scheme.weights == ScaledBy::Tensor;
        let (count, shape) = (of.count.count, [down.count, across.count]);
        let spread = SpreadScales { count, shape, swapped, times, rows, is_above_zero };
        // A tensor of several matrices is cut between matrices only.
        let lines = if of.count.whole == 1 { one } else { of.count.times(one.whole) };
        let cut = Cut::of(lines, other, &[lines.whole, other.whole]);
        self.scales([count * rows, across.count], WeightSource::WeightScales(name.to_owned(), spread), cut);
        Ok(())
    }

    /// The largest scale of activations among the parts of a GEMM, which is used for all of these
    /// parts, as in vLLM. The scales of all experts are included, even if other ranks hold them, so
    /// that replies do not depend on the number of ranks.
    pub(super) fn input_scale(&mut self, names: Vec<String>) -> Result<f32, WeightError> {
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
            self.names.mark_read(name);
        }
        Ok(largest)
    }

    /// Reads the checkpoint's scales, and refuses values that are not valid. Call this after the
    /// last claim.
    ///
    /// # Errors
    /// [`WeightError::Scale`] and [`WeightError::Group`].
    pub fn refuse_bad_scales(&self) -> Result<(), WeightError> {
        for copy in self.copies() {
            if let WeightSource::Tensor(name) = &copy.source
                && self.checkpoint.tensors.is_packed(name)
                && let Some(packed) = &self.checkpoint.tensor(name)?.packed
            {
                self.check_packed_weight(name, packed)?;
            }
            if let WeightSource::WeightScales(name, spread) = &copy.source {
                let found = numbers(&self.checkpoint.tensor(name)?);
                let of = if spread.is_above_zero { ScaleOf::Matrix } else { ScaleOf::Parts };
                found.into_iter().try_for_each(|value| check_scale(name, value, of))?;
            }
        }
        Ok(())
    }

    /// Refuses a packed weight that has a column whose group does not exist, or a scale that is not
    /// valid.
    fn check_packed_weight(&self, name: &str, packed: &PackedMatrix<'_>) -> Result<(), WeightError> {
        if let Some((column, group)) = packed.bad_group() {
            return Err(WeightError::Group { name: name.to_owned(), column, group, groups: packed.groups() });
        }
        match self.checkpoint.tensors.bad_scale(name) {
            Some((name, value, expected)) => Err(WeightError::Scale { name, value, expected }),
            None => Ok(()),
        }
    }
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
