//! A captured decode step, with arrays at fixed addresses and padding after the last sequence,
//! gives the same result as a step that uploads its own arrays.

use bursar_budgets::{Bytes, Class, Workspace};
use bursar_kernels::{
    BLOCK_TOKENS, Cpu, DType, FaultyBackend, InputToken, Scope, Tensor, UnseenToken, WorkCounter,
    ops::transfer::fill_elements,
};
use bursar_model::{
    blocks::{decoder::StepCaches, draft_head::DraftRows},
    flow::{BlockTable, DraftInputs, LogitsOf, NextToken, SequencePart, StateSlots, StepBatch, StepLayout},
};

use crate::{
    bench::{self, Bench},
    copy::QWEN3_MOE,
};

const CONTEXT: usize = 60;

/// Tokens of each sequence before it decodes.
const PASTS: [usize; 3] = [19, 1, 40];

/// A step over the tokens of each sequence after its first `cached` tokens.
fn batch(tokens: &[Vec<u32>], cached: &[usize], has_states: bool) -> StepBatch {
    let each = CONTEXT.div_ceil(BLOCK_TOKENS);
    let blocks = |sequence: usize| (0..each).map(|at| (at * tokens.len() + sequence) as u32).collect::<Vec<_>>();
    let tables: Vec<[BlockTable; 1]> = (0..tokens.len()).map(|sequence| [blocks(sequence).into()]).collect();
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
        tables: &tables[sequence],
        pictures: &[],
        logit_rows: 1,
        scored: 0..0,
        // The state before a decoded token is kept, so that the token can be decoded again.
        state: has_states.then(|| StateSlots {
            write: sequence as u32 + if cached[sequence] == 0 { 0 } else { 10 },
            ..StateSlots::in_place(sequence as u32)
        }),
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
        let logits =
            bench.model.step(&scope, batch, &caches, LogitsOf::AllRanks, None, |_, _| Ok(())).expect("the step runs");
        scope.download::<f32>(&logits).expect("the logits are downloaded")
    };
    let prompts = PASTS.map(|past| (0..past as u32).map(|at| at * 3 % 200 + 1).collect());
    // Number of expert choices so far, over all layers.
    let choices = || {
        let loads = bench.model.expert_loads()?;
        let scope = Scope::new(&bench.backend, &workspace, &counter);
        Some(
            scope
                .download::<u32>(loads)
                .expect("the expert loads are downloaded")
                .into_iter()
                .map(u64::from)
                .sum::<u64>(),
        )
    };
    let made = |before: Option<u64>| choices().zip(before).map(|(after, before)| after - before);
    let has_states = bench.model.config().decoder().step_format().has_states;
    step(&batch(&prompts, &[0; 3], has_states));
    let decoding = batch(&[vec![5], vec![7], vec![11]], &PASTS, has_states);
    let before = choices();
    let expected = step(&decoding);
    let of_three = made(before);

    let format = bench.model.config().decoder().step_format();
    for rows in [3, 5, 8] {
        let layout = StepLayout::decode(rows, format, CONTEXT);
        // Words that the step does not write contain NaN or invalid block numbers.
        let segment = bench.memory.poisoned(&bench.backend, Class::Graphs, DType::U32.bytes(layout.words()));
        // SAFETY: the segment is backed for the layout, and only the test's thread accesses it.
        let mut image = unsafe { Tensor::persistent(segment.address(), [layout.words()], DType::U32) };
        let mut words = Vec::new();
        layout.pack(&decoding, &mut words);
        fill_elements(&bench.backend, &words, &mut image.row_range_mut(0..words.len()))
            .expect("the words are uploaded");
        let before = choices();
        let scope = Scope::new(&bench.backend, &workspace, &counter);
        let logits =
            bench.model.step_over(&scope, &image, &layout, &caches, LogitsOf::AllRanks, None).expect("the step runs");
        let found = scope.download::<f32>(&logits).expect("the logits are downloaded");
        assert!(found.iter().all(|logit| logit.is_finite()), "the logits of padding are finite");
        let (found, _) = found.split_at(expected.len());
        let error = bench::relative_error(found, &expected);
        assert!(error < 1e-5, "{rows} rows: {error}");
        drop(scope);
        assert_eq!(made(before), of_three, "padding is routed to no expert");
    }
}

#[test]
fn padded_decoding_of_a_mixture_is_decoding_and_its_padding_is_not_counted() {
    padded_decoding_is_decoding(QWEN3_MOE);
}

#[test]
fn between_two_mixtures_nothing_is_launched_for_a_norm() {
    let bench = Bench::load(QWEN3_MOE, 2);
    let (layers, previous, counter) = (bench.layers(), bench.previous(), WorkCounter::default());
    let workspace = Workspace::over(bench.memory.poisoned(&bench.backend, Class::StepWorkspace, Bytes::mib(16)));
    let (backend, prompt) = (FaultyBackend::over(Cpu::new(1)), batch(&[vec![5]], &[0], false));
    let launches = |layers: usize| {
        let caches = StepCaches { layers: &bench.layers()[..layers], pictures: None, previous: &previous };
        let runs = |launches: &usize| {
            backend.fail_launches(*launches, 1);
            let scope = Scope::new(&backend, &workspace, &counter);
            bench.model.step(&scope, &prompt, &caches, LogitsOf::AllRanks, None, |_, _| Ok(())).is_ok()
        };
        (0..100).find(runs).expect("a step runs after at most 100 attempts")
    };
    // The seven launches of a layer: query, key and value projection; rotary positions and cache
    // write; attention; its output projection; routing to the experts; the first half of the
    // experts; and the sum of the experts with the next norm.
    assert_eq!(launches(layers.len()) - launches(layers.len() - 1), 7);
}

