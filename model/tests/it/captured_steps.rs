//! A captured decode step, with arrays at fixed places and padding after the last sequence, gives the same as a step
//! that uploads its own arrays.

use bursar_budgets::{Bytes, Class, Workspace};
use bursar_kernels::{BLOCK_TOKENS, DType, Scope, Tensor, WorkCounter, ops::transfer::fill_elements};
use bursar_model::{
    blocks::decoder::StepCaches,
    flow::{SequencePart, StepBatch, StepLayout},
};

use crate::bench::{self, Bench};

const CONTEXT: usize = 60;

/// Tokens of each sequence before it decodes.
const PASTS: [usize; 3] = [19, 1, 40];

/// A step over the tokens of each sequence after its first `cached`.
fn batch(tokens: &[Vec<u32>], cached: &[usize]) -> StepBatch {
    let each = CONTEXT.div_ceil(BLOCK_TOKENS);
    let blocks: Vec<Vec<u32>> =
        (0..tokens.len()).map(|sequence| (0..each).map(|at| (at * tokens.len() + sequence) as u32).collect()).collect();
    let positions: Vec<Vec<[u32; 3]>> = tokens
        .iter()
        .zip(cached)
        .map(|(new, past)| (*past..past + new.len()).map(|at| [at as u32; 3]).collect())
        .collect();
    let part = |sequence: usize| SequencePart {
        tokens: &tokens[sequence],
        unseen: None,
        positions: &positions[sequence],
        cached_tokens: cached[sequence],
        blocks: &blocks[sequence],
        pictures: &[],
        wants_logits: true,
        scored: 0..0,
    };
    StepBatch::pack(&(0..tokens.len()).map(part).collect::<Vec<_>>())
}

fn padded_decoding_is_decoding(folder: &str) {
    let bench = Bench::load(folder, 2);
    let (layers, previous, counter) = (bench.layers(), bench.previous(), WorkCounter::default());
    let caches = StepCaches { layers: &layers, pictures: None, previous: &previous };
    let workspace = Workspace::over(bench.memory.poisoned(&bench.backend, Class::StepWorkspace, Bytes::mib(16)));
    let step = |batch: &StepBatch| {
        let scope = Scope::new(&bench.backend, &workspace, &counter);
        let logits = bench.model.step(&scope, batch, &caches, |_, _| Ok(())).expect("it runs");
        scope.download::<f32>(&logits).expect("it comes")
    };
    let prompts = PASTS.map(|past| (0..past as u32).map(|at| at * 3 % 200 + 1).collect());
    step(&batch(&prompts, &[0; 3]));
    let decoding = batch(&[vec![5], vec![7], vec![11]], &PASTS);
    let expected = step(&decoding);

    let axes = bench.model.config().decoder().rope_axes.count();
    for rows in [3, 5, 8] {
        let layout = StepLayout::decode(rows, axes, CONTEXT);
        // Words that the step leaves untouched are NaN and invalid block numbers.
        let segment = bench.memory.poisoned(&bench.backend, Class::Graphs, DType::U32.bytes(layout.words()));
        // SAFETY: the segment is backed for the layout, and a test has one thread.
        let mut image = unsafe { Tensor::persistent(segment.address(), [layout.words()], DType::U32) };
        let mut words = Vec::new();
        layout.pack(&decoding, &mut words);
        fill_elements(&bench.backend, &words, &mut image.row_range_mut(0..words.len())).expect("it is put there");
        let scope = Scope::new(&bench.backend, &workspace, &counter);
        let logits = bench.model.step_over(&scope, &image, &layout, &caches).expect("it runs");
        let found = scope.download::<f32>(&logits).expect("it comes");
        assert!(found.iter().all(|logit| logit.is_finite()), "padding is finite too");
        let (found, _) = found.split_at(expected.len());
        let error = bench::relative_error(found, &expected);
        assert!(error < 1e-5, "{rows} rows: {error}");
    }
}

#[test]
fn padded_decoding_of_qwen2_is_decoding() {
    padded_decoding_is_decoding("tests/golden/qwen2");
}

#[test]
fn padded_decoding_of_qwen2_5_vl_is_decoding() {
    padded_decoding_is_decoding("tests/golden/qwen2_5_vl");
}
