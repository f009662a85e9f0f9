//! Each operation as a pass that runs on any backend, and its expected result.

use bursar_kernels::{
    ops::{
        argmax::NO_CHOICE,
        attention_packed::PackedSequences,
        gelu::Gelu,
        patchify::{PatchSize, Pixels},
        rms_norm::RmsNorm,
        rotary::{PairAxes, Rope},
    },
    *,
};

use super::{
    Batch, Clustered, Fp8, Mixed, PagedData, Random, RotaryKv, Routed, Step, Variant, attend, narrowed,
    paged::{PagedPictures, masked},
    pixels::PixelData,
    rounded,
    wide::{Wide, floats, inside, margins, wide},
};

/// How the result of a GEMM is written to its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum How {
    New,
    Into,
    Add,
}

/// One operation at one size. `PagedFp8` is `Paged` over a cache in E4M3. Inputs that may have gaps
/// between their rows are views of wider tensors.
#[derive(Clone, Debug)]
pub enum Pass {
    Patchify { pictures: Vec<(usize, usize, usize)>, side: usize, frames: usize, patches: usize },
    PositionGrid { pictures: Vec<(usize, usize, usize)>, side: usize, hidden: usize, patches: usize, dtype: DType },
    Embed { vocabulary: usize, hidden: usize, tokens: usize, dtype: DType },
    RmsNorm { rows: usize, hidden: usize, dtype: DType },
    LayerNorm { rows: usize, hidden: usize, dtype: DType },
    Linear { rows: usize, in_features: usize, out_features: usize, dtype: DType, bias: bool, how: How },
    GatedLinear { rows: usize, in_features: usize, features: usize, dtype: DType, bias: bool },
    Rotary { rows: usize, heads: usize, head_dim: usize, axes: PairAxes },
    Fp8(Fp8),
    Mixed(Mixed),
    Routed(Routed),
    RotaryKv(RotaryKv),
    Step(Step),
    Variant(Variant),
    GatedRmsNorm { rows: usize, heads: usize, head_dim: usize },
    SigmoidMul { rows: usize, columns: usize, by_row: bool },
    Paged { heads: usize, kv_heads: usize, head_dim: usize, sequences: Vec<(usize, usize)>, window: Option<usize> },
    PagedPictures(PagedPictures),
    PagedFp8 { heads: usize, kv_heads: usize, head_dim: usize, sequences: Vec<(usize, usize)>, window: Option<usize> },
    Packed { heads: usize, head_dim: usize, lengths: Vec<usize> },
    SiluMul { rows: usize, features: usize },
    Gelu { rows: usize, features: usize, kind: Gelu },
    GatherRows { rows: usize, columns: usize, chosen: usize },
    ScatterRows { rows: usize, columns: usize, chosen: usize },
    AddRows { rows: usize, places: usize, columns: usize, chosen: usize },
    Argmax { rows: usize, columns: usize, has_ids: bool },
    Clustered(Clustered),
    Sample { rows: usize, vocabulary: usize },
}

