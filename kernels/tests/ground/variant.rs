//! Operations that only Gemma uses: GELU in place of SiLU, a norm that is added to other rows,
//! scaled embeddings, and means of rows.

use bursar_kernels::{
    ops::{gate_mul::GateActivation, rms_norm::RmsNorm},
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
    GeluMul { rows: usize, features: usize },
    GeluLinear { rows: usize, in_features: usize, features: usize, dtype: DType, bias: bool },
    NormAdd { rows: usize, hidden: usize, dtype: DType },
    ScaledEmbed { vocabulary: usize, hidden: usize, tokens: usize, dtype: DType },
    MeanRows { rows: usize, columns: usize, count: usize },
}

/// Factor of embeddings, which bf16 and f16 cannot represent.
const SCALE: f32 = 33.941_124;

/// Offset of the norm's weights.
const OFFSET: f32 = 1.0;

impl Variant {
    pub(super) fn cases() -> Vec<Variant> {
        let mut cases =
            vec![Variant::GeluMul { rows: 13, features: 41 }, Variant::GeluMul { rows: 301, features: 523 }];
        for (rows, columns, count) in [(7, 33, 16), (3, 1152, 16), (5, 4099, 9), (1, 8, 1)] {
            cases.push(Variant::MeanRows { rows, columns, count });
        }
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Rows that fit into registers, with and without vector loads, more rows than thread
            // blocks, and longer rows.
            for (rows, hidden) in [(11, 61), (257, 1031), (1100, 72), (3, 9001), (2, 9216), (0, 8)] {
                cases.push(Variant::NormAdd { rows, hidden, dtype });
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
            Variant::GeluMul { .. } | Variant::MeanRows { .. } => None,
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
            Variant::NormAdd { rows, hidden, dtype } => {
                let x = wide(scope, rows, hidden, random)?;
                let weight = narrowed(scope, [hidden], dtype, &random.floats(hidden))?;
                let mut sum = wide(scope, rows, hidden, random)?;
                let (before, _) = margins(scope.target().activation());
                let norm = RmsNorm { weight_offset: OFFSET, ..RmsNorm::new(&weight, 1e-5) };
                scope.rms_norm_add(&inside(&x), norm, &mut sum.column_range_mut(before..before + hidden))?;
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
            Variant::NormAdd { rows, hidden, dtype } => {
                let x = Wide::new(activation, rows, hidden, random);
                let weight = offset_by(OFFSET, rounded(dtype, &random.floats(hidden)));
                let normed: Vec<_> = (0..rows).map(|row| rms_normed(&x.row(row), &weight)).collect();
                Wide::new(activation, rows, hidden, random).changed(|row, column, held| held + normed[row][column])
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
