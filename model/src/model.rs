//! A model: the weights of its family in one segment, or a plan of their layout.

use std::{cmp::Reverse, ops::ControlFlow, sync::Arc};

use bursar_budgets::{Address, Bytes, Segment};
use bursar_kernels::{
    Backend, DType, E4m3, KernelError, KvShape, Rank, Scope, Target, Tensor,
    ops::{
        fill_random::{LARGEST_DEVIATIONS, MatrixSlice, fill_random_part},
        transfer,
    },
};
use half::bf16;
use rayon::prelude::*;

use crate::{
    Depth,
    blocks::{decoder::StepCaches, vision::share_out},
    checkpoint::{Checkpoint, RandomTensor, TensorInfo, random_checkpoint::DEVIATION},
    flow::{CacheFormat, LogitsOf, ResizedImage, StepBatch, StepLayout},
    load_error::LoadError,
    registry::{EncoderBatch, Family, FamilyConfig},
    weights::{
        Cut, MadeScales, WeightCopy, WeightError, WeightMap, WeightSource, buffer_for, dtype, rounded_parts,
        rounded_to_fp8, scaled_parts, spread, swapped_parts, unpacked_parts,
    },
};

/// A loaded model, or a planned one. A planned model runs on [`Plan`](bursar_kernels::Plan) only.
pub struct Model {
    config: FamilyConfig,
    family: Family,
    quantization: Option<&'static str>,
    cache: CacheFormat,
    weight_bytes: Bytes,
    parameters: u64,
    /// The memory of the family's tensors; `None` for a plan.
    segment: Option<Arc<Segment>>,
}

impl Model {
    /// Plans the layout of the checkpoint's weights for `target`. Every name, shape and type is
    /// checked, and no weight is read, with one exception: if the configuration ties the output
    /// projection to the embedding and the file has both, the two are compared.
    pub fn plan(checkpoint: &Checkpoint, target: &Target) -> Result<Self, LoadError> {
        Model::plan_rank(checkpoint, target, Rank::ALONE)
    }

    /// Like [`plan`](Self::plan), for the shard of the model that belongs to `rank`.
    ///
    /// # Errors
    /// See [`plan`](Self::plan); [`WeightError::Ranks`] and [`WeightError::Cut`] if the model cannot
    /// be divided among this many ranks.
    pub fn plan_rank(checkpoint: &Checkpoint, target: &Target, rank: Rank) -> Result<Self, LoadError> {
        let config = FamilyConfig::of(checkpoint)?;
        let formats = checkpoint.weight_formats()?;
        let quantization = formats.name();
        let mut map = WeightMap::dry(checkpoint, *target, formats).of_rank(rank);
        let family = config.clone().claim(&mut map)?;
        map.refuse_extra()?;
        map.refuse_untied()?;
        map.refuse_bad_scales()?;
        let (cache, weight_bytes, parameters) = (checkpoint.cache(), map.used(), map.parameters());
        Ok(Model { config, family, quantization, cache, weight_bytes, parameters, segment: None })
    }

    /// Like [`plan_rank`](Self::plan_rank), for the rank with the most weights. Everything else is
    /// the same on all ranks.
    ///
    /// # Errors
    /// See [`plan_rank`](Self::plan_rank).
    pub fn plan_heaviest(checkpoint: &Checkpoint, target: &Target, ranks: usize) -> Result<Self, LoadError> {
        let mut heaviest = Model::plan_rank(checkpoint, target, Rank::new(0, ranks))?;
        for rank in Rank::all(ranks).skip(1) {
            let other = Model::plan_rank(checkpoint, target, rank)?;
            if other.weight_bytes > heaviest.weight_bytes {
                heaviest = other;
            }
        }
        Ok(heaviest)
    }

    /// Copies the weights of the backend's [rank](Backend::rank) into `segment`, or draws them
    /// there if the checkpoint is random. At least [`weight_bytes`](Model::weight_bytes) of the
    /// segment must be backed. `progress` is called after each tensor with the bytes copied so far
    /// and the total, and decides whether to continue.
    ///
    /// # Errors
    /// See [`plan`](Self::plan); [`LoadError::Kernel`] if a copy fails;
    /// [`LoadError::Stopped`] if `progress` breaks.
    ///
    /// # Panics
    /// If less of the segment is backed than the weights take.
    pub fn load<B: Backend>(
        checkpoint: &Checkpoint,
        backend: &B,
        segment: impl Into<Arc<Segment>>,
        progress: impl FnMut(Bytes, Bytes) -> ControlFlow<()>,
    ) -> Result<Self, LoadError> {
        Model::load_rank(checkpoint, backend.rank(), backend, segment, progress)
    }

