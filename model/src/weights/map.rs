//! The map of a weight segment: the address of each tensor.

use std::collections::BTreeSet;

use bursar_budgets::{Address, Bytes};
use bursar_kernels::{DType, Rank, RankShard, Shape, Target, Tensor, Weight};

use super::{
    Linear, RoutingSkew, WeightCopy, WeightError, WeightSource,
    cut::{Cut, whole_units},
    fp8_claims::{Matrices, is_attention_scale},
};
use crate::checkpoint::{Checkpoint, RandomTensor, Stored, TensorType, WeightFormats, quantization::OUTER};

/// Each tensor starts at a multiple of this many bytes, as tensor-core loads require.
const ALIGNMENT: Bytes = Bytes(256);

/// The base address of a map that only measures. It is never read or written.
const NOWHERE: Address = Address(1 << 40);

/// Number of names that an error about extra tensors lists.
const EXTRA_SHOWN: usize = 3;

/// Buffers that older versions of transformers saved with the weights. They are computed from the
/// configuration here, as transformers itself does now.
const BUFFERS: [&str; 2] = [".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq"];

/// The storage of a tensor in the segment.
#[derive(Clone, Copy, Default)]
pub(super) struct WeightLayout {
    /// Number of zero rows after the rows of each part, which the target needs.
    pub rows: usize,
    /// Number of zeros after each row.
    pub columns: usize,
    /// The element type, if it is not the target's type for weights.
    pub kept: Option<DType>,
    /// Whether the file has FP8 numbers.
    pub is_fp8: bool,
    /// Whether the tensor is unquantized, regardless of the configuration.
    pub is_always_plain: bool,
}

/// Assigns addresses in the segment, one claim after the other.
pub struct WeightMap<'c> {
    pub(super) checkpoint: &'c Checkpoint,
    pub(super) target: Target,
    pub(super) formats: WeightFormats,
    /// The rank that holds the weights.
    rank: Rank,
    /// Whether claims belong to the decoder. Only its projections are quantized
    /// at the user's request.
    pub(super) is_in_decoder: bool,
    base: Address,
    pub(super) used: Bytes,
    pub(super) copies: Vec<WeightCopy>,
    /// Tensors that need not be read, each with the tensor that is read in its place.
    twins: Vec<(String, String)>,
    /// Tensors that are multiplied into other tensors, with their number of elements.
    folded: Vec<(String, usize)>,
    /// Scales that were read while claiming.
    pub(super) read: Vec<String>,
    /// The first parts of the names that were claimed outside the decoder.
    pub(super) outside: BTreeSet<String>,
    /// See [`expect_plain_tower`](WeightMap::expect_plain_tower).
    pub(super) is_tower_plain: bool,
    /// Names of tensors, and of modules with all their tensors, that other ranks read.
    elsewhere: BTreeSet<String>,
}

impl<'c> WeightMap<'c> {
    /// A map that only measures. Its tensors are for planning, and no computation may access them.
    pub fn dry(checkpoint: &'c Checkpoint, target: Target, formats: WeightFormats) -> Self {
        WeightMap {
            checkpoint,
            target,
            formats,
            rank: Rank::ALONE,
            is_in_decoder: false,
            base: NOWHERE,
            used: Bytes(0),
            copies: Vec::new(),
            twins: Vec::new(),
            folded: Vec::new(),
            read: Vec::new(),
            outside: BTreeSet::new(),
            is_tower_plain: false,
            elsewhere: BTreeSet::new(),
        }
    }

    /// The same map for a rank.
    pub fn of_rank(self, rank: Rank) -> Self {
        WeightMap { rank, ..self }
    }

    /// The rank that holds the weights.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// A map of the segment that starts at `base`.
    ///
    /// # Safety
    /// `base` must be the start of at least [`used`](WeightMap::used) bytes of backed memory,
    /// as counted after the last claim. The memory must stay backed for as long as a tensor of
    /// the map is used.
    pub unsafe fn at(checkpoint: &'c Checkpoint, target: Target, formats: WeightFormats, base: Address) -> Self {
        WeightMap { base, ..WeightMap::dry(checkpoint, target, formats) }
    }