#[test]
fn padded_decoding_of_a_hybrid_is_decoding() {
    padded_decoding_is_decoding("tests/golden/qwen3_5");
}

#[test]
fn padded_decoding_of_qwen2_is_decoding() {
    padded_decoding_is_decoding("tests/golden/qwen2");
}

#[test]
fn padded_decoding_of_qwen2_5_vl_is_decoding() {
    padded_decoding_is_decoding("tests/golden/qwen2_5_vl");
}

#[test]
fn padding_does_not_change_drafts() {
    let bench = Bench::of(bench::open("tests/golden/qwen3_5").with_draft_head(true), 2);
    let (layers, previous, counter) = (bench.layers(), bench.previous(), WorkCounter::default());
    let caches = StepCaches { layers: &layers, pictures: None, previous: &previous };
    let workspace = Workspace::over(bench.memory.poisoned(&bench.backend, Class::StepWorkspace, Bytes::mib(16)));
    let scope = Scope::new(&bench.backend, &workspace, &counter);
    let (all, width) = (LogitsOf::AllRanks, bench.model.config().decoder().hidden);
    // Each prompt ends in a token that the step after it decodes.
    let tokens = PASTS.map(|past| (0..past as u32).map(|at| at * 3 % 200 + 1).collect());
    let next = [5, 7, 11].map(|token| NextToken::Known { token, cache_row: None });
    let drafts = |tokens: &[Vec<u32>], next: &[NextToken]| {
        let rows = tokens.iter().zip(next).flat_map(|(tokens, next)| {
            let last = match *next {
                NextToken::Known { token, .. } => token,
                NextToken::Chosen => panic!("the prompts have a next token"),
            };
            tokens[1..].iter().copied().chain([last])
        });
        DraftInputs { tokens: rows.map(InputToken::Known).collect(), ..DraftInputs::default() }
    };
    let prompts = StepBatch { drafts: Some(drafts(&tokens, &next)), ..batch(&tokens, &[0; 3], true) };
    let mut hidden = scope.empty([prompts.token_count(), width]).expect("the workspace is large");
    bench.model.step(&scope, &prompts, &caches, all, Some(&mut hidden), |_, _| Ok(())).expect("a step");
    let mut normed = scope.empty([3, width]).expect("the workspace is large");
    let rows = DraftRows { hidden: &hidden, normed: &mut normed };
    bench.model.draft(&scope, &prompts, &caches, all, rows).expect("the prompts are drafted");

    let chosen = scope.upload([3], &[20u32, 21, 22]).expect("the tokens are uploaded");
    let draft_caches = StepCaches { previous: &chosen, ..caches };
    let unseen = (0..3).map(|row| InputToken::Unseen(UnseenToken { row })).collect();
    let inputs = DraftInputs { tokens: unseen, ..DraftInputs::default() };
    let decoding = StepBatch { drafts: Some(inputs), ..batch(&[vec![5], vec![7], vec![11]], &PASTS, true) };
    let mut hidden = scope.empty([3, width]).expect("the workspace is large");
    bench.model.step(&scope, &decoding, &caches, all, Some(&mut hidden), |_, _| Ok(())).expect("a step");
    let rows = DraftRows { hidden: &hidden, normed: &mut normed };
    let expected = bench.model.draft(&scope, &decoding, &draft_caches, all, rows).expect("a draft");
    let expected = scope.download::<f32>(&expected).expect("the logits are downloaded");

    let decoder = bench.model.config().decoder();
    for rows in [3, 5] {
        let image = |batch: &StepBatch, layout: &StepLayout| {
            let mut words = Vec::new();
            layout.pack(batch, &mut words);
            words.resize(layout.words(), u32::MAX);
            scope.upload([layout.words()], &words).expect("the words are uploaded")
        };
        let layout = StepLayout::decode(rows, decoder.step_format(), CONTEXT);
        let mut hidden = scope.empty([rows, width]).expect("the workspace is large");
        let arrays = image(&decoding, &layout);
        bench.model.step_over(&scope, &arrays, &layout, &caches, all, Some(&mut hidden)).expect("the step runs");
        let layout = StepLayout::decode(rows, decoder.draft_format(), CONTEXT);
        let mut normed = scope.empty([rows, width]).expect("the workspace is large");
        let arrays = image(&decoding.draft_pass(), &layout);
        let rows_of_head = DraftRows { hidden: &hidden, normed: &mut normed };
        let logits = bench.model.draft_over(&scope, &arrays, &layout, &draft_caches, all, rows_of_head);
        let found = scope.download::<f32>(&logits.expect("the pass runs")).expect("the logits are downloaded");
        assert!(found.iter().all(|logit| logit.is_finite()), "the logits of padding are finite");
        let error = bench::relative_error(&found[..expected.len()], &expected);
        assert!(error < 1e-5, "{rows} rows: {error}");
    }
}
