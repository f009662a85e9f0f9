//! The map of a weight segment: the claims of a model, and the tensors that they become.

use std::mem;

use bursar_budgets::{Address, Bytes};
use bursar_kernels::{
    DType, Rank, RankShard, Shape, Target, Tensor, Weight,
    ops::patchify::{CHANNELS, PatchSize},
};

use super::{
    NormScaling, RoutingSkew, WeightCopy, WeightError, WeightSource, cut::Cut, module_formats::ModuleFormats,
    segment_layout::SegmentLayout, tensor_names::TensorNames,
};
use crate::checkpoint::{Checkpoint, WeightFormats};

/// The storage of a claim in the segment.
#[derive(Clone, Copy, Default)]
pub(super) struct WeightLayout {
    /// Number of zero rows that the target needs after the rows of each part.
    pub rows: usize,
    /// Number of zeros after each row.
    pub columns: usize,
    /// The element type, if it is not the target's type for weights.
    pub kept: Option<DType>,
    /// Whether the tensor is quantized in the file.
    pub is_stored_quantized: bool,
    /// Whether the tensor is unquantized, regardless of the configuration.
    pub is_always_plain: bool,
    /// Whether 4-bit integers are widened, because the operation has no kernels for them.
    pub is_widened: bool,
}

/// The type of a tensor, its source, and the part to read.
type TensorSource = (DType, WeightSource, Option<Cut>);

/// Places the weights of a model in a segment, one claim after the other.
pub struct WeightMap<'c> {
    pub(super) checkpoint: &'c Checkpoint,
    pub(super) target: Target,
    /// The rank that holds the weights.
    rank: Rank,
    pub(super) formats: ModuleFormats<'c>,
    pub(super) segment: SegmentLayout,
    pub(super) names: TensorNames,
    /// Whether a map that only measures also refuses weights that the target has no kernels for.
    needs_kernels: bool,
}

impl<'c> WeightMap<'c> {
    /// A map that only measures. Its tensors are for planning, and no computation may access them.
    pub fn dry(checkpoint: &'c Checkpoint, target: Target, formats: WeightFormats) -> Self {
        WeightMap {
            checkpoint,
            target,
            rank: Rank::ALONE,
            formats: ModuleFormats::new(checkpoint, formats),
            segment: SegmentLayout::dry(),
            names: TensorNames::default(),
            needs_kernels: false,
        }
    }

    /// The same map, which refuses weights that the target has no kernels for even if the map only
    /// measures.
    pub fn with_kernels(self) -> Self {
        WeightMap { needs_kernels: true, ..self }
    }

    /// A map of the segment that starts at `base`.
    ///
    /// # Safety
    /// `base` must be the start of at least [`used`](WeightMap::used) bytes of backed memory,
    /// as counted after the last claim. The memory must stay backed for as long as a tensor of
    /// the map is used.
    pub unsafe fn at(checkpoint: &'c Checkpoint, target: Target, formats: WeightFormats, base: Address) -> Self {
        // SAFETY: the caller guarantees that all bytes of the claims are backed from `base` on, for
        // as long as their tensors are used.
        let segment = unsafe { SegmentLayout::at(base) };
        WeightMap { segment, ..WeightMap::dry(checkpoint, target, formats) }
    }

    /// The same map for a rank.
    pub fn of_rank(self, rank: Rank) -> Self {
        WeightMap { rank, ..self }
    }

    /// The rank that holds the weights.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Sets whether the following claims belong to the decoder. Only the decoder's projections are
    /// quantized at the user's request.
    pub fn set_in_decoder(&mut self, is_in_decoder: bool) {
        self.formats.set_in_decoder(is_in_decoder);
    }

    /// Sets whether the following claims belong to a draft model, whose weights are never quantized.
    pub fn set_in_draft_model(&mut self, is_in_draft_model: bool) {
        self.formats.set_in_draft_model(is_in_draft_model);
    }

    /// Declares that the model's vision tower is supported only without quantization. If the file
    /// is not available, the tower is assumed to be unquantized.
    pub fn expect_plain_tower(&mut self) {
        self.formats.expect_plain_tower();
    }

