//! Rows before a mixture's experts, which are normalized and then routed. The router's expected
//! logits are computed in `f64` from the rounded rows.

use bursar_kernels::{
    ops::{rms_norm::RmsNorm, rms_norm_route::Router, rotary_kv_write::NO_SLOT, route::RoutingRule},
    *,
};

use super::{
    Random,
    mixed::chosen,
    narrowed,
    pass::{offset_by, rms_normed},
    rounded,
    wide::{Wide, floats, inside, wide},
};

/// Added to the weights of the norm.
const OFFSET: f32 = 0.5;

#[derive(Clone, Debug)]
pub struct Routed {
    pub rows: usize,
    pub hidden: usize,
    pub experts: usize,
    pub top: usize,
    pub dtype: DType,
}

impl Routed {
    pub fn cases() -> Vec<Routed> {
        let sizes = [
            (0, 32, 4, 2),
            (1, 2048, 128, 8),
            (3, 61, 5, 2),
            (7, 4096, 60, 4),
            (16, 96, 128, 8),
            (9, 512, 16, 1),
            (17, 64, 8, 3),
        ];
        let of = |dtype| sizes.map(|(rows, hidden, experts, top)| Routed { rows, hidden, experts, top, dtype });
        [DType::F32, DType::F16, DType::BF16].into_iter().flat_map(of).collect()
    }

    /// The routing rule without `expert_scales`.
    fn rule(&self) -> RoutingRule<'static> {
        RoutingRule { logit_scale: 0.625, ..RoutingRule::renormalized(self.top) }
    }

    fn expert_scales(&self) -> Vec<f32> {
        (0..self.experts).map(|expert| 0.25 + (expert % 7) as f32 / 8.0).collect()
    }

    /// A router whose logits do not grow with the number of columns.
    fn router(&self, random: &mut Random) -> Vec<f32> {
        let scale = 3.0 * (self.hidden as f32).powf(-0.5);
        random.floats(self.experts * self.hidden).into_iter().map(|number| scale * number).collect()
    }

    /// Returns the normalized rows, the weights of each row's choices, the positions of the choices
    /// sorted by expert, the first position of each expert, and the loads.
    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>, random: &mut Random) -> Result<Vec<f32>, KernelError> {
        let Routed { rows, hidden, experts, dtype, .. } = *self;
        let x = wide(scope, rows, hidden, random)?;
        let weight = narrowed(scope, [hidden], dtype, &random.floats(hidden))?;
        let router = narrowed(scope, [experts, hidden], dtype, &self.router(random))?;
        let loads = scope.upload([experts], &vec![7u32; experts])?;
        let slots = scope.upload([rows], &(0..rows).map(slot).collect::<Vec<_>>())?;
        let mut normed = Activations::of_plain(scope.empty([rows, hidden])?);
        let norm = RmsNorm { weight_offset: OFFSET, ..RmsNorm::new(&weight, 1e-5) };
        let scales = scope.upload([experts], &self.expert_scales())?;
        let rule = RoutingRule { expert_scales: Some(&scales), ..self.rule() };
        let router = Router { weight: &router, rule, loads: &loads, slots: Some(&slots) };
        let routing = scope.rms_norm_route(&inside(&x), norm, &mut normed, router)?;
        let mut found = floats(scope, normed.plain())?;
        found.extend(floats(scope, &routing.weights)?);
        for list in [&routing.places, &routing.starts, &loads] {
            found.extend(scope.download::<u32>(list)?.into_iter().map(|number| number as f32));
        }
        Ok(found)
    }

    pub fn expected(&self, activation: DType, random: &mut Random) -> Vec<f64> {
        let Routed { rows, hidden, experts, top, dtype } = *self;
        let x = Wide::new(activation, rows, hidden, random);
        let weight = offset_by(OFFSET, rounded(dtype, &random.floats(hidden)));
        let router = rounded(dtype, &self.router(random));
        let normed: Vec<Vec<f64>> = (0..rows).map(|row| rms_normed(&x.row(row), &weight)).collect();
        let of_row = |row: &Vec<f64>| {
            let stored: Vec<f32> = row.iter().map(|number| *number as f32).collect();
            let stored = rounded(activation, &stored);
            let logit = |router: &[f64]| router.iter().zip(&stored).map(|(weight, x)| weight * x).sum::<f64>();
            let mut choices = chosen(&router.chunks(hidden).map(logit).collect::<Vec<_>>(), self.rule());
            let scales = self.expert_scales();
            choices.iter_mut().for_each(|(expert, weight)| *weight *= f64::from(scales[*expert]));
            choices
        };
        let choices: Vec<(usize, f64)> = normed.iter().flat_map(of_row).collect();
        let count = |is: &dyn Fn(usize) -> bool| choices.iter().filter(|(expert, _)| is(*expert)).count() as f64;
        let mut found: Vec<f64> = normed.into_iter().flatten().collect();
        found.extend(choices.iter().map(|(_, weight)| weight));
        found.extend(choices.iter().enumerate().map(|(at, (expert, _))| {
            let earlier = choices[..at].iter().filter(|(other, _)| other == expert).count() as f64;
            count(&|other| other < *expert) + earlier
        }));
        found.extend((0..=experts).map(|expert| count(&|other| other < expert)));
        let counted = |expert: usize| {
            let is_counted = |(at, (other, _)): &(usize, &(usize, f64))| *other == expert && slot(at / top) != NO_SLOT;
            choices.iter().enumerate().filter(is_counted).count() as f64
        };
        found.extend((0..experts).map(|expert| 7.0 + counted(expert)));
        found
    }
}

/// The slot of a row's keys. Every third row has no slot.
fn slot(row: usize) -> u32 {
    if row % 3 == 1 { NO_SLOT } else { row as u32 }
}
