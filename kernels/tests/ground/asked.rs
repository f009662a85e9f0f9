//! Rows of logits to sample from, and the expected choices, which are computed by sorting all
//! tokens and examining each token separately.

use bursar_kernels::{
    ops::{argmax::NO_CHOICE, sample::outcomes},
    sampling::{LISTED_MAX, NO_REPORT, RowLists, SampleBatch, SampleRow, philox},
    *,
};

use super::Random;

/// Rows, and the tokens that the previous step chose. There are more tokens than rows.
pub struct Batch {
    vocabulary: usize,
    asked: Vec<Asked>,
    previous: Vec<u32>,
}

impl Batch {
    pub fn random(random: &mut Random, rows: usize, vocabulary: usize) -> Self {
        let previous = random.indices(rows + 3, vocabulary);
        let asked = (0..rows).map(|at| Asked::random(random, at, rows, vocabulary)).collect();
        Batch { vocabulary, asked, previous }
    }

    /// Returns for each row the token, the fault, the log-probability (1 if there is none), and the
    /// likeliest tokens with their log-probabilities. The rest of the previously chosen tokens
    /// follows.
    pub fn run<B: Backend>(&self, scope: &Scope<'_, B>) -> Result<Vec<f32>, KernelError> {
        let Batch { vocabulary, ref asked, ref previous } = *self;
        let mut batch = SampleBatch::new(vocabulary);
        asked.iter().for_each(|asked| asked.push(&mut batch));
        let mut words = Vec::new();
        let layout = batch.pack(asked.len(), &mut words);
        // Both buffers are longer than needed.
        words.push(7);
        let packed = scope.upload([words.len()], &words)?;
        let mut report = scope.upload([layout.report_words() + 1], &vec![9u32; layout.report_words() + 1])?;
        let mut chosen = scope.upload([previous.len()], previous)?;
        // Rows are deliberately unaligned.
        let wide: Vec<f32> =
            asked.iter().flat_map(|asked| [&[9.0; 3][..], &asked.logits, &[9.0; 2][..]].concat()).collect();
        let wide = scope.upload([asked.len(), vocabulary + 5], &wide)?;
        let logits = wide.column_range(3..vocabulary + 3);
        scope.sample_into(&logits, &packed, layout, &mut chosen, &mut report)?;
        let chosen = scope.download(&chosen)?;
        let report = scope.download(&report.row_range(0..layout.report_words()))?;
        let mut found = Vec::new();
        for (outcome, &id) in outcomes(&chosen, &report, layout).iter().zip(&chosen) {
            let fault = outcome.chosen.err().map_or(0, |fault| fault as u32);
            found.extend([id as f32, fault as f32, outcome.log_probability.unwrap_or(1.0)]);
            found.extend(outcome.top.iter().flat_map(|(id, logarithm)| [*id as f32, *logarithm]));
        }
        found.extend(chosen[asked.len()..].iter().map(|id| *id as f32));
        Ok(found)
    }

    pub fn expected(&self) -> Vec<f64> {
        let mut found = Vec::new();
        for asked in &self.asked {
            let expected = asked.expected(&self.previous);
            let logarithm = expected.log_probability.unwrap_or(1.0);
            found.extend([f64::from(expected.chosen as f32), f64::from(expected.fault), logarithm]);
            found.extend(expected.top.iter().flat_map(|(id, logarithm)| [f64::from(*id), *logarithm]));
        }
        found.extend(self.previous[self.asked.len()..].iter().map(|id| f64::from(*id)));
        found
    }
}

/// One row with its lists.
struct Asked {
    logits: Vec<f32>,
    row: SampleRow,
    min_p: f64,
    mask: Option<Vec<u32>>,
    forbidden: Vec<u32>,
    biased: Vec<u32>,
    biases: Vec<f32>,
    prompt: Vec<u32>,
    produced: Vec<u32>,
    unseen: Option<UnseenToken>,
}

/// The expected result of a row: token, fault, log-probability, and the likeliest
/// tokens with their log-probabilities.
struct Expected {
    chosen: u32,
    fault: u32,
    log_probability: Option<f64>,
    top: Vec<(u32, f64)>,
}