    /// Like [`load`](Self::load), for a rank that may differ from the backend's. Loading does not
    /// communicate with other ranks.
    ///
    /// # Errors
    /// See [`load`](Self::load).
    pub fn load_rank<B: Backend>(
        checkpoint: &Checkpoint,
        rank: Rank,
        backend: &B,
        segment: impl Into<Arc<Segment>>,
        mut progress: impl FnMut(Bytes, Bytes) -> ControlFlow<()>,
    ) -> Result<Self, LoadError> {
        let segment = segment.into();
        let config = FamilyConfig::of(checkpoint)?;
        let formats = checkpoint.weight_formats()?;
        let quantization = formats.name();
        // SAFETY: the model keeps the segment for as long as the tensors, and the assertion below
        // checks that it is backed before any tensor is used.
        let map = unsafe { WeightMap::at(checkpoint, *backend.target(), formats, segment.address_on(rank.index())) };
        let mut map = map.of_rank(rank);
        let family = config.clone().claim(&mut map)?;
        map.refuse_bad_scales()?;
        let total = map.used();
        assert!(total <= segment.backed(), "{total} of weights in a segment of {}", segment.backed());
        let mut done = Bytes(0);
        // If loading ends early, this guard waits for the copies in flight before
        // the segment is dropped.
        let _settled = Settled(backend);
        // The largest copies run first, so that the threads that a backend starts for them are
        // available for all other copies as well.
        let mut copies: Vec<_> = map.copies().iter().collect();
        copies.sort_by_key(|copy| Reverse(copy.bytes));
        let mut buffer = RoundingBuffer::default();
        for copy in copies {
            upload(checkpoint, backend, copy, &mut buffer)?;
            done += copy.bytes;
            if progress(done, total).is_break() {
                return Err(LoadError::Stopped);
            }
        }
        let (cache, parameters) = (checkpoint.cache(), map.parameters());
        let segment = Some(segment);
        Ok(Model { config, family, quantization, cache, weight_bytes: total, parameters, segment })
    }

    /// The segment of the weights, which all ranks of a group share. `None` for a plan.
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        self.segment.as_ref()
    }

    pub fn config(&self) -> &FamilyConfig {
        &self.config
    }

    /// The name of the method that quantized the weights to FP8, either while they loaded or in the
    /// checkpoint; `None` if all weights are unquantized. See
    /// [`WeightFormats::name`](crate::checkpoint::WeightFormats::name).
    pub fn quantization(&self) -> Option<&'static str> {
        self.quantization
    }

    /// The storage format of keys and values.
    pub fn cache(&self) -> CacheFormat {
        self.cache
    }

    /// Bytes of the weights' segment.
    pub fn weight_bytes(&self) -> Bytes {
        self.weight_bytes
    }

    /// Elements of all checkpoint tensors that the model reads; tied tensors count once.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// The rank that holds these weights.
    pub fn rank(&self) -> Rank {
        self.family.decoder().share().rank
    }

    /// Number of times that each expert was chosen; see
    /// [`Decoder::expert_loads`](crate::blocks::decoder::Decoder::expert_loads).
    pub fn expert_loads(&self) -> Option<&Tensor<'static>> {
        self.family.decoder().expert_loads()
    }

    /// The shape and the element type of this rank's keys and values on `target`.
    pub fn kv_shape(&self, target: &Target) -> KvShape {
        self.family.decoder().kv_shape(self.cache.dtype(target))
    }

    /// Bytes of one row of the vision cache on `target`.
    pub fn picture_row_bytes(&self, target: &Target) -> Bytes {
        target.activation().bytes(self.config.embedding_layout().width())
    }

    /// Number of ranks that divide the pictures of a launch among themselves, and must therefore be
    /// linked when they encode. The number is 1 for a model on one device.
    pub fn picture_ranks(&self) -> usize {
        self.rank().of()
    }

    /// Packs pictures for one launch, each with the vision cache rows for its embeddings, and
    /// [distributes](crate::blocks::vision::share_out) them over the ranks.
    pub fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> EncoderBatch {
        let patches: Vec<_> = pictures.iter().map(|(image, _)| image.grid.patches()).collect();
        let of_rank = |share: Vec<usize>| share.into_iter().map(|picture| pictures[picture]).collect();
        let of_ranks: Vec<Vec<_>> = share_out(&patches, self.picture_ranks()).into_iter().map(of_rank).collect();
        self.family.pack(&of_ranks)
    }

    /// Like [`pack`](Self::pack), but each rank encodes all of these pictures.
    pub fn pack_for_each_rank(&self, pictures: &[(&ResizedImage, &[u32])]) -> EncoderBatch {
        self.family.pack(&vec![pictures.to_vec(); self.picture_ranks()])
    }

    /// Runs the vision encoder and writes the results to the rows of `cache`
    /// `[rows, width]`. The [`EmbeddingLayout`](crate::blocks::vision::EmbeddingLayout)
    /// determines `width`. If pictures are distributed over ranks, each rank encodes its own
    /// pictures, and all ranks receive all rows.
    pub fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &EncoderBatch,
        cache: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        self.encode_through(scope, batch, cache, Depth::Whole)
    }

    /// Like [`encode`](Self::encode), but runs only the layers of the encoder that `depth` selects.
    pub fn encode_through<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &EncoderBatch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        self.assert_loaded::<B>();
        self.family.encode(scope, batch, cache, depth)
    }

    /// Runs one step of the decoder and returns `[logit_rows, vocabulary]` f32,
    /// or only this rank's columns of it. On a GPU, there may be gaps between
    /// the rows. `score` receives the logits of the scored rows, a few rows at
    /// a time; see [`Decoder::step`](crate::blocks::decoder::Decoder::step).
    pub fn step<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &StepBatch,
        caches: &StepCaches<'_>,
        of: LogitsOf,
        score: impl FnMut(&Scope<'_, B>, &Tensor<'_>) -> Result<(), KernelError>,
    ) -> Result<Tensor<'s>, KernelError> {
        self.assert_loaded::<B>();
        self.family.decoder().step(scope, batch, caches, of, score)
    }

    /// Launches a step whose arrays are already on the device, or will be when a CUDA graph of the
    /// step is replayed; see [`Decoder::step_over`](crate::blocks::decoder::Decoder::step_over).
    pub fn step_over<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        step_arrays: &Tensor<'_>,
        layout: &StepLayout,
        caches: &StepCaches<'_>,
        of: LogitsOf,
    ) -> Result<Tensor<'s>, KernelError> {
        self.assert_loaded::<B>();
        self.family.decoder().step_over(scope, step_arrays, layout, caches, of)
    }

    fn assert_loaded<B: Backend>(&self) {
        assert!(!B::COMPUTES || self.segment.is_some(), "a planned model has no weights to compute with");
    }
}