    /// Claims a single tensor of `shape`.
    pub fn tensor(&mut self, name: &str, shape: impl Into<Shape>) -> Result<Tensor<'static>, WeightError> {
        let shape = shape.into();
        let part = (name.to_owned(), shape.rows().into());
        self.stacked(&[part], shape, shape.columns().into(), WeightLayout::default())
    }

    /// Claims a matrix of `shape` that the checkpoint stores transposed.
    pub fn transposed(&mut self, name: &str, shape: [usize; 2]) -> Result<Tensor<'static>, WeightError> {
        let [rows, columns] = shape;
        // Random tensors are drawn in the final shape.
        if self.checkpoint.tensors.random(name, 2).is_some() {
            return self.tensor(name, shape);
        }
        let matrix = self.tensor(name, [columns, rows])?;
        self.segment.transpose_last();
        Ok(matrix.into_shape(shape))
    }

    /// Claims a single list of numbers, stored as f32 on every target. `elements` may be a
    /// [share](RankShard) of the list.
    pub fn tensor_f32(&mut self, name: &str, elements: impl Into<RankShard>) -> Result<Tensor<'static>, WeightError> {
        let elements = elements.into();
        let place = WeightLayout { kept: Some(DType::F32), ..WeightLayout::default() };
        self.stacked(&[(name.to_owned(), elements)], [elements.count].into(), 1.into(), place)
    }

    /// Claims the weight of a norm of `size` elements, changed so that the norm's result is scaled.
    pub fn scaled_norm(
        &mut self,
        name: &str,
        size: usize,
        scaling: NormScaling,
    ) -> Result<Tensor<'static>, WeightError> {
        let place = WeightLayout { kept: Some(self.target.weight(DType::F32)), ..WeightLayout::default() };
        let weight = self.stacked(&[(name.to_owned(), size.into())], [size].into(), 1.into(), place)?;
        self.segment.scale_last(scaling);
        Ok(weight)
    }

    /// Claims several ranges of the rows of one matrix `name`, one after the other.
    pub fn rows_of_parts(
        &mut self,
        name: &str,
        parts: &[RankShard],
        columns: usize,
    ) -> Result<Tensor<'static>, WeightError> {
        let rows = parts.iter().map(|rows| rows.count).sum();
        let parts: Vec<_> = parts.iter().map(|rows| (name.to_owned(), *rows)).collect();
        self.stacked(&parts, [rows, columns].into(), columns.into(), WeightLayout::default())
    }

    /// Claims ranges of the elements of one vector `name`, one after the other.
    pub fn vector_of_parts(&mut self, name: &str, parts: &[RankShard]) -> Result<Tensor<'static>, WeightError> {
        let elements: usize = parts.iter().map(|part| part.count).sum();
        let parts: Vec<_> = parts.iter().map(|part| (name.to_owned(), *part)).collect();
        self.stacked(&parts, [elements].into(), 1.into(), WeightLayout::default())
    }

    /// Claims matrix `which` of a `[count, rows, columns]` tensor.
    pub fn matrix_of(
        &mut self,
        name: &str,
        which: RankShard,
        [rows, columns]: [usize; 2],
    ) -> Result<Tensor<'static>, WeightError> {
        let (part, elements) = ((name.to_owned(), which), rows * columns);
        let matrix = self.stacked(&[part], [1, elements].into(), elements.into(), WeightLayout::default())?;
        Ok(matrix.into_shape([rows, columns]))
    }

    /// Claims two scalars as one `[2]` f32 tensor.
    pub fn bounds(&mut self, names: [String; 2]) -> Result<Tensor<'static>, WeightError> {
        let place = WeightLayout { kept: Some(DType::F32), ..WeightLayout::default() };
        self.stacked(&names.map(|name| (name, 1.into())), [2].into(), 1.into(), place)
    }

    /// Claims a vector of `elements` zeros in the type of weights.
    pub fn zeros(&mut self, elements: usize) -> Tensor<'static> {
        self.segment.align();
        let dtype = self.target.weight(DType::F32);
        let copy = WeightCopy::of(WeightSource::Zeros, dtype, (elements, 0), dtype.bytes(elements));
        let to = self.segment.place(copy);
        self.segment.tensor(to, [elements], dtype)
    }

    /// Claims a projection of patches, `[hidden, values]`. The checkpoint interleaves the channels
    /// of each pixel; patches store each channel contiguously.
    pub fn patch_projection(
        &mut self,
        name: &str,
        hidden: usize,
        patch: PatchSize,
    ) -> Result<Tensor<'static>, WeightError> {
        self.deinterleaved_channels(name, [hidden, patch.values()].into(), patch)
    }

    /// Claims a vector with an element for each value of a patch, in the order of
    /// [`patch_projection`](Self::patch_projection).
    pub fn patch_vector(&mut self, name: &str, patch: PatchSize) -> Result<Tensor<'static>, WeightError> {
        self.deinterleaved_channels(name, [patch.values()].into(), patch)
    }

    /// Claims a tensor whose last axis interleaves channels in the checkpoint, and stores each channel
    /// contiguously.
    fn deinterleaved_channels(
        &mut self,
        name: &str,
        shape: Shape,
        patch: PatchSize,
    ) -> Result<Tensor<'static>, WeightError> {
        let axes = shape.extents().len();
        let weight = self.tensor(name, shape)?;
        // Random tensors are drawn in the final order.
        if self.checkpoint.tensors.random(name, axes).is_none() {
            self.segment.swap_rows_last([patch.values() / CHANNELS, CHANNELS]);
        }
        Ok(weight)
    }

    /// Claims a range of columns of a matrix. The inner axes of a tensor with more axes count as
    /// columns.
    pub fn columns_of(&mut self, name: &str, rows: usize, columns: RankShard) -> Result<Tensor<'static>, WeightError> {
        let shape = [rows, columns.count].into();
        self.stacked(&[(name.to_owned(), rows.into())], shape, columns, WeightLayout::default())
    }

    /// Claims the router of a mixture, `[experts, hidden]`, which chooses `top`
    /// experts for each row.
    pub fn router(&mut self, name: &str, shape: [usize; 2], top: usize) -> Result<Tensor<'static>, WeightError> {
        let router = self.tensor(name, shape)?;
        if let Some(exponent) = self.checkpoint.tensors.routing_skew() {
            self.segment.skew_last(RoutingSkew { top, exponent });
        }
        Ok(router)
    }

    /// Claims a table with one row of `hidden` elements for each token of `vocabulary`.
    pub fn table(&mut self, name: &str, vocabulary: RankShard, hidden: usize) -> Result<Weight<'static>, WeightError> {
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
    ) -> Result<Weight<'static>, WeightError> {
        self.rows_of(name, vocabulary, hidden, self.target.padded_vocabulary(rows) - vocabulary.count)
    }

    /// Claims `share` of the rows of the matrix `name`, and `more` rows of zeros.
    fn rows_of(
        &mut self,
        name: &str,
        share: RankShard,
        columns: usize,
        more: usize,
    ) -> Result<Weight<'static>, WeightError> {
        let part = [(name.to_owned(), share)];
        if let Some(weight) = self.in_blocks(&part, columns.into(), more)? {
            return Ok(weight);
        }
        let place = WeightLayout { rows: more, ..WeightLayout::default() };
        Ok(Weight::plain(self.stacked(&part, [share.count, columns].into(), columns.into(), place)?))
    }

    /// Claims memory for `numbers`, which are stored as f32.
    pub fn constant(&mut self, numbers: &[f32]) -> Tensor<'static> {
        self.segment.align();
        let (row, source) = ((numbers.len(), 0), WeightSource::Constant(numbers.to_vec()));
        let to = self.segment.place(WeightCopy::of(source, DType::F32, row, DType::F32.bytes(numbers.len())));
        self.segment.tensor(to, [numbers.len()], DType::F32)
    }

    /// Claims the token ids of a draft model's reduced vocabulary of `count` tokens, `[count]` u32.
    /// The tensor `name` `[count]` has the difference between each id and its index. `None` if the
    /// vocabulary is not reduced and has no such tensor. A random checkpoint has the first `count`
    /// of all `vocabulary` tokens.
    ///
    /// # Errors
    /// The tensor is missing or has the wrong shape or type, or [`WeightError::DraftId`].
    pub fn draft_ids(
        &mut self,
        name: &str,
        count: usize,
        vocabulary: usize,
    ) -> Result<Option<Tensor<'static>>, WeightError> {
        let is_random = self.checkpoint.tensors.random(name, 1).is_some();
        if count == vocabulary && !self.has(name) {
            return Ok(None);
        }
        let differences = if is_random { vec![0; count] } else { self.checkpoint.tensors.integers(name)? };
        if differences.len() != count {
            let (name, expected, found) = (name.to_owned(), vec![count], vec![differences.len()]);
            return Err(WeightError::Shape { name, expected, found });
        }
        let id = |(index, difference): (usize, i64)| {
            let id = i64::try_from(index).ok()?.checked_add(difference)?;
            u32::try_from(id).ok().filter(|id| (*id as usize) < vocabulary)
        };
        let ids = differences.iter().copied().enumerate().map(|each| {
            id(each).ok_or_else(|| WeightError::DraftId {
                name: name.to_owned(),
                index: each.0,
                difference: each.1,
                vocabulary,
            })
        });
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        Ok(Some(self.place_ids(name, ids)))
    }

    /// Claims the tensor `name`, a permutation of the token ids 0 to `vocabulary` - 1, as `[vocabulary]`
    /// u32. In a random checkpoint, the ids ascend.
    ///
    /// # Errors
    /// The tensor is missing or has the wrong shape or type, or [`WeightError::TokenId`].
    pub fn token_ids(&mut self, name: &str, vocabulary: usize) -> Result<Tensor<'static>, WeightError> {
        let is_random = self.checkpoint.tensors.random(name, 1).is_some();
        let stored =
            if is_random { (0..vocabulary as i64).collect() } else { self.checkpoint.tensors.integers(name)? };
        if stored.len() != vocabulary {
            let (name, expected, found) = (name.to_owned(), vec![vocabulary], vec![stored.len()]);
            return Err(WeightError::Shape { name, expected, found });
        }
        let mut is_listed = vec![false; vocabulary];
        let ids = stored.iter().enumerate().map(|(index, id)| {
            let known =
                usize::try_from(*id).ok().filter(|id| *id < vocabulary && !mem::replace(&mut is_listed[*id], true));
            let error = || WeightError::TokenId { name: name.to_owned(), index, id: *id, vocabulary };
            known.map(|id| id as u32).ok_or_else(error)
        });
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        Ok(self.place_ids(name, ids))
    }

    /// Places `ids`, which the tensor `name` gives, in the segment as `[ids]` u32.
    fn place_ids(&mut self, name: &str, ids: Vec<u32>) -> Tensor<'static> {
        let count = ids.len();
        self.names.mark_read(name.to_owned());
        self.segment.align();
        let source = WeightSource::Ids(ids);
        let to = self.segment.place(WeightCopy::of(source, DType::U32, (count, 0), DType::U32.bytes(count)));
        self.segment.tensor(to, [count], DType::U32)
    }

    /// Claims `rows` adjacent lists of `columns` counters, which are u32 and start at 0. Returns
    /// all of them as `[rows, columns]`, and each list separately.
    pub fn counters(&mut self, rows: usize, columns: usize) -> (Tensor<'static>, Vec<Tensor<'static>>) {
        self.segment.align();
        let line = DType::U32.bytes(columns);
        let to = self.segment.place(WeightCopy::of(WeightSource::Zeros, DType::U32, (columns, 0), line * rows as u64));
        let each = |row: usize| self.segment.tensor(to.offset(line * row as u64), [columns], DType::U32);
        (self.segment.tensor(to, [rows, columns], DType::U32), (0..rows).map(each).collect())
    }

    /// Whether the checkpoint has a tensor with this name, to choose among several spellings.
    /// Always false for a random checkpoint.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.tensors.contains(name)
    }

    /// Whether the checkpoint has no tensor of `module`. Always false for a random checkpoint.
    pub fn lacks(&self, module: &str) -> bool {
        let is_in = |name: &str| name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
        let tensors = &self.checkpoint.tensors;
        tensors.random(&format!("{module}.weight"), 0).is_none() && !tensors.names().any(is_in)
    }

    /// Leaves all tensors of `module` unread, because the model does not compute with them.
    pub fn leave_unread(&mut self, module: &str) {
        self.names.leave_unread([module.to_owned()]);
    }

    /// Allows the checkpoint to have a tensor `name` with the same values as `tied_to`. The model
    /// reads only `tied_to`.
    pub fn allow_tied(&mut self, name: &str, tied_to: &str) {
        self.names.add_tied(name, tied_to);
    }

    /// Compares tied tensors byte by byte: each unread [tied tensor](WeightMap::allow_tied) and the
    /// tensor that is read in its place. Call this after the last claim. If the file has both
    /// tensors and they differ, the file or the configuration is wrong. transformers 5.17 does not
    /// tie the tensors in this case (`modeling_utils.py`, `tie_weights`).
    ///
    /// # Errors
    /// [`WeightError::Untied`].
    pub fn refuse_untied(&self) -> Result<(), WeightError> {
        self.names.refuse_untied(self.checkpoint)
    }

    /// Refuses tensors that no layer has claimed, because the model would run without them and give
    /// wrong replies. Call this after the last claim. Only the following tensors may stay
    /// unclaimed: [tied tensors](WeightMap::allow_tied), tensors that only other ranks read or that
    /// were [left unread](WeightMap::leave_unread), buffers of rotary frequencies, scales of keys
    /// and values that are not needed, and biases of packed weights that are all 0.
    ///
    /// # Errors
    /// [`WeightError::Extra`], and [`WeightError::AttentionScale`] for scales that attention in
    /// this project does not use.
    pub fn refuse_extra(&self) -> Result<(), WeightError> {
        self.names.refuse_extra(self.checkpoint, self.copies())
    }

    /// Refuses weights that the target has no kernels for, which `unsupported` names. A map that
    /// only measures allows them, unless it was made by [`with_kernels`](Self::with_kernels).
    pub(super) fn refuse_unsupported(&self, unsupported: Option<&'static str>) -> Result<(), WeightError> {
        match unsupported {
            Some(what) if self.needs_kernels || !self.is_dry() => {
                Err(WeightError::Unsupported { what, target: self.target.name() })
            }
            _ => Ok(()),
        }
    }

    /// Whether this map only measures.
    pub(super) fn is_dry(&self) -> bool {
        self.segment.is_dry()
    }

    /// Bytes of all claims so far, with alignment and padding.
    pub fn used(&self) -> Bytes {
        self.segment.used()
    }

    /// The number of parameters: the elements of the checkpoint's weights, without padding and
    /// without the scales of quantized weights. Tied tensors count once.
    pub fn parameters(&self) -> u64 {
        let is_counted = |copy: &&WeightCopy| {
            let is_weight = matches!(
                copy.source,
                WeightSource::Tensor(_) | WeightSource::Random(..) | WeightSource::SkewedRouter(..)
            );
            is_weight && !copy.is_duplicate
        };
        let claimed = self.copies().iter().filter(is_counted).map(WeightCopy::elements);
        claimed.chain(self.names.folded_elements()).map(|elements| elements as u64).sum()
    }

    /// The copies to make, in the order of the claims.
    pub fn copies(&self) -> &[WeightCopy] {
        self.segment.copies()
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
        self.segment.align();
        let columns = shape.columns() + place.columns;
        let found = parts.iter().map(|(name, rows)| self.tensor_source(name, *rows, of_row, shape));
        let found = found.collect::<Result<Vec<_>, _>>()?;
        let dtype = self.common_type(parts, &found)?;
        let kept = place.kept.unwrap_or_else(|| self.target.weight(dtype));
        let mut start: Option<Address> = None;
        for ((name, rows), (dtype, source, cut)) in parts.iter().zip(found) {
            if !self.formats.is_in_decoder() {
                self.names.mark_outside_decoder(name);
            }
            if !matches!(source, WeightSource::Random(..)) {
                self.formats.check(name, dtype, place.is_stored_quantized)?;
            }
            let copy = WeightCopy::of(source, kept, (shape.columns(), place.columns), kept.bytes(rows.count * columns));
            let to = self.segment.place(WeightCopy { cut, ..copy });
            start.get_or_insert(to);
            if place.rows > 0 {
                let bytes = kept.bytes(place.rows * columns);
                self.segment.place(WeightCopy::of(WeightSource::Zeros, kept, (columns, 0), bytes));
            }
        }
        let to = start.expect("a claim names at least one tensor");
        let rows = shape.rows() + parts.len() * place.rows;
        Ok(match (place.rows, place.columns) {
            (0, 0) => self.segment.tensor(to, shape, kept),
            (_, 0) if shape.extents().len() == 1 => self.segment.tensor(to, [rows], kept),
            _ => self.segment.tensor(to, [rows, columns], kept),
        })
    }

    /// The type of tensors that are claimed as one. All must have the same type, except that packed
    /// weights may be claimed with other weights. The common type is then f32, because packed
    /// weights have the type of their scales, which may differ from the type of the other weights.
    fn common_type(&self, parts: &[(String, RankShard)], found: &[TensorSource]) -> Result<DType, WeightError> {
        let first = found.first().expect("a claim names at least one tensor").0;
        let Some(at) = found.iter().position(|(dtype, ..)| *dtype != first) else { return Ok(first) };
        let is_wide = |dtype: &DType| matches!(dtype, DType::F16 | DType::BF16 | DType::F32);
        if parts.iter().any(|(name, _)| self.checkpoint.tensors.is_packed(name))
            && found.iter().all(|(dtype, ..)| is_wide(dtype))
        {
            return Ok(DType::F32);
        }
        Err(WeightError::Mixed { name: parts[at].0.clone(), expected: first, found: found[at].0 })
    }

    /// For the checkpoint's tensor `name`: its type, its source, and the part to read. The
    /// rows and the inner extents of the tensor are checked against the claim. A random checkpoint
    /// has every tensor that is claimed.
    pub(super) fn tensor_source(
        &self,
        name: &str,
        rows: RankShard,
        of_row: RankShard,
        shape: Shape,
    ) -> Result<TensorSource, WeightError> {
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
        let cut = Cut::of(rows, of_row, found.shape);
        Ok((found.dtype.into(), WeightSource::Tensor(name.to_owned()), cut))
    }
}
