//! Sampling on the device: the sampler sends its request, the operation chooses, and the
//! sampler reads the answer.

use bursar_budgets::{Bytes, Class, Workspace};
use bursar_kernels::{
    Cpu, DType, Scope, Tensor, UnseenToken, WorkCounter, ops::sample::outcomes, sampling::SampleBatch,
};
use bursar_model::{
    error::SamplingError,
    flow::{SCORE_ROWS, Token},
    sampling::{
        Past, Sampler, SamplerScratch, SamplingBuffers, SamplingParams, SamplingShape, Score, Scores,
        log_probabilities, philox,
    },
};

use crate::bench::Memory;

const VOCABULARY: usize = 300;

fn logits(row: u64) -> Vec<f32> {
    (0..VOCABULARY as u64).map(|id| (philox::uniform(row, id) * 12.0 - 6.0) as f32).collect()
}

fn sampler(params: SamplingParams) -> Sampler {
    Sampler::new(params, VOCABULARY).expect("valid parameters")
}

/// Samplers with different parameters, one per row.
fn samplers() -> Vec<Sampler> {
    let warm = || SamplingParams { temperature: 0.9, seed: 11, ..Default::default() };
    let reported = |sampler: Sampler, top| sampler.with_log_probabilities(top).expect("few enough");
    vec![
        sampler(SamplingParams::default()),
        sampler(warm()),
        sampler(SamplingParams { top_k: 5, top_p: 0.8, min_p: 0.01, ..warm() }),
        reported(sampler(SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.5, ..warm() }), 7),
        reported(sampler(SamplingParams { presence_penalty: 1.0, logit_bias: [(7, 3.0)].into(), ..warm() }), 0),
        sampler(SamplingParams { temperature: 0.0, ..warm() })
            .with_tokens_min(90, (0..290).collect())
            .expect("few enough"),
        sampler(SamplingParams { top_k: usize::MAX, ..warm() }),
    ]
}