    /// Claims a single tensor of `shape`.
    pub fn tensor(&mut self, name: &str, shape: impl Into<Shape>) -> Result<Tensor<'static>, WeightError> {
        let shape = shape.into();
        let part = (name.to_owned(), shape.rows().into());
        self.stacked(&[part], shape, shape.columns().into(), WeightLayout::default())
    }

    /// Claims the router of a mixture, `[experts, hidden]`, which chooses `top`
    /// experts for each row.
    pub fn router(&mut self, name: &str, shape: [usize; 2], top: usize) -> Result<Tensor<'static>, WeightError> {
        let router = self.tensor(name, shape)?;
        if let (Some(exponent), Some(copy)) = (self.checkpoint.tensors.routing_skew(), self.copies.last_mut())
            && let WeightSource::Random(name, RandomTensor::Drawn { seed }) = &copy.source
        {
            copy.source = WeightSource::SkewedRouter(name.clone(), *seed, RoutingSkew { top, exponent });
        }
        Ok(router)
    }

    /// Claims a table with a row of `hidden` for each token of `vocabulary`.
    pub fn table(&mut self, name: &str, vocabulary: RankShard, hidden: usize) -> Result<Tensor<'static>, WeightError> {
        self.rows_of(name, vocabulary, hidden, 0)
    }

    /// Like [`table`](Self::table), for an output projection with at least `rows` rows. The target
    /// may add more rows. Added rows are zeros.
    pub fn vocabulary(
        &mut self,
        name: &str,
        vocabulary: RankShard,
        rows: usize,
        hidden: usize,
    ) -> Result<Tensor<'static>, WeightError> {
        self.rows_of(name, vocabulary, hidden, self.target.padded_vocabulary(rows) - vocabulary.count)
    }

    /// Claims `share` of the rows of the matrix `name`, and `more` rows of zeros.
    fn rows_of(
        &mut self,
        name: &str,
        share: RankShard,
        columns: usize,
        more: usize,
    ) -> Result<Tensor<'static>, WeightError> {
        let place = WeightLayout { rows: more, ..WeightLayout::default() };
        self.stacked(&[(name.to_owned(), share)], [share.count, columns].into(), columns.into(), place)
    }

    /// Claims a projection `name.weight` `[out_features, in_features]`, and `name.bias`
    /// `[out_features]` if `bias`. Either number may be a [share](RankShard). A share
    /// of `in_features` gives a partial result, and only the first rank's partial
    /// result includes the bias.
    pub fn linear(
        &mut self,
        name: &str,
        out_features: impl Into<RankShard>,
        in_features: impl Into<RankShard>,
        bias: bool,
    ) -> Result<Linear, WeightError> {
        self.fused_linear(&[(name, out_features.into())], in_features, bias)
    }

    /// Like [`linear`](Self::linear), for the convolution that embeds patches. The kernel becomes a
    /// matrix. This matrix is never quantized: tools quantize only linear layers, and their lists
    /// need not name other layers.
    pub fn patch_embedding(
        &mut self,
        name: &str,
        out_features: usize,
        in_features: usize,
        bias: bool,
    ) -> Result<Linear, WeightError> {
        let place = WeightLayout { is_always_plain: true, ..WeightLayout::default() };
        self.padded_linear(&[(name, out_features.into())], in_features.into(), bias, place)
    }

    /// Like [`linear`](Self::linear) with a bias, where output `i` is multiplied by element `i` of
    /// the tensor `scale` `[out_features]`. The product is computed while loading, in f32, and
    /// rounded once to the type of activations.
    pub fn scaled_linear(
        &mut self,
        name: &str,
        scale: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<Linear, WeightError> {
        let (_, source, _) = self.part(scale, out_features.into(), 1.into(), [out_features].into())?;
        self.folded.push((scale.to_owned(), out_features));
        let first = self.copies.len();
        if self.scheme_of([name])?.is_some() {
            return Err(WeightError::ScaledFp8 { name: name.to_owned(), scale: scale.to_owned() });
        }
        let place = WeightLayout { kept: Some(self.target.activation()), ..WeightLayout::default() };
        let linear = self.padded_linear(&[(name, out_features.into())], in_features.into(), true, place)?;
        // Random weights need no scale.
        if let WeightSource::Tensor(scale) = source {
            self.copies[first..].iter_mut().for_each(|copy| copy.scale = Some(scale.clone()));
        }
        Ok(linear)
    }

    /// Claims projections of the same input as one projection with concatenated rows.
    pub fn fused_linear<S: Into<RankShard> + Copy>(
        &mut self,
        parts: &[(&str, S)],
        in_features: impl Into<RankShard>,
        bias: bool,
    ) -> Result<Linear, WeightError> {
        let parts: Vec<_> = parts.iter().map(|(name, rows)| (*name, (*rows).into())).collect();
        self.padded_linear(&parts, in_features.into(), bias, WeightLayout::default())
    }

    /// Claims the projections `gate` and `up` `[intermediate, hidden]` as one layer, and
    /// `down` `[hidden, intermediate]`. The target may pad `intermediate`; the added rows
    /// and columns are zeros.
    pub fn gated(
        &mut self,
        [gate, up, down]: [&str; 3],
        (hidden, intermediate): (usize, RankShard),
        bias: bool,
    ) -> Result<[Linear; 2], WeightError> {
        let more = self.target.padded_features(intermediate.count) - intermediate.count;
        let (of_gate, of_down) = (
            WeightLayout { rows: more, ..WeightLayout::default() },
            WeightLayout { columns: more, ..WeightLayout::default() },
        );
        Ok([
            self.padded_linear(&[(gate, intermediate), (up, intermediate)], hidden.into(), bias, of_gate)?,
            self.padded_linear(&[(down, hidden.into())], intermediate, bias, of_down)?,
        ])
    }

    /// Claims the gated MLPs of a share of the experts: gate and up, expert by expert, as
    /// `[experts * 2 * intermediate, hidden]`, and down as `[experts * hidden, intermediate]`.
    ///
    /// A checkpoint may have each expert's projections under separate names:
    /// `name.{expert}.gate_proj.weight` and so on, or `name.gate_proj.{expert}.weight` (ModelOpt
    /// 0.43, for Qwen3-VL; vLLM's issue 40885). Or a checkpoint has all experts in
    /// `name.gate_up_proj` and `name.down_proj`, where the two axes of each matrix may be swapped:
    /// Qwen3-VL was released as `[experts, in, out]`, and transformers swaps the axes if the shape
    /// does not match (5.17, `conversion_mapping.py`).
    ///
    /// # Errors
    /// A tensor is missing, or has the wrong shape.
    pub fn experts(
        &mut self,
        name: &str,
        experts: RankShard,
        (hidden, intermediate): (usize, usize),
    ) -> Result<[Weight<'static>; 2], WeightError> {
        let fused = [("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)];
        let fused = fused.map(|(part, rows, columns)| (format!("{name}.{part}"), rows, columns));
        if self.has(&fused[0].0) {
            // A tensor of square matrices is assumed to have the same orientation
            // as the other tensor.
            let mut is_swapped = false;
            for (name, rows, columns) in &fused {
                is_swapped |=
                    rows != columns && *self.checkpoint.tensor(name)?.shape == [experts.whole, *columns, *rows];
            }
            let [gate_up, down] = &fused;
            let both = [self.matrices(gate_up, experts, is_swapped)?, self.matrices(down, experts, is_swapped)?];
            return self.served_experts(experts.count, both);
        }
        const PARTS: [&str; 3] = ["gate", "up", "down"];
        let is_by_part = self.has(&format!("{name}.gate_proj.0.weight"));
        let module = |expert: usize, part: &str| {
            if is_by_part { format!("{name}.{part}_proj.{expert}") } else { format!("{name}.{expert}.{part}_proj") }
        };
        let others = (0..experts.whole).filter(|expert| !experts.range().contains(expert));
        self.elsewhere.extend(others.flat_map(|expert| PARTS.map(|part| module(expert, part))));
        let of = |expert: usize, part: &str, rows: usize| (module(expert, part), rows.into());
        let gate_up = experts.range().flat_map(|expert| ["gate", "up"].map(|part| of(expert, part, intermediate)));
        let down = experts.range().map(|expert| of(expert, "down", hidden));
        let (gate_up, down): (Vec<_>, Vec<_>) = (gate_up.collect(), down.collect());
        // All experts, including the experts of other ranks, quantize their rows
        // with the same scale.
        let inputs = |parts: &[&str]| -> Vec<String> {
            (0..experts.whole).flat_map(|expert| parts.iter().map(move |part| module(expert, part))).collect()
        };
        let gate_up = self.weight(&gate_up, &inputs(&["gate", "up"]), hidden.into(), WeightLayout::default())?;
        let both = [gate_up, self.weight(&down, &inputs(&["down"]), intermediate.into(), WeightLayout::default())?];
        self.served_experts(experts.count, both)
    }

    /// Claims a share of the matrices `[rows, columns]` of a tensor as one matrix, stacked
    /// row-wise. If `swapped` is set, the axes of these matrices are swapped in the file.
    fn matrices(
        &mut self,
        (name, rows, columns): &(String, usize, usize),
        count: RankShard,
        swapped: bool,
    ) -> Result<Weight<'static>, WeightError> {
        let scheme = self.scheme_of([name.as_str()])?;
        let found = self.checkpoint.tensor(name)?;
        let expected = if swapped { [count.whole, *columns, *rows] } else { [count.whole, *rows, *columns] };
        if *found.shape != expected {
            let (name, expected, found) = (name.clone(), vec![count.whole, *rows, *columns], found.shape.to_vec());
            return Err(WeightError::Shape { name, expected, found });
        }
        let dtype = dtype(found.dtype);
        let kept = self.kept(name, dtype, scheme)?;
        self.align();
        let source = WeightSource::Tensor(name.clone());
        let cut = Cut::of(count, (rows * columns).into(), found.shape);
        let to = self.place(kept.bytes(count.count * rows * columns), (*columns, 0), kept, source);
        if let Some(copy) = self.copies.last_mut() {
            (copy.swapped, copy.cut) = (swapped, cut);
        }
        let data = self.tensor_at(to, [count.count * rows, *columns], kept);
        let matrices = Matrices { count, rows: (*rows).into(), columns: (*columns).into(), swapped };
        self.scaled_matrices(name, data, scheme, matrices)
    }

    /// The tensor at an address.
    pub(super) fn tensor_at(&self, to: Address, shape: impl Into<Shape>, dtype: DType) -> Tensor<'static> {
        // SAFETY: the caller of `at` guarantees that the segment is backed while its tensors are
        // used. No computation accesses the tensors of a map that only measures.
        unsafe { Tensor::persistent(to, shape, dtype) }
    }

    /// The address of byte `at` of the segment.
    pub(super) fn address(&self, at: Bytes) -> Address {
        self.base.offset(at)
    }

    /// Whether this map only measures, so that kernels for its weights need not exist.
    pub(super) fn is_dry(&self) -> bool {
        self.base == NOWHERE
    }

    fn padded_linear(
        &mut self,
        parts: &[(&str, RankShard)],
        in_features: RankShard,
        bias: bool,
        place: WeightLayout,
    ) -> Result<Linear, WeightError> {
        let rows: usize = parts.iter().map(|(_, rows)| rows.count).sum();
        let modules: Vec<_> = parts.iter().map(|(name, rows)| ((*name).to_owned(), *rows)).collect();
        let inputs: Vec<_> = parts.iter().map(|(name, _)| (*name).to_owned()).collect();
        let weight = self.weight(&modules, &inputs, in_features, place)?;
        let biases: Vec<_> = parts.iter().map(|(name, rows)| (format!("{name}.bias"), *rows)).collect();
        let bias = match bias {
            true if in_features.first > 0 => {
                self.elsewhere.extend(biases.into_iter().map(|(name, _)| name));
                None
            }
            true => Some(self.stacked(&biases, [rows].into(), 1.into(), WeightLayout { columns: 0, ..place })?),
            false => None,
        };
        Ok(Linear { weight, bias, is_partial: !in_features.is_whole() })
    }

    /// Claims memory for `numbers`, which are stored as f32.
    pub fn constant(&mut self, numbers: &[f32]) -> Tensor<'static> {
        self.align();
        let bytes = DType::F32.bytes(numbers.len());
        let to = self.place(bytes, (numbers.len(), 0), DType::F32, WeightSource::Constant(numbers.to_vec()));
        // SAFETY: the caller of `at` guarantees that the segment is backed while its tensors are
        // used. No computation accesses the tensors of a map that only measures.
        unsafe { Tensor::persistent(to, [numbers.len()], DType::F32) }
    }

    /// Claims `rows` adjacent lists of `columns` counters, which are u32 and start at 0. Returns
    /// all of them as `[rows, columns]`, and each list separately.
    pub fn counters(&mut self, rows: usize, columns: usize) -> (Tensor<'static>, Vec<Tensor<'static>>) {
        self.align();
        let line = DType::U32.bytes(columns);
        let to = self.place(line * rows as u64, (columns, 0), DType::U32, WeightSource::Zeros);
        // SAFETY: the caller of `at` guarantees that the segment is backed while its tensors are
        // used. No computation accesses the tensors of a map that only measures.
        let tensor = |to, shape: [usize; 2]| unsafe { Tensor::persistent(to, shape, DType::U32) };
        let each = |row: usize| tensor(to.offset(line * row as u64), [1, columns]).into_shape([columns]);
        (tensor(to, [rows, columns]), (0..rows).map(each).collect())
    }

    /// Whether the checkpoint has a tensor with this name, to choose among several spellings.
    /// Always false for a random checkpoint.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.tensors.contains(name)
    }

    /// Allows the checkpoint to have a tensor `name` that the model does not read, if it equals
    /// `twin`, which the model reads.
    pub fn twin(&mut self, name: &str, twin: &str) {
        self.twins.push((name.to_owned(), twin.to_owned()));
    }

    /// Compares each tensor that is not read because of a tie with the tensor that replaces
    /// it, byte by byte. Call this after the last claim. If the file has both and they
    /// differ, the file or the configuration is wrong; transformers 5.17 does not tie them in
    /// this case (`modeling_utils.py`, `tie_weights`).
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

    /// Refuses tensors that no layer has claimed, because the model would run without them and give
    /// wrong replies. Call this after the last claim. Only [twins](WeightMap::twin) and buffers of
    /// rotary frequencies may be left out.
    ///
    /// # Errors
    /// [`WeightError::Extra`], and [`WeightError::AttentionScale`] for scales that attention in
    /// this project does not use.
    pub fn refuse_extra(&self) -> Result<(), WeightError> {
        let claimed: BTreeSet<&str> = self.copies.iter().filter_map(|copy| copy.source.name()).collect();
        let is_extra = |name: &&str| {
            !claimed.contains(name)
                && !self.folded.iter().any(|(folded, _)| folded == name)
                && !self.read.iter().any(|read| read == name)
                && !self.is_elsewhere(name)
                && !self.is_unread_cache_scale(name)
                && !self.twins.iter().any(|(twin, _)| twin == name)
                && !BUFFERS.iter().any(|buffer| name.ends_with(buffer))
        };
        let extra: Vec<&str> = self.checkpoint.tensors.names().filter(is_extra).collect();
        if extra.is_empty() {
            return Ok(());
        }
        Err(match extra.iter().find(|name| is_attention_scale(name)) {
            Some(&name) => WeightError::AttentionScale { name: name.to_owned() },
            None => WeightError::Extra {
                count: extra.len(),
                first: extra.iter().take(EXTRA_SHOWN).map(|&name| name.to_owned()).collect(),
            },
        })
    }

    /// Whether other ranks read the tensor `name`.
    fn is_elsewhere(&self, name: &str) -> bool {
        self.elsewhere.contains(name)
            || name.match_indices('.').any(|(module, _)| self.elsewhere.contains(&name[..module]))
    }

    /// Bytes of all claims so far, with alignment and padding.
    pub fn used(&self) -> Bytes {
        self.used
    }

    /// The number of parameters: the elements of the checkpoint's tensors, without padding.
    /// Tied tensors count once.
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

    /// Claims the given rows of tensors, with the columns `of_row` of each row, as one tensor
    /// of `shape`. The inner axes of the tensors may be folded in `shape`: a convolution's
    /// kernel becomes a matrix.
    pub(super) fn stacked(
        &mut self,
        parts: &[(String, RankShard)],
        shape: Shape,
        of_row: RankShard,
        place: WeightLayout,
    ) -> Result<Tensor<'static>, WeightError> {
        self.align();
        let columns = shape.columns() + place.columns;
        let mut whole: Option<(Address, DType)> = None;
        for (name, rows) in parts {
            let (dtype, source, cut) = self.part(name, *rows, of_row, shape)?;
            if !self.is_in_decoder {
                self.outside.insert(root(name).to_owned());
            }
            let first = whole.map_or(dtype, |(_, dtype)| dtype);
            if dtype != first {
                return Err(WeightError::Mixed { name: name.clone(), expected: first, found: dtype });
            }
            if (dtype == DType::F8E4M3) != place.is_fp8 && !matches!(source, WeightSource::Random(..)) {
                return Err(self.other_format(name, place.is_fp8, dtype));
            }
            let kept = place.kept.unwrap_or_else(|| self.target.weight(dtype));
            let to = self.place(kept.bytes(rows.count * columns), (shape.columns(), place.columns), kept, source);
            if let Some(copy) = self.copies.last_mut() {
                copy.cut = cut;
            }
            whole.get_or_insert((to, dtype));
            if place.rows > 0 {
                self.place(kept.bytes(place.rows * columns), (columns, 0), kept, WeightSource::Zeros);
            }
        }
        let (to, dtype) = whole.expect("a claim names at least one tensor");
        // SAFETY: the caller of `at` guarantees that the segment is backed while its tensors are
        // used. No computation accesses the tensors of a map that only measures.
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

    /// The type, the source and the part to read of the checkpoint's tensor with this name. The
    /// rows and the inner extents of the tensor are checked against the claim. A random checkpoint
    /// has every tensor that is claimed.
    pub(super) fn part(
        &self,
        name: &str,
        rows: RankShard,
        of_row: RankShard,
        shape: Shape,
    ) -> Result<(DType, WeightSource, Option<Cut>), WeightError> {
        if let Some((dtype, random)) = self.checkpoint.tensors.random(name, shape.extents().len()) {
            let cut = Cut::of(rows, of_row, &[rows.whole, of_row.whole]);
            return Ok((dtype, WeightSource::Random(name.to_owned(), random), cut));
        }
        let found = self.checkpoint.tensor(name)?;
        let folded = [found.shape.first().copied().unwrap_or(1), found.shape.iter().skip(1).product()];
        if folded != [rows.whole, of_row.whole] {
            let mut expected = shape.extents().to_vec();
            expected[0] = rows.whole;
            if !of_row.is_whole() {
                expected = vec![rows.whole, of_row.whole];
            }
            return Err(WeightError::Shape { name: name.to_owned(), expected, found: found.shape.to_vec() });
        }
        if let Stored::Blocks(kind) = found.stored {
            whole_units(name, of_row, (kind.elements(), "blocks of quantized numbers"))?;
        }
        let cut = Cut::of(rows, of_row, found.shape);
        Ok((dtype(found.dtype), WeightSource::Tensor(name.to_owned()), cut))
    }

    pub(super) fn align(&mut self) {
        self.used = self.used.round_up(ALIGNMENT);
    }

    pub(super) fn place(&mut self, bytes: Bytes, row: (usize, usize), kept: DType, source: WeightSource) -> Address {
        let to = self.base.offset(self.used);
        self.copies.push(WeightCopy {
            to,
            bytes,
            row,
            kept,
            source,
            cut: None,
            scale: None,
            swapped: false,
            rounded: None,
        });
        self.used += bytes;
        to
    }
}

/// The first part of a name that is the same in all releases of a model.
pub(super) fn root(name: &str) -> &str {
    name.split('.').find(|part| !OUTER.contains(part)).unwrap_or(name)
}

pub(crate) fn dtype(found: TensorType) -> DType {
    match found {
        TensorType::BF16 => DType::BF16,
        TensorType::F16 => DType::F16,
        TensorType::F32 => DType::F32,
        TensorType::F8E4M3 => DType::F8E4M3,
    }
}
