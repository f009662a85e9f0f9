//! Steps that verify drafts, with and without graphs.

use bursar_kernels::ops::gated_delta::NO_STATE;

use super::*;

impl Stage {
    /// Decodes `tokens` tokens after a prompt for each sequence of `guesses`, with drafts that are
    /// mostly the tokens of `guesses`. The sequences use blocks from `first_block` on. The steps
    /// have different numbers of drafts and of accepted drafts. Returns the tokens, the drafts of
    /// the draft head, and the numbers of steps, of steps that ran as a graph, and of accepted
    /// drafts.
    fn drafted(&self, guesses: &[Vec<u32>], tokens: usize, first_block: usize) -> Drafted {
        let (sequences, groups) = (guesses.len(), self.groups.count());
        let block = |s: usize, group: usize, at: usize| (first_block + (at * groups + group) * sequences + s) as u32;
        let table = |s, group| (0..blocks_each(self.shape)).map(|at| block(s, group, at)).collect::<Vec<_>>().into();
        let tables: Vec<Vec<BlockTable>> =
            (0..sequences).map(|s| (0..groups).map(|group| table(s, group)).collect()).collect();
        let prompts: Vec<Vec<u32>> =
            (0..sequences as u32).map(|s| (0..9 + s).map(|at| at * 7 % 300 + s).collect()).collect();
        let sampler = self.sampler(SamplingParams::default());
        let mut drafted = Drafted { replies: vec![Vec::new(); sequences], ..Drafted::default() };
        // The number of drafts that the last step of each sequence accepted. If the model has a
        // state, these drafts run again in the next step.
        let mut repeated = vec![0; sequences];
        while drafted.replies.iter().any(|reply| reply.len() < tokens) {
            let drafts_of = |s: usize| -> Vec<u32> {
                let (produced, count) = (drafted.replies[s].len(), (drafted.steps + s) % 4);
                let wrong = |at: usize| (at + s + drafted.steps).is_multiple_of(5);
                let guess = |at: usize| guesses[s].get(at).map(|token| token ^ u32::from(wrong(at)));
                if produced == 0 { Vec::new() } else { (produced..produced + count).map_while(guess).collect() }
            };
            let drafts: Vec<Vec<u32>> = (0..sequences).map(drafts_of).collect();
            let rows_of = |s: usize| -> (Vec<u32>, usize) {
                let reply = &drafted.replies[s];
                let known: Vec<u32> = prompts[s].iter().chain(reply).copied().collect();
                let first = if reply.is_empty() { 0 } else { known.len() - 1 - repeated[s] };
                (known[first..].iter().chain(&drafts[s]).copied().collect(), first)
            };
            let rows: Vec<_> = (0..sequences).map(rows_of).collect();
            let positions: Vec<Vec<[u32; 3]>> = rows
                .iter()
                .map(|(tokens, first)| (0..tokens.len()).map(|at| [(first + at) as u32; 3]).collect())
                .collect();
            let parts: Vec<_> = (0..sequences)
                .map(|s| {
                    let (count, slot) = (rows[s].0.len(), s as u32);
                    let mut state = StateSlots::in_place(slot);
                    if !drafts[s].is_empty() {
                        // The step writes the state as it is before the drafts.
                        state.write = NO_STATE;
                        state.snapshots[1] = Some(((count - drafts[s].len()) as u32, slot));
                    }
                    SequencePart {
                        logit_rows: 1 + drafts[s].len(),
                        repeated: if rows[s].1 == 0 { 0 } else { repeated[s] },
                        state: self.shape.format.has_states.then_some(state),
                        ..part(&rows[s].0, &positions[s], rows[s].1, &tables[s])
                    }
                })
                .collect();
            let choice = |s: usize| Choice {
                sampler: sampler.clone(),
                position: drafted.replies[s].len() as u64,
                past: None,
                drafts: drafts[s].clone(),
                acceptance: Acceptance::Equal,
                further: None,
            };
            let choices = (0..sequences).map(choice).collect();
            let stepped = self.submit(&parts, choices).recv().expect("each job is answered").expect("the step runs");
            drafted.steps += 1;
            drafted.replayed += usize::from(stepped.is_by_graph);
            for (s, chosen) in stepped.chosen.into_iter().enumerate() {
                let has_state_before_drafts = self.shape.format.has_states && !drafts[s].is_empty();
                repeated[s] = if has_state_before_drafts { chosen.len() - 1 } else { 0 };
                drafted.accepted += chosen.len() - 1;
                drafted.replies[s].extend(chosen.into_iter().map(|token| token.expect("a number").id));
            }
            drafted.of_head.push(stepped.drafts);
        }
        drafted
    }
}

