//! Distributions of the samplers, compared with a simple reference that sorts, cuts and normalizes
//! in f64.

use std::collections::BTreeMap;

use bursar_model::sampling::{Past, Sampler, SamplerScratch, SamplingParams};

const DRAWS: u64 = 24_000;

/// Parameters and past of a case.
#[derive(Clone, Default)]
struct Case {
    name: &'static str,
    params: SamplingParams,
    prompt: Vec<u32>,
    produced: Vec<u32>,
    ends: Vec<u32>,
    tokens_min: usize,
}

fn logits() -> Vec<f32> {
    vec![1.0, 3.0, -0.5, 2.5, f32::NEG_INFINITY, 2.5, 0.0, -4.0, 0.75, -1.0, 1.5]
}

/// The probabilities, computed step by step from the definitions.
fn reference(logits: &[f32], case: &Case) -> Vec<f64> {
    let params = &case.params;
    let mut scores: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    if case.produced.len() < case.tokens_min {
        case.ends.iter().for_each(|&id| scores[id as usize] = f64::NEG_INFINITY);
    }
    for (id, score) in scores.iter_mut().enumerate() {
        *score += params.logit_bias.get(&(id as u32)).copied().unwrap_or(0.0);
        let count = |tokens: &[u32]| tokens.iter().filter(|&&token| token as usize == id).count();
        let produced = count(&case.produced);
        if produced + count(&case.prompt) > 0 {
            let penalty = params.repetition_penalty;
            *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
        }
        *score -= params.frequency_penalty * produced as f64;
        *score -= if produced > 0 { params.presence_penalty } else { 0.0 };
        *score /= params.temperature;
    }
    let mut descending = scores.clone();
    descending.sort_by(|a, b| b.total_cmp(a));
    if params.top_k > 0 {
        let least = descending[params.top_k.min(scores.len()) - 1];
        scores.iter_mut().filter(|score| **score < least).for_each(|score| *score = f64::NEG_INFINITY);
    }
    let probabilities = softmax(&scores);
    let bound = params.min_p * probabilities.iter().copied().fold(0.0, f64::max);
    probabilities.iter().zip(&mut scores).filter(|(p, _)| **p < bound).for_each(|(_, s)| *s = f64::NEG_INFINITY);
    let probabilities = softmax(&scores);
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]).then(a.cmp(&b)));
    let mut before = 0.0;
    for id in order {
        if before >= params.top_p {
            scores[id] = f64::NEG_INFINITY;
        }
        before += probabilities[id];
    }
    softmax(&scores)
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// Counts how often each token is drawn after the past of `case`, with a different
/// seed for each draw.
fn draw(logits: &[f32], case: &Case) -> Vec<u64> {
    let mut scratch = SamplerScratch::default();
    let mut counts = vec![0; logits.len()];
    for seed in 0..DRAWS {
        let params = SamplingParams { seed, ..case.params.clone() };
        let sampler = Sampler::new(params, logits.len()).expect("valid parameters");
        let sampler =
            sampler.with_tokens_min(case.tokens_min, case.ends.clone().into()).expect("the end tokens are few enough");
        let past = Past::new(&case.prompt, &case.produced);
        counts[sampler.sample(logits, past, &mut scratch).expect("a token").id as usize] += 1;
    }
    counts
}