/// Every operation, at sizes that are not multiples of tiles or vectors, and at the head sizes of
/// real models.
pub fn passes() -> Vec<Pass> {
    let mut passes = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        passes.push(Pass::Embed { vocabulary: 53, hidden: 37, tokens: 19, dtype });
        passes.push(Pass::Embed { vocabulary: 7, hidden: 4099, tokens: 41, dtype });
        // Pictures of one patch down or across, pictures larger and smaller than the grid, and
        // grids of one point.
        let pictures = vec![(4, 6, 1), (1, 1, 2), (1, 9, 1), (61, 1, 1), (33, 50, 2)];
        passes.push(Pass::PositionGrid { pictures: pictures.clone(), side: 7, hidden: 35, patches: 203, dtype });
        passes.push(Pass::PositionGrid { pictures: pictures.clone(), side: 16, hidden: 72, patches: 67, dtype });
        passes.push(Pass::PositionGrid { pictures: pictures.clone(), side: 3, hidden: 2060, patches: 5, dtype });
        passes.push(Pass::PositionGrid { pictures, side: 1, hidden: 16, patches: 9, dtype });
        passes.push(Pass::PositionGrid { pictures: vec![], side: 2, hidden: 8, patches: 0, dtype });
        // Rows short enough to keep in registers, with and without vector loads, and longer rows.
        for (rows, hidden) in [(11, 61), (257, 1031), (1100, 72), (3, 9001)] {
            passes.push(Pass::RmsNorm { rows, hidden, dtype });
            passes.push(Pass::LayerNorm { rows, hidden, dtype });
        }
        for how in [How::New, How::Into, How::Add] {
            for (rows, in_features, out_features) in
                [(1, 1, 1), (1, 67, 301), (3, 193, 129), (5, 17, 128), (37, 517, 263)]
            {
                passes.push(Pass::Linear { rows, in_features, out_features, dtype, bias: rows != 3, how });
            }
        }
        passes.push(Pass::Linear { rows: 0, in_features: 5, out_features: 9, dtype, bias: true, how: How::New });
        // Few rows, for this project's kernel, with tiles that are split between blocks and within
        // them.
        let few = [(1, 8, 1), (2, 72, 301), (9, 1000, 130), (17, 136, 77), (33, 64, 263), (64, 520, 129), (65, 40, 50)];
        for (how, (rows, in_features, out_features)) in [How::New, How::Into, How::Add].into_iter().cycle().zip(few) {
            passes.push(Pass::Linear { rows, in_features, out_features, dtype, bias: rows % 2 == 0, how });
        }
        for (rows, in_features, features) in
            [(0, 8, 3), (1, 8, 8), (5, 67, 31), (7, 1000, 136), (31, 72, 200), (64, 264, 72)]
        {
            passes.push(Pass::GatedLinear { rows, in_features, features, dtype, bias: rows == 5 });
        }
        // About a hundred rows, for which gated GEMMs have a separate kernel: 64 or 128 rows per
        // block, and last tiles that overlap other tiles.
        for (rows, in_features, features) in [(65, 72, 136), (128, 520, 100), (130, 1000, 200), (200, 8, 292)] {
            passes.push(Pass::GatedLinear { rows, in_features, features, dtype, bias: rows == 130 });
        }
        // Many rows, for this project's kernels, with tiles that extend beyond rows, columns and
        // depth.
        let many = [(257, 72, 136), (300, 264, 392), (700, 40, 264)];
        for (how, (rows, in_features, out_features)) in [How::New, How::Add, How::Into].into_iter().zip(many) {
            passes.push(Pass::Linear { rows, in_features, out_features, dtype, bias: rows % 2 == 0, how });
        }
        for (rows, in_features, features) in [(257, 72, 136), (513, 136, 264)] {
            passes.push(Pass::GatedLinear { rows, in_features, features, dtype, bias: rows == 257 });
        }
    }
    for (heads, head_dim) in [(5, 32), (3, 64), (3, 72), (2, 80), (2, 128), (2, 256), (1, 512), (1, 2), (2, 34)] {
        passes.push(Pass::Rotary { rows: 23, heads, head_dim, axes: PairAxes::Sections(vec![head_dim / 2]) });
        passes.push(Pass::Packed { heads, head_dim, lengths: vec![1, 64, 7, 0, 33, 129, 31] });
        // Decoding together with first and later prefill chunks, and a sequence without rows.
        let sequences = vec![(1, 1), (1, 333), (37, 37), (18, 150), (0, 40), (1, 16), (16, 32), (3, 129)];
        passes.push(Pass::Paged { heads, kv_heads: heads, head_dim, sequences, window: None });
        let sequences = vec![(1, 261), (1, 0), (1, 17), (21, 37), (0, 40), (1, 16), (3, 129)];
        passes.push(Pass::Paged { heads: 7 * heads, kv_heads: heads, head_dim, sequences, window: None });
    }
    passes.extend(Fp8::cases().into_iter().map(Pass::Fp8));
    passes.extend(Mixed::cases().into_iter().map(Pass::Mixed));
    passes.extend(Routed::cases().into_iter().map(Pass::Routed));
    passes.extend(RotaryKv::cases().into_iter().chain(RotaryKv::partial_cases()).map(Pass::RotaryKv));
    passes.extend(Step::cases().into_iter().map(Pass::Step));
    passes.extend(Variant::cases().into_iter().map(Pass::Variant));
    for (rows, heads, head_dim) in [(5, 3, 20), (7, 4, 128), (3, 2, 300), (2, 3, 1), (9, 2, 512), (70, 5, 24)] {
        passes.push(Pass::GatedRmsNorm { rows, heads, head_dim });
    }
    for (rows, columns) in [(13, 41), (301, 523), (3, 4096), (130, 264)] {
        passes.extend([false, true].map(|by_row| Pass::SigmoidMul { rows, columns, by_row }));
    }
    for axes in [PairAxes::Sections(vec![8, 11, 5]), PairAxes::Interleaved(7, 5)] {
        passes.push(Pass::Rotary { rows: 300, heads: 9, head_dim: 48, axes });
    }
    let packed = [(3, 32, vec![300, 211]), (2, 72, vec![200, 64, 113, 1]), (1, 72, vec![64, 40, 0, 64])];
    passes.extend(packed.map(|(heads, head_dim, lengths)| Pass::Packed { heads, head_dim, lengths }));
    passes.push(Pass::Paged { heads: 33, kv_heads: 1, head_dim: 20, sequences: vec![(1, 0), (5, 47)], window: None });
    passes.push(Pass::Paged { heads: 2, kv_heads: 1, head_dim: 8, sequences: vec![(1, 0); 3], window: None });
    // Only decoding. For these numbers of sequences, a GPU uses blocks of eight, four, two and one
    // warps. One sequence of each batch is long.
    for count in [14, 32, 60, 125] {
        let sequences = (0..count).map(|i| (1, if i == 3 { 1501 } else { 37 * i % 90 })).collect();
        passes.push(Pass::Paged { heads: 64, kv_heads: 1, head_dim: 32, sequences, window: None });
    }
    // Only decoding, with contexts cut into pieces whose size is chosen for the longest context.
    let sequences = (0..30).map(|i| (1, 500 + i)).collect();
    passes.push(Pass::Paged { heads: 2, kv_heads: 1, head_dim: 32, sequences, window: None });
    // A few rows over a long context, which a GPU splits.
    let sequences = vec![(1, 30), (9, 4500), (0, 5), (3, 2101)];
    passes.push(Pass::Paged { heads: 7, kv_heads: 1, head_dim: 128, sequences, window: None });
    passes.extend(masked());
    // Patches down, patches across and frames of each picture: still pictures, time steps of a
    // video and a picture of one patch.
    let pictures = vec![(4, 6, 1), (1, 1, 2), (3, 5, 2), (2, 2, 1)];
    passes.push(Pass::Patchify { pictures: pictures.clone(), side: 14, frames: 2, patches: 101 });
    passes.push(Pass::Patchify { pictures, side: 3, frames: 5, patches: 23 });
    passes.push(Pass::Patchify { pictures: vec![(2, 3, 1)], side: 1, frames: 1, patches: 7 });
    passes.push(Pass::Patchify { pictures: vec![], side: 16, frames: 2, patches: 0 });
    passes.extend([(13, 41), (301, 523)].map(|(rows, features)| Pass::SiluMul { rows, features }));
    for kind in [Gelu::Erf, Gelu::Tanh, Gelu::Quick] {
        for (rows, features) in [(13, 41), (101, 523), (3, 4304)] {
            passes.push(Pass::Gelu { rows, features, kind });
        }
    }
    passes.extend([(37, 61), (2053, 67)].map(|(columns, chosen)| Pass::GatherRows { rows: 29, columns, chosen }));
    passes.push(Pass::ScatterRows { rows: 29, columns: 37, chosen: 11 });
    passes.push(Pass::ScatterRows { rows: 83, columns: 2053, chosen: 71 });
    for (rows, places, columns, chosen) in [(29, 53, 37, 11), (7, 83, 2053, 71), (31, 40, 2568, 40), (5, 3, 8, 0)] {
        passes.push(Pass::AddRows { rows, places, columns, chosen });
    }
    passes.extend([false, true].map(|has_ids| Pass::Argmax { rows: 17, columns: 1009, has_ids }));
    passes.extend(Clustered::cases().into_iter().map(Pass::Clustered));
    // More rows than a GPU processes at a time, and a vocabulary of many slices.
    for (rows, vocabulary) in [(1, 5), (3, 4096), (76, 1009), (21, 9001), (5, 151_937)] {
        passes.push(Pass::Sample { rows, vocabulary });
    }
    let rounded = |pass: &Pass| {
        let Pass::Paged { heads, kv_heads, head_dim, sequences, window } = pass.clone() else { return None };
        Some(Pass::PagedFp8 { heads, kv_heads, head_dim, sequences, window })
    };
    let rounded: Vec<Pass> = passes.iter().filter_map(rounded).collect();
    passes.extend(rounded);
    passes
}

