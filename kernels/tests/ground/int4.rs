//! GEMMs with 4-bit integer weights, and their expected results: the elements are rounded once to
//! the type of the scales, and sums are computed in `f64`.

use bursar_kernels::*;

use super::{Random, narrowed, rounded};

/// Variant of the GEMM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    Plain,
    Bias,
    Added,
    F32,
    Gated,
    GatedBias,
}

/// A GEMM at one size.
#[derive(Clone, Copy, Debug)]
pub struct Int4 {
    pub rows: usize,
    /// Rows of the weight, including the rows of the gates.
    pub out_features: usize,
    pub in_features: usize,
    pub group: usize,
    pub has_zero_points: bool,
    pub way: Way,
}

/// The content of an output before the GEMM, and of the gaps after its rows.
const MARK: f32 = 1536.0;
/// Elements in the gap after each row of the output.
const GAP: usize = 3;

/// The operands of a case.
struct Parts {
    integers: Vec<u8>,
    scales: Vec<f32>,
    zero_points: Vec<u8>,
    x: Vec<f32>,
    bias: Vec<f32>,
    before: Vec<f32>,
}

impl Int4 {
    /// Cases of every variant, with sizes that are not multiples of a tile.
    pub fn cases() -> Vec<Int4> {
        let ways = [Way::Plain, Way::Bias, Way::Added, Way::F32, Way::Gated, Way::GatedBias];
        let sizes = [
            (32_usize, 32, 32),
            (96, 96, 32),
            (48, 512, 128),
            (160, 128, 64),
            (288, 448, 64),
            (320, 640, 128),
            (64, 1152, 128),
            (16, 896, 128),
        ];
        let cases = sizes.into_iter().enumerate().flat_map(|(size, (out_features, in_features, group))| {
            let half_is_whole = (out_features / 2).is_multiple_of(int4::BLOCK_ROWS);
            let of_size = move |way: &Way| half_is_whole || !matches!(way, Way::Gated | Way::GatedBias);
            ways.into_iter().filter(of_size).enumerate().flat_map(move |(at, way)| {
                // Large GEMMs take a long time in f64.
                let most = if size < 4 { 129 } else { 33 };
                let rows = [1, 3, 8, 9, 17, 33, 64, 65, 129].into_iter().filter(move |rows| *rows <= most);
                rows.filter(move |rows| (rows + at + size) % 3 == 0).map(move |rows| {
                    let has_zero_points = (rows + at + size) % 2 == 0;
                    Int4 { rows, out_features, in_features, group, has_zero_points, way }
                })
            })
        });
        cases.collect()
    }

    fn is_gated(self) -> bool {
        matches!(self.way, Way::Gated | Way::GatedBias)
    }

    /// Number of output features.
    fn features(self) -> usize {
        if self.is_gated() { self.out_features / 2 } else { self.out_features }
    }

    fn parts(self) -> Parts {
        let mut random = Random::new((self.rows * 7919 + self.out_features * 31 + self.in_features) as u64);
        let groups = self.out_features * self.in_features / self.group;
        let small = (self.in_features as f32).powf(-0.5) / 4.0;
        Parts {
            integers: (0..self.out_features * self.in_features).map(|_| random.below(16) as u8).collect(),
            scales: random.floats(groups).iter().map(|number| number * small).collect(),
            zero_points: (0..groups).map(|_| random.below(16) as u8).collect(),
            x: random.floats(self.rows * self.in_features),
            bias: random.floats(self.out_features),
            before: random.floats(self.rows * self.features()),
        }
    }

    /// Returns the values of `[rows, groups]` in the order in which a weight has them.
    fn in_blocks<T: Copy>(self, values: &[T]) -> Vec<T> {
        let groups = self.in_features / self.group;
        let mut all = values.to_vec();
        for (at, value) in values.iter().enumerate() {
            all[int4::scale_index(at / groups, at % groups, groups)] = *value;
        }
        all
    }

