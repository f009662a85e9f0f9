//! GEMMs with FP8 weights, and their expected results: activations are rounded as in the models'
//! published code, and sums are computed in `f64`.

use bursar_kernels::{ops::route::RoutingRule, *};

use super::{
    How, Random,
    mixed::{chosen, shares},
    narrowed,
    wide::{Wide, floats, inside, margins, wide},
    widened,
};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaled {
    /// Blocks of this many rows and 128 columns.
    Blocks(usize),
    Rows,
    /// Rows, with one scale for all activations.
    Fixed(f32),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Product {
    Linear {
        how: How,
        bias: bool,
    },
    Gated {
        bias: bool,
    },
    /// The gate and up GEMM of experts.
    GatedExperts {
        experts: usize,
        top: usize,
    },
    /// The down GEMM of experts.
    AddExperts {
        experts: usize,
        top: usize,
    },
    /// Only the quantization of activations.
    Quantize,
}

/// With this number of experts, most rows choose expert 7.
const LIKED: usize = 60;

/// A GEMM at one size.
#[derive(Clone, Debug)]
pub struct Fp8 {
    pub rows: usize,
    pub in_features: usize,
    pub out_features: usize,
    pub scaled: Scaled,
    pub product: Product,
}

impl Fp8 {
    pub fn cases() -> Vec<Fp8> {
        let mut cases = Vec::new();
        let mut add = |rows, in_features, out_features, scaled, product| {
            cases.push(Fp8 { rows, in_features, out_features, scaled, product });
        };
        let schemes = [Scaled::Blocks(128), Scaled::Blocks(32), Scaled::Rows, Scaled::Fixed(0.0017)];
        for scaled in schemes {
            let sizes =
                [(0, 5, 9), (1, 1, 1), (1, 128, 128), (2, 384, 301), (5, 67, 64), (37, 517, 263), (129, 200, 130)];
            let hows = [How::New, How::Into, How::Add];
            for (how, (rows, in_features, out_features)) in hows.into_iter().cycle().zip(sizes) {
                add(rows, in_features, out_features, scaled, Product::Linear { how, bias: rows % 2 == 1 });
            }
            for (rows, in_features, features) in [(0, 8, 3), (1, 256, 128), (7, 130, 31), (40, 67, 200)] {
                add(rows, in_features, 2 * features, scaled, Product::Gated { bias: rows == 7 });
            }
            // Sizes whose rows TMA copies can read and write. The last two are between the sizes
            // for which kernels are compiled.
            let sizes = [
                (1, 128, 128),
                (2, 384, 304),
                (5, 64, 64),
                (37, 528, 264),
                (129, 208, 136),
                (300, 272, 256),
                (12, 1424, 72),
                (27, 656, 40),
            ];
            for (how, (rows, in_features, out_features)) in hows.into_iter().cycle().zip(sizes) {
                add(rows, in_features, out_features, scaled, Product::Linear { how, bias: rows % 2 == 1 });
            }
            for (rows, in_features, features) in [(1, 256, 128), (40, 64, 200), (300, 144, 264), (300, 272, 192)] {
                add(rows, in_features, 2 * features, scaled, Product::Gated { bias: rows == 40 });
            }
            add(17, 18_944, 1, scaled, Product::Quantize);
            for (rows, in_features, features, experts, top) in [
                (1, 72, 40, 128, 8),
                (9, 200, 136, 5, 3),
                (0, 8, 8, 4, 2),
                (90, 128, 64, 3, 2),
                // Sizes whose rows TMA copies can read and write.
                (1, 144, 48, 128, 8),
                (9, 208, 144, 5, 3),
                (131, 256, 128, 16, 4),
                (300, 272, 192, 3, 2),
                // Most rows choose one expert, whose rows take several tiles. Each of the other
                // experts is chosen by few rows.
                (41, 272, 144, LIKED, 2),
                (70, 144, 80, LIKED, 1),
            ] {
                add(rows, in_features, 2 * features, scaled, Product::GatedExperts { experts, top });
                add(rows, in_features, features, scaled, Product::AddExperts { experts, top });
            }
            for (rows, columns) in [(3, 1), (17, 128), (9, 1031), (0, 7)] {
                add(rows, columns, 1, scaled, Product::Quantize);
            }
        }
        cases
    }

    /// Whether the target has kernels for this case.
    pub fn is_served(&self, target: &Target) -> bool {
        let scheme = match self.scaled {
            Scaled::Blocks(height) => QuantizationScheme::BLOCK.in_memory(height),
            _ => QuantizationScheme::ROW,
        };
        match self.product {
            Product::GatedExperts { .. } | Product::AddExperts { .. } => {
                target.has_quantized_experts(scheme, [self.out_features, self.in_features])
            }
            Product::Quantize => target.has_quantized(QuantizationScheme::ROW, [8, self.in_features]),
            _ => target.has_quantized(scheme, [self.out_features, self.in_features]),
        }
    }

    /// Whether the result is computed from two sums, gate and up.
    pub fn is_gated(&self) -> bool {
        matches!(self.product, Product::Gated { .. } | Product::GatedExperts { .. })
    }

    fn experts(&self) -> (usize, usize) {
        match self.product {
            Product::GatedExperts { experts, top } | Product::AddExperts { experts, top } => (experts, top),
            _ => (1, 1),
        }
    }

    /// Rows of the activations. The down GEMM of experts takes a row for each choice.
    fn x_rows(&self) -> usize {
        let (_, top) = self.experts();
        if matches!(self.product, Product::AddExperts { .. }) { self.rows * top } else { self.rows }
    }

    fn quantization(&self) -> Quantization {
        match self.scaled {
            Scaled::Blocks(_) => Quantization::Groups,
            Scaled::Rows => Quantization::Rows,
            Scaled::Fixed(scale) => Quantization::Fixed(scale),
        }
    }

    /// The weight's codes and its scales. The largest number that they represent is about 1.
    fn weight(&self, random: &mut Random) -> (Vec<E4m3>, Vec<f32>) {
        let rows = self.experts().0 * self.out_features;
        let code = |code: u32| E4m3(if code & 0x7f == 0x7f { 0 } else { code as u8 });
        let codes = random.indices(rows * self.in_features, 256).into_iter().map(code).collect();
        let count = match self.scaled {
            Scaled::Blocks(height) => rows.div_ceil(height) * self.in_features.div_ceil(128),
            _ => rows,
        };
        (codes, random.floats(count).into_iter().map(|number| (0.5 + number.abs()) / 448.0).collect())
    }

    fn upload<'s, B: Backend>(&self, scope: &'s Scope<'_, B>, random: &mut Random) -> Result<Weight<'s>, KernelError> {
        let (rows, (codes, scales)) = (self.experts().0 * self.out_features, self.weight(random));
        let data = scope.upload([rows, self.in_features], &codes)?;
        let scales = match self.scaled {
            Scaled::Blocks(height) => {
                let shape = [rows.div_ceil(height), self.in_features.div_ceil(128)];
                WeightScales::blocks(scope.upload(shape, &scales)?, height)
            }
            Scaled::Rows => WeightScales::rows(scope.upload([rows], &scales)?, None),
            Scaled::Fixed(scale) => WeightScales::rows(scope.upload([rows], &scales)?, Some(scale)),
        };
        Ok(Weight { scales: Some(scales), ..Weight::plain(data) })
    }

    fn logits(&self, random: &mut Random) -> Vec<f32> {
        let (experts, _) = self.experts();
        let mut logits: Vec<f32> = random.floats(self.rows * experts).into_iter().map(|logit| logit * 5.0).collect();
        if experts == LIKED {
            logits.chunks_mut(experts).for_each(|row| row[7] += 6.0);
        }
        logits
    }

    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>, random: &mut Random) -> Result<Vec<f32>, KernelError> {
        let (experts, top) = self.experts();
        let logits = scope.upload([self.rows, experts], &self.logits(random))?;
        let x = wide(scope, self.x_rows(), self.in_features, random)?;
        let weight = self.upload(scope, random)?;
        let bias =
            narrowed(scope, [self.out_features], scope.target().activation(), &random.floats(self.out_features))?;
        let bias = |is_there| if is_there { Some(&bias) } else { None };
        let (before, _) = margins(scope.target().activation());
        let loads = scope.upload([experts], &vec![0u32; experts])?;
        match self.product {
            Product::Linear { how: How::New, bias: has } => {
                floats(scope, &scope.linear(&inside(&x), &weight, bias(has))?)
            }
            Product::Linear { how, bias: has } => {
                let mut out = wide(scope, self.rows, self.out_features, random)?;
                let mut place = out.column_range_mut(before..before + self.out_features);
                match how {
                    How::Add => scope.linear_add(&inside(&x), &weight, bias(has), &mut place)?,
                    _ => scope.linear_into(&inside(&x), &weight, bias(has), &mut place)?,
                }
                floats(scope, &out)
            }
            Product::Gated { bias: has } => floats(scope, &scope.gated_linear(&inside(&x), &weight, bias(has))?),
            Product::GatedExperts { .. } => {
                let routing = scope.route(&logits, RoutingRule::renormalized(top), &loads)?;
                floats(scope, &scope.gated_experts(&inside(&x), &weight, &routing)?)
            }
            Product::AddExperts { .. } => {
                let mut sum = wide(scope, self.rows, self.out_features, random)?;
                let x = scope.gather_rows(&inside(&x), &scope.upload([self.x_rows()], &every(self.x_rows()))?)?;
                let mut place = sum.column_range_mut(before..before + self.out_features);
                match &weight.scales {
                    // The experts of two ranks, computed one rank after the other.
                    Some(WeightScales { factors, by: by @ ScaledBy::Row, activations, .. }) => {
                        for held in shares(experts) {
                            let rows = held.times(self.out_features).range();
                            let factors = factors.row_range(rows.clone());
                            let scales =
                                Some(WeightScales { factors, by: *by, activations: *activations, zero_points: None });
                            let weight = Weight { scales, ..Weight::plain(weight.data.row_range(rows)) };
                            let routing = scope.route(&logits, RoutingRule::renormalized(top), &loads)?.held(held);
                            scope.add_experts(&x, &weight, &routing, &mut place)?;
                        }
                    }
                    _ => scope.add_experts(
                        &x,
                        &weight,
                        &scope.route(&logits, RoutingRule::renormalized(top), &loads)?,
                        &mut place,
                    )?,
                }
                floats(scope, &sum)
            }
            Product::Quantize => {
                let quantized = scope.quantize(&inside(&x), self.quantization())?.quantized.expect("quantized output");
                let codes: Vec<E4m3> = scope.download(&quantized.data)?;
                let scales: Vec<f32> = scope.download(&quantized.scales)?;
                Ok(codes.into_iter().map(E4m3::to_f32).chain(scales).collect())
            }
        }
    }

    /// The expected result of a linear layer at the given rows and features only.
    pub fn linear_at(&self, activation: DType, random: &mut Random, places: &[(usize, usize)]) -> Vec<f64> {
        let Product::Linear { how, bias: has_bias } = self.product else { panic!("{self:?} is not a linear product") };
        self.logits(random);
        let x = Wide::new(activation, self.rows, self.in_features, random);
        let (codes, scales) = self.weight(random);
        let bias = super::rounded(activation, &random.floats(self.out_features));
        let out = (how == How::Add).then(|| Wide::new(activation, self.rows, self.out_features, random));
        let product = |&(row, feature): &(usize, usize)| -> f64 {
            let scale = |column: usize| match self.scaled {
                Scaled::Blocks(height) => scales[feature / height * self.in_features.div_ceil(128) + column / 128],
                _ => scales[feature],
            };
            let weight = |column| value(codes[feature * self.in_features + column]) * f64::from(scale(column));
            let row_of_x = quantized(&x.row(row), self.quantization());
            let sum: f64 = row_of_x.values().enumerate().map(|(column, x)| x * weight(column)).sum();
            let held = out.as_ref().map_or(0.0, |out| out.at(row, feature));
            sum + held + if has_bias { bias[feature] } else { 0.0 }
        };
        places.iter().map(product).collect()
    }

    /// Index of a row's feature in the result of [`run`](Fp8::run) for a linear product.
    pub fn index_of(&self, activation: DType, (row, feature): (usize, usize)) -> usize {
        let (before, behind) = margins(activation);
        match self.product {
            Product::Linear { how: How::New, .. } => row * self.out_features + feature,
            _ => row * (before + self.out_features + behind) + before + feature,
        }
    }

    pub fn expected(&self, activation: DType, random: &mut Random) -> Vec<f64> {
        let (experts, top) = self.experts();
        // Experts of each row, and their weights, which add up to 1.
        let logits = widened(&self.logits(random));
        let chosen: Vec<_> = logits.chunks(experts).map(|row| chosen(row, RoutingRule::renormalized(top))).collect();
        // Choices sorted by expert, then by row.
        let places = || {
            let of_row = |(row, of): (usize, &Vec<(usize, f64)>)| {
                of.iter().map(move |(expert, _)| (*expert, row)).collect::<Vec<_>>()
            };
            let mut places: Vec<(usize, usize)> = chosen.iter().enumerate().flat_map(of_row).collect();
            places.sort_unstable();
            places
        };
        let x = Wide::new(activation, self.x_rows(), self.in_features, random);
        let quantized: Vec<_> = (0..self.x_rows()).map(|row| quantized(&x.row(row), self.quantization())).collect();
        let (codes, scales) = self.weight(random);
        let bias = super::rounded(activation, &random.floats(self.out_features));
        let scale = |feature: usize, column: usize| match self.scaled {
            Scaled::Blocks(height) => scales[feature / height * self.in_features.div_ceil(128) + column / 128],
            _ => scales[feature],
        };
        let product = |row: usize, feature: usize| -> f64 {
            let weight = |column| value(codes[feature * self.in_features + column]) * f64::from(scale(feature, column));
            quantized[row].values().enumerate().map(|(column, x)| x * weight(column)).sum()
        };
        let with_bias = |row, feature: usize, has: bool| {
            product(row, feature) + if has { bias[feature % self.out_features] } else { 0.0 }
        };
        let features = self.out_features / 2;
        let gated = |row, expert: usize, feature, has| {
            let [gate, up] =
                [0, features].map(|first| with_bias(row, expert * self.out_features + first + feature, has));
            gate / (1.0 + (-gate).exp()) * up
        };
        match self.product {
            Product::Linear { how: How::New, bias } => {
                let at = |at: usize| with_bias(at / self.out_features, at % self.out_features, bias);
                (0..self.rows * self.out_features).map(at).collect()
            }
            Product::Linear { how, bias } => {
                let out = Wide::new(activation, self.rows, self.out_features, random);
                out.changed(|row, feature, held| match how {
                    How::Add => held + with_bias(row, feature, bias),
                    _ => with_bias(row, feature, bias),
                })
            }
            Product::Gated { bias } => {
                (0..self.rows * features).map(|at| gated(at / features, 0, at % features, bias)).collect()
            }
            Product::GatedExperts { .. } => {
                let row = |(expert, row): (usize, usize)| (0..features).map(move |at| (expert, row, at));
                places().into_iter().flat_map(row).map(|(expert, row, at)| gated(row, expert, at, false)).collect()
            }
            Product::AddExperts { .. } => {
                let places = places();
                let place =
                    |row, expert| places.iter().position(|at| *at == (expert, row)).expect("a choice has a position");
                Wide::new(activation, self.rows, self.out_features, random).changed(|row, feature, held| {
                    let of_expert = |(expert, weight): &(usize, f64)| {
                        weight * product(place(row, *expert), expert * self.out_features + feature)
                    };
                    held + chosen[row].iter().map(of_expert).sum::<f64>()
                })
            }
            Product::Quantize => {
                let codes = quantized.iter().flat_map(|row| row.codes.clone());
                codes.chain(quantized.iter().flat_map(|row| row.stored_scales())).collect()
            }
        }
    }
}

