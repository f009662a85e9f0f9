//! The map of a weight segment: the place of each tensor.

use std::collections::BTreeSet;

use bursar_budgets::{Address, Bytes};
use bursar_kernels::{DType, Shape, Target, Tensor, Weight};
use thiserror::Error;

use super::{Linear, fp8_claims::Matrices};
use crate::checkpoint::{Checkpoint, RandomTensor, ScaledBy, TensorType, WeightFormats, error::CheckpointError};

/// Each tensor starts at a multiple of this many bytes, as tensor-core loads require.
const ALIGNMENT: Bytes = Bytes(256);

/// The base address of a map that only measures. It is never read or written.
const NOWHERE: Address = Address(1 << 40);

/// A tensor of the checkpoint that does not match the model's configuration.
#[derive(Debug, Error)]
pub enum WeightError {
    /// It is missing, or the file is broken.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its shape differs from the configuration's.
    #[error("tensor {name} has shape {found:?}, but config.json asks for {expected:?}")]
    Shape {
        /// The tensor's name.
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// The file has tensors that the model has no place for: file and configuration are of different models.
    #[error("config.json has no place for {count} tensors of the checkpoint: {}", .first.join(", "))]
    Extra {
        /// The number of such tensors.
        count: usize,
        /// The first three names, in alphabetical order.
        first: Vec<String>,
    },
    /// The configuration ties two tensors, but the file has both with different values.
    #[error("config.json ties {name} to {twin}, but the checkpoint has both and they are not the same")]
    Untied {
        /// The tensor that would not be read.
        name: String,
        /// The tensor that would be read in its place.
        twin: String,
    },
    /// The target cannot compute what the model consists of.
    #[error("{what} are not computed on {target} yet")]
    Unserved {
        /// The part of the model.
        what: &'static str,
        /// The target's name.
        target: &'static str,
    },
    /// A tensor's type is not what the checkpoint's configuration of FP8 says.
    #[error("tensor {name} holds {found}, but {expected}")]
    Format {
        /// The tensor's name.
        name: String,
        /// What the configuration says, in words.
        expected: &'static str,
        /// The type in the file.
        found: DType,
    },
    /// Some of the projections that are computed together are FP8, others plain.
    #[error("by the checkpoint's quantization_config {name} is FP8 and {other} plain, but they are computed as one")]
    PartlyQuantized {
        /// One that is FP8.
        name: String,
        /// One that is not.
        other: String,
    },
    /// A scale of FP8 numbers that cannot be one.
    #[error("{name} holds the scale {value}, which is not {expected}")]
    Scale {
        /// The tensor's name.
        name: String,
        /// The number.
        value: f32,
        /// What a scale is, in words.
        expected: &'static str,
    },
    /// Tensors that are fused have different element types.
    #[error("tensor {name} holds {found}, but its neighbours hold {expected}")]
    Mixed {
        /// The tensor's name.
        name: String,
        /// The first neighbour's type.
        expected: DType,
        /// This tensor's type.
        found: DType,
    },
}

/// How many names an error about extra tensors shows.
const EXTRA_SHOWN: usize = 3;

/// Buffers that older versions of transformers saved with the weights. They are computed from the configuration here,
/// as transformers itself does now.
const BUFFERS: [&str; 2] = [".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq"];

/// A copy to one place of the segment.
#[derive(Clone, Debug)]
pub struct WeightCopy {
    /// The destination address.
    pub to: Address,
    /// Bytes at the destination.
    pub bytes: Bytes,
    /// Elements of a row, and zeros after each row.
    pub row: (usize, usize),
    /// The element type at the destination, to which the file's elements are rounded.
    pub kept: DType,
    /// Where the values come from.
    pub source: WeightSource,
    /// The checkpoint's vector that rows are multiplied by.
    pub scale: Option<String>,
    /// The file has each matrix of the tensor with its axes swapped.
    pub swapped: bool,
    /// The elements are rounded to FP8 while they are read.
    pub rounded: Option<MadeScales>,
}

/// Scales that are made while weights are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MadeScales {
    /// Where those of the copy's first row stand.
    pub to: Address,
    /// What has one.
    pub by: ScaledBy,
    /// Rows of a block, or of a matrix that has one scale for each row to hold.
    pub height: usize,
}

