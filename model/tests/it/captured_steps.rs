//! A captured decode step, with arrays at fixed addresses and padding after the last sequence,
//! gives the same result as a step that uploads its own arrays.

use bursar_budgets::{Bytes, Class, Workspace};
use bursar_kernels::{
    BLOCK_TOKENS, Cpu, DType, FaultyBackend, InputToken, Scope, Tensor, UnseenToken, WorkCounter,
    ops::transfer::fill_elements,
};
use bursar_model::{
    blocks::{decoder::StepCaches, draft_head::DraftRows},
    flow::{BlockTable, DraftInputs, LogitsOf, NextToken, SequencePart, StateSlots, StepBatch, StepFormat, StepLayout},
};

use crate::{
    bench::{self, Bench},
    copy::QWEN3_MOE,
};

const CONTEXT: usize = 60;

/// Tokens of each sequence before it decodes.
const PASTS: [usize; 3] = [19, 1, 40];

/// The rows of one sequence in a step.
struct Rows<'a> {
    sequence: usize,
    tokens: &'a [u32],
    cached: usize,
    /// Number of tokens at the end of `tokens` that have logits. If the sequence decodes, the
    /// tokens before them are computed again.
    logit_rows: usize,
    /// The slots from which a state is read and to which it is written.
    state: [u32; 2],
}

fn packed(rows: &[Rows<'_>], format: StepFormat) -> StepBatch {
    let each = CONTEXT.div_ceil(BLOCK_TOKENS);
    let block =
        |sequence: usize, group: usize, at: usize| ((at * format.groups + group) * PASTS.len() + sequence) as u32;
    let table = |sequence, group| (0..each).map(|at| block(sequence, group, at)).collect::<Vec<_>>().into();
    let tables_of = |rows: &Rows<'_>| (0..format.groups).map(|group| table(rows.sequence, group)).collect();
    let tables: Vec<Vec<BlockTable>> = rows.iter().map(tables_of).collect();
    let of_row = |rows: &Rows<'_>| -> Vec<[u32; 3]> {
        (rows.cached..rows.cached + rows.tokens.len()).map(|at| [at as u32; 3]).collect()
    };
    let positions: Vec<_> = rows.iter().map(of_row).collect();
    let parts = rows.iter().enumerate().map(|(index, rows)| SequencePart {
        tokens: rows.tokens,
        positions: &positions[index],
        cached_tokens: rows.cached,
        tables: &tables[index],
        logit_rows: rows.logit_rows,
        repeated: if rows.cached > 0 { rows.tokens.len() - rows.logit_rows } else { 0 },
        state: format.has_states.then(|| StateSlots { write: rows.state[1], ..StateSlots::in_place(rows.state[0]) }),
        ..SequencePart::default()
    });
    StepBatch::pack(&parts.collect::<Vec<_>>())
}

/// The slots of a sequence's state. The state before a decoded token is kept, so that the token can
/// be decoded again.
fn slots(sequence: usize, cached: usize) -> [u32; 2] {
    let slot = sequence as u32;
    [slot, if cached == 0 { slot } else { slot + 10 }]
}

