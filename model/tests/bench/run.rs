//! Runs of prompts and their answers, each by itself and batched with others. Assertions check that
//! both give the same result.

use bursar_kernels::Backend;

use super::{Bench, Case, Random, Sequence, greatest, relative_error};

/// Tokens of a recorded answer.
const ANSWER: usize = 32;

pub struct Run {
    /// The tokens with the largest logits, even if the answer continued with other tokens.
    pub tokens: Vec<u32>,
    /// The logits that each token was chosen from.
    pub logits: Vec<Vec<f32>>,
}

/// Runs a case by itself, with its prompt in chunks of these sizes, repeated.
pub fn alone(bench: &Bench<impl Backend>, case: &Case, picture_rows: &[Vec<u32>], sizes: &[usize]) -> Run {
    let mut sequence = bench.sequence(case, picture_rows);
    let last = bench.prefill(&mut sequence, sizes).pop().expect("a prompt is not empty");
    let logits = bench.decode(&mut sequence, case, last, ANSWER);
    bench.end(sequence);
    Run { tokens: logits.iter().map(|logits| greatest(logits)).collect(), logits }
}

/// Logits at some positions of a prompt. The logits of each position come from a run of the prompt
/// up to that position in one step, or up to the end of a picture that must be whole. Up to four
/// such runs share a batch, each in separate blocks.
pub fn prefixes(
    bench: &Bench<impl Backend>,
    case: &Case,
    picture_rows: &[Vec<u32>],
    places: &[usize],
) -> Vec<Vec<f32>> {
    let mut logits = Vec::new();
    for places in places.chunks(4) {
        let mut sequences: Vec<_> = places.iter().map(|_| bench.sequence(case, picture_rows)).collect();
        let chunks = sequences.iter_mut().zip(places);
        let (mut chunks, counts): (Vec<_>, Vec<_>) =
            chunks.map(|(sequence, place)| sequence.next_chunk(place + 1).with_logits_from(*place)).unzip();
        let mut all = bench.step(&mut chunks).into_iter();
        // Keep only the first logits of each sequence.
        logits.extend(counts.into_iter().filter_map(|count| all.by_ref().take(count).reduce(|first, _| first)));
        sequences.into_iter().for_each(|sequence| bench.end(sequence));
    }
    logits
}

/// Encodes a case's pictures, and each time step of its videos as a picture, in one batch.
/// Returns their cache rows.
pub fn encode(bench: &Bench<impl Backend>, case: &Case) -> Vec<Vec<u32>> {
    if case.images.is_empty() { Vec::new() } else { bench.encode(&case.images.iter().collect::<Vec<_>>()) }
}

/// Asserts that the answer has the recorded tokens, and that the logits of prompt and answer are
/// within `tolerance` of the recorded logits.
pub fn assert_recorded(bench: &Bench<impl Backend>, case: &Case, picture_rows: &[Vec<u32>], tolerance: f32) {
    let (places, expected): (Vec<usize>, Vec<Vec<f32>>) = case.logits("logit_positions", "logits").into_iter().unzip();
    let found = prefixes(bench, case, picture_rows, &places);
    let errors = found.iter().zip(&expected).map(|(found, expected)| relative_error(found, expected));
    let prefill = errors.fold(0.0, f32::max);
    assert!(prefill <= tolerance, "{}: prefill logits differ by {prefill:e}", case.name);
    let decode = assert_recorded_answer(case, &alone(bench, case, picture_rows, &[usize::MAX]), tolerance);
    println!("{}: prefill {prefill:.1e}, decode {decode:.1e}", case.name);
}

