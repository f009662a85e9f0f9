//! Sampling: repeatable seeds, forbidden tokens, refused parameters and log-probabilities.
//! Distributions are tested in a separate file.

use bursar_budgets::Hint;
use bursar_model::error::SamplingError;
use bursar_model::flow::{LogProbability, Token};
use bursar_model::sampling::{
    GenerationDefaults, Past, Sampler, SamplerScratch, SamplingParams, TOP_LOG_PROBABILITIES_MAX, log_probabilities,
};
use proptest::prelude::*;

/// Tokens at positions from 0, computed independently of this code, and equal to the tokens
/// of the first version.
const DRAWN_BY_SEED_42: [u32; 16] = [3, 0, 5, 5, 1, 1, 1, 1, 3, 1, 3, 1, 1, 1, 1, 5];

fn logits() -> Vec<f32> {
    vec![1.0, 3.0, -0.5, 2.5, f32::NEG_INFINITY, 2.5, 0.0, -4.0]
}

fn sampler(params: SamplingParams, vocabulary: usize) -> Sampler {
    Sampler::new(params, vocabulary).expect("valid parameters")
}

fn sample(sampler: &Sampler, logits: &[f32], past: Past<'_>) -> Result<Token, SamplingError> {
    sampler.sample(logits, past, &mut SamplerScratch::default())
}

#[test]
fn a_seed_gives_the_same_tokens_in_any_order() {
    let params = SamplingParams { temperature: 1.0, presence_penalty: 0.5, seed: 42, ..Default::default() };
    let produced = [3u32; 200];
    let draw = |sampler: &Sampler, at: usize, scratch: &mut SamplerScratch| {
        sampler.sample(&logits(), Past::new(&[], &produced[..at]), scratch).expect("a token")
    };
    let ours = sampler(params.clone(), 8);
    let other = sampler(SamplingParams { frequency_penalty: 1.0, ..params.clone() }, 33);
    let mut scratch = SamplerScratch::default();
    let forward: Vec<_> = (0..200).map(|at| draw(&ours, at, &mut scratch)).collect();
    let mut backward: Vec<_> = (0..200)
        .rev()
        .map(|at| {
            let past = Past::new(&[], &produced[..at]);
            other.sample(&[0.5; 33], past, &mut scratch).expect("the other sampler's token");
            draw(&ours.clone(), at, &mut scratch)
        })
        .collect();
    backward.reverse();
    assert_eq!(forward, backward);
    let other = sampler(SamplingParams { seed: 43, ..params }, 8);
    let others: Vec<_> = (0..200).map(|at| draw(&other, at, &mut scratch)).collect();
    assert_ne!(forward, others);
}

/// These numbers must not change from one version to the next.
#[test]
fn a_seed_gives_the_same_tokens_in_every_version() {
    let params = SamplingParams { temperature: 1.0, top_p: 0.95, seed: 42, ..Default::default() };
    let sampler = sampler(params, 8);
    let draw = |at| sample(&sampler, &logits(), Past::at(at)).expect("a token").id;
    let drawn: Vec<_> = (0..16).map(draw).collect();
    assert_eq!(DRAWN_BY_SEED_42, drawn[..]);
}

#[test]
fn greedy_sampling_takes_the_first_of_the_likeliest_tokens() {
    let greedy = sampler(SamplingParams::default(), 3);
    assert_eq!(1, sample(&greedy, &[0.0, 2.0, 2.0], Past::at(0)).expect("a token").id);
    // A temperature as small as Qwen2.5-VL's 1e-6 is effectively greedy and gives no NaN.
    let cold = sampler(SamplingParams { temperature: 1e-6, top_p: 0.001, ..Default::default() }, 8);
    assert_eq!(1, sample(&cold, &logits(), Past::at(9)).expect("a token").id);
}