/// A guard that waits for the backend when it is dropped.
struct Settled<'b, B: Backend>(&'b B);

impl<B: Backend> Drop for Settled<'_, B> {
    fn drop(&mut self) {
        // An error is ignored here: a lost device runs nothing any more, and the next call to the
        // device reports the loss.
        drop(transfer::settle(self.0));
    }
}

/// Host buffers for unpacking, padding and rounding. They are reused for each tensor because
/// writing to memory that was used before is much faster than writing to fresh memory.
#[derive(Default)]
struct RoundingBuffer {
    unpacked: Vec<u8>,
    padded: Vec<u8>,
    rounded: Vec<u8>,
}

fn upload<B: Backend>(
    checkpoint: &Checkpoint,
    backend: &B,
    copy: &WeightCopy,
    buffer: &mut RoundingBuffer,
) -> Result<(), LoadError> {
    let made: Vec<u8>;
    let source: &[u8] = match &copy.source {
        WeightSource::Tensor(name) => {
            let found = part(checkpoint, name, copy)?;
            if let Some(scale) = &copy.scale {
                let scale = checkpoint.tensor(scale).map_err(WeightError::from)?;
                return upload_scaled(backend, (&found, &scale), copy, buffer);
            }
            if let Some(made) = copy.rounded {
                return upload_to_fp8(backend, &found, copy, made, buffer);
            }
            return if copy.swapped {
                upload_swapped(backend, &found, copy, buffer)
            } else {
                upload_tensor(backend, &found, copy, buffer)
            };
        }
        WeightSource::Constant(numbers) => {
            made = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
            &made
        }
        WeightSource::Zeros => {
            made = vec![0; copy.bytes.as_usize()];
            &made
        }
        WeightSource::WeightScales(name, how) => {
            let found = part(checkpoint, name, copy)?;
            made = spread(&found, *how).into_iter().flat_map(f32::to_ne_bytes).collect();
            &made
        }
        WeightSource::Same(number) => {
            made = number.to_ne_bytes().repeat(DType::F32.elements(copy.bytes));
            &made
        }
        WeightSource::Made => return Ok(()),
        WeightSource::Random(_, RandomTensor::Ones) => {
            let found = DType::BF16;
            made = bf16::ONE.to_ne_bytes().repeat(copy.kept.elements(copy.bytes));
            if copy.kept != found {
                return upload_rounded(backend, &made, found, (copy.to, copy.kept), &mut buffer.rounded);
            }
            &made
        }
        WeightSource::SkewedRouter(_, seed, skew) => {
            let columns = copy.row.0;
            let experts = copy.kept.elements(copy.bytes) / columns;
            // SAFETY: the map laid this copy out inside the segment, which `load_rank` holds and
            // has checked to be backed.
            let mut out = unsafe { Tensor::persistent(copy.to, [experts, columns], copy.kept) };
            for (expert, deviation) in skew.deviations(experts, *seed).into_iter().enumerate() {
                let (part, mut row) = (
                    MatrixSlice { seed: *seed, first: (expert * columns) as u64, pitch: columns },
                    out.row_range_mut(expert..expert + 1),
                );
                fill_random_part(backend, part, DEVIATION * deviation, &mut row)?;
            }
            return Ok(());
        }
        WeightSource::Random(_, RandomTensor::Drawn { seed }) => {
            let (columns, zeros) = copy.row;
            let (first, pitch) = copy.cut.as_ref().map_or((0, columns), Cut::place);
            let columns = columns + zeros;
            let rows = copy.kept.elements(copy.bytes) / columns;
            // SAFETY: the map laid this copy out inside the segment, which `load_rank` holds and
            // has checked to be backed.
            let mut out = unsafe { Tensor::persistent(copy.to, [rows, columns], copy.kept) };
            // FP8 numbers are drawn over the full range of E4M3. Their scale brings the weights to
            // the same deviation as other weights.
            let deviation = match copy.kept {
                DType::F8E4M3 => E4m3::MAX / LARGEST_DEVIATIONS,
                _ => DEVIATION,
            };
            return Ok(fill_random_part(backend, MatrixSlice { seed: *seed, first, pitch }, deviation, &mut out)?);
        }
    };
    fill(backend, source, copy.to)
}