impl Pass {
    fn random(&self) -> Random {
        Random::new(format!("{self:?}").bytes().fold(7, |seed, byte| seed * 31 % 1_000_003 + u64::from(byte)))
    }

    /// Runs the pass and returns its output as `f32`. If the output is a view, the columns on both
    /// sides of the view are included, because the pass must not change them.
    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>) -> Result<Vec<f32>, KernelError> {
        let mut random = self.random();
        let (before, _) = margins(scope.target().activation());
        match self.clone() {
            Pass::Embed { vocabulary, hidden, tokens, dtype } => {
                let table = narrowed(scope, [vocabulary, hidden], dtype, &random.floats(vocabulary * hidden))?;
                let (ids, previous) = ids(&mut random, tokens, vocabulary);
                let (ids, previous) = (scope.upload([tokens], &ids)?, scope.upload([previous.len()], &previous)?);
                floats(scope, &scope.embed(&table, &ids, &previous)?)
            }
            Pass::RmsNorm { rows, hidden, dtype } => {
                let wide = wide(scope, rows, hidden, &mut random)?;
                let weight = narrowed(scope, [hidden], dtype, &random.floats(hidden))?;
                floats(
                    scope,
                    &scope.rms_norm(
                        &inside(&wide),
                        RmsNorm { weight_offset: offset(rows), ..RmsNorm::new(&weight, 1e-5) },
                    )?,
                )
            }
            Pass::LayerNorm { rows, hidden, dtype } => {
                let wide = wide(scope, rows, hidden, &mut random)?;
                let weight = narrowed(scope, [hidden], dtype, &random.floats(hidden))?;
                let bias = narrowed(scope, [hidden], dtype, &random.floats(hidden))?;
                floats(scope, &scope.layer_norm(&inside(&wide), &weight, &bias, 1e-5)?)
            }
            Pass::Linear { rows, in_features, out_features, dtype, bias, how } => {
                let x = wide(scope, rows, in_features, &mut random)?;
                let numbers = random.floats(out_features * in_features);
                let weight = narrowed(scope, [out_features, in_features], dtype, &numbers)?;
                let bias_numbers = random.floats(out_features);
                let bias = if bias { Some(narrowed(scope, [out_features], dtype, &bias_numbers)?) } else { None };
                if how == How::New {
                    return floats(scope, &scope.linear(&inside(&x), &weight, bias.as_ref())?);
                }
                let mut out = wide(scope, rows, out_features, &mut random)?;
                let mut place = out.column_range_mut(before..before + out_features);
                match how {
                    How::Add => scope.linear_add(&inside(&x), &weight, bias.as_ref(), &mut place)?,
                    _ => scope.linear_into(&inside(&x), &weight, bias.as_ref(), &mut place)?,
                }
                floats(scope, &out)
            }
            Pass::GatedLinear { rows, in_features, features, dtype, bias } => {
                let x = wide(scope, rows, in_features, &mut random)?;
                let numbers = random.floats(2 * features * in_features);
                let weight = narrowed(scope, [2 * features, in_features], dtype, &numbers)?;
                let numbers = random.floats(2 * features);
                let bias = if bias { Some(narrowed(scope, [2 * features], dtype, &numbers)?) } else { None };
                floats(scope, &scope.gated_linear(&inside(&x), &weight, bias.as_ref())?)
            }
            Pass::Rotary { rows, heads, head_dim, axes } => {
                let mut x = wide(scope, rows, heads * head_dim, &mut random)?;
                let positions = random.indices(axes.count() * rows, 5000);
                let positions = scope.upload([axes.count(), rows], &positions)?;
                let frequencies = scope.upload([head_dim / 2], &random.floats(head_dim / 2))?;
                let mut place = x.column_range_mut(before..x.columns());
                scope.rotary(&mut place, heads, None, &positions, &Rope { frequencies, axes })?;
                floats(scope, &x)
            }
            Pass::Fp8(fp8) => fp8.run(scope, &mut random),
            Pass::Mixed(mixed) => mixed.run(scope, &mut random),
            Pass::Routed(routed) => routed.run(scope, &mut random),
            Pass::RotaryKv(rotary) => rotary.run(scope, &mut random),
            Pass::Step(step) => step.run(scope, &mut random),
            Pass::Variant(variant) => variant.run(scope, &mut random),
            Pass::GatedRmsNorm { rows, heads, head_dim } => {
                let columns = heads * head_dim;
                let x = narrowed(scope, [rows, columns], scope.target().activation(), &random.floats(rows * columns))?;
                let gate = wide(scope, rows, columns, &mut random)?;
                let weight = scope.upload([head_dim], &random.floats(head_dim))?;
                floats(scope, &scope.gated_rms_norm(&x, &inside(&gate), &weight, 1e-5)?)
            }
            Pass::SigmoidMul { rows, columns, by_row } => {
                let mut x = wide(scope, rows, columns, &mut random)?;
                let gate = wide(scope, rows, if by_row { 1 } else { columns }, &mut random)?;
                scope.sigmoid_mul(&mut x.column_range_mut(before..before + columns), &inside(&gate))?;
                floats(scope, &x)
            }
            Pass::Paged { heads, kv_heads, head_dim, sequences, window } => {
                let (activation, sizes) = (scope.target().activation(), [heads, kv_heads, head_dim]);
                PagedData::new(activation, false, sizes, &sequences, window, &mut random).run(scope)
            }
            Pass::PagedFp8 { heads, kv_heads, head_dim, sequences, window } => {
                let (activation, sizes) = (scope.target().activation(), [heads, kv_heads, head_dim]);
                PagedData::new(activation, true, sizes, &sequences, window, &mut random).run(scope)
            }
            Pass::PagedPictures(pictures) => pictures.data(scope.target().activation(), &mut random).run(scope),
            Pass::Packed { heads, head_dim, lengths } => {
                let rows: usize = lengths.iter().sum();
                let qkv = wide(scope, rows, 3 * heads * head_dim, &mut random)?;
                let bounds = starts(0, &lengths);
                let pairs = lengths.iter().map(|length| (length * length) as u64).sum();
                let longest = lengths.iter().copied().max().unwrap_or(0);
                let starts = scope.upload([bounds.len()], &bounds)?;
                let sequences = PackedSequences { starts, longest, query_key_pairs: pairs };
                floats(scope, &scope.attention_packed(&inside(&qkv), heads, &sequences)?)
            }
            Pass::Patchify { pictures, side, frames, patches } => {
                let data = PixelData::new(&pictures, side, patches, &mut random);
                let size = PatchSize { side, frames };
                let mut out = scope.empty([patches, size.values()])?;
                let pixels = Pixels {
                    bytes: scope.upload_parts(&data.bytes.chunks(997).collect::<Vec<_>>())?,
                    layout: scope.upload([pictures.len(), 4], data.layout.as_flattened())?,
                    levels: scope.upload([pictures.len(), 7], data.levels.as_flattened())?,
                    places: scope.upload([3, patches], &data.places.concat())?,
                };
                scope.patchify(&pixels, size, &mut out)?;
                floats(scope, &out)
            }
            Pass::PositionGrid { pictures, side, hidden, patches, dtype } => {
                let table = narrowed(scope, [side * side, hidden], dtype, &random.floats(side * side * hidden))?;
                let data = PixelData::new(&pictures, 1, patches, &mut random);
                let places = scope.upload([3, patches], &data.places.concat())?;
                let layout = scope.upload([pictures.len(), 4], data.layout.as_flattened())?;
                let mut out = wide(scope, patches, hidden, &mut random)?;
                let mut place = out.column_range_mut(before..before + hidden);
                scope.position_grid(&table, side, &places, &layout, &mut place)?;
                floats(scope, &out)
            }
            Pass::SiluMul { rows, features } => {
                let gate_up = wide(scope, rows, 2 * features, &mut random)?;
                floats(scope, &scope.silu_mul(&inside(&gate_up))?)
            }
            Pass::Gelu { rows, features, kind } => {
                let mut x = wide(scope, rows, features, &mut random)?;
                scope.gelu(&mut x.column_range_mut(before..before + features), kind)?;
                floats(scope, &x)
            }
            Pass::GatherRows { rows, columns, chosen } => {
                let x = wide(scope, rows, columns, &mut random)?;
                let chosen = scope.upload([chosen], &random.indices(chosen, rows))?;
                floats(scope, &scope.gather_rows(&inside(&x), &chosen)?)
            }
            Pass::ScatterRows { rows, columns, chosen } => {
                let x = wide(scope, chosen, columns, &mut random)?;
                let places = scope.upload([chosen], &random.shuffled(rows)[..chosen])?;
                let mut out = wide(scope, rows, columns, &mut random)?;
                scope.scatter_rows(&inside(&x), &places, &mut out.column_range_mut(before..before + columns))?;
                floats(scope, &out)
            }
            Pass::AddRows { rows, places, columns, chosen } => {
                let x = wide(scope, rows, columns, &mut random)?;
                let from = scope.upload([chosen], &random.indices(chosen, rows))?;
                let to = scope.upload([chosen], &random.shuffled(places)[..chosen])?;
                let mut out = wide(scope, places, columns, &mut random)?;
                scope.add_rows(&inside(&x), &from, &to, &mut out.column_range_mut(before..before + columns))?;
                floats(scope, &out)
            }
            Pass::Argmax { rows, columns, has_ids } => {
                let x = wide(scope, rows, columns, &mut random)?;
                let (ids, mut chosen) = (scope.upload([columns], &random.shuffled(columns))?, scope.empty_u32([rows])?);
                if has_ids {
                    scope.argmax_ids_into(&inside(&x), &ids, &mut chosen)?;
                } else {
                    scope.argmax_into(&inside(&x), &mut chosen)?;
                }
                Ok(scope.download::<u32>(&chosen)?.into_iter().map(|id| id as f32).collect())
            }
            Pass::Clustered(clustered) => clustered.run(scope, &mut random),
            Pass::Sample { rows, vocabulary } => Batch::random(&mut random, rows, vocabulary).run(scope),
        }
    }

    /// The expected result of [`run`](Pass::run), computed in `f64` by the operation's definition,
    /// from operands stored as `activation`.
    pub fn expected(&self, activation: DType) -> Vec<f64> {
        let (before, _) = margins(activation);
        let mut random = self.random();
        match self.clone() {
            Pass::Embed { vocabulary, hidden, tokens, dtype } => {
                let table = rounded(dtype, &random.floats(vocabulary * hidden));
                let (ids, previous) = ids(&mut random, tokens, vocabulary);
                let row = |id: u32| match id {
                    NO_CHOICE => vec![0.0; hidden],
                    id => table[id as usize * hidden..][..hidden].to_vec(),
                };
                let known = |id: &u32| InputToken::of_code(*id).id(&previous).expect("a row of the previous step");
                ids.iter().map(known).flat_map(row).collect()
            }
            Pass::RmsNorm { rows, hidden, dtype } => {
                let x = Wide::new(activation, rows, hidden, &mut random);
                let weight = offset_by(offset(rows), rounded(dtype, &random.floats(hidden)));
                (0..rows).flat_map(|row| rms_normed(&x.row(row), &weight)).collect()
            }
            Pass::LayerNorm { rows, hidden, dtype } => {
                let x = Wide::new(activation, rows, hidden, &mut random);
                let (weight, bias) = (rounded(dtype, &random.floats(hidden)), rounded(dtype, &random.floats(hidden)));
                (0..rows).flat_map(|row| layer_normed(&x.row(row), &weight, &bias)).collect()
            }
            Pass::Linear { rows, in_features, out_features, dtype, bias, how } => {
                let x = Wide::new(activation, rows, in_features, &mut random);
                let weight = rounded(dtype, &random.floats(out_features * in_features));
                let bias_numbers = rounded(dtype, &random.floats(out_features));
                let product = |row: usize, out: usize| {
                    let weight = &weight[out * in_features..][..in_features];
                    let sum: f64 = weight.iter().enumerate().map(|(at, weight)| x.at(row, at) * weight).sum();
                    if bias { sum + bias_numbers[out] } else { sum }
                };
                if how == How::New {
                    return (0..rows * out_features).map(|at| product(at / out_features, at % out_features)).collect();
                }
                Wide::new(activation, rows, out_features, &mut random).changed(|row, out, held| match how {
                    How::Add => held + product(row, out),
                    _ => product(row, out),
                })
            }
            Pass::GatedLinear { rows, in_features, features, dtype, bias } => {
                let x = Wide::new(activation, rows, in_features, &mut random);
                let weight = rounded(dtype, &random.floats(2 * features * in_features));
                let bias_numbers = rounded(dtype, &random.floats(2 * features));
                let product = |row: usize, out: usize| {
                    let weight = &weight[out * in_features..][..in_features];
                    let sum: f64 = weight.iter().enumerate().map(|(at, weight)| x.at(row, at) * weight).sum();
                    if bias { sum + bias_numbers[out] } else { sum }
                };
                let element = |at: usize| {
                    let (row, feature) = (at / features, at % features);
                    let (gate, up) = (product(row, feature), product(row, features + feature));
                    gate / (1.0 + (-gate).exp()) * up
                };
                (0..rows * features).map(element).collect()
            }
            Pass::Rotary { rows, heads, head_dim, axes } => {
                let x = Wide::new(activation, rows, heads * head_dim, &mut random);
                let positions = random.indices(axes.count() * rows, 5000);
                let frequencies = random.floats(head_dim / 2);
                let axes = axes.of_pairs(head_dim / 2);
                x.clone().changed(|row, column, held| {
                    let (pair, second) = (column % head_dim % (head_dim / 2), column % head_dim >= head_dim / 2);
                    // The angle is rounded to f32, as it is in the models.
                    let angle = f64::from(positions[axes[pair] * rows + row] as f32 * frequencies[pair]);
                    let other = |offset: isize| x.at(row, (column as isize + offset) as usize);
                    if second {
                        held * angle.cos() + other(-(head_dim as isize) / 2) * angle.sin()
                    } else {
                        held * angle.cos() - other(head_dim as isize / 2) * angle.sin()
                    }
                })
            }
            Pass::Fp8(fp8) => fp8.expected(activation, &mut random),
            Pass::Mixed(mixed) => mixed.expected(activation, &mut random),
            Pass::Routed(routed) => routed.expected(activation, &mut random),
            Pass::RotaryKv(rotary) => rotary.expected(activation, &mut random),
            Pass::Step(step) => step.expected(activation, &mut random),
            Pass::Variant(variant) => variant.expected(activation, &mut random),
            Pass::GatedRmsNorm { rows, heads, head_dim } => {
                let columns = heads * head_dim;
                let x = rounded(activation, &random.floats(rows * columns));
                let gate = Wide::new(activation, rows, columns, &mut random);
                let weight = rounded(DType::F32, &random.floats(head_dim));
                let normed = x.chunks(head_dim).flat_map(|x| rms_normed(x, &weight));
                let gated = |(at, x): (usize, f64)| {
                    let gate = gate.at(at / columns, at % columns);
                    x * gate / (1.0 + (-gate).exp())
                };
                normed.enumerate().map(gated).collect()
            }
            Pass::SigmoidMul { rows, columns, by_row } => {
                let x = Wide::new(activation, rows, columns, &mut random);
                let gate = Wide::new(activation, rows, if by_row { 1 } else { columns }, &mut random);
                let of = |row, column| gate.at(row, if by_row { 0 } else { column });
                x.changed(|row, column, held| held / (1.0 + (-of(row, column)).exp()))
            }
            Pass::Paged { heads, kv_heads, head_dim, sequences, window } => {
                PagedData::new(activation, false, [heads, kv_heads, head_dim], &sequences, window, &mut random)
                    .expected()
            }
            Pass::PagedFp8 { heads, kv_heads, head_dim, sequences, window } => {
                PagedData::new(activation, true, [heads, kv_heads, head_dim], &sequences, window, &mut random)
                    .expected()
            }
            Pass::PagedPictures(pictures) => pictures.data(activation, &mut random).expected(),
            Pass::Packed { heads, head_dim, lengths } => {
                let qkv = Wide::new(activation, lengths.iter().sum(), 3 * heads * head_dim, &mut random);
                let vector = |row: usize, part: usize, head: usize| {
                    &qkv.numbers[row * qkv.pitch() + before + (part * heads + head) * head_dim..][..head_dim]
                };
                let bounds = starts(0, &lengths);
                let mut out = Vec::new();
                for bounds in bounds.windows(2) {
                    let stretch = bounds[0] as usize..bounds[1] as usize;
                    for (row, head) in stretch.clone().flat_map(|row| (0..heads).map(move |head| (row, head))) {
                        let [keys, values] =
                            [1, 2].map(|part| stretch.clone().map(|row| vector(row, part, head)).collect::<Vec<_>>());
                        out.extend(attend(vector(row, 0, head), &keys, &values));
                    }
                }
                out
            }
            Pass::Patchify { pictures, side, frames, patches } => {
                let data = PixelData::new(&pictures, side, patches, &mut random);
                let value = |at: usize| {
                    let (patch, inside) = (at / (3 * frames * side * side), at % (3 * frames * side * side));
                    let [channel, frame] = [inside / (frames * side * side), inside / (side * side) % frames];
                    data.value(patch, channel, frame, side, [inside / side % side, inside % side])
                };
                (0..patches * 3 * frames * side * side).map(value).collect()
            }
            Pass::PositionGrid { pictures, side, hidden, patches, dtype } => {
                let table = rounded(dtype, &random.floats(side * side * hidden));
                let data = PixelData::new(&pictures, 1, patches, &mut random);
                Wide::new(activation, patches, hidden, &mut random)
                    .changed(|patch, element, _| data.position(&table, [side, hidden], patch, element))
            }
            Pass::SiluMul { rows, features } => {
                let gate_up = Wide::new(activation, rows, 2 * features, &mut random);
                let element = |at: usize| {
                    let (row, feature) = (at / features, at % features);
                    let (gate, up) = (gate_up.at(row, feature), gate_up.at(row, features + feature));
                    gate / (1.0 + (-gate).exp()) * up
                };
                (0..rows * features).map(element).collect()
            }
            Pass::Gelu { rows, features, kind } => {
                let tanh_of = |x: f64| std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3));
                let unit = |x: f64| match kind {
                    Gelu::Erf => 0.5 * x * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2)),
                    Gelu::Tanh => 0.5 * x * (1.0 + tanh_of(x).tanh()),
                    Gelu::Quick => x / (1.0 + (-1.702 * x).exp()),
                };
                Wide::new(activation, rows, features, &mut random).changed(|_, _, x| unit(x))
            }
            Pass::GatherRows { rows, columns, chosen } => {
                let x = Wide::new(activation, rows, columns, &mut random);
                random.indices(chosen, rows).iter().flat_map(|row| x.row(*row as usize)).collect()
            }
            Pass::ScatterRows { rows, columns, chosen } => {
                let x = Wide::new(activation, chosen, columns, &mut random);
                let places = random.shuffled(rows)[..chosen].to_vec();
                Wide::new(activation, rows, columns, &mut random).changed(|row, column, held| {
                    let source = places.iter().position(|place| *place as usize == row);
                    source.map_or(held, |source| x.at(source, column))
                })
            }
            Pass::AddRows { rows, places, columns, chosen } => {
                let x = Wide::new(activation, rows, columns, &mut random);
                let (from, to) = (random.indices(chosen, rows), random.shuffled(places)[..chosen].to_vec());
                Wide::new(activation, places, columns, &mut random).changed(|row, column, held| {
                    let added = to.iter().position(|place| *place as usize == row);
                    held + added.map_or(0.0, |chosen| x.at(from[chosen] as usize, column))
                })
            }
            Pass::Argmax { rows, columns, has_ids } => {
                let x = Wide::new(activation, rows, columns, &mut random);
                let ids = random.shuffled(columns);
                let largest =
                    |row: Vec<f64>| (0..columns).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a column");
                let chosen = |column: usize| if has_ids { f64::from(ids[column]) } else { column as f64 };
                (0..rows).map(|row| chosen(largest(x.row(row)))).collect()
            }
            Pass::Clustered(clustered) => clustered.expected(activation, &mut random),
            Pass::Sample { rows, vocabulary } => Batch::random(&mut random, rows, vocabulary).expected(),
        }
    }
}

