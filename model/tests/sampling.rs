//! Stories of sampling: distributions against a plain reference, and seeds that repeat.

use bursar_model::error::SamplingError;
use bursar_model::sampling::{GenerationDefaults, Sampler, SamplerScratch, SamplingParams};
use proptest::prelude::*;

const DRAWS: u64 = 20_000;

fn logits() -> Vec<f32> {
    vec![1.0, 3.0, -0.5, 2.5, f32::NEG_INFINITY, 2.5, 0.0, -4.0]
}

/// Probabilities by the book: sort, cut, normalise, one step after another in f64.
fn reference(logits: &[f32], params: &SamplingParams, history: &[u32]) -> Vec<f64> {
    let mut scores: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for (id, score) in scores.iter_mut().enumerate().filter(|(id, _)| history.contains(&(*id as u32))) {
        let penalty = params.repetition_penalty;
        *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
        assert!(id < logits.len());
    }
    scores.iter_mut().for_each(|score| *score /= params.temperature);
    let mut descending = scores.clone();
    descending.sort_by(|a, b| b.total_cmp(a));
    if params.top_k > 0 {
        let least = descending[params.top_k.min(scores.len()) - 1];
        scores.iter_mut().filter(|score| **score < least).for_each(|score| *score = f64::NEG_INFINITY);
    }
    let softmax = |scores: &[f64]| {
        let weights: Vec<f64> = scores.iter().map(|score| (score - descending[0]).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / total).collect::<Vec<_>>()
    };
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
    let probabilities = softmax(&scores);
    let bound = params.min_p * probabilities.iter().copied().fold(0.0, f64::max);
    probabilities.iter().zip(&mut scores).filter(|(p, _)| **p < bound).for_each(|(_, s)| *s = f64::NEG_INFINITY);
    softmax(&scores)
}

fn counts(params: &SamplingParams, history: &[u32]) -> Vec<u64> {
    let sampler = Sampler::new(params.clone()).expect("valid parameters");
    let (logits, mut scratch) = (logits(), SamplerScratch::default());
    let mut counts = vec![0; logits.len()];
    for position in 0..DRAWS {
        let token = sampler.sample(&logits, history, position, &mut scratch).expect("a token");
        counts[token.id as usize] += 1;
    }
    counts
}

#[test]
fn draws_follow_the_distribution_of_a_plain_reference() {
    let warm = SamplingParams { temperature: 1.0, seed: 11, ..Default::default() };
    let cases = [
        (warm.clone(), vec![]),
        (SamplingParams { temperature: 0.6, ..warm.clone() }, vec![]),
        (SamplingParams { top_k: 2, ..warm.clone() }, vec![]), // a tie: three stay
        (SamplingParams { top_k: 100, top_p: 0.8, ..warm.clone() }, vec![]),
        (SamplingParams { min_p: 0.2, ..warm.clone() }, vec![]),
        (SamplingParams { repetition_penalty: 1.5, top_p: 0.95, ..warm.clone() }, vec![1, 1, 2, 99]),
        (SamplingParams { temperature: 1.7, top_k: 4, top_p: 0.9, min_p: 0.05, ..warm }, vec![3]),
    ];
    for (params, history) in cases {
        let expected = reference(&logits(), &params, &history);
        let counts = counts(&params, &history);
        let mut chi_square = 0.0;
        for (&probability, &count) in expected.iter().zip(&counts) {
            let mean = probability * DRAWS as f64;
            if probability == 0.0 {
                assert_eq!(0, count, "{params:?}: a forbidden token was drawn");
            } else {
                chi_square += (count as f64 - mean).powi(2) / mean;
            }
        }
        // Seven degrees of freedom exceed 29.9 once in 10,000; the seeds are fixed, so this does not flicker.
        assert!(chi_square < 29.9, "{params:?}: {chi_square}, {counts:?} for {expected:?}");
    }
}

#[test]
fn the_log_probability_is_that_of_the_drawn_token() {
    let params = SamplingParams { temperature: 0.7, top_k: 4, seed: 5, ..Default::default() };
    let expected = reference(&logits(), &params, &[]);
    let sampler = Sampler::new(params).expect("valid parameters");
    for position in 0..50 {
        let token = sampler.sample(&logits(), &[], position, &mut SamplerScratch::default()).expect("a token");
        let log = expected[token.id as usize].ln() as f32;
        assert!((log - token.log_probability).abs() < 1e-5, "{log} {token:?}");
    }
}

#[test]
fn a_seed_repeats_whatever_was_sampled_in_between() {
    let params = SamplingParams { temperature: 1.0, seed: 42, ..Default::default() };
    let sampler = Sampler::new(params.clone()).expect("valid parameters");
    let mut scratch = SamplerScratch::default();
    let forward: Vec<_> =
        (0..200).map(|at| sampler.sample(&logits(), &[], at, &mut scratch).expect("a token")).collect();
    let mut backward: Vec<_> = (0..200)
        .rev()
        .map(|at| {
            sampler.sample(&[0.5; 33], &[], at, &mut scratch).expect("a neighbour's token");
            sampler.clone().sample(&logits(), &[], at, &mut scratch).expect("a token")
        })
        .collect();
    backward.reverse();
    assert_eq!(forward, backward);
    let other = Sampler::new(SamplingParams { seed: 43, ..params }).expect("valid parameters");
    let others: Vec<_> = (0..200).map(|at| other.sample(&logits(), &[], at, &mut scratch).expect("a token")).collect();
    assert_ne!(forward, others);
}

