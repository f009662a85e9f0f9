//! Drafts after the first, which a draft head computes one by one.

use super::{BlockTable, NextToken, POSITION_AXES, SequencePart, StepBatch};

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
    /// Block table of each cache group, with enough blocks for the rows of all passes even if every
    /// draft of the step is accepted.
    pub tables: Vec<BlockTable>,
}

impl FurtherDrafts {
    /// The batch that computes draft number `1 + further` of each sequence. `sequences` has, for
    /// each sequence, its positions and blocks and the number of drafts that the step accepted. The
    /// input of row `i` is the previous draft of sequence `i`, which only the device knows (row `i`
    /// of `caches.previous`).
    pub fn batch(sequences: &[(&FurtherDrafts, usize)], further: usize) -> StepBatch {
        // Index and position of the row. The row's input is the draft at the next index.
        let before: Vec<_> = sequences
            .iter()
            .map(|(place, accepted)| {
                let passed = accepted + further - 1;
                (place.index + passed, [[place.position + passed as u32; POSITION_AXES]])
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
        let batch = FurtherDrafts::batch(&[(&one, 1), (&other, 0)], 1).draft_pass();
        let unseen = |row| InputToken::Unseen(UnseenToken { row });
        assert_eq!((&batch.tokens[..], &batch.logit_rows[..]), (&[unseen(0), unseen(1)][..], &[0, 1][..]));
        // The token that the step chose after one accepted draft is the 16th of its sequence.
        assert_eq!((&batch.slots[..], &batch.context_lengths[..]), (&[3 * 16 + 15, 8 * 16 + 7][..], &[16, 8][..]));
        assert_eq!(batch.positions, [41, 7, 41, 7, 41, 7]);
        let next = FurtherDrafts::batch(&[(&one, 1), (&other, 0)], 2).draft_pass();
        assert_eq!((&next.slots[..], next.positions[0]), (&[4 * 16, 8 * 16 + 8][..], 42));
    }
}
