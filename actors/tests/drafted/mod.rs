//! A lane runs the passes of a draft model.

use bursar_model::flow::{CacheGroups, FurtherDrafts, NextToken};
use safetensors::SafeTensors;

use super::*;

/// Blocks of each sequence in each cache group.
const BLOCKS: usize = 3;
/// Drafts after the first one.
const FURTHER: usize = 2;

/// The integers of an array in a recorded case.
fn recorded(case: &SafeTensors<'_>, array: &str) -> Vec<u32> {
    let bytes = case.tensor(array).expect("a recorded array").data();
    bytes.chunks_exact(8).map(|number| u32::from_le_bytes([number[0], number[1], number[2], number[3]])).collect()
}

/// The next tokens of a sequence, and drafts after them.
struct Next<'a> {
    sequence: usize,
    tokens: &'a [u32],
    cached: usize,
    drafts: &'a [u32],
}

impl Stage {
    /// Runs the next tokens of sequences in one step. Returns the tokens that the model chooses and
    /// the tokens that the draft model drafts after them, for each sequence.
    fn drafted(&self, groups: &CacheGroups, sequences: &[Next<'_>]) -> Vec<(Vec<u32>, Vec<u32>)> {
        let (mut parts, mut choices) = (Vec::new(), Vec::new());
        let tables = |next: &Next<'_>| -> Vec<BlockTable> {
            let first = (next.sequence * groups.count() * BLOCKS) as u32;
            let of_group = |group| (first + group..).step_by(groups.count()).take(BLOCKS).collect::<Vec<_>>().into();
            (0..groups.count() as u32).map(of_group).collect()
        };
        let tables: Vec<_> = sequences.iter().map(tables).collect();
        let tokens = sequences.iter().map(|next| [next.tokens, next.drafts].concat());
        let tokens: Vec<_> = tokens.collect();
        let positions = sequences.iter().zip(&tokens).map(|(next, tokens)| {
            (next.cached..next.cached + tokens.len()).map(|position| [position as u32; 3]).collect::<Vec<_>>()
        });
        let positions: Vec<_> = positions.collect();
        for (at, next) in sequences.iter().enumerate() {
            let end = next.cached + next.tokens.len();
            parts.push(SequencePart {
                tokens: &tokens[at],
                positions: &positions[at],
                cached_tokens: next.cached,
                tables: &tables[at],
                logit_rows: 1 + next.drafts.len(),
                ..SequencePart::default()
            });
            choices.push(Choice {
                sampler: self.sampler(SamplingParams::default()),
                position: 0,
                past: None,
                drafts: next.drafts.to_vec(),
                acceptance: Acceptance::Equal,
                further: Some(FurtherDrafts {
                    count: FURTHER,
                    index: end,
                    position: end as u32,
                    tables: tables[at].clone(),
                }),
            });
        }
        let batch = StepBatch::pack_with_drafts(&parts, &vec![NextToken::Chosen; parts.len()]);
        let answer = self.submit("drafted", batch, choices, Vec::new());
        let stepped = answer.recv().expect("each job is answered").expect("the step runs");
        let chosen =
            stepped.chosen.into_iter().map(|tokens| tokens.into_iter().map(|token| token.expect("a number").id));
        chosen.map(Iterator::collect).zip(stepped.drafts).collect()
    }
}

/// The drafts after a prompt equal the recorded ones. The drafts after accepted drafts equal those
/// of a sequence whose tokens run one by one, although both sequences share steps.
#[test]
fn further_drafts_follow_the_chosen_token() {
    for (name, target) in [("eagle3", "llama"), ("gemma4_assistant", "gemma4_sharing")] {
        let draft_model = CheckpointSource::Folder(bursar_golden::path(name));
        let checkpoint =
            open(target).with_draft_model(&draft_model).expect("the draft model opens").with_draft_head(true);
        let planned = Model::plan(&checkpoint, Cpu::new(1).target()).expect("the model can be planned");
        let groups = planned.cache_groups().clone();
        let stage = Stage::of(checkpoint, 2 * groups.count() * BLOCKS);
        stage.clock.let_past(ALL);
        let case = std::fs::read(bursar_golden::path(name).join("cases/short.safetensors")).expect("a recorded case");
        let case = SafeTensors::deserialize(&case).expect("a recorded case");
        let [prompt, reply, drafts] =
            ["input_ids", "greedy_tokens", "drafted_tokens"].map(|array| recorded(&case, array));
        let next = |sequence, tokens, cached, drafts| Next { sequence, tokens, cached, drafts };
        let end = prompt.len();

        let after_prompt = stage.drafted(&groups, &[next(0, &prompt, 0, &[])]).remove(0);
        assert_eq!(after_prompt, (vec![reply[0]], drafts), "{name}");
        // The second sequence begins while the first one verifies two right drafts.
        let both = [next(0, &reply[..1], end, &reply[1..3]), next(1, &prompt, 0, &[])];
        let together = stage.drafted(&groups, &both);
        assert_eq!(together[1], after_prompt, "{name}");
        assert_eq!(together[0].0, reply[1..4], "{name}: the drafts are accepted");
        let one_by_one: Vec<_> =
            (0..3).map(|at| stage.drafted(&groups, &[next(1, &reply[at..at + 1], end + at, &[])]).remove(0)).collect();
        assert_eq!(one_by_one[2], (vec![reply[3]], together[0].1.clone()), "{name}");
        // A wrong draft is not accepted, and the head drafts after the token chosen in its place.
        let wrong = [reply[4] ^ 1, reply[5]];
        let [first, second] = [(0, &wrong[..]), (1, &[])].map(|(sequence, drafts)| {
            stage.drafted(&groups, &[next(sequence, &reply[3..4], end + 3, drafts)]).remove(0)
        });
        assert_eq!(first, second, "{name}");
    }
}