#[test]
fn no_temperature_takes_the_first_of_the_likeliest() {
    let greedy = Sampler::new(SamplingParams::default()).expect("valid parameters");
    let mut scratch = SamplerScratch::default();
    assert_eq!(1, greedy.sample(&[0.0, 2.0, 2.0], &[], 0, &mut scratch).expect("a token").id);
    // A temperature as small as Qwen2.5-VL's 1e-6 is greedy in effect and computes no NaN.
    let cold = SamplingParams { temperature: 1e-6, top_p: 0.001, ..Default::default() };
    let token = Sampler::new(cold).expect("valid").sample(&logits(), &[], 9, &mut scratch).expect("a token");
    assert_eq!((1, 0.0), (token.id, token.log_probability));
}

#[test]
fn what_is_no_distribution_is_a_typed_error() {
    let sampler = Sampler::new(SamplingParams { temperature: 1.0, ..Default::default() }).expect("valid parameters");
    let sample = |logits: &[f32]| sampler.sample(logits, &[], 0, &mut SamplerScratch::default());
    assert_eq!(Err(SamplingError::NoLogits), sample(&[]));
    assert_eq!(Err(SamplingError::BadLogit { token: 1 }), sample(&[0.0, f32::NAN]));
    assert_eq!(Err(SamplingError::BadLogit { token: 0 }), sample(&[f32::INFINITY, 0.0]));
    assert_eq!(Err(SamplingError::NothingAllowed { logits: 2 }), sample(&[f32::NEG_INFINITY; 2]));
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let default = SamplingParams::default;
    let bad = [
        ("temperature", SamplingParams { temperature: f64::NAN, ..default() }),
        ("temperature", SamplingParams { temperature: -1.0, ..default() }),
        ("temperature", SamplingParams { temperature: f64::INFINITY, ..default() }),
        ("top_p", SamplingParams { top_p: 0.0, ..default() }),
        ("top_p", SamplingParams { top_p: 1.1, ..default() }),
        ("min_p", SamplingParams { min_p: -0.1, ..default() }),
        ("min_p", SamplingParams { min_p: f64::NAN, ..default() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..default() }),
    ];
    for (name, params) in bad {
        let error = Sampler::new(params).expect_err("refused");
        let SamplingError::OutOfRange { parameter, .. } = error else { panic!("{error}") };
        assert_eq!(name, parameter);
        assert!(error.hint().contains(name));
    }
}

#[test]
fn generation_config_gives_the_defaults_of_a_checkpoint() {
    let released = br#"{"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": true,
        "eos_token_id": [151645, 151643], "repetition_penalty": 1.05, "temperature": 0.000001}"#;
    let defaults = GenerationDefaults::from_json(released).expect("it parses");
    assert_eq!(vec![151645, 151643], defaults.eos_ids);
    assert_eq!(Some(151643), defaults.bos_id);
    let expected = SamplingParams { temperature: 1e-6, top_k: 50, repetition_penalty: 1.05, ..Default::default() };
    assert_eq!(expected, defaults.sampling);
    let plain = GenerationDefaults::from_json(br#"{"eos_token_id": 5, "temperature": 0.7}"#).expect("it parses");
    assert_eq!((vec![5], true), (plain.eos_ids, plain.sampling.is_greedy()));
    for (json, setting) in [
        ("[]", "(the file)"),
        (r#"{"eos_token_id": "x"}"#, "eos_token_id"),
        (r#"{"do_sample": 1}"#, "do_sample"),
        (r#"{"top_k": -1}"#, "top_k"),
    ] {
        assert_eq!(Err(SamplingError::Defaults { setting }), GenerationDefaults::from_json(json.as_bytes()));
    }
}

proptest! {
    #[test]
    fn any_finite_logits_and_valid_parameters_yield_an_allowed_token(
        logits in prop::collection::vec(prop_oneof![-1e30f32..1e30, Just(f32::NEG_INFINITY), Just(0.0)], 1..50),
        temperature in prop_oneof![Just(0.0), Just(1e-6), 0.01f64..100.0],
        top_k in 0usize..60,
        top_p in 0.001f64..=1.0,
        min_p in 0.0f64..=1.0,
        repetition_penalty in 0.5f64..2.0,
        seed in any::<u64>(),
    ) {
        prop_assume!(logits.iter().any(|logit| logit.is_finite()));
        let params = SamplingParams { temperature, top_k, top_p, min_p, repetition_penalty, seed };
        let token = Sampler::new(params).expect("valid").sample(&logits, &[0, 3], 1, &mut SamplerScratch::default());
        let token = token.expect("a token");
        prop_assert!(logits[token.id as usize].is_finite());
        prop_assert!(token.log_probability <= 0.0);
    }
}