/// The part of the checkpoint's tensor `name` that `copy` reads.
fn part<'c>(checkpoint: &'c Checkpoint, name: &str, copy: &'c WeightCopy) -> Result<TensorInfo<'c>, WeightError> {
    let found = checkpoint.tensor(name)?;
    Ok(copy.cut.as_ref().map_or(found, |cut| cut.take(&found)))
}

/// Copies a tensor of the checkpoint, part by part if it must be unpacked.
fn upload_tensor<B: Backend>(
    backend: &B,
    found: &TensorInfo<'_>,
    copy: &WeightCopy,
    buffer: &mut RoundingBuffer,
) -> Result<(), LoadError> {
    let (mut to, kept, dtype) = (copy.to, copy.kept, dtype(found.dtype));
    unpacked_parts(found, &mut buffer.unpacked, |part| {
        let (padded, place) = (padded(part, dtype, copy.row, &mut buffer.padded), to);
        to = to.offset(kept.bytes(padded.len() / dtype.size()));
        if dtype == kept {
            fill(backend, padded, place)
        } else {
            upload_rounded(backend, padded, dtype, (place, kept), &mut buffer.rounded)
        }
    })
}

/// Copies a tensor of the checkpoint and multiplies its rows by scales, part by part.
fn upload_scaled<B: Backend>(
    backend: &B,
    (found, scale): (&TensorInfo<'_>, &TensorInfo<'_>),
    copy: &WeightCopy,
    buffer: &mut RoundingBuffer,
) -> Result<(), LoadError> {
    let mut to = copy.to;
    scaled_parts(found, scale, &mut buffer.unpacked, |part| {
        let place = to;
        to = to.offset(copy.kept.bytes(part.len() / DType::F32.size()));
        upload_rounded(backend, part, DType::F32, (place, copy.kept), &mut buffer.rounded)
    })
}

/// Copies a tensor of the checkpoint and swaps the axes of its matrices, some matrices at a time.
fn upload_swapped<B: Backend>(
    backend: &B,
    found: &TensorInfo<'_>,
    copy: &WeightCopy,
    buffer: &mut RoundingBuffer,
) -> Result<(), LoadError> {
    let (mut to, dtype) = (copy.to, dtype(found.dtype));
    swapped_parts(found, &mut buffer.unpacked, |part| {
        let place = to;
        to = to.offset(copy.kept.bytes(part.len() / dtype.size()));
        if dtype == copy.kept {
            fill(backend, part, place)
        } else {
            upload_rounded(backend, part, dtype, (place, copy.kept), &mut buffer.rounded)
        }
    })
}

