//! Drafts after the first, which a draft head computes one by one.

use super::{BlockTable, NextToken, POSITION_AXES, SequencePart, StepBatch};

/// The positions of the drafts after the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftPositions {
    /// Each draft has the position after the previous one, and the head caches its keys and values.
    Advancing,
    /// All drafts have the position of the token that the step chose (Gemma 4 assistants, which
    /// cache nothing).
    Constant,
}

/// The positions and blocks of a sequence's further drafts. The draft head proposes the first draft
/// together with the step, and each further draft in a pass over one row per sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FurtherDrafts {
    /// Number of further drafts, at least 1.
    pub count: usize,
    /// Index, within the sequence, of the token that the step samples in its first logit row.
    pub index: usize,
    /// Position of that token on all axes.
    pub position: u32,
    /// Block table of each cache group, with enough blocks for the drafts of the step. With advancing
    /// positions, they also have enough blocks for the rows of all passes after accepted drafts.
    pub tables: Vec<BlockTable>,
}

impl FurtherDrafts {
    /// The batch that computes draft number `1 + further` of each sequence. `sequences` has, for
    /// each sequence, its positions and blocks and the number of drafts that the step accepted. The
    /// input of row `i` is the previous draft of sequence `i`, which only the device knows (row `i`
    /// of `caches.previous`).
    pub fn batch(sequences: &[(&FurtherDrafts, usize)], further: usize, positions: DraftPositions) -> StepBatch {
        let passed = match positions {
            DraftPositions::Advancing => further,
            DraftPositions::Constant => 0,
        };
        // Index and position of the row. With advancing positions, the row's input is the draft at the
        // next index. With constant positions, the row is always the one before the chosen token.
        let before: Vec<_> = sequences
            .iter()
            .map(|(place, accepted)| {
                let (index, position) = (place.index + accepted + passed, place.position as usize + accepted + passed);
                (index - 1, [[position as u32 - 1; POSITION_AXES]])
            })
            .collect();
        let parts: Vec<_> = sequences
            .iter()
            .zip(&before)
            .map(|((place, _), (index, positions))| SequencePart {
                tokens: &[0],
                positions,
                cached_tokens: *index,
                tables: &place.tables,
                logit_rows: 1,
                ..SequencePart::default()
            })
            .collect();
        StepBatch::pack_with_drafts(&parts, &vec![NextToken::Chosen; parts.len()])
    }
}

#[cfg(test)]
mod tests {
    use bursar_kernels::{InputToken, UnseenToken};

    use super::*;

    #[test]
    fn a_further_draft_follows_the_accepted_drafts() {
        let place = |index, position, block| FurtherDrafts {
            count: 2,
            index,
            position,
            tables: vec![vec![block, block + 1].into()],
        };
        let (one, other) = (place(14, 40, 3), place(7, 7, 8));
        let batch = |further| FurtherDrafts::batch(&[(&one, 1), (&other, 0)], further, DraftPositions::Advancing);
        let (batch, next) = (batch(1).draft_pass(), batch(2).draft_pass());
        let unseen = |row| InputToken::Unseen(UnseenToken { row });
        assert_eq!((&batch.tokens[..], &batch.logit_rows[..]), (&[unseen(0), unseen(1)][..], &[0, 1][..]));
        // The token that the step chose after one accepted draft is the 16th of its sequence.
        assert_eq!((&batch.slots[..], &batch.context_lengths[..]), (&[3 * 16 + 15, 8 * 16 + 7][..], &[16, 8][..]));
        assert_eq!(batch.positions, [41, 7, 41, 7, 41, 7]);
        assert_eq!((&next.slots[..], next.positions[0]), (&[4 * 16, 8 * 16 + 8][..], 42));
        // With constant positions, every draft sees the context of the row that chose the token.
        for further in [1, 2] {
            let batch = FurtherDrafts::batch(&[(&one, 1), (&other, 0)], further, DraftPositions::Constant);
            let batch = batch.draft_pass_of_logit_rows();
            assert_eq!((&batch.context_lengths[..], &batch.positions[..2]), (&[15, 7][..], &[41, 7][..]));
            assert_eq!(batch.tokens, [unseen(0), unseen(1)]);
        }
    }
}