/// A step over the tokens of each sequence after its first `cached` tokens. Only the last token of
/// each sequence has logits.
fn batch(tokens: &[Vec<u32>], cached: &[usize], format: StepFormat) -> StepBatch {
    let rows = tokens.iter().zip(cached).enumerate().map(|(sequence, (tokens, cached))| Rows {
        sequence,
        tokens,
        cached: *cached,
        logit_rows: 1,
        state: slots(sequence, *cached),
    });
    packed(&rows.collect::<Vec<_>>(), format)
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
    let format = bench.model.config().decoder().step_format();
    step(&batch(&prompts, &[0; 3], format));
    let decoding = batch(&[vec![5], vec![7], vec![11]], &PASTS, format);
    let before = choices();
    let expected = step(&decoding);
    let of_three = made(before);

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

/// A step that verifies drafts has the same logits as decoding the tokens one by one, also if some
/// tokens are computed again and if the step has padding.
fn verified_rows_are_decoded_rows(folder: &str) {
    let bench = Bench::load(folder, 2);
    let (layers, previous, counter) = (bench.layers(), bench.previous(), WorkCounter::default());
    let caches = StepCaches { layers: &layers, pictures: None, previous: &previous };
    let workspace = Workspace::over(bench.memory.poisoned(&bench.backend, Class::StepWorkspace, Bytes::mib(16)));
    let all = LogitsOf::AllRanks;
    let step = |batch: &StepBatch| {
        let scope = Scope::new(&bench.backend, &workspace, &counter);
        let logits = bench.model.step(&scope, batch, &caches, all, None, |_, _| Ok(())).expect("the step runs");
        scope.download::<f32>(&logits).expect("the logits are downloaded")
    };
    let format = bench.model.config().decoder().step_format();
    let (has_states, vocabulary) = (format.has_states, bench.model.config().decoder().vocabulary);
    let prompts = PASTS.map(|past| (0..past as u32).map(|at| at * 3 % 200 + 1).collect());
    step(&batch(&prompts, &[0; 3], format));
    let tokens = [vec![5, 6, 7, 8], vec![9], vec![10, 11, 12]];
    let logit_rows = if has_states { [2, 1, 3] } else { [4, 1, 3] };

    let mut expected = Vec::new();
    for (sequence, (tokens, logit_rows)) in tokens.iter().zip(logit_rows).enumerate() {
        let [read, write] = slots(sequence, PASTS[sequence]);
        for (at, token) in tokens.iter().enumerate() {
            let state = [if at == 0 { read } else { write }, write];
            let cached = PASTS[sequence] + at;
            let one = Rows { sequence, tokens: std::slice::from_ref(token), cached, logit_rows: 1, state };
            let logits = step(&packed(&[one], format));
            expected.extend((at + logit_rows >= tokens.len()).then_some(logits).into_iter().flatten());
        }
    }
    let rows = tokens.iter().zip(logit_rows).enumerate().map(|(sequence, (tokens, logit_rows))| {
        let cached = PASTS[sequence];
        Rows { sequence, tokens, cached, logit_rows, state: slots(sequence, cached) }
    });
    let verifying = packed(&rows.collect::<Vec<_>>(), format);
    assert_eq!((verifying.short_sequences, verifying.short_rows()), (3, 8));
    let error = bench::relative_error(&step(&verifying), &expected);
    assert!(error < 1e-5, "the error is {error} in a step of exactly this size");
    for rows in [8, 11] {
        let layout = if has_states {
            StepLayout::verify(rows, 7, format, CONTEXT)
        } else {
            StepLayout::decode(rows, format, CONTEXT).with_linked_rows(true)
        };
        let segment = bench.memory.poisoned(&bench.backend, Class::Graphs, DType::U32.bytes(layout.words()));
        // SAFETY: the segment is backed for the layout, and only the test's thread accesses it.
        let mut image = unsafe { Tensor::persistent(segment.address(), [layout.words()], DType::U32) };
        let mut words = Vec::new();
        layout.pack(&verifying, &mut words);
        fill_elements(&bench.backend, &words, &mut image.row_range_mut(0..words.len()))
            .expect("the words are uploaded");
        let scope = Scope::new(&bench.backend, &workspace, &counter);
        let logits = bench.model.step_over(&scope, &image, &layout, &caches, all, None).expect("the step runs");
        let found = scope.download::<f32>(&logits).expect("the logits are downloaded");
        let error = bench::relative_error(&found[..logit_rows.iter().sum::<usize>() * vocabulary], &expected);
        assert!(error < 1e-5, "{rows} rows: {error}");
    }
}

#[test]
fn verified_rows_of_a_hybrid_are_decoded_rows() {
    verified_rows_are_decoded_rows("tests/golden/qwen3_5");
}

#[test]
fn verified_rows_of_windowed_layers_are_decoded_rows() {
    verified_rows_are_decoded_rows("tests/golden/qwen2_windowed");
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
    let (backend, prompt) =
        (FaultyBackend::over(Cpu::new(1)), batch(&[vec![5]], &[0], bench.model.config().decoder().step_format()));
    let launches = |layers: usize| {
        let caches = StepCaches { layers: &bench.layers()[..layers], pictures: None, previous: &previous };
        let runs = |launches: &usize| {
            backend.fail_launches(*launches, 1);
            let scope = Scope::new(&backend, &workspace, &counter);
            bench.model.step(&scope, &prompt, &caches, LogitsOf::AllRanks, None, |_, _| Ok(())).is_ok()
        };
        (0..100).find(runs).expect("a step has fewer than 100 launches")
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
    for folder in ["qwen3_5", "eagle3", "eagle3_vl", "gemma4_assistant", "gemma4_assistant_vl"] {
        padding_does_not_change_drafts_of(&Bench::of(bench::open_with_head(&format!("tests/golden/{folder}")), 2));
    }
}

fn padding_does_not_change_drafts_of(bench: &Bench) {
    let (layers, previous, counter) = (bench.layers(), bench.previous(), WorkCounter::default());
    let caches = StepCaches { layers: &layers, pictures: None, previous: &previous };
    let workspace = Workspace::over(bench.memory.poisoned(&bench.backend, Class::StepWorkspace, Bytes::mib(16)));
    let scope = Scope::new(&bench.backend, &workspace, &counter);
    let (all, width) = (LogitsOf::AllRanks, bench.model.config().decoder().draft_width());
    let format = bench.model.config().decoder().step_format();
    // `next` has the token that follows each prompt. The second step decodes these tokens.
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
    let prompts = StepBatch { drafts: Some(drafts(&tokens, &next)), ..batch(&tokens, &[0; 3], format) };
    let mut hidden = scope.empty([prompts.token_count(), width]).expect("the workspace is large");
    bench.model.step(&scope, &prompts, &caches, all, Some(&mut hidden), |_, _| Ok(())).expect("a step");
    let mut output = scope.empty([3, width]).expect("the workspace is large");
    let rows = DraftRows { hidden: &hidden, output: &mut output };
    bench.model.draft(&scope, &prompts, &caches, all, rows).expect("the prompts are drafted");

    let chosen = scope.upload([3], &[20u32, 21, 22]).expect("the tokens are uploaded");
    let draft_caches = StepCaches { previous: &chosen, ..caches };
    let unseen = (0..3).map(|row| InputToken::Unseen(UnseenToken { row })).collect();
    let inputs = DraftInputs { tokens: unseen, ..DraftInputs::default() };
    let decoding = StepBatch { drafts: Some(inputs), ..batch(&[vec![5], vec![7], vec![11]], &PASTS, format) };
    let mut hidden = scope.empty([3, width]).expect("the workspace is large");
    bench.model.step(&scope, &decoding, &caches, all, Some(&mut hidden), |_, _| Ok(())).expect("a step");
    let rows = DraftRows { hidden: &hidden, output: &mut output };
    let expected = bench.model.draft(&scope, &decoding, &draft_caches, all, rows).expect("a draft");
    let expected = scope.download::<f32>(&expected.logits).expect("the logits are downloaded");

    for rows in [3, 5] {
        let image = |batch: &StepBatch, layout: &StepLayout| {
            let mut words = Vec::new();
            layout.pack(batch, &mut words);
            words.resize(layout.words(), u32::MAX);
            scope.upload([layout.words()], &words).expect("the words are uploaded")
        };
        let layout = StepLayout::decode(rows, format, CONTEXT).with_drafts(true);
        let mut hidden = scope.empty([rows, width]).expect("the workspace is large");
        let arrays = image(&decoding, &layout);
        bench.model.step_over(&scope, &arrays, &layout, &caches, all, Some(&mut hidden)).expect("the step runs");
        let mut output = scope.empty([rows, width]).expect("the workspace is large");
        let rows_of_head = DraftRows { hidden: &hidden, output: &mut output };
        let logits = bench.model.draft_over(&scope, &arrays, &layout, &draft_caches, all, rows_of_head);
        let found = scope.download::<f32>(&logits.expect("the pass runs").logits).expect("the logits are downloaded");
        assert!(found.iter().all(|logit| logit.is_finite()), "the logits of padding are finite");
        let error = bench::relative_error(&found[..expected.len()], &expected);
        assert!(error < 1e-5, "{rows} rows: {error}");
    }
}