#[test]
fn only_the_repetition_penalty_counts_prompt_tokens() {
    let greedy = |params| sampler(params, 3);
    let row = [1.0, 1.5, 1.2];
    let pick = |params, prompt: &[u32], produced: &[u32]| {
        sample(&greedy(params), &row, Past::new(prompt, produced)).expect("a token").id
    };
    let presence = || SamplingParams { presence_penalty: 0.4, ..Default::default() };
    assert_eq!(1, pick(presence(), &[1, 1, 1], &[]), "prompt tokens are not penalized for presence");
    assert_eq!(2, pick(presence(), &[], &[1]));
    assert_eq!(2, pick(presence(), &[], &[1, 1, 1, 1]), "presence counts once, however often a token occurs");
    let frequency = || SamplingParams { frequency_penalty: 0.2, ..Default::default() };
    assert_eq!(1, pick(frequency(), &[1, 1, 1], &[1]));
    assert_eq!(2, pick(frequency(), &[], &[1, 1]), "frequency costs 0.4 for two occurrences");
    assert_eq!(0, pick(frequency(), &[], &[1, 1, 1, 2, 2]));
    let repetition = SamplingParams { repetition_penalty: 1.3, ..Default::default() };
    assert_eq!(2, pick(repetition, &[1], &[]));
}

#[test]
fn a_bias_never_allows_a_token_with_probability_zero() {
    let biased =
        |pairs: &[(u32, f64)]| SamplingParams { logit_bias: pairs.iter().copied().collect(), ..Default::default() };
    let pick = |params| sample(&sampler(params, 8), &logits(), Past::at(0)).expect("a token").id;
    assert_eq!(7, pick(biased(&[(7, 100.0)])));
    assert_eq!(3, pick(biased(&[(1, -100.0), (4, 100.0)])), "token 4 has a score of -infinity");
}

#[test]
fn end_tokens_are_forbidden_before_the_minimum_length() {
    let ends: std::sync::Arc<[u32]> = [1, 3, 5, 4_000].into();
    let sampler = sampler(SamplingParams::default(), 8).with_tokens_min(2, ends.clone()).expect("few enough");
    let at = |position| sample(&sampler, &logits(), Past::at(position)).expect("a token").id;
    assert_eq!([0, 0, 1, 1], [at(0), at(1), at(2), at(100)]);
    let all = self::sampler(SamplingParams::default(), 2).with_tokens_min(2, [0, 1].into()).expect("few enough");
    assert_eq!(Err(SamplingError::NothingAllowed { logits: 2 }), sample(&all, &[0.0, 1.0], Past::at(0)));
}

#[test]
fn a_sampler_reports_the_inputs_that_it_reads() {
    let with = |params| sampler(params, 8);
    let plain = with(SamplingParams::default());
    assert!(plain.is_plain_argmax() && !plain.reads_past() && !plain.reads_prompt());
    assert!(with(SamplingParams { temperature: 1.0, top_k: 1, ..Default::default() }).is_plain_argmax());
    let biased = with(SamplingParams { logit_bias: [(1, 1.0)].into(), ..Default::default() });
    assert!(!biased.is_plain_argmax() && !biased.reads_past());
    assert!(!plain.clone().with_tokens_min(1, [0].into()).expect("few enough").is_plain_argmax());
    assert!(
        !plain.clone().with_log_probabilities(0).expect("a request for no other tokens is accepted").is_plain_argmax()
    );
    let present = with(SamplingParams { presence_penalty: 0.1, ..Default::default() });
    assert!(!present.is_plain_argmax() && present.reads_past() && !present.reads_prompt());
    let repeated = with(SamplingParams { repetition_penalty: 1.1, ..Default::default() });
    assert!(!repeated.is_plain_argmax() && repeated.reads_past() && repeated.reads_prompt());
    assert_eq!(Err(SamplingError::PastMissing), sample(&present, &logits(), Past::at(3)));
}