/// Runs all cases in shared steps. A case begins every `steps_between` steps, or all cases begin in
/// the first step if this number is 0. Each step takes a chunk of every prompt that has begun, of a
/// size that the seed determines, and one token of each answer. The order in the batch changes from
/// step to step.
pub fn together(
    bench: &Bench<impl Backend>,
    cases: &[(&Case, Vec<Vec<u32>>)],
    steps_between: usize,
    seed: u64,
) -> Vec<Run> {
    let mut random = Random::new(seed);
    let mut sequences: Vec<Option<Sequence>> = cases.iter().map(|_| None).collect();
    let mut runs: Vec<Run> = cases.iter().map(|_| Run { tokens: Vec::new(), logits: Vec::new() }).collect();
    for step in 0.. {
        for (index, (case, rows)) in cases.iter().enumerate().filter(|(index, _)| index * steps_between == step) {
            sequences[index] = Some(bench.sequence(case, rows));
        }
        let order = random.shuffled(cases.len());
        let mut running: Vec<(usize, &mut Sequence)> = sequences
            .iter_mut()
            .enumerate()
            .filter_map(|(index, sequence)| Some((index, sequence.as_mut()?)))
            .collect();
        running.sort_by_key(|(index, _)| order[*index]);
        let mut wanting = Vec::new();
        let mut chunks = Vec::new();
        for (index, sequence) in running {
            let left = sequence.prompt_left();
            let count = if left == 0 { 1 } else { left.min(1 + random.below(60)) };
            if count >= left {
                wanting.push(index);
                chunks.push(sequence.next_chunk(count));
            } else {
                chunks.push(sequence.next_chunk(count).without_logits());
            }
        }
        if chunks.is_empty() {
            return runs;
        }
        let logits = bench.step(&mut chunks);
        assert_eq!(logits.len(), wanting.len());
        for (index, logits) in wanting.into_iter().zip(logits) {
            let sequence = sequences[index].as_mut().expect("the sequence is running");
            runs[index].tokens.push(greatest(&logits));
            sequence.push(bench.next(cases[index].0, sequence.answer().len(), &logits));
            runs[index].logits.push(logits);
            if sequence.answer().len() == ANSWER {
                bench.end(sequences[index].take().expect("the sequence is running"));
            }
        }
    }
    unreachable!("the list of steps is endless")
}

/// Tokens per chunk in the functions below.
const CHUNK: usize = 24;

/// Runs a prompt in chunks with all of its tokens scored, and again with some or none of its tokens
/// scored. If most tokens need no logits, the last layer runs only for the tokens that need logits.
/// Returns the largest difference of logits, including the prompt's last logits.
pub fn whatever_is_wanted(bench: &Bench<impl Backend>, case: &Case, picture_rows: &[Vec<u32>]) -> f32 {
    let (all, last) = scored(bench, case, picture_rows, CHUNK, true);
    let mut worst = 0.0f32;
    for (rows, wants_logits) in [(0, false), (1, false), (CHUNK / 2 - 1, true), (CHUNK / 2, true), (CHUNK - 1, false)] {
        let (some, behind) = scored(bench, case, picture_rows, rows, wants_logits);
        worst = worst.max(relative_error(&behind, &last));
        for (some, all) in some.iter().zip(&all) {
            assert_eq!(some.len(), rows.min(all.len()));
            let same = some.iter().zip(&all[all.len() - some.len()..]);
            worst = same.map(|(one, other)| relative_error(one, other)).fold(worst, f32::max);
        }
    }
    worst
}

/// The scores of the last `rows` tokens of each chunk, and the prompt's last logits. With
/// `wants_logits`, every chunk asks for its last logits.
fn scored(
    bench: &Bench<impl Backend>,
    case: &Case,
    picture_rows: &[Vec<u32>],
    rows: usize,
    wants_logits: bool,
) -> (Vec<Vec<Vec<f32>>>, Vec<f32>) {
    let mut sequence = bench.sequence(case, picture_rows);
    let (mut scores, mut last) = (Vec::new(), Vec::new());
    while sequence.prompt_left() > 0 {
        let left = sequence.prompt_left();
        let count = CHUNK.min(left);
        let chunk = sequence.next_chunk(count).scored_last(rows.min(count));
        let chunk = if wants_logits || count == left { chunk } else { chunk.without_logits() };
        let (mut logits, of_chunk) = bench.step_and_score(&mut [chunk]);
        last = logits.pop().unwrap_or_default();
        scores.push(of_chunk);
    }
    bench.end(sequence);
    (scores, last)
}

/// Asserts that two runs choose the same tokens, and that their logits differ by at most
/// `tolerance`. Returns the largest difference.
pub fn assert_same_run(what: &str, found: &Run, expected: &Run, tolerance: f32) -> f32 {
    assert_eq!(found.tokens, expected.tokens, "{what}: the tokens differ");
    let errors = found.logits.iter().zip(&expected.logits).map(|(found, expected)| relative_error(found, expected));
    let worst = errors.fold(0.0, f32::max);
    assert!(worst <= tolerance, "{what}: logits differ by {worst:e}");
    worst
}

/// Asserts that the tokens equal the recording, and that the logits at the recorded steps are
/// within `tolerance` of it. Returns the largest error.
fn assert_recorded_answer(case: &Case, run: &Run, tolerance: f32) -> f32 {
    assert_eq!(run.tokens, case.greedy_tokens(), "{}: the answer", case.name);
    let recorded = case.logits("decode_steps", "decode_logits");
    let errors = recorded.iter().map(|(step, expected)| relative_error(&run.logits[*step], expected));
    let worst = errors.fold(0.0, f32::max);
    assert!(worst <= tolerance, "{}: decode logits differ by {worst:e}", case.name);
    worst
}
