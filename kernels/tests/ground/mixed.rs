//! Mixtures of experts: routed rows, and their expected sums, computed choice by choice in `f64`.

use bursar_kernels::{
    ops::{
        gate_mul::GateActivation,
        rms_norm::RmsNorm,
        route::{Routing, RoutingRule},
    },
    *,
};

use super::{
    Random, narrowed,
    pass::{offset_by, rms_normed},
    rounded,
    wide::{Wide, floats, inside, margins, wide},
    widened,
};

/// Added to the weights of norms.
const OFFSET: f32 = 0.25;

/// A layer of experts, and the number of rows that pass through it.
#[derive(Clone, Debug)]
pub struct Mixed {
    pub rows: usize,
    pub experts: usize,
    pub top: usize,
    pub hidden: usize,
    pub features: usize,
    pub dtype: DType,
    pub renormalized: bool,
    pub activation: GateActivation,
    pub drawn: Drawn,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Drawn {
    /// Each row has different logits.
    Even,
    /// All rows choose the same few experts.
    OneForAll,
    /// Each row prefers a different expert, as long as there are enough experts.
    OneEach,
    /// Equal logits, so that the first experts are chosen.
    Ties,
}

impl Mixed {
    pub fn cases() -> Vec<Mixed> {
        let mut cases = Vec::new();
        let draws = [Drawn::Even, Drawn::OneForAll, Drawn::OneEach, Drawn::Ties];
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (at, (rows, experts, top, hidden, features)) in [
                (1, 1, 1, 8, 8),
                (1, 128, 8, 72, 40),
                (3, 8, 2, 67, 31),
                (70, 5, 3, 136, 72),
                (131, 16, 4, 64, 136),
                (9, 512, 32, 16, 8),
                // Two experts may have all rows, in several tiles.
                (70, 60, 2, 136, 72),
                (0, 4, 2, 8, 8),
                // Hundreds of rows per expert.
                (300, 3, 2, 136, 200),
            ]
            .into_iter()
            .enumerate()
            {
                for (turn, drawn) in draws.into_iter().enumerate() {
                    let renormalized = (at + turn) % 2 == 0;
                    let activation = [GateActivation::Silu, GateActivation::GeluTanh][(at + turn / 2) % 2];
                    cases.push(Mixed { rows, experts, top, hidden, features, dtype, renormalized, activation, drawn });
                }
            }
        }
        cases
    }