/// The outcome of [`Stage::drafted`].
#[derive(Debug, Default, PartialEq, Eq)]
struct Drafted {
    replies: Vec<Vec<u32>>,
    of_head: Vec<Vec<Vec<u32>>>,
    steps: usize,
    replayed: usize,
    accepted: usize,
}

/// Checks that steps with drafts replay a graph too, and that graphs change no reply and no draft
/// of the draft head. If `is_certain`, greedy replies must also equal the replies without drafts.
/// A model with random weights is not certain: its best two logits are often so close that rounding
/// decides.
fn assert_graphs_keep_drafted_replies(checkpoint: Checkpoint, shape: GraphLimits, is_certain: bool) {
    let Some(stage) = Stage::of_checkpoint(checkpoint, shape, 1) else { return };
    stage.capture();
    for sequences in [1, 3] {
        let unguessed = stage.drafted(&vec![Vec::new(); sequences], 40, 0);
        assert_eq!((unguessed.accepted, unguessed.replayed), (0, unguessed.steps - 1));
        let guesses = &unguessed.replies;
        // No step has written these blocks, so a key that is read too early is zero.
        let unused = sequences * blocks_each(shape) * shape.format.groups;
        let by_graphs = stage.drafted(guesses, 36, unused);
        assert_eq!(by_graphs.replayed, by_graphs.steps - 1, "every step except the prompt step replays a graph");
        assert!(by_graphs.accepted > 0, "no draft was accepted");
        let equal = by_graphs.replies.iter().zip(guesses).filter(|(reply, guess)| reply[..36] == guess[..36]);
        assert!(equal.count() == sequences || !is_certain, "{:?} differ from {guesses:?}", by_graphs.replies);
        assert!(by_graphs.of_head.iter().flatten().all(|drafts| drafts.len() == usize::from(shape.has_draft_head)));
        stage.forget(&shape.sizes());
        let eager = stage.drafted(guesses, 36, unused);
        assert_eq!(eager, Drafted { replayed: 0, ..by_graphs });
        stage.capture();
    }
}

#[test]
fn drafts_are_verified_the_same_with_and_without_graphs() {
    let of_rows = GraphLimits { logit_rows: 16, decode_rows: 16, ..GraphLimits::without_drafts(4, 180, FORMAT) };
    assert_graphs_keep_drafted_replies(open(demo()), GraphLimits { has_linked_rows: true, ..of_rows }, true);
}

#[test]
fn drafts_of_draft_models_are_the_same_with_and_without_graphs() {
    let folder = |name| CheckpointSource::Folder(bursar_golden::path(name));
    for (head, target) in [
        ("eagle3", "llama"),
        ("eagle3_vl", "qwen3_vl"),
        ("gemma4_assistant", "gemma4_sharing"),
        ("gemma4_assistant_vl", "gemma4"),
    ] {
        let checkpoint = open(folder(target)).with_draft_model(&folder(head)).expect("the head opens");
        let checkpoint = checkpoint.with_draft_head(true);
        let format = FamilyConfig::of(&checkpoint).expect("the settings are valid").decoder().step_format();
        let usual = GraphLimits::without_drafts(4, 180, format);
        let of_rows = GraphLimits { logit_rows: 16, decode_rows: 16, has_draft_head: true, ..usual };
        assert_graphs_keep_drafted_replies(checkpoint, GraphLimits { has_linked_rows: true, ..of_rows }, false);
    }
}

#[test]
fn drafts_of_a_hybrid_are_verified_the_same_with_and_without_graphs() {
    let weights = random_checkpoint("qwen3.5-0.8b", 7).expect("the shape is known");
    let random = CheckpointSource::Random(Arc::new(weights));
    let trained = CheckpointSource::Folder(bursar_golden::hybrid_demo_checkpoint());
    let format = StepFormat { has_states: true, ..FORMAT };
    for has_draft_head in [false, true] {
        let of_rows = GraphLimits { logit_rows: 16, verify_rows: 28, ..GraphLimits::without_drafts(8, 180, format) };
        assert_graphs_keep_drafted_replies(open(random.clone()), GraphLimits { has_draft_head, ..of_rows }, false);
        assert_graphs_keep_drafted_replies(open(trained.clone()), GraphLimits { has_draft_head, ..of_rows }, true);
    }
}