/// Quantizes a tensor of the checkpoint to FP8, and copies the result and its scales.
fn upload_to_fp8<B: Backend>(
    backend: &B,
    found: &TensorInfo<'_>,
    copy: &WeightCopy,
    made: MadeScales,
    buffer: &mut RoundingBuffer,
) -> Result<(), LoadError> {
    let (mut to, mut scales_to, dtype) = (copy.to, made.to, dtype(found.dtype));
    let RoundingBuffer { unpacked, padded: zeros, rounded } = buffer;
    let mut each = |rows: &[u8]| {
        let columns = copy.row.0 + copy.row.1;
        let rows = padded(rows, dtype, copy.row, zeros);
        rounded_to_fp8(rows, (dtype, columns), made, rounded, |codes, scales| {
            let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_ne_bytes()).collect();
            fill(backend, codes, to)?;
            fill(backend, &bytes, scales_to)?;
            to = to.offset(Bytes(codes.len() as u64));
            scales_to = scales_to.offset(Bytes(bytes.len() as u64));
            Ok(())
        })
    };
    if copy.swapped {
        return swapped_parts(found, unpacked, each);
    }
    if found.is_in_place() {
        return each(found.bytes);
    }
    // The whole tensor is gathered first, because scale blocks and matrices do not end at the
    // ends of unpacked parts.
    let mut all = Vec::new();
    unpacked_parts(found, unpacked, |part| {
        all.extend_from_slice(part);
        Ok::<_, LoadError>(())
    })?;
    each(&all)
}

/// Copies `source` to the address `to`.
fn fill<B: Backend>(backend: &B, source: &[u8], to: Address) -> Result<(), LoadError> {
    // The copy ignores the element type.
    // SAFETY: `to` is inside the segment, which `load_rank` holds and has checked to be backed.
    let mut out = unsafe { Tensor::persistent(to, [source.len()], DType::U8) };
    Ok(transfer::fill(backend, source, &mut out)?)
}

/// Minimum number of rows that one thread pads.
const PADDED_BY_A_THREAD: usize = 64;

/// Returns the rows of a file's tensor, each followed by `zeros` zero elements. The result is in
/// `buffer`, or is `bytes` itself if `zeros` is 0.
fn padded<'s>(bytes: &'s [u8], dtype: DType, (columns, zeros): (usize, usize), buffer: &'s mut Vec<u8>) -> &'s [u8] {
    if zeros == 0 {
        return bytes;
    }
    let (row, longer) = (columns * dtype.size(), (columns + zeros) * dtype.size());
    let padded = buffer_for(buffer, bytes.len() / row * longer);
    let rows = padded.par_chunks_exact_mut(longer).zip(bytes.par_chunks_exact(row));
    rows.with_min_len(PADDED_BY_A_THREAD).for_each(|(longer, row)| {
        let (place, behind) = longer.split_at_mut(row.len());
        place.copy_from_slice(row);
        behind.fill(0);
    });
    padded
}

/// Elements that the host rounds at a time: 64 MiB of 16-bit elements. The GPU backend uses several
/// threads for a copy that is larger than its page-locked buffers of 32 MiB.
const ROUNDED_AT_ONCE: usize = 1 << 25;

/// Rounds elements of type `found` to the nearest values of type `kept`, and copies them to `to`.
fn upload_rounded<B: Backend>(
    backend: &B,
    source: &[u8],
    found: DType,
    (mut to, kept): (Address, DType),
    buffer: &mut Vec<u8>,
) -> Result<(), LoadError> {
    rounded_parts(source, (found, kept), ROUNDED_AT_ONCE, buffer, |rounded| {
        let place = to;
        to = to.offset(Bytes(rounded.len() as u64));
        fill(backend, rounded, place)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_its_zeros_behind_it_to_the_last() {
        let rows = 3 * PADDED_BY_A_THREAD + 1;
        let bytes: Vec<u8> = (0..rows * 10).map(|at| (at % 251) as u8 + 1).collect();
        let expected: Vec<u8> = bytes.chunks_exact(10).flat_map(|row| [row, &[0; 6]].concat()).collect();
        // Leftovers of another tensor, longer and shorter than this tensor.
        for mut buffer in [vec![0xff; 2 * expected.len()], vec![0xff; 7]] {
            assert_eq!(padded(&bytes, DType::BF16, (5, 3), &mut buffer), expected);
            assert_eq!(padded(&bytes, DType::BF16, (5, 0), &mut buffer).as_ptr(), bytes.as_ptr(), "nothing is copied");
        }
    }
}