    /// The routing rule without `expert_scales`.
    fn rule(&self) -> RoutingRule<'static> {
        let logit_scale = if self.has_scales() { 0.375 } else { 1.0 };
        RoutingRule { renormalized: self.renormalized, logit_scale, ..RoutingRule::softmax(self.top) }
    }

    /// Whether the case uses `logit_scale` and `expert_scales`. Only the cases with GELU use them, as
    /// in Gemma 4.
    fn has_scales(&self) -> bool {
        self.activation == GateActivation::GeluTanh
    }

    fn expert_scales(&self) -> Vec<f32> {
        (0..self.experts).map(|expert| 0.5 + (expert % 5) as f32 / 4.0).collect()
    }

    /// Multiplies the weights of a row's choices by the factors of their experts.
    fn weighted(&self, mut choices: Vec<(usize, f64)>) -> Vec<(usize, f64)> {
        if self.has_scales() {
            let scales = self.expert_scales();
            choices.iter_mut().for_each(|(expert, weight)| *weight *= f64::from(scales[*expert]));
        }
        choices
    }

    fn logits(&self, random: &mut Random) -> Vec<f32> {
        let Mixed { rows, experts, top, .. } = *self;
        let mut logits = random.floats(rows * experts);
        for (at, logit) in logits.iter_mut().enumerate() {
            let (row, expert) = (at / experts, at % experts);
            match self.drawn {
                Drawn::Even => *logit *= 5.0,
                Drawn::OneForAll => *logit += if expert < top { 9.0 } else { 0.0 },
                Drawn::OneEach => *logit += if expert == row * 7 % experts { 9.0 } else { 0.0 },
                Drawn::Ties => *logit = 0.5,
            }
        }
        logits
    }

    /// Returns the weights of each row's choices, the positions of the choices sorted by expert,
    /// the first position of each expert, and the loads. Four tensors follow: the tensor that
    /// contains the sums, with its margins; the same tensor after a second computation, which uses
    /// first a third of the experts and then the rest, as two ranks would; a residual to which the
    /// sums were added; and the norm of this residual.
    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>, random: &mut Random) -> Result<Vec<f32>, KernelError> {
        let Mixed { rows, experts, hidden, features, dtype, activation, .. } = *self;
        // Rows of logits have gaps between them.
        let apart: Vec<f32> =
            self.logits(random).chunks(experts.max(1)).flat_map(|row| [row, &[9.0; 3]].concat()).collect();
        let logits = scope.upload([rows, experts + 3], &apart)?;
        // Counters that are about to wrap.
        let loads = scope.upload([experts], &vec![u32::MAX; experts])?;
        let scales = scope.upload([experts], &self.expert_scales())?;
        let rule = RoutingRule { expert_scales: self.has_scales().then_some(&scales), ..self.rule() };
        let routing = scope.route(&logits.column_range(0..experts), rule, &loads)?;
        let gate = |x: &Tensor<'_>, weight: &Tensor<'_>, routing: &Routing<'_>| {
            scope.gated_experts_as(x, weight, routing, activation, ActivationFormat::PLAIN)
        };
        let x = wide(scope, rows, hidden, random)?;
        let numbers = weights(experts * 2 * features, hidden, random);
        let gate_up = narrowed(scope, [experts * 2 * features, hidden], dtype, &numbers)?;
        let numbers = weights(experts * hidden, features, random);
        let down = narrowed(scope, [experts * hidden, features], dtype, &numbers)?;
        let mut sum = wide(scope, rows, hidden, random)?;
        let (before, _) = margins(sum.dtype());
        let gated = gate(&inside(&x), &gate_up, &routing)?;
        scope.add_experts(&gated, &down, &routing, &mut sum.column_range_mut(before..before + hidden))?;
        let mut found = floats(scope, &routing.weights)?;
        for list in [&routing.places, &routing.starts, &loads] {
            found.extend(scope.download::<u32>(list)?.into_iter().map(|number| number as f32));
        }
        found.extend(floats(scope, &sum)?);
        for (held, accumulate) in shares(experts).into_iter().zip([false, true]) {
            let routing = scope.route(&logits.column_range(0..experts), rule, &loads)?.held(held);
            let gate_up = gate_up.row_range(held.times(2 * features).range());
            let gated = gate(&inside(&x), &gate_up, &routing)?;
            let down = down.row_range(held.times(hidden).range());
            let mut sum = sum.column_range_mut(before..before + hidden);
            if accumulate {
                scope.add_experts(&gated, &down, &routing, &mut sum)?
            } else {
                scope.experts_into(&gated, &down, &routing, &mut sum)?
            }
        }
        found.extend(floats(scope, &sum)?);
        let mut residual = wide(scope, rows, hidden, random)?;
        let weight = narrowed(scope, [hidden], dtype, &norm_weight(hidden, random))?;
        let norm = RmsNorm { weight_offset: OFFSET, ..RmsNorm::new(&weight, 1e-5) };
        let mut out = Activations::of_plain(scope.empty([rows, hidden])?);
        let mut place = residual.column_range_mut(before..before + hidden);
        scope.add_experts_rms_norm(&gated, &down, &routing, &mut place, norm, &mut out)?;
        found.extend(floats(scope, &residual)?);
        found.extend(floats(scope, out.plain())?);
        Ok(found)
    }

    pub fn expected(&self, activation: DType, random: &mut Random) -> Vec<f64> {
        let Mixed { rows, experts, hidden, features, dtype, .. } = *self;
        let logits = self.logits(random);
        let chosen: Vec<Vec<(usize, f64)>> =
            logits.chunks(experts).map(|row| self.weighted(chosen(&widened(row), self.rule()))).collect();
        let x = Wide::new(activation, rows, hidden, random);
        let gate_up = rounded(dtype, &weights(experts * 2 * features, hidden, random));
        let down = rounded(dtype, &weights(experts * hidden, features, random));
        let product = |row: &[f64], weight: &[f64]| row.iter().zip(weight).map(|(a, b)| a * b).sum::<f64>();
        let of_expert = |row: usize, expert: usize| -> Vec<f64> {
            let row = x.row(row);
            let weight =
                |part: usize, feature: usize| &gate_up[((expert * 2 + part) * features + feature) * hidden..][..hidden];
            let gated = |feature: usize| {
                let [gate, up] = [0, 1].map(|part| product(&row, weight(part, feature)));
                activate(self.activation, gate) * up
            };
            let gated: Vec<f64> = (0..features).map(gated).collect();
            let down = |out: usize| &down[(expert * hidden + out) * features..][..features];
            (0..hidden).map(|out| product(&gated, down(out))).collect()
        };
        let sums: Vec<Vec<f64>> = (0..rows)
            .map(|row| {
                let mut sum = vec![0.0; hidden];
                for (expert, weight) in &chosen[row] {
                    let product = of_expert(row, *expert);
                    sum.iter_mut().zip(product).for_each(|(sum, product)| *sum += weight * product);
                }
                sum
            })
            .collect();
        let mut found: Vec<f64> = chosen.iter().flatten().map(|(_, weight)| *weight).collect();
        // The position of a choice in the order by expert: the number of choices sorted before it.
        let experts_of: Vec<usize> = chosen.iter().flatten().map(|(expert, _)| *expert).collect();
        let place = |choice: usize| {
            let key = |at: usize| (experts_of[at], at);
            (0..experts_of.len()).filter(|other| key(*other) < key(choice)).count() as f64
        };
        found.extend((0..experts_of.len()).map(place));
        let count = |is: &dyn Fn(usize) -> bool| experts_of.iter().filter(|of| is(**of)).count();
        found.extend((0..=experts).map(|expert| count(&|of| of < expert) as f64));
        let load = |expert: usize| u32::MAX.wrapping_add(count(&|of| of == expert) as u32) as f32;
        found.extend((0..experts).map(load).map(f64::from));
        let around = Wide::new(activation, rows, hidden, random);
        found.extend(around.clone().changed(|row, out, held| held + sums[row][out]));
        found.extend(around.changed(|row, out, _| sums[row][out]));
        let residual = Wide::new(activation, rows, hidden, random);
        let weight = offset_by(OFFSET, rounded(dtype, &norm_weight(hidden, random)));
        let normed = |row: usize| {
            let total: Vec<f64> = residual.row(row).iter().zip(&sums[row]).map(|(held, sum)| held + sum).collect();
            rms_normed(&total, &weight)
        };
        let out: Vec<f64> = (0..rows).flat_map(normed).collect();
        found.extend(residual.changed(|row, out, held| held + sums[row][out]));
        found.extend(out);
        found
    }
}