fn every(rows: usize) -> Vec<u32> {
    (0..rows as u32).collect()
}

/// A row of quantized activations.
struct QuantizedRow {
    codes: Vec<f64>,
    scales: Vec<f32>,
    group: usize,
    is_fixed: bool,
}

impl QuantizedRow {
    fn values(&self) -> impl Iterator<Item = f64> {
        self.codes.iter().enumerate().map(|(column, code)| code * f64::from(self.scales[column / self.group]))
    }

    fn stored_scales(&self) -> impl Iterator<Item = f64> {
        self.scales.iter().filter(|_| !self.is_fixed).map(|scale| f64::from(*scale))
    }
}

/// Quantizes a row by the definition: scales and quotients are f32, and each quotient becomes
/// the nearest E4M3 number.
fn quantized(x: &[f64], quantization: Quantization) -> QuantizedRow {
    let group = if quantization == Quantization::Groups { 128 } else { x.len().max(1) };
    let mut row = QuantizedRow { codes: Vec::new(), scales: Vec::new(), group, is_fixed: false };
    for group in x.chunks(group) {
        let largest = group.iter().map(|x| x.abs() as f32).fold(0.0, f32::max);
        let scale = match quantization {
            Quantization::Fixed(scale) => scale,
            _ => (largest / 448.0).max(f32::MIN_POSITIVE),
        };
        row.is_fixed = matches!(quantization, Quantization::Fixed(_));
        row.scales.push(scale);
        row.codes.extend(group.iter().map(|x| nearest(f64::from(*x as f32 / scale))));
    }
    row
}

/// The nearest E4M3 number, with ties to even.
fn nearest(number: f64) -> f64 {
    let unit = 2f64.powi((number.abs().log2().floor().max(-6.0) as i32) - 3);
    ((number / unit).round_ties_even() * unit).clamp(-448.0, 448.0)
}

/// The value of an E4M3 code, by the format's definition.
fn value(code: E4m3) -> f64 {
    let (exponent, mantissa) = (i32::from(code.0 >> 3 & 0xf), f64::from(code.0 & 7));
    let size = match exponent {
        0 => mantissa * 2f64.powi(-9),
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    if code.0 & 0x80 == 0 { size } else { -size }
}
