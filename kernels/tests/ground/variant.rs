//! Operations that only Gemma uses: GELU in place of SiLU, a norm that is added to other rows,
//! scaled embeddings, means of rows, limited logits, and heads that are normalized and rotated.

use bursar_kernels::{
    ops::{
        gate_mul::GateActivation,
        rms_norm::RmsNorm,
        rotary::{PairAxes, Rope},
    },
    *,
};

use super::{
    Random, narrowed,
    pass::{offset_by, rms_normed},
    rounded,
    wide::{Wide, floats, inside, margins, wide},
};

#[derive(Clone, Debug)]
pub enum Variant {
    GeluMul {
        rows: usize,
        features: usize,
    },
    GeluLinear {
        rows: usize,
        in_features: usize,
        features: usize,
        dtype: DType,
        bias: bool,
    },
    /// Gates and factors in separate tensors.
    GeluMulRows {
        rows: usize,
        features: usize,
    },
    NormAdd {
        rows: usize,
        hidden: usize,
        dtype: DType,
        factor: Option<f32>,
    },
    NormedRotary {
        rows: usize,
        heads: usize,
        head_dim: usize,
    },
    SoftCap {
        rows: usize,
        columns: usize,
    },
    Clamp {
        rows: usize,
        columns: usize,
        in_place: bool,
    },
    Standardize {
        rows: usize,
        columns: usize,
    },
    ScaledEmbed {
        vocabulary: usize,
        hidden: usize,
        tokens: usize,
        dtype: DType,
    },
    MeanRows {
        rows: usize,
        columns: usize,
        count: usize,
    },
}

/// Factor of embeddings, which bf16 and f16 cannot represent.
const SCALE: f32 = 33.941_124;

/// Factor of the sums of norms.
const FACTOR: f32 = 0.613;

/// The limit of logits, which the random numbers of the tests exceed.
const CAP: f32 = 0.4;

/// Bounds of elements, which bf16 and f16 can represent.
const BOUNDS: [f32; 2] = [-0.25, 0.5];

/// Offset of the norm's weights.
const OFFSET: f32 = 1.0;