#[test]
fn invalid_logits_are_a_typed_error() {
    let sample = |logits: &[f32]| {
        let sampler = sampler(SamplingParams { temperature: 1.0, ..Default::default() }, 2);
        sample(&sampler, logits, Past::at(0))
    };
    assert_eq!(Err(SamplingError::NoLogits), sample(&[]));
    assert_eq!(Err(SamplingError::BadLogit { token: 1 }), sample(&[0.0, f32::NAN]));
    assert_eq!(Err(SamplingError::BadLogit { token: 0 }), sample(&[f32::INFINITY, 0.0]));
    assert_eq!(Err(SamplingError::NothingAllowed { logits: 2 }), sample(&[f32::NEG_INFINITY; 2]));
    assert_eq!(Err(SamplingError::Width { logits: 3, vocabulary: 2 }), sample(&[0.0; 3]));
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
        ("repetition_penalty", SamplingParams { repetition_penalty: -1.0, ..default() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: f64::NAN, ..default() }),
        ("presence_penalty", SamplingParams { presence_penalty: 2.1, ..default() }),
        ("presence_penalty", SamplingParams { presence_penalty: f64::NAN, ..default() }),
        ("frequency_penalty", SamplingParams { frequency_penalty: -2.1, ..default() }),
        ("frequency_penalty", SamplingParams { frequency_penalty: f64::INFINITY, ..default() }),
        ("logit_bias", SamplingParams { logit_bias: [(0, 0.0), (1, 100.5)].into(), ..default() }),
        ("logit_bias", SamplingParams { logit_bias: [(0, f64::NAN)].into(), ..default() }),
    ];
    for (name, params) in bad {
        let error = Sampler::new(params, 8).expect_err("the parameters are refused");
        let SamplingError::OutOfRange { parameter, .. } = error else { panic!("{error}") };
        assert_eq!(name, parameter);
        assert!(error.hint().contains(name));
    }
    let unknown = SamplingParams { logit_bias: [(7, 1.0), (8, 1.0)].into(), ..default() };
    let error = Sampler::new(unknown, 8).expect_err("the parameters are refused");
    assert_eq!(SamplingError::UnknownToken { parameter: "logit_bias", token: 8, vocabulary: 8 }, error);
    assert!(error.hint().contains("below 8"));
}

#[test]
fn sampling_parameters_without_penalties_can_be_deserialized() {
    let written =
        r#"{"temperature": 0.5, "top_k": 3, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 9}"#;
    let params: SamplingParams = serde_json::from_str(written).expect("the JSON parses");
    assert_eq!(SamplingParams { temperature: 0.5, top_k: 3, seed: 9, ..Default::default() }, params);
    let biased = SamplingParams { logit_bias: [(3, -1.5)].into(), ..params };
    let again = serde_json::from_str(&serde_json::to_string(&biased).expect("the parameters are written and read"))
        .expect("the JSON parses");
    assert_eq!(biased, again);
}

#[test]
fn log_probabilities_ignore_temperature_penalties_and_bias() {
    let params = SamplingParams {
        temperature: 0.3,
        top_k: 2,
        presence_penalty: 2.0,
        logit_bias: [(7, 100.0)].into(),
        ..Default::default()
    };
    let sampler =
        sampler(params, 8).with_log_probabilities(4).expect("the request for four log probabilities is accepted");
    let token = sample(&sampler, &logits(), Past::new(&[], &[1])).expect("a token");
    assert_eq!(7, token.id, "the bias decides the token");
    let total = logits().iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
    let of = |id: u32| LogProbability { id, log_probability: (f64::from(logits()[id as usize]) - total) as f32 };
    let close =
        |a: LogProbability, b: LogProbability| a.id == b.id && (a.log_probability - b.log_probability).abs() < 1e-6;
    let reported = token.log_probabilities.expect("log probabilities were requested");
    assert!(close(of(7), reported.chosen), "{reported:?}");
    let expected = [1, 3, 5, 0].map(of); // 3 and 5 are equal
    assert_eq!(4, reported.top.len());
    assert!(expected.iter().zip(&reported.top).all(|(a, b)| close(*a, *b)), "{reported:?}");
    // `log_probabilities`, which scores the next token of a prompt, gives the same result. A token
    // of a prompt may have the probability 0.
    assert_eq!(*reported, log_probabilities(&logits(), 7, 4).expect("a row"));
    let impossible = log_probabilities(&logits(), 4, 20).expect("a row");
    assert_eq!(f32::NEG_INFINITY, impossible.chosen.log_probability);
    assert_eq!(7, impossible.top.len(), "an impossible token is not among the likeliest");
    assert_eq!(Vec::<LogProbability>::new(), log_probabilities(&logits(), 1, 0).expect("a row").top);
}