/// Token ids and a list of previous choices. Every third id refers to an entry of that list, and
/// one entry is `NO_CHOICE`.
fn ids(random: &mut Random, tokens: usize, vocabulary: usize) -> (Vec<u32>, Vec<u32>) {
    let (mut ids, mut previous) = (random.indices(tokens, vocabulary), random.indices(11, vocabulary));
    previous[3] = NO_CHOICE;
    ids.iter_mut()
        .step_by(3)
        .enumerate()
        .for_each(|(place, id)| *id = UnseenToken { row: (place * 5 % 11) as u32 }.code());
    (ids, previous)
}

/// The offset of a norm's weights: 0 for some sizes, to test norms with and without an offset.
fn offset(rows: usize) -> f32 {
    if rows.is_multiple_of(3) { 0.0 } else { 0.5 }
}

/// Weights to which `offset` is added.
pub(super) fn offset_by(offset: f32, weights: Vec<f64>) -> Vec<f64> {
    weights.into_iter().map(|weight| weight + f64::from(offset)).collect()
}

/// A row divided by its root mean square, and multiplied by `weight`.
pub(super) fn rms_normed(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, weight)| x / (mean + 1e-5).sqrt() * weight).collect()
}

/// A row normalized to mean 0 and variance 1, scaled and shifted.
fn layer_normed(x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let normed = x.iter().map(|x| (x - mean) / (variance + 1e-5).sqrt());
    normed.zip(weight.iter().zip(bias)).map(|(x, (weight, bias))| x * weight + bias).collect()
}

pub(super) fn starts(first: usize, lengths: &[usize]) -> Vec<u32> {
    let mut starts = vec![first as u32];
    lengths.iter().for_each(|length| starts.push(starts[starts.len() - 1] + *length as u32));
    starts
}