/// Rows, width and output format of each case of `normed_sum`.
pub const NORMED_SUMS: [(usize, usize, ActivationFormat); 7] = {
    const fn quantized(quantization: Quantization, is_unquantized: bool) -> ActivationFormat {
        ActivationFormat { is_unquantized, quantization: Some(quantization) }
    }
    [
        (1, 2048, ActivationFormat::PLAIN),
        (19, 1031, ActivationFormat::PLAIN),
        (3, 9008, ActivationFormat::PLAIN),
        (1, 2048, quantized(Quantization::Groups, true)),
        (19, 136, quantized(Quantization::Groups, false)),
        (70, 264, quantized(Quantization::Rows, false)),
        (3, 9008, quantized(Quantization::Fixed(0.002), true)),
    ]
};

/// The bits of a residual to which experts were added, and of its norm in `format`. If `by_one`, a
/// single operation computes both, otherwise two operations do.
pub fn normed_sum<B: Backend>(
    scope: &Scope<'_, B>,
    (rows, hidden, format): (usize, usize, ActivationFormat),
    by_one: bool,
) -> Result<Vec<u32>, KernelError> {
    let (experts, features, activation, mut random) = (5, 16, scope.target().activation(), Random::new(7));
    let logits = scope.upload([rows, experts], &random.floats(rows * experts))?;
    let routing =
        scope.route(&logits, RoutingRule::renormalized(3), &scope.upload([experts], &vec![0u32; experts])?)?;
    let gated = narrowed(scope, [rows * 3, features], activation, &random.floats(rows * 3 * features))?;
    let down = narrowed(scope, [experts * hidden, features], activation, &random.floats(experts * hidden * features))?;
    let mut residual = narrowed(scope, [rows, hidden], activation, &random.floats(rows * hidden))?;
    let weight = narrowed(scope, [hidden], activation, &random.floats(hidden))?;
    let norm = RmsNorm { weight_offset: OFFSET, ..RmsNorm::new(&weight, 1e-5) };
    let mut scratch = scope.activation_scratch([format], rows + 1, hidden)?;
    let mut out = scratch.place(format, rows);
    if by_one {
        scope.add_experts_rms_norm(&gated, &down, &routing, &mut residual, norm, &mut out)?
    } else {
        scope.add_experts(&gated, &down, &routing, &mut residual)?;
        scope.rms_norm_into(&residual, norm, &mut out)?;
    }
    let mut found = floats(scope, &residual)?;
    if let Some(plain) = &out.plain {
        found.extend(floats(scope, plain)?);
    }
    if let Some(quantized) = &out.quantized {
        found.extend(scope.download::<f32>(&quantized.scales)?);
        found.extend(scope.download::<E4m3>(&quantized.data)?.into_iter().map(E4m3::to_f32));
    }
    Ok(found.into_iter().map(f32::to_bits).collect())
}

