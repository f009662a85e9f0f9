//! Argmax over the tokens of the best clusters. The expected tokens are computed from logits in `f64`.

use bursar_kernels::{
    ops::{argmax::NO_CHOICE, clustered_argmax::TokenClusters},
    *,
};

use super::{
    Random, narrowed, rounded,
    wide::{Wide, inside, wide},
};

#[derive(Clone, Debug)]
pub struct Clustered {
    pub rows: usize,
    pub width: usize,
    pub clusters: usize,
    /// Tokens of a cluster.
    pub size: usize,
    pub top: usize,
    /// Whether the scores have NaN, equal numbers and infinities.
    pub has_odd_scores: bool,
}

impl Clustered {
    pub fn cases() -> Vec<Clustered> {
        let sizes =
            [(7, 32, 24, 16, 5), (3, 41, 7, 3, 7), (2, 264, 1500, 9, 32), (0, 8, 2, 2, 1), (33, 256, 4096, 2, 40)];
        let all = sizes.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)]);
        all.map(|((rows, width, clusters, size, top), has_odd_scores)| Clustered {
            rows,
            width,
            clusters,
            size,
            top,
            has_odd_scores,
        })
        .collect()
    }

    fn scores(&self, random: &mut Random) -> Vec<f32> {
        let mut scores = random.floats(self.rows * self.clusters);
        if self.has_odd_scores {
            for (index, score) in scores.iter_mut().enumerate() {
                *score = match index % 5 {
                    _ if index < self.clusters => f32::NAN, // all scores of the first row
                    0 => f32::NAN,
                    1 => f32::NEG_INFINITY,
                    2 => 0.5,
                    3 => (*score * 4.0).round(),
                    _ => *score,
                };
            }
        }
        scores
    }

    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>, random: &mut Random) -> Result<Vec<f32>, KernelError> {
        let (rows, vocabulary) = (self.rows, self.clusters * self.size);
        let x = wide(scope, rows, self.width, random)?;
        let numbers = random.floats(vocabulary * self.width);
        let table = narrowed(scope, [vocabulary, self.width], scope.target().activation(), &numbers)?;
        let scores = scope.upload([rows, self.clusters], &self.scores(random))?;
        let tokens = scope.upload([vocabulary], &random.shuffled(vocabulary))?;
        let mut chosen = scope.empty_u32([rows])?;
        let clusters = TokenClusters { scores: &scores, tokens: &tokens, top: self.top };
        scope.clustered_argmax_into(&inside(&x), &(&table).into(), clusters, &mut chosen)?;
        Ok(scope.download::<u32>(&chosen)?.into_iter().map(|token| token as f32).collect())
    }

    pub fn expected(&self, activation: DType, random: &mut Random) -> Vec<f64> {
        let (width, vocabulary) = (self.width, self.clusters * self.size);
        let x = Wide::new(activation, self.rows, width, random);
        let table = rounded(activation, &random.floats(vocabulary * width));
        let (scores, tokens) = (self.scores(random), random.shuffled(vocabulary));
        let best_token = |row: usize| {
            let scores = &scores[row * self.clusters..][..self.clusters];
            let better = |score: f32| scores.iter().filter(|other| **other > score).count();
            let is_selected = |cluster: &usize| !scores[*cluster].is_nan() && better(scores[*cluster]) < self.top;
            let best = (0..self.clusters).filter(is_selected);
            let best = best.flat_map(|cluster| &tokens[cluster * self.size..][..self.size]);
            let logit = |token: &u32| -> f64 {
                let weights = table[*token as usize * width..][..width].iter().enumerate();
                weights.map(|(column, weight)| x.at(row, column) * weight).sum()
            };
            let best = best.max_by(|one, other| logit(one).total_cmp(&logit(other)).then(other.cmp(one)));
            f64::from(best.copied().unwrap_or(NO_CHOICE) as f32)
        };
        (0..self.rows).map(best_token).collect()
    }
}