#[test]
fn too_many_log_probabilities_and_unknown_tokens_are_refused() {
    let too_many = SamplingError::TooManyLogProbabilities { asked: 21, limit: TOP_LOG_PROBABILITIES_MAX };
    assert_eq!(
        too_many,
        sampler(SamplingParams::default(), 8).with_log_probabilities(21).expect_err("the parameters are refused")
    );
    assert_eq!(Err(too_many), log_probabilities(&logits(), 0, 21));
    assert_eq!(
        Err(SamplingError::UnknownToken { parameter: "tokens", token: 8, vocabulary: 8 }),
        log_probabilities(&logits(), 8, 1)
    );
}

#[test]
fn generation_config_gives_the_defaults_of_a_checkpoint() {
    let released = br#"{"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": true,
        "eos_token_id": [151645, 151643], "repetition_penalty": 1.05, "temperature": 0.000001}"#;
    let defaults = GenerationDefaults::from_json(released).expect("the JSON parses");
    assert_eq!(vec![151645, 151643], defaults.eos_ids);
    assert_eq!(Some(151643), defaults.bos_id);
    let expected = SamplingParams { temperature: 1e-6, top_k: 50, repetition_penalty: 1.05, ..Default::default() };
    assert_eq!(expected, defaults.sampling);
    let plain = GenerationDefaults::from_json(br#"{"eos_token_id": 5, "temperature": 0.7}"#).expect("the JSON parses");
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

fn row() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![-1e30f32..1e30, -20.0f32..20.0, Just(f32::NEG_INFINITY), Just(0.0), Just(f32::MAX)];
    prop::collection::vec(logit, 1..50).prop_filter("one is allowed", |row| row.iter().any(|logit| logit.is_finite()))
}

prop_compose! {
    fn params(tokens: u32)(
        temperature in prop_oneof![Just(0.0), Just(1e-6), 0.01f64..100.0],
        top_k in 0usize..60,
        top_p in 0.001f64..=1.0,
        min_p in 0.0f64..=1.0,
        repetition_penalty in prop_oneof![Just(1.0), 0.01f64..100.0],
        presence_penalty in prop_oneof![Just(0.0), -2.0f64..=2.0],
        frequency_penalty in prop_oneof![Just(0.0), -2.0f64..=2.0],
        logit_bias in prop::collection::btree_map(0..tokens, -100.0f64..=100.0, 0..4),
        seed in any::<u64>(),
    ) -> SamplingParams {
        SamplingParams {
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed,
        }
    }
}