/// The experts of two ranks: the first third of the experts, and the remaining experts if there are
/// any.
pub(super) fn shares(whole: usize) -> Vec<RankShard> {
    let first = whole.div_ceil(3);
    let all = [RankShard { first: 0, count: first, whole }, RankShard { first, count: whole - first, whole }];
    all.into_iter().filter(|share| share.count > 0).collect()
}

/// The experts of a row with their weights, likeliest first. Experts with equal logits are in the
/// order of their indices.
pub(super) fn chosen(logits: &[f64], rule: RoutingRule<'_>) -> Vec<(usize, f64)> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|one, other| logits[*other].total_cmp(&logits[*one]).then(one.cmp(other)));
    order.truncate(rule.top);
    let exponential = |logit: f64| (logit * f64::from(rule.logit_scale)).exp();
    let total: f64 = if rule.renormalized {
        order.iter().map(|expert| exponential(logits[*expert])).sum()
    } else {
        logits.iter().map(|logit| exponential(*logit)).sum()
    };
    order.into_iter().map(|expert| (expert, exponential(logits[expert]) / total)).collect()
}

fn activate(activation: GateActivation, gate: f64) -> f64 {
    match activation {
        GateActivation::Silu => gate / (1.0 + (-gate).exp()),
        GateActivation::GeluTanh => {
            gate / 2.0 * (1.0 + (std::f64::consts::FRAC_2_PI.sqrt() * (gate + 0.044715 * gate.powi(3))).tanh())
        }
    }
}

/// Weights of a norm, small enough that the norm does not amplify the error of its inputs.
fn norm_weight(hidden: usize, random: &mut Random) -> Vec<f32> {
    random.floats(hidden).into_iter().map(|number| 0.5 * number).collect()
}

/// Weights whose GEMM results are about as large as the numbers in `x`, so that the rounding errors
/// of intermediate results are no larger either.
fn weights(rows: usize, columns: usize, random: &mut Random) -> Vec<f32> {
    let scale = 2.0 * (columns as f32).powf(-0.5);
    random.floats(rows * columns).into_iter().map(|number| scale * number).collect()
}