    /// Computes the GEMM with scales of type `kept`.
    ///
    /// # Panics
    /// If memory next to the output was written.
    pub fn run<B: Backend>(self, scope: &Scope<'_, B>, kept: DType) -> Result<Vec<f32>, KernelError> {
        let (parts, features) = (self.parts(), self.features());
        let activation = scope.target().activation();
        let mut words = vec![0; parts.integers.len() / 2];
        int4::pack(&parts.integers, self.in_features, &mut words);
        let shape = [self.out_features, self.in_features / self.group];
        let zero_points =
            if self.has_zero_points { Some(scope.upload(shape, &self.in_blocks(&parts.zero_points))?) } else { None };
        let scales = narrowed(scope, shape, kept, &self.in_blocks(&parts.scales))?;
        let scales = WeightScales::int4(scales, zero_points, self.group);
        let words = scope.upload([words.len()], &words)?;
        // SAFETY: the words are in the workspace until the end of this function, and nothing writes
        // them.
        let data = unsafe { Tensor::persistent(words.address(), [self.out_features, self.in_features], DType::U4) };
        let weight = || Weight { scales: Some(WeightScales { ..view(&scales) }), ..Weight::plain(row_view(&data)) };
        let x = narrowed(scope, [self.rows, self.in_features], activation, &parts.x)?;
        let bias = narrowed(scope, [self.out_features], activation, &parts.bias)?;
        if self.is_gated() {
            let bias = (self.way == Way::GatedBias).then_some(&bias);
            return wide(scope, &scope.gated_linear(&x, weight(), bias)?);
        }
        let out = if self.way == Way::F32 { DType::F32 } else { activation };
        let marked: Vec<f32> = (0..self.rows)
            .flat_map(|row| {
                let before = &parts.before[row * features..][..features];
                let inside = if self.way == Way::Added { before.to_vec() } else { vec![MARK; features] };
                [inside, vec![MARK; GAP]].concat()
            })
            .collect();
        let mut around = narrowed(scope, [self.rows, features + GAP], out, &marked)?;
        {
            let mut inside = around.column_range_mut(0..features);
            match self.way {
                Way::Added => scope.linear_add(&x, weight(), None, &mut inside)?,
                way => scope.linear_into(&x, weight(), (way == Way::Bias).then_some(&bias), &mut inside)?,
            }
        }
        let all = wide(scope, &around)?;
        let rows = all.chunks(features + GAP);
        let is_kept = rows.clone().all(|row| row[features..].iter().all(|mark| *mark == MARK));
        assert!(is_kept || !B::COMPUTES, "{self:?}: the gap after a row was written");
        Ok(rows.flat_map(|row| row[..features].to_vec()).collect())
    }

    /// The result in f64, for scales of type `kept` and activations of type `activation`.
    pub fn expected(self, kept: DType, activation: DType) -> Vec<f64> {
        let (parts, features) = (self.parts(), self.features());
        let (scales, x) = (rounded(kept, &parts.scales), rounded(activation, &parts.x));
        let (bias, before) = (rounded(activation, &parts.bias), rounded(activation, &parts.before));
        let exact: Vec<f32> = parts
            .integers
            .iter()
            .enumerate()
            .map(|(at, integer)| {
                let group = at / self.group;
                let zero_point = if self.has_zero_points { parts.zero_points[group] } else { 8 };
                // For 16-bit scales, this product is exact in f32. For f32 scales, the product
                // rounded to f32 is the definition.
                (f32::from(*integer) - f32::from(zero_point)) * scales[group] as f32
            })
            .collect();
        let elements = rounded(kept, &exact);
        let product = |row: usize, feature: usize| {
            let (x, weight) = (&x[row * self.in_features..], &elements[feature * self.in_features..]);
            let sum: f64 = x.iter().zip(weight).take(self.in_features).map(|(x, weight)| x * weight).sum();
            let is_biased = matches!(self.way, Way::Bias | Way::GatedBias);
            sum + if is_biased { bias[feature] } else { 0.0 }
        };
        let out = |row: usize, feature: usize| match self.way {
            Way::Gated | Way::GatedBias => {
                let gate = product(row, feature);
                gate / (1.0 + (-gate).exp()) * product(row, features + feature)
            }
            Way::Added => product(row, feature) + before[row * features + feature],
            _ => product(row, feature),
        };
        (0..self.rows).flat_map(|row| (0..features).map(move |feature| out(row, feature))).collect()
    }
}

fn view<'a>(scales: &'a WeightScales<'_>) -> WeightScales<'a> {
    let all = |tensor: &'a Tensor<'_>| tensor.row_range(0..tensor.rows());
    WeightScales {
        factors: all(&scales.factors),
        zero_points: scales.zero_points.as_ref().map(all),
        by: scales.by,
        activations: scales.activations,
    }
}

fn row_view<'a>(data: &'a Tensor<'_>) -> Tensor<'a> {
    data.row_range(0..data.rows())
}

/// Downloads floats of any type.
fn wide<B: Backend>(scope: &Scope<'_, B>, tensor: &Tensor<'_>) -> Result<Vec<f32>, KernelError> {
    Ok(match tensor.dtype() {
        DType::F16 => scope.download::<half::f16>(tensor)?.into_iter().map(half::f16::to_f32).collect(),
        DType::BF16 => scope.download::<half::bf16>(tensor)?.into_iter().map(half::bf16::to_f32).collect(),
        _ => scope.download::<f32>(tensor)?,
    })
}