proptest! {
    #[test]
    fn valid_parameters_always_give_an_allowed_token(
        (row, params) in row().prop_flat_map(|row| { let tokens = row.len() as u32; (Just(row), params(tokens)) }),
        prompt in prop::collection::vec(0u32..60, 0..20),
        produced in prop::collection::vec(0u32..60, 0..20),
        top in 0usize..=20,
    ) {
        let sampler = sampler(params, row.len()).with_log_probabilities(top).expect("at most 20");
        let mut scratch = SamplerScratch::default();
        let past = Past::new(&prompt, &produced);
        let token = sampler.sample(&row, past, &mut scratch).expect("a token");
        prop_assert!(row[token.id as usize].is_finite());
        prop_assert_eq!(produced.len() as u64, token.position);
        // The buffers keep no state of a row.
        prop_assert_eq!(&token, &sampler.sample(&row, past, &mut scratch).expect("the second sample succeeds"));
        let log = token.log_probabilities.expect("log probabilities were requested");
        prop_assert!(log.chosen.log_probability <= 0.0 && log.top.len() <= top);
        let mut by_sorting: Vec<(f32, u32)> = row.iter().copied().zip(0..).filter(|(logit, _)| logit.is_finite()).collect();
        by_sorting.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let expected: Vec<_> = by_sorting.iter().take(top).map(|(_, id)| *id).collect();
        prop_assert_eq!(expected, log.top.iter().map(|one| one.id).collect::<Vec<_>>());
    }

    #[test]
    fn a_token_with_bias_minus_100_is_never_chosen(
        row in prop::collection::vec(-20.0f32..20.0, 2..40),
        temperature in prop_oneof![Just(0.0), 0.1f64..2.0],
        seed in any::<u64>(),
    ) {
        let forbidden = (seed % row.len() as u64) as u32;
        let params = SamplingParams { temperature, seed, logit_bias: [(forbidden, -100.0)].into(), ..Default::default() };
        let sampler = sampler(params, row.len());
        for position in 0..50 {
            prop_assert_ne!(forbidden, sample(&sampler, &row, Past::at(position)).expect("a token").id);
        }
    }

    #[test]
    fn no_reply_ends_before_its_minimum_length(
        row in prop::collection::vec(-20.0f32..20.0, 4..40),
        temperature in prop_oneof![Just(0.0), 0.1f64..5.0],
        tokens_min in 1usize..30,
        seed in any::<u64>(),
    ) {
        let params = SamplingParams { temperature, seed, logit_bias: [(0, 100.0)].into(), ..Default::default() };
        let sampler = sampler(params, row.len()).with_tokens_min(tokens_min, [0, 2].into()).expect("few enough");
        for position in 0..tokens_min as u64 {
            let id = sample(&sampler, &row, Past::at(position)).expect("a token").id;
            prop_assert!(id != 0 && id != 2);
        }
        // The bias forces the token as soon as it is allowed.
        prop_assert_eq!(0, sample(&sampler, &row, Past::at(tokens_min as u64)).expect("a token").id);
    }
}

#[test]
fn token_lists_have_a_limit_that_errors_name() {
    let biased = |count: u32| {
        let logit_bias = (0..count).map(|token| (token, 1.0)).collect();
        Sampler::new(SamplingParams { logit_bias, ..Default::default() }, 5000)
    };
    assert!(biased(1024).is_ok());
    let error = biased(1025).expect_err("one entry more than the limit");
    assert_eq!(error, SamplingError::TooManyTokens { parameter: "logit_bias", asked: 1025, limit: 1024 });
    assert_eq!(error.to_string(), "`logit_bias` names 1025 tokens; the limit is 1024");
    assert!(error.hint().contains("1024") && error.hint().contains("logit_bias"), "{}", error.hint());
    let ended =
        |tokens_min, count| sampler(SamplingParams::default(), 5000).with_tokens_min(tokens_min, (0..count).collect());
    assert!(ended(1, 1024).is_ok() && ended(0, 5000).is_ok(), "without a minimum, any number of end tokens is allowed");
    assert!(matches!(ended(1, 1025), Err(SamplingError::TooManyTokens { parameter: "stop_token_ids", .. })));
}

#[test]
fn only_a_repetition_penalty_reads_the_distinct_prompt_tokens() {
    let repeated = sampler(SamplingParams { repetition_penalty: 1.2, ..Default::default() }, 9);
    assert_eq!(repeated.read_of(&[7, 3, 7, 7, 3])[..], [3, 7]);
    assert!(sampler(SamplingParams { presence_penalty: 1.0, ..Default::default() }, 9).read_of(&[7, 3]).is_empty());
    // The whole prompt and the part that is read give the same token.
    let row = [1.0, 1.0, -0.2, 1.1, 0.0, 0.3, 0.2, 1.15, -1.0];
    let choose = |prompt: &[u32]| sample(&repeated, &row, Past::new(prompt, &[0])).expect("a token").id;
    assert_eq!(choose(&[7, 3, 7, 7, 3]), choose(&[3, 7]));
    assert_ne!(choose(&[]), choose(&[3, 7]));
}