/// Pearson's chi-squared test of whether the counts are plausible. `None` if a token with
/// probability 0 was drawn. The test rejects the true distribution with a probability of 1 in
/// 10,000. Seeds are fixed, so the result never changes.
fn believable(expected: &[f64], counts: &[u64]) -> Option<bool> {
    let draws = counts.iter().sum::<u64>() as f64;
    let (mut chi_square, mut freedom) = (0.0, -1.0f64);
    let mut rare = (0.0, 0.0);
    for (&probability, &count) in expected.iter().zip(counts) {
        let mean = probability * draws;
        if probability == 0.0 && count > 0 {
            return None;
        } else if mean < 5.0 {
            // Too few draws for the normal approximation: count all such tokens together.
            rare = (rare.0 + mean, rare.1 + count as f64);
        } else {
            chi_square += (count as f64 - mean).powi(2) / mean;
            freedom += 1.0;
        }
    }
    if rare.0 >= 5.0 {
        chi_square += (rare.1 - rare.0).powi(2) / rare.0;
        freedom += 1.0;
    }
    // Wilson and Hilferty 1931; 3.719 standard deviations.
    let ninth = 2.0 / (9.0 * freedom.max(1.0));
    Some(chi_square <= freedom.max(1.0) * (1.0 - ninth + 3.719 * ninth.sqrt()).powi(3))
}

fn cases() -> Vec<Case> {
    let warm = SamplingParams { temperature: 1.0, ..Default::default() };
    let case = |name, params: SamplingParams| Case { name, params, ..Case::default() };
    let text_of = |case: Case| Case { prompt: vec![1, 1, 2, 99, 6], produced: vec![3, 3, 3, 0, 7, u32::MAX], ..case };
    let bias = |pairs: &[(u32, f64)]| pairs.iter().copied().collect::<BTreeMap<_, _>>();
    vec![
        case("unchanged", warm.clone()),
        case("cold", SamplingParams { temperature: 0.6, ..warm.clone() }),
        case("hot", SamplingParams { temperature: 2.5, ..warm.clone() }),
        case("top-k with a tie: three stay", SamplingParams { top_k: 2, ..warm.clone() }),
        case("top-k", SamplingParams { top_k: 4, ..warm.clone() }),
        case("top-k beyond the vocabulary", SamplingParams { top_k: 100, ..warm.clone() }),
        case("top-p", SamplingParams { top_p: 0.8, ..warm.clone() }),
        case("top-p, only the likeliest token", SamplingParams { top_p: 0.05, ..warm.clone() }),
        case("min-p", SamplingParams { min_p: 0.2, ..warm.clone() }),
        case("top-p after min-p", SamplingParams { top_p: 0.7, min_p: 0.4, ..warm.clone() }),
        text_of(case("repetition", SamplingParams { repetition_penalty: 1.5, ..warm.clone() })),
        text_of(case("repetition, encouraged", SamplingParams { repetition_penalty: 0.7, ..warm.clone() })),
        text_of(case("presence", SamplingParams { presence_penalty: 1.2, ..warm.clone() })),
        text_of(case("presence, encouraged", SamplingParams { presence_penalty: -2.0, ..warm.clone() })),
        text_of(case("frequency", SamplingParams { frequency_penalty: 0.8, ..warm.clone() })),
        case("bias", SamplingParams { logit_bias: bias(&[(0, 1.5), (1, -1.0), (4, 100.0)]), ..warm.clone() }),
        case("forbidden by bias", SamplingParams { logit_bias: bias(&[(1, -100.0)]), ..warm.clone() }),
        Case { ends: vec![1, 5], tokens_min: 1, ..case("too short to end", warm.clone()) },
        Case { ends: vec![1, 5], tokens_min: 3, ..text_of(case("long enough to end", warm.clone())) },
        case("three cuts", SamplingParams { temperature: 1.7, top_k: 6, top_p: 0.9, min_p: 0.05, ..warm.clone() }),
        text_of(Case {
            ends: vec![10],
            tokens_min: 20,
            ..case(
                "everything",
                SamplingParams {
                    temperature: 1.3,
                    top_k: 7,
                    top_p: 0.97,
                    min_p: 0.02,
                    repetition_penalty: 1.2,
                    presence_penalty: 0.3,
                    frequency_penalty: -0.4,
                    logit_bias: bias(&[(9, 2.0), (3, -0.5)]),
                    ..warm
                },
            )
        }),
    ]
}