/// The source of a copy.
#[derive(Clone, Debug)]
pub enum WeightSource {
    /// The checkpoint's tensor with this name.
    Tensor(String),
    /// The random checkpoint's tensor with this name.
    Random(String, RandomTensor),
    /// Numbers that the configuration implies.
    Constant(Vec<f32>),
    /// Zero padding between tensors.
    Zeros,
    /// The checkpoint's scales of FP8 numbers with this name.
    Scales(String, SpreadScales),
    /// The same number everywhere.
    Same(f32),
    /// Written together with the rows that it scales.
    Made,
}

/// How a checkpoint's scales become those of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpreadScales {
    /// Matrices of scales that stand one after the other.
    pub count: usize,
    /// Rows and columns of each in the model's order.
    pub shape: [usize; 2],
    /// The file has the two axes of each swapped.
    pub swapped: bool,
    /// How often each row is repeated.
    pub times: usize,
    /// Rows of each after that; the last may be repeated less often.
    pub rows: usize,
    /// Whether zero is no scale.
    pub is_above_zero: bool,
}

/// How a tensor is kept.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    /// Rows of zeros after those of each part, which the target needs.
    pub rows: usize,
    /// Columns of zeros after each row.
    pub columns: usize,
    /// The element type, if it is not the target's for weights.
    pub kept: Option<DType>,
    /// Whether the file has FP8 numbers.
    pub is_fp8: bool,
}

impl WeightSource {
    /// The tensor's name in the checkpoint, if it is from there.
    pub fn name(&self) -> Option<&str> {
        match self {
            WeightSource::Tensor(name) | WeightSource::Random(name, _) | WeightSource::Scales(name, _) => Some(name),
            WeightSource::Constant(_) | WeightSource::Zeros | WeightSource::Same(_) | WeightSource::Made => None,
        }
    }
}

/// Assigns places in the segment, one claim after the other.
pub struct WeightMap<'c> {
    pub(super) checkpoint: &'c Checkpoint,
    pub(super) target: Target,
    pub(super) formats: WeightFormats,
    /// Whether claims are the decoder's, whose projections a user may want rounded.
    pub(super) is_in_decoder: bool,
    base: Address,
    pub(super) used: Bytes,
    pub(super) copies: Vec<WeightCopy>,
    /// Tensors that need not be read, each with the tensor that is read in its place.
    twins: Vec<(String, String)>,
    /// Tensors that are multiplied into others, with their elements.
    folded: Vec<(String, usize)>,
    /// Tensors of one number that was read while claiming.
    pub(super) read: Vec<String>,
}

impl<'c> WeightMap<'c> {
    /// A map that only measures. Its tensors are for planning and must never be computed with.
    pub fn dry(checkpoint: &'c Checkpoint, target: Target, formats: WeightFormats) -> Self {
        WeightMap {
            checkpoint,
            target,
            formats,
            is_in_decoder: false,
            base: NOWHERE,
            used: Bytes(0),
            copies: Vec::new(),
            twins: Vec::new(),
            folded: Vec::new(),
            read: Vec::new(),
        }
    }

    /// A map of the segment that starts at `base`.
    ///
    /// # Safety
    /// `base` must be the start of at least [`used`](WeightMap::used) bytes of backed memory, as counted after the last
    /// claim. The memory must stay backed for as long as a tensor of the map is used.
    pub unsafe fn at(checkpoint: &'c Checkpoint, target: Target, formats: WeightFormats, base: Address) -> Self {
        WeightMap { base, ..WeightMap::dry(checkpoint, target, formats) }
    }