/// The operation's choices from `rows`, after a step that has chosen `before`.
fn chosen(
    samplers: &[Sampler],
    rows: &[Vec<f32>],
    pasts: &[Past<'_>],
    before: &[u32],
) -> Vec<Result<Token, SamplingError>> {
    let memory = Memory::new(Bytes::mib(4));
    let (cpu, counter) = (Cpu::new(2), WorkCounter::default());
    let workspace = Workspace::over(memory.poisoned(&cpu, Class::StepWorkspace, Bytes::mib(2)));
    let scope = Scope::new(&cpu, &workspace, &counter);
    let mut batch = SampleBatch::new(VOCABULARY);
    for (sampler, past) in samplers.iter().zip(pasts) {
        sampler.ask(*past, &mut batch).expect("the past tokens are given");
    }
    let shape = SamplingShape { rows: before.len(), context_tokens: 64, vocabulary: VOCABULARY };
    let buffers = memory.poisoned(&cpu, Class::StepWorkspace, DType::U32.bytes(shape.words()));
    // SAFETY: these words are backed, and only the test's thread accesses them.
    let words = unsafe { Tensor::persistent(buffers.address(), [shape.words()], DType::U32) };
    let mut buffers = SamplingBuffers::over(words, shape);
    let mut words = Vec::new();
    let layout = batch.pack(rows.len(), &mut words);
    let mut run = || {
        let logits = scope.upload([rows.len(), VOCABULARY], &rows.concat())?;
        // SAFETY: the buffers have a slot for each row, and no pass is running.
        let mut chosen = unsafe { Tensor::persistent(buffers.chosen().address(), [before.len()], DType::U32) };
        scope.upload_into(before, &mut chosen)?;
        buffers.ask(&scope, &words)?;
        buffers.choose(&scope, &logits)?;
        let results = scope.download(&buffers.results(layout.report_words()))?;
        let (ids, report) = results.split_at(before.len());
        Ok::<_, bursar_kernels::KernelError>(outcomes(ids, report, layout))
    };
    let outcomes = run().expect("sampling runs");
    let answers = outcomes.iter().zip(samplers).zip(pasts);
    answers.map(|((outcome, sampler), past)| sampler.answer(outcome, past.position())).collect()
}

#[test]
fn host_and_backend_sampling_choose_the_same_tokens() {
    let samplers = samplers();
    let rows: Vec<_> = (0..samplers.len() as u64).map(logits).collect();
    for position in 0..40u32 {
        let past = |row: u32| {
            ((0..9).map(|at| at * 31 % 300).collect(), (0..position).map(|at| (at + row) * 17 % 60).collect())
        };
        let pasts: Vec<(Vec<u32>, Vec<u32>)> = (0..samplers.len() as u32).map(past).collect();
        let asked: Vec<_> = pasts.iter().map(|(prompt, produced)| Past::new(prompt, produced)).collect();
        let found = chosen(&samplers, &rows, &asked, &[0; 7]);
        let mut scratch = SamplerScratch::default();
        for ((sampler, row), ((prompt, produced), found)) in samplers.iter().zip(&rows).zip(pasts.iter().zip(found)) {
            let expected = sampler.sample(row, Past::new(prompt, produced), &mut scratch);
            assert_eq!(expected, found, "{:?} at {position}", sampler.params());
        }
    }
}

#[test]
fn penalties_count_a_token_that_the_host_has_not_seen() {
    let wanted = SamplingParams { presence_penalty: 2.0, ..Default::default() };
    let mut row = vec![0.0; VOCABULARY];
    (row[4], row[9]) = (2.0, 1.0);
    let pick = |row_before: u32| {
        let past = Past::new(&[], &[]).then(UnseenToken { row: row_before });
        let found = chosen(&[sampler(wanted.clone())], &[row.clone()], &[past], &[8, 4, 8]);
        found[0].as_ref().expect("a token").id
    };
    assert_eq!(9, pick(1), "token 4 is at this position");
    assert_eq!(4, pick(2), "token 8 is at this position");
    assert_eq!(4, pick(3), "no token is listed at this position");
}

#[test]
fn host_and_backend_give_the_same_scores() {
    let rows = 2 * SCORE_ROWS + 5;
    let mut logits: Vec<_> = (0..rows as u64).map(logits).collect();
    let mut wanted: Vec<_> =
        (0..rows).map(|row| Score { token: (row * 31 % VOCABULARY) as u32, top: row % 21 }).collect();
    logits[3][200] = f32::NAN;
    logits[SCORE_ROWS].fill(f32::NEG_INFINITY);
    logits[4].fill(1.0);
    logits[5][wanted[5].token as usize] = f32::NEG_INFINITY;
    wanted[6].token = VOCABULARY as u32;
    wanted[SCORE_ROWS + 1].top = 21;
    let memory = Memory::new(Bytes::mib(4));
    let (cpu, counter) = (Cpu::new(2), WorkCounter::default());
    let workspace = Workspace::over(memory.poisoned(&cpu, Class::StepWorkspace, Bytes::mib(2)));
    let scope = Scope::new(&cpu, &workspace, &counter);
    let run = || {
        let mut scores = Scores::begin(&scope, &wanted, VOCABULARY)?;
        for some in logits.chunks(SCORE_ROWS) {
            let inner = scope.scope();
            scores.score(&inner, &inner.upload([some.len(), VOCABULARY], &some.concat())?)?;
        }
        scores.download(&scope)?.expect("at least one score is requested").finish(&wanted)
    };
    let found = run().expect("sampling runs");
    let host = logits.iter().zip(&wanted).map(|(row, score)| log_probabilities(row, score.token, score.top).ok());
    assert_eq!(found, host.collect::<Vec<_>>());
    let without: Vec<_> = (0..rows).filter(|row| found[*row].is_none()).collect();
    assert_eq!(without, [3, 6, SCORE_ROWS, SCORE_ROWS + 1]);
    assert_eq!(found[5].as_ref().map(|score| score.chosen.log_probability), Some(f32::NEG_INFINITY));
}

#[test]
fn a_row_without_allowed_tokens_affects_no_other_row() {
    let samplers = [(); 4].map(|()| sampler(SamplingParams { temperature: 1.0, ..Default::default() }));
    let mut rows: Vec<_> = (0..4).map(logits).collect();
    rows[0][17] = f32::NAN;
    rows[1].fill(f32::NEG_INFINITY);
    let mut samplers = samplers.to_vec();
    samplers[2] = samplers[2].clone().with_tokens_min(1, (0..300).collect()).expect("few enough");
    let pasts = [Past::new(&[], &[]); 4];
    let found = chosen(&samplers, &rows, &pasts, &[0; 4]);
    let nothing = || Err(SamplingError::NothingAllowed { logits: VOCABULARY });
    assert_eq!(found[..3], [Err(SamplingError::NonFiniteLogits), nothing(), nothing()]);
    assert!(found[3].is_ok());
}