#[test]
fn sampled_tokens_follow_the_reference_distribution() {
    for case in cases() {
        let (expected, counts) = (reference(&logits(), &case), draw(&logits(), &case));
        assert_eq!(Some(true), believable(&expected, &counts), "{}: {counts:?} for {expected:?}", case.name);
    }
}

#[test]
fn samples_over_positions_follow_the_reference_distribution() {
    let case = Case { params: SamplingParams { temperature: 0.9, seed: 11, ..Default::default() }, ..Case::default() };
    let sampler = Sampler::new(case.params.clone(), logits().len()).expect("valid parameters");
    let (mut counts, mut scratch) = (vec![0; logits().len()], SamplerScratch::default());
    for position in 0..DRAWS {
        let token = sampler.sample(&logits(), Past::at(position), &mut scratch).expect("a token");
        counts[token.id as usize] += 1;
    }
    assert_eq!(Some(true), believable(&reference(&logits(), &case), &counts));
}

/// Tests each case's draws against every other case's distribution. A distribution must be refused
/// if its probabilities differ by more than 0.04 in total.
#[test]
fn the_distribution_test_rejects_wrong_distributions() {
    let cases = cases();
    let distributions: Vec<_> = cases.iter().map(|case| reference(&logits(), case)).collect();
    let counts: Vec<_> = cases.iter().map(|case| draw(&logits(), case)).collect();
    let mut refused = 0;
    for (one, counts) in counts.iter().enumerate() {
        for (other, expected) in distributions.iter().enumerate() {
            let distance = expected.iter().zip(&distributions[one]).map(|(a, b)| (a - b).abs()).sum::<f64>();
            if distance > 0.04 {
                let verdict = believable(expected, counts);
                assert_ne!(Some(true), verdict, "{} drawn, {} expected", cases[one].name, cases[other].name);
                refused += 1;
            }
        }
    }
    assert!(refused > 300, "{refused}");
    // A small skew is detected as well.
    assert_eq!(Some(false), believable(&[0.265, 0.25, 0.25, 0.235], &[6_000; 4]));
    assert_eq!(Some(true), believable(&[0.25; 4], &[6_000, 6_050, 5_970, 5_980]));
    assert_eq!(None, believable(&[0.5, 0.5, 0.0], &[10, 10, 1]));
}

/// The size of Qwen2.5's vocabulary. Top-p reads only a part of it, which must
/// not change the result.
#[test]
fn top_p_of_a_large_vocabulary_matches_a_full_sort() {
    let vocabulary = 152_064;
    // From peaked to flat, so that the nucleus has a few, a few hundred or nearly all tokens.
    for spread in [9.0, 2.5, 0.4] {
        let logits: Vec<f32> = (0..vocabulary as u64)
            .map(|id| spread * (4.0 * bursar_model::sampling::philox::uniform(17, id) as f32 - 2.0))
            .collect();
        let mut sorted: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let probabilities = softmax(&sorted);
        let mut reached = 0.0;
        let kept = probabilities.iter().take_while(|&&probability| {
            let before = reached;
            reached += probability;
            before < 0.9
        });
        let least = sorted[kept.count() - 1] as f32;
        let mut scratch = SamplerScratch::default();
        let (mut lowest, mut draws) = (f32::INFINITY, 0);
        for seed in 0..40 {
            let params = SamplingParams { temperature: 1.0, top_p: 0.9, seed, ..Default::default() };
            let sampler = Sampler::new(params, vocabulary).expect("valid parameters");
            let token = sampler.sample(&logits, Past::at(0), &mut scratch).expect("a token");
            lowest = lowest.min(logits[token.id as usize]);
            draws += u32::from(logits[token.id as usize] >= least);
        }
        assert_eq!(40, draws, "no draw falls below the nucleus, spread {spread}");
        // The largest uniform numbers reach the end of the nucleus, so the nucleus is
        // not too small either.
        let within = (lowest - least) / (sorted[0] as f32 - least);
        assert!(within < 0.25, "spread {spread}: the lowest probability {lowest} is far above {least}");
    }
}