impl Variant {
    pub(super) fn cases() -> Vec<Variant> {
        let mut cases =
            vec![Variant::GeluMul { rows: 13, features: 41 }, Variant::GeluMul { rows: 301, features: 523 }];
        for (rows, columns, count) in [(7, 33, 16), (3, 1152, 16), (5, 4099, 9), (1, 8, 1)] {
            cases.push(Variant::MeanRows { rows, columns, count });
        }
        for (rows, features) in [(1, 256), (13, 41), (301, 520)] {
            cases.push(Variant::GeluMulRows { rows, features });
        }
        for (rows, columns) in [(1, 4099), (5, 33), (200, 1031)] {
            cases.push(Variant::SoftCap { rows, columns });
        }
        for (rows, columns) in [(1, 4099), (5, 33), (200, 1031), (0, 8)] {
            cases.push(Variant::Clamp { rows, columns, in_place: rows == 5 });
            cases.push(Variant::Standardize { rows, columns });
        }
        for (rows, heads, head_dim) in [(1, 8, 512), (37, 3, 256), (5, 4, 64), (9, 2, 34), (3, 5, 80)] {
            cases.push(Variant::NormedRotary { rows, heads, head_dim });
        }
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Rows that fit into registers, with and without vector loads, more rows than thread
            // blocks, and longer rows.
            for (rows, hidden) in [(11, 61), (257, 1031), (1100, 72), (3, 9001), (2, 9216), (0, 8)] {
                let factor = (rows % 2 == 1).then_some(FACTOR);
                cases.push(Variant::NormAdd { rows, hidden, dtype, factor });
            }
            for (rows, in_features, features) in
                [(0, 8, 3), (1, 8, 8), (5, 67, 31), (7, 1000, 136), (130, 72, 200), (300, 136, 264)]
            {
                cases.push(Variant::GeluLinear { rows, in_features, features, dtype, bias: rows == 5 });
            }
            for (vocabulary, hidden, tokens) in [(53, 37, 19), (7, 4099, 41), (29, 1152, 8)] {
                cases.push(Variant::ScaledEmbed { vocabulary, hidden, tokens, dtype });
            }
        }
        cases
    }

    /// The type of the weights; `None` for an operation without weights.
    pub fn dtype(&self) -> Option<DType> {
        match self {
            Variant::GeluMul { .. }
            | Variant::GeluMulRows { .. }
            | Variant::MeanRows { .. }
            | Variant::NormedRotary { .. }
            | Variant::SoftCap { .. }
            | Variant::Clamp { .. }
            | Variant::Standardize { .. } => None,
            Variant::GeluLinear { dtype, .. } | Variant::NormAdd { dtype, .. } | Variant::ScaledEmbed { dtype, .. } => {
                Some(*dtype)
            }
        }
    }

    pub(super) fn run<B: Backend>(&self, scope: &Scope<'_, B>, random: &mut Random) -> Result<Vec<f32>, KernelError> {
        let (activation, format) = (GateActivation::GeluTanh, ActivationFormat::PLAIN);
        match *self {
            Variant::GeluMul { rows, features } => {
                let gate_up = wide(scope, rows, 2 * features, random)?;
                let out = scope.gate_mul_as(&inside(&gate_up), activation, format)?;
                floats(scope, out.plain.as_ref().expect("the plain format"))
            }
            Variant::GeluLinear { rows, in_features, features, dtype, bias } => {
                let x = wide(scope, rows, in_features, random)?;
                let numbers = random.floats(2 * features * in_features);
                let weight = narrowed(scope, [2 * features, in_features], dtype, &numbers)?;
                let numbers = random.floats(2 * features);
                let bias = if bias { Some(narrowed(scope, [2 * features], dtype, &numbers)?) } else { None };
                let out = scope.gated_linear_as(&inside(&x), &weight, bias.as_ref(), activation, format)?;
                floats(scope, out.plain.as_ref().expect("the plain format"))
            }
            Variant::GeluMulRows { rows, features } => {
                let (gate, up) = (wide(scope, rows, features, random)?, wide(scope, rows, features, random)?);
                floats(scope, &scope.gate_mul(&inside(&gate), &inside(&up), activation)?)
            }
            Variant::SoftCap { rows, columns } => {
                let (before, after) = margins(DType::F32);
                let width = before + columns + after;
                let mut x = scope.upload([rows, width], &random.floats(rows * width))?;
                scope.soft_cap(&mut x.column_range_mut(before..before + columns), CAP)?;
                floats(scope, &x)
            }
            Variant::Clamp { rows, columns, in_place } => {
                let mut x = wide(scope, rows, columns, random)?;
                let bounds = scope.upload([2], &BOUNDS)?;
                if !in_place {
                    return floats(scope, &scope.clamp(&inside(&x), &bounds)?);
                }
                let (before, _) = margins(scope.target().activation());
                scope.clamp_in_place(&mut x.column_range_mut(before..before + columns), &bounds)?;
                floats(scope, &x)
            }
            Variant::Standardize { rows, columns } => {
                let mut x = wide(scope, rows, columns, random)?;
                let shift = scope.upload([columns], &random.floats(columns))?;
                let scale = scope.upload([columns], &random.floats(columns))?;
                let (before, _) = margins(scope.target().activation());
                scope.standardize(&mut x.column_range_mut(before..before + columns), SCALE, &shift, &scale)?;
                floats(scope, &x)
            }
            Variant::NormedRotary { rows, heads, head_dim } => {
                let mut x = wide(scope, rows, heads * head_dim, random)?;
                let positions = scope.upload([1, rows], &random.indices(rows, 5000))?;
                let frequencies = scope.upload([head_dim / 2], &random.floats(head_dim / 2))?;
                let weight = random.floats(head_dim);
                let weight = narrowed(scope, [head_dim], scope.target().activation(), &weight)?;
                let norm = RmsNorm { weight_offset: OFFSET, ..RmsNorm::new(&weight, 1e-5) };
                let rope = Rope { frequencies, axes: PairAxes::Sections(vec![head_dim / 2]) };
                let (before, _) = margins(scope.target().activation());
                let mut place = x.column_range_mut(before..before + heads * head_dim);
                scope.rotary(&mut place, heads, Some(norm), &positions, &rope)?;
                floats(scope, &x)
            }
            Variant::NormAdd { rows, hidden, dtype, factor } => {
                let x = wide(scope, rows, hidden, random)?;
                let weight = narrowed(scope, [hidden], dtype, &random.floats(hidden))?;
                let mut sum = wide(scope, rows, hidden, random)?;
                let (before, _) = margins(scope.target().activation());
                let norm = RmsNorm { weight_offset: OFFSET, ..RmsNorm::new(&weight, 1e-5) };
                let factor = factor.map(|factor| scope.upload([1], &[factor])).transpose()?;
                let mut place = sum.column_range_mut(before..before + hidden);
                scope.rms_norm_add(&inside(&x), norm, factor.as_ref(), &mut place)?;
                floats(scope, &sum)
            }
            Variant::MeanRows { rows, columns, count } => {
                let x = wide(scope, rows * count, columns, random)?;
                floats(scope, &scope.mean_rows(&inside(&x), count)?)
            }
            Variant::ScaledEmbed { vocabulary, hidden, tokens, dtype } => {
                let table = narrowed(scope, [vocabulary, hidden], dtype, &random.floats(vocabulary * hidden))?;
                let ids = scope.upload([tokens], &random.indices(tokens, vocabulary))?;
                let share = RankShard::all(vocabulary);
                floats(scope, &scope.embed_share(&table, share, &ids, &scope.empty_u32([0])?, SCALE)?)
            }
        }
    }

    pub(super) fn expected(&self, activation: DType, random: &mut Random) -> Vec<f64> {
        let tanh_of = |x: f64| std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3));
        let gelu = |x: f64| 0.5 * x * (1.0 + tanh_of(x).tanh());
        match *self {
            Variant::GeluMul { rows, features } => {
                let gate_up = Wide::new(activation, rows, 2 * features, random);
                let element = |at: usize| {
                    let (row, feature) = (at / features, at % features);
                    gelu(gate_up.at(row, feature)) * gate_up.at(row, features + feature)
                };
                (0..rows * features).map(element).collect()
            }
            Variant::GeluLinear { rows, in_features, features, dtype, bias } => {
                let x = Wide::new(activation, rows, in_features, random);
                let weight = rounded(dtype, &random.floats(2 * features * in_features));
                let biases = rounded(dtype, &random.floats(2 * features));
                let product = |row: usize, out: usize| {
                    let weight = &weight[out * in_features..][..in_features];
                    let sum: f64 = weight.iter().enumerate().map(|(at, weight)| x.at(row, at) * weight).sum();
                    if bias { sum + biases[out] } else { sum }
                };
                let element = |at: usize| {
                    let (row, feature) = (at / features, at % features);
                    gelu(product(row, feature)) * product(row, features + feature)
                };
                (0..rows * features).map(element).collect()
            }
            Variant::GeluMulRows { rows, features } => {
                let gate = Wide::new(activation, rows, features, random);
                let up = Wide::new(activation, rows, features, random);
                let element = |at: usize| (at / features, at % features);
                let product = |(row, feature)| gelu(gate.at(row, feature)) * up.at(row, feature);
                (0..rows * features).map(element).map(product).collect()
            }
            Variant::SoftCap { rows, columns } => {
                let (before, after) = margins(DType::F32);
                let (width, cap) = (before + columns + after, f64::from(CAP));
                let capped = |(at, x): (usize, f32)| match (at % width).checked_sub(before) {
                    Some(column) if column < columns => cap * (f64::from(x) / cap).tanh(),
                    _ => f64::from(x),
                };
                random.floats(rows * width).into_iter().enumerate().map(capped).collect()
            }
            Variant::Clamp { rows, columns, in_place } => {
                let x = Wide::new(activation, rows, columns, random);
                let limited = |x: f64| x.clamp(f64::from(BOUNDS[0]), f64::from(BOUNDS[1]));
                if in_place {
                    return x.changed(|_, _, held| limited(held));
                }
                (0..rows * columns).map(|at| limited(x.at(at / columns, at % columns))).collect()
            }
            Variant::Standardize { rows, columns } => {
                let x = Wide::new(activation, rows, columns, random);
                let (shift, scale) = (random.floats(columns), random.floats(columns));
                x.changed(|_, column, held| {
                    (held * f64::from(SCALE) - f64::from(shift[column])) * f64::from(scale[column])
                })
            }
            Variant::NormedRotary { rows, heads, head_dim } => {
                let x = Wide::new(activation, rows, heads * head_dim, random);
                let (positions, frequencies) = (random.indices(rows, 5000), random.floats(head_dim / 2));
                let weight = offset_by(OFFSET, rounded(activation, &random.floats(head_dim)));
                let half = head_dim / 2;
                let turned = |row: usize, head: usize| {
                    let x = rms_normed(&x.row(row)[head * head_dim..][..head_dim], &weight);
                    let angle = |pair: usize| f64::from(positions[row] as f32 * frequencies[pair]);
                    let left = (0..half).map(|pair| x[pair] * angle(pair).cos() - x[pair + half] * angle(pair).sin());
                    let right = (0..half).map(|pair| x[pair + half] * angle(pair).cos() + x[pair] * angle(pair).sin());
                    left.chain(right).collect::<Vec<_>>()
                };
                let rows: Vec<Vec<f64>> =
                    (0..rows).map(|row| (0..heads).flat_map(|head| turned(row, head)).collect()).collect();
                x.changed(|row, column, _| rows[row][column])
            }
            Variant::NormAdd { rows, hidden, dtype, factor } => {
                let x = Wide::new(activation, rows, hidden, random);
                let weight = offset_by(OFFSET, rounded(dtype, &random.floats(hidden)));
                let normed: Vec<_> = (0..rows).map(|row| rms_normed(&x.row(row), &weight)).collect();
                Wide::new(activation, rows, hidden, random)
                    .changed(|row, column, held| (held + normed[row][column]) * f64::from(factor.unwrap_or(1.0)))
            }
            Variant::MeanRows { rows, columns, count } => {
                let x = Wide::new(activation, rows * count, columns, random);
                let mean =
                    |row, column| (0..count).map(|at| x.at(row * count + at, column)).sum::<f64>() / count as f64;
                (0..rows * columns).map(|at| mean(at / columns, at % columns)).collect()
            }
            Variant::ScaledEmbed { vocabulary, hidden, tokens, dtype } => {
                let (table, scale) =
                    (rounded(dtype, &random.floats(vocabulary * hidden)), rounded(activation, &[SCALE]));
                let row = |id: u32| table[id as usize * hidden..][..hidden].iter().map(|element| element * scale[0]);
                random.indices(tokens, vocabulary).into_iter().flat_map(row).collect()
            }
        }
    }
}