    /// Claims one tensor.
    pub fn tensor(&mut self, name: &str, shape: impl Into<Shape>) -> Result<Tensor<'static>, WeightError> {
        let shape = shape.into();
        self.stacked(&[(name.to_owned(), shape.rows())], shape, Place::default())
    }

    /// Claims a table of `vocabulary` rows that is an output projection. The target may add rows of zeros.
    pub fn vocabulary(&mut self, name: &str, vocabulary: usize, hidden: usize) -> Result<Tensor<'static>, WeightError> {
        let rows = self.target.padded_vocabulary(vocabulary) - vocabulary;
        self.stacked(&[(name.to_owned(), vocabulary)], [vocabulary, hidden].into(), Place { rows, ..Place::default() })
    }

    /// Claims a projection `name.weight` `[out_features, in_features]`, and `name.bias` `[out_features]` if `bias`.
    pub fn linear(
        &mut self,
        name: &str,
        out_features: usize,
        in_features: usize,
        bias: bool,
    ) -> Result<Linear, WeightError> {
        self.fused_linear(&[(name, out_features)], in_features, bias)
    }

    /// As [`linear`](Self::linear) with a bias, where output `i` is multiplied by element `i` of the tensor `scale`
    /// `[out_features]`. The product is taken while loading, in f32, and rounded once to the type of activations.
    pub fn scaled_linear(
        &mut self,
        name: &str,
        scale: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<Linear, WeightError> {
        let (_, source) = self.part(scale, out_features, [out_features].into())?;
        self.folded.push((scale.to_owned(), out_features));
        let first = self.copies.len();
        if self.scheme_of([name])?.is_some() {
            let what = "FP8 weights whose outputs are scaled";
            return Err(WeightError::Unserved { what, target: self.target.name() });
        }
        let place = Place { kept: Some(self.target.activation()), ..Place::default() };
        let linear = self.padded_linear(&[(name, out_features)], in_features, true, place)?;
        // What is drawn needs no scale.
        if let WeightSource::Tensor(scale) = source {
            self.copies[first..].iter_mut().for_each(|copy| copy.scale = Some(scale.clone()));
        }
        Ok(linear)
    }

    /// Claims projections of the same input as one, their rows concatenated.
    pub fn fused_linear(
        &mut self,
        parts: &[(&str, usize)],
        in_features: usize,
        bias: bool,
    ) -> Result<Linear, WeightError> {
        self.padded_linear(parts, in_features, bias, Place::default())
    }

    /// Claims the projections `gate` and `up` `[intermediate, hidden]` as one layer, and `down`
    /// `[hidden, intermediate]`. The target may pad `intermediate`; the added rows and columns are zeros.
    pub fn gated(
        &mut self,
        [gate, up, down]: [&str; 3],
        (hidden, intermediate): (usize, usize),
        bias: bool,
    ) -> Result<[Linear; 2], WeightError> {
        let more = self.target.padded_features(intermediate) - intermediate;
        let (of_gate, of_down) =
            (Place { rows: more, ..Place::default() }, Place { columns: more, ..Place::default() });
        Ok([
            self.padded_linear(&[(gate, intermediate), (up, intermediate)], hidden, bias, of_gate)?,
            self.padded_linear(&[(down, hidden)], intermediate, bias, of_down)?,
        ])
    }

    /// Claims the gated MLPs of `experts` experts: gate and up of each after the other, `[experts * 2 * intermediate,
    /// hidden]`, and down, `[experts * hidden, intermediate]`.
    ///
    /// A checkpoint has each expert's projections under their own names, `name.{expert}.gate_proj.weight` and so on, or
    /// all in `name.gate_up_proj` and `name.down_proj`, where the two axes of a matrix may be swapped: Qwen3-VL was
    /// released as `[experts, in, out]`, and transformers swaps them as long as the shape does not fit (5.17,
    /// `conversion_mapping.py`).
    ///
    /// # Errors
    /// A tensor is missing, or has another shape.
    pub fn experts(
        &mut self,
        name: &str,
        experts: usize,
        (hidden, intermediate): (usize, usize),
    ) -> Result<[Weight<'static>; 2], WeightError> {
        let fused = [("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)];
        let fused = fused.map(|(part, rows, columns)| (format!("{name}.{part}"), rows, columns));
        if self.has(&fused[0].0) {
            // One whose sides are equal stands as the other does.
            let mut is_swapped = false;
            for (name, rows, columns) in &fused {
                is_swapped |= rows != columns && *self.checkpoint.tensor(name)?.shape == [experts, *columns, *rows];
            }
            let [gate_up, down] = &fused;
            let both = [self.matrices(gate_up, experts, is_swapped)?, self.matrices(down, experts, is_swapped)?];
            return self.served_experts(experts, both);
        }
        let of = |expert: usize, part: &str, rows: usize| (format!("{name}.{expert}.{part}_proj"), rows);
        let gate_up = (0..experts).flat_map(|expert| ["gate", "up"].map(|part| of(expert, part, intermediate)));
        let down = (0..experts).map(|expert| of(expert, "down", hidden));
        let (gate_up, down): (Vec<_>, Vec<_>) = (gate_up.collect(), down.collect());
        let both =
            [self.weight(&gate_up, hidden, Place::default())?, self.weight(&down, intermediate, Place::default())?];
        self.served_experts(experts, both)
    }

    /// Claims a tensor of `count` matrices `[rows, columns]` as one matrix, all below each other. The file has their axes
    /// swapped or not.
    fn matrices(
        &mut self,
        (name, rows, columns): &(String, usize, usize),
        count: usize,
        swapped: bool,
    ) -> Result<Weight<'static>, WeightError> {
        let scheme = self.scheme_of([name.as_str()])?;
        let found = self.checkpoint.tensor(name)?;
        let expected = if swapped { [count, *columns, *rows] } else { [count, *rows, *columns] };
        if *found.shape != expected {
            let (name, expected, found) = (name.clone(), vec![count, *rows, *columns], found.shape.to_vec());
            return Err(WeightError::Shape { name, expected, found });
        }
        let dtype = dtype(found.dtype);
        let kept = self.kept(name, dtype, scheme)?;
        self.align();
        let source = WeightSource::Tensor(name.clone());
        let to = self.place(kept.bytes(count * rows * columns), (*columns, 0), kept, source);
        if let Some(copy) = self.copies.last_mut() {
            copy.swapped = swapped;
        }
        let data = self.tensor_at(to, [count * rows, *columns], kept);
        let matrices = Matrices { count, rows: *rows, columns: *columns, swapped };
        self.scaled_matrices(name, data, scheme, matrices)
    }

    /// The view of a place.
    pub(super) fn tensor_at(&self, to: Address, shape: impl Into<Shape>, dtype: DType) -> Tensor<'static> {
        // SAFETY: the caller of `at` vouched for the segment; a dry map's tensors are never computed with.
        unsafe { Tensor::persistent(to, shape, dtype) }
    }

    /// The address of a place of the segment.
    pub(super) fn address(&self, at: Bytes) -> Address {
        self.base.offset(at)
    }

    /// Whether this map only measures, so that kernels for what it holds need not be there.
    pub(super) fn is_dry(&self) -> bool {
        self.base == NOWHERE
    }

    fn padded_linear(
        &mut self,
        parts: &[(&str, usize)],
        in_features: usize,
        bias: bool,
        place: Place,
    ) -> Result<Linear, WeightError> {
        let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
        let modules: Vec<_> = parts.iter().map(|(name, rows)| ((*name).to_owned(), *rows)).collect();
        let weight = self.weight(&modules, in_features, place)?;
        let biases: Vec<_> = parts.iter().map(|(name, rows)| (format!("{name}.bias"), *rows)).collect();
        let bias = match bias {
            true => Some(self.stacked(&biases, [rows].into(), Place { columns: 0, ..place })?),
            false => None,
        };
        Ok(Linear { weight, bias })
    }

    /// Claims a place for `numbers`, which are copied there as f32.
    pub fn constant(&mut self, numbers: &[f32]) -> Tensor<'static> {
        self.align();
        let bytes = DType::F32.bytes(numbers.len());
        let to = self.place(bytes, (numbers.len(), 0), DType::F32, WeightSource::Constant(numbers.to_vec()));
        // SAFETY: the caller of `at` vouched for the segment; a dry map's tensors are never computed with.
        unsafe { Tensor::persistent(to, [numbers.len()], DType::F32) }
    }

    /// Claims `rows` lists of `columns` counters, u32 and 0 at first, side by side: all of them as `[rows, columns]`, and
    /// each to count in.
    pub fn counters(&mut self, rows: usize, columns: usize) -> (Tensor<'static>, Vec<Tensor<'static>>) {
        self.align();
        let line = DType::U32.bytes(columns);
        let to = self.place(line * rows as u64, (columns, 0), DType::U32, WeightSource::Zeros);
        // SAFETY: the caller of `at` vouched for the segment; a dry map's tensors are never computed with.
        let tensor = |to, shape: [usize; 2]| unsafe { Tensor::persistent(to, shape, DType::U32) };
        let each = |row: usize| tensor(to.offset(line * row as u64), [1, columns]).into_shape([columns]);
        (tensor(to, [rows, columns]), (0..rows).map(each).collect())
    }

    /// Whether the checkpoint has a tensor with this name, to choose among several spellings. Always false for a random
    /// checkpoint.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.tensors.contains(name)
    }

    /// Allows the checkpoint a tensor `name` that the model does not read, if it equals `twin`, which the model reads.
    pub fn twin(&mut self, name: &str, twin: &str) {
        self.twins.push((name.to_owned(), twin.to_owned()));
    }

    /// Call this after the last claim. It compares each tensor that a tie leaves out with the one that replaces it,
    /// byte by byte. If the file has both and they differ, file or configuration is wrong; transformers 5.17 does not
    /// tie them then (`modeling_utils.py`, `tie_weights`).
    ///
    /// # Errors
    /// [`WeightError::Untied`].
    pub fn refuse_untied(&self) -> Result<(), WeightError> {
        for (name, twin) in self.twins.iter().filter(|(name, _)| self.has(name)) {
            let (one, other) = (self.checkpoint.tensor(name)?, self.checkpoint.tensor(twin)?);
            if (one.dtype, one.shape, one.bytes) != (other.dtype, other.shape, other.bytes) {
                return Err(WeightError::Untied { name: name.clone(), twin: twin.clone() });
            }
        }
        Ok(())
    }

    /// Call this after the last claim. It refuses tensors that no layer has claimed, because the model would run
    /// without them and answer wrongly. Only [twins](WeightMap::twin) and buffers of rotary frequencies may be left
    /// out.
    ///
    /// # Errors
    /// [`WeightError::Extra`].
    pub fn refuse_extra(&self) -> Result<(), WeightError> {
        let claimed: BTreeSet<&str> = self.copies.iter().filter_map(|copy| copy.source.name()).collect();
        let is_extra = |name: &&str| {
            !claimed.contains(name)
                && !self.folded.iter().any(|(folded, _)| folded == name)
                && !self.read.iter().any(|read| read == name)
                && !self.is_cache_scale(name)
                && !self.twins.iter().any(|(twin, _)| twin == name)
                && !BUFFERS.iter().any(|buffer| name.ends_with(buffer))
        };
        let extra: Vec<&str> = self.checkpoint.tensors.names().filter(is_extra).collect();
        match extra.is_empty() {
            true => Ok(()),
            false => Err(WeightError::Extra {
                count: extra.len(),
                first: extra.iter().take(EXTRA_SHOWN).map(|&name| name.to_owned()).collect(),
            }),
        }
    }

    /// Bytes of all claims so far, with alignment and padding.
    pub fn used(&self) -> Bytes {
        self.used
    }

    /// Elements that the checkpoint's tensors fill, without padding: the parameters. Tied ones count once.
    pub fn parameters(&self) -> u64 {
        let elements = |copy: &WeightCopy| {
            let (row, zeros) = copy.row;
            copy.kept.elements(copy.bytes) / (row + zeros).max(1) * row
        };
        let is_parameter =
            |copy: &&WeightCopy| matches!(copy.source, WeightSource::Tensor(_) | WeightSource::Random(..));
        let claimed = self.copies.iter().filter(is_parameter).map(elements);
        claimed.chain(self.folded.iter().map(|(_, elements)| *elements)).map(|elements| elements as u64).sum()
    }

    /// The copies to make, in the order of the claims.
    pub fn copies(&self) -> &[WeightCopy] {
        &self.copies
    }

    /// Claims tensors of the given rows as one tensor of `shape`. The inner extents of `shape` may fold those of the
    /// file: a convolution's kernel becomes a matrix.
    pub(super) fn stacked(
        &mut self,
        parts: &[(String, usize)],
        shape: Shape,
        place: Place,
    ) -> Result<Tensor<'static>, WeightError> {
        self.align();
        let columns = shape.columns() + place.columns;
        let mut whole: Option<(Address, DType)> = None;
        for (name, rows) in parts {
            let (dtype, source) = self.part(name, *rows, shape)?;
            let first = whole.map_or(dtype, |(_, dtype)| dtype);
            if dtype != first {
                return Err(WeightError::Mixed { name: name.clone(), expected: first, found: dtype });
            }
            if (dtype == DType::F8E4M3) != place.is_fp8 && !matches!(source, WeightSource::Random(..)) {
                return Err(WeightError::Format { name: name.clone(), expected: expected(place.is_fp8), found: dtype });
            }
            let kept = place.kept.unwrap_or_else(|| self.target.weight(dtype));
            let to = self.place(kept.bytes(rows * columns), (shape.columns(), place.columns), kept, source);
            whole.get_or_insert((to, dtype));
            if place.rows > 0 {
                self.place(kept.bytes(place.rows * columns), (columns, 0), kept, WeightSource::Zeros);
            }
        }
        let (to, dtype) = whole.expect("a claim names at least one tensor");
        // SAFETY: the caller of `at` vouched for the segment; a dry map's tensors are never computed with.
        let whole = unsafe {
            let dtype = place.kept.unwrap_or_else(|| self.target.weight(dtype));
            match (place.rows, place.columns) {
                (0, 0) => Tensor::persistent(to, shape, dtype),
                (more, 0) if shape.extents().len() == 1 => {
                    Tensor::persistent(to, [shape.rows() + parts.len() * more], dtype)
                }
                (more, _) => Tensor::persistent(to, [shape.rows() + parts.len() * more, columns], dtype),
            }
        };
        Ok(whole)
    }

    /// The checkpoint's tensor with this name, checked against the claimed rows and inner extents. A random checkpoint
    /// has every tensor that is claimed.
    pub(super) fn part(&self, name: &str, rows: usize, shape: Shape) -> Result<(DType, WeightSource), WeightError> {
        if let Some((dtype, random)) = self.checkpoint.tensors.random(name, shape.extents().len()) {
            return Ok((dtype, WeightSource::Random(name.to_owned(), random)));
        }
        let found = self.checkpoint.tensor(name)?;
        let folded = [found.shape.first().copied().unwrap_or(1), found.shape.iter().skip(1).product()];
        if folded != [rows, shape.columns()] {
            let mut expected = shape.extents().to_vec();
            expected[0] = rows;
            return Err(WeightError::Shape { name: name.to_owned(), expected, found: found.shape.to_vec() });
        }
        Ok((dtype(found.dtype), WeightSource::Tensor(name.to_owned())))
    }

    pub(super) fn align(&mut self) {
        self.used = self.used.round_up(ALIGNMENT);
    }

    pub(super) fn place(&mut self, bytes: Bytes, row: (usize, usize), kept: DType, source: WeightSource) -> Address {
        let to = self.base.offset(self.used);
        self.copies.push(WeightCopy { to, bytes, row, kept, source, scale: None, swapped: false, rounded: None });
        self.used += bytes;
        to
    }
}

pub(crate) fn dtype(found: TensorType) -> DType {
    match found {
        TensorType::BF16 => DType::BF16,
        TensorType::F16 => DType::F16,
        TensorType::F32 => DType::F32,
        TensorType::F8E4M3 => DType::F8E4M3,
    }
}

/// What the configuration says of a tensor, for an error.
pub(super) fn expected(is_fp8: bool) -> &'static str {
    if is_fp8 { "quantization_config says that it is FP8" } else { "by quantization_config it is plain" }
}