impl Asked {
    /// Row `at` of a batch. Each row has different options. Every seventh row has all penalties,
    /// limits and lists, but not always a mask or a given token.
    fn random(random: &mut Random, at: usize, rows: usize, vocabulary: usize) -> Self {
        let scale = [1.0, 4.0, 30.0][at % 3];
        let mut logits: Vec<f32> = random.floats(vocabulary).into_iter().map(|number| number * scale).collect();
        match at % 17 {
            5 => logits.iter_mut().step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY),
            // Many ties, but no -0, which would sort after 0.
            8 => logits.iter_mut().for_each(|logit| *logit = logit.round() + 0.0),
            11 => logits[random.below(vocabulary)] = f32::NAN,
            12 => logits[random.below(vocabulary)] = f32::INFINITY,
            13 => logits.fill(f32::NEG_INFINITY),
            14 => logits.fill(-2.5),
            _ => {}
        }
        let on = |random: &mut Random| at % 7 == 6 || random.below(3) == 0;
        let one_of = |random: &mut Random, values: &[f64]| values[random.below(values.len())];
        let mut row = SampleRow { seed: 77 + at as u64, position: (at as u64) << 30, ..SampleRow::default() };
        let mut min_p = 0.0;
        if on(random) || random.below(2) == 0 {
            row.temperature = one_of(random, &[0.3, 1.0, 1.7]);
        }
        if on(random) {
            row.top_k = [1, 2, 50, 600, vocabulary as u32][random.below(5)];
        }
        if on(random) {
            row.top_p = one_of(random, &[0.05, 0.5, 0.9, 0.999]);
        }
        if on(random) {
            min_p = one_of(random, &[0.001, 0.2]);
            row.min_p_logarithm = f64::ln(min_p);
        }
        if on(random) {
            row.repetition = one_of(random, &[0.5, 1.3]) as f32;
        }
        if on(random) {
            row.presence = one_of(random, &[-1.0, 0.7]);
            row.frequency = one_of(random, &[0.0, 0.25]);
        }
        if on(random) {
            row.top = [0, 3, 20][random.below(3)];
        }
        row.ignored = at % 19 == 18;
        row.given = (at % 5 == 3).then(|| random.below(vocabulary) as u32);
        let mask = (random.below(4) == 0).then(|| random.indices(vocabulary.div_ceil(32), u32::MAX as usize));
        let biased: Vec<u32> =
            if on(random) { (0..vocabulary as u32).step_by(3).take(LISTED_MAX).collect() } else { Vec::new() };
        let biases = random.floats(biased.len());
        // Some ids are beyond the vocabulary, as placeholders of pictures may be in a real prompt.
        let produced = random.indices(23, vocabulary + 3);
        let unseen = (!at.is_multiple_of(3)).then(|| UnseenToken { row: random.below(rows) as u32 });
        let forbidden = if on(random) { random.indices(3, vocabulary + 3) } else { Vec::new() };
        Asked {
            logits,
            row,
            min_p,
            mask,
            forbidden,
            biased,
            biases,
            prompt: random.indices(31, vocabulary + 3),
            produced,
            unseen,
        }
    }

    fn push(&self, batch: &mut SampleBatch) {
        let row_lists = RowLists {
            allowed: self.mask.as_deref(),
            forbidden: &self.forbidden,
            biased: &self.biased,
            biases: &self.biases,
            prompt: &self.prompt,
            produced: &self.produced,
            unseen: self.unseen,
        };
        batch.push(&self.row, &row_lists);
    }

    /// The expected result, if `previous` was chosen by the previous step.
    fn expected(&self, previous: &[u32]) -> Expected {
        let Asked { logits, row, .. } = self;
        let nothing = |fault| Expected { chosen: NO_CHOICE, fault, log_probability: None, top: Vec::new() };
        if row.ignored {
            return nothing(3);
        }
        if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return nothing(1);
        }
        let changed: Vec<f32> = match row.given {
            Some(_) => logits.clone(),
            None => (0..logits.len()).map(|id| self.changed(id, previous)).collect(),
        };
        if logits.iter().chain(&changed).all(|logit| *logit == f32::NEG_INFINITY)
            || changed.iter().all(|logit| *logit == f32::NEG_INFINITY)
        {
            return nothing(2);
        }
        let chosen = row.given.unwrap_or_else(|| self.chosen(&changed));
        if row.top == NO_REPORT {
            return Expected { chosen, fault: 0, log_probability: None, top: Vec::new() };
        }
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let of = |id: u32| f64::from(logits[id as usize]) - total.ln();
        let mut top = sorted(logits);
        top.truncate(row.top as usize);
        let top = top.into_iter().map(|id| (id, of(id))).collect();
        Expected { chosen, fault: 0, log_probability: Some(of(chosen)), top }
    }

    fn changed(&self, id: usize, previous: &[u32]) -> f32 {
        let unseen = self.unseen.map(|unseen| previous[unseen.row as usize]);
        let is = |token: &u32| *token == id as u32;
        let masked = self.mask.as_ref().is_some_and(|mask| mask[id / 32] >> (id % 32) & 1 == 0);
        if masked || self.forbidden.iter().any(is) || self.logits[id] == f32::NEG_INFINITY {
            return f32::NEG_INFINITY;
        }
        let bias = self.biased.binary_search(&(id as u32)).map_or(0.0, |place| self.biases[place]);
        let mut logit = self.logits[id] + bias;
        if !self.row.penalizes() {
            return logit;
        }
        let times = self.produced.iter().chain(&unseen).filter(|token| is(token)).count();
        if times > 0 || (self.row.repetition != 1.0 && self.prompt.iter().any(is)) {
            logit = if logit < 0.0 { logit * self.row.repetition } else { logit / self.row.repetition };
        }
        if times > 0 {
            logit -= (self.row.frequency * times as f64 + self.row.presence) as f32;
        }
        logit
    }

    fn chosen(&self, logits: &[f32]) -> u32 {
        let row = &self.row;
        let mut kept = sorted(logits);
        let likeliest = logits[kept[0] as usize];
        if row.temperature == 0.0 || row.top_k == 1 {
            return kept[0];
        }
        let weight = |id: &u32| (f64::from(logits[*id as usize] - likeliest) / row.temperature).exp();
        let limits = row.top_k > 0 && (row.top_k as usize) < kept.len();
        if limits {
            let least = logits[kept[row.top_k as usize - 1] as usize];
            kept.retain(|id| logits[*id as usize] >= least);
        }
        kept.retain(|id| weight(id) >= self.min_p);
        if row.top_p < 1.0 {
            let whole: f64 = kept.iter().map(weight).sum();
            let mut reached = 0.0;
            kept.retain(|id| {
                let before = reached;
                reached += weight(id);
                before < row.top_p * whole
            });
        } else if !limits {
            kept.sort_unstable();
        }
        let whole: f64 = kept.iter().map(weight).sum();
        let mut left = philox::uniform(row.seed, row.position) * whole;
        let passed = |id: &&u32| {
            left -= weight(id);
            left < 0.0
        };
        *kept.iter().find(passed).expect("the draw falls on a token")
    }
}

/// The possible tokens, largest logit first and ties by id.
fn sorted(logits: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).filter(|&id| logits[id as usize] > f32::NEG_INFINITY).collect();
    ids.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap());
    ids
}
