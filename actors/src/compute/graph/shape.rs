//! Pure: sizes of captured steps and the layout of their inputs.

use bursar_budgets::Bytes;
use bursar_kernels::DType;
use bursar_model::{
    Envelope,
    blocks::DecoderConfig,
    flow::{StepBatch, StepFormat, StepLayout},
};

/// Sizes double up to this number of rows and then grow by this number. A step therefore has fewer
/// than this number of padding rows. Padding rows cost little compared with reading the weights.
const STEP: usize = 8;

/// Maximum rows of a captured step that verifies drafts of sequences with recurrent states. Larger
/// steps are not captured: their device time already hides the host's launch time.
const VERIFY_ROWS_MAX: usize = 64;

/// The numbers of rows for which steps of at most `most` rows are captured: 1, 2, 4, 8, then
/// multiples of 8, and `most` itself.
pub fn buckets(most: usize) -> Vec<usize> {
    (1..=most).filter(|rows| bucket(*rows, most) == Some(*rows)).collect()
}

/// The size in which a step of `rows` rows runs. `None` if `rows` exceeds `most`.
fn bucket(rows: usize, most: usize) -> Option<usize> {
    let size = if rows <= STEP { rows.next_power_of_two() } else { rows.next_multiple_of(STEP) };
    (rows <= most).then_some(size.min(most))
}

/// The work of the sequences in a captured step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StepKind {
    /// Each row samples a token. Sequences without recurrent states may have drafted tokens.
    Decode,
    /// Sequences with recurrent states have drafted tokens, or run accepted drafts again.
    Verify,
}

impl StepKind {
    const ALL: [StepKind; 2] = [StepKind::Decode, StepKind::Verify];
}

/// A size in which steps are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GraphKey {
    pub rows: usize,
    pub kind: StepKind,
}

impl GraphKey {
    /// A step in which each of `rows` rows samples a token.
    pub fn decode(rows: usize) -> Self {
        GraphKey { rows, kind: StepKind::Decode }
    }
}

/// Limits that determine the layouts of captured steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphLimits {
    /// Rows of the largest step of [`StepKind::Decode`].
    pub decode_rows: usize,
    /// Rows of the largest step of [`StepKind::Verify`]; 0 for a model without such steps.
    pub verify_rows: usize,
    /// Maximum rows of logits in a step.
    pub logit_rows: usize,
    /// Maximum tokens of a sequence.
    pub context_tokens: usize,
    /// The arrays that the model reads.
    pub format: StepFormat,
    /// Whether sequences without recurrent states may have drafted tokens.
    pub has_linked_rows: bool,
    /// Whether the model was loaded with its draft head.
    pub has_draft_head: bool,
}

impl GraphLimits {
    /// The limits for steps within `envelope`.
    pub fn of(envelope: &Envelope, decoder: &DecoderConfig) -> Self {
        let (format, logit_rows) = (decoder.step_format(), envelope.logit_rows());
        let verifies_states = format.has_states && envelope.drafts_of_step() > 0;
        GraphLimits {
            decode_rows: if format.has_states { envelope.sequences.min(logit_rows) } else { logit_rows },
            verify_rows: if verifies_states { envelope.decoding_rows(true).min(VERIFY_ROWS_MAX) } else { 0 },
            logit_rows,
            has_linked_rows: !format.has_states && envelope.drafts_of_step() > 0,
            context_tokens: envelope.context_tokens,
            format,
            has_draft_head: decoder.draft_head.is_some(),
        }
    }

    /// The limits for steps in which at most `sequences` sequences decode one token each.
    pub fn without_drafts(sequences: usize, context_tokens: usize, format: StepFormat) -> Self {
        GraphLimits {
            decode_rows: sequences,
            verify_rows: 0,
            logit_rows: sequences,
            context_tokens,
            format,
            has_linked_rows: false,
            has_draft_head: false,
        }
    }

    /// The layout of the arrays of a captured step.
    pub fn layout(&self, size: GraphKey) -> StepLayout {
        let layout = match size.kind {
            StepKind::Decode => {
                StepLayout::decode(size.rows, self.format, self.context_tokens).with_linked_rows(self.has_linked_rows)
            }
            StepKind::Verify => StepLayout::verify(size.rows, self.logit_rows, self.format, self.context_tokens),
        };
        layout.with_drafts(self.has_draft_head)
    }

    /// Words of the inputs of the largest step.
    pub fn words(&self) -> usize {
        self.sizes().into_iter().map(|size| self.layout(size).words()).max().unwrap_or(0)
    }

    /// Bytes of the inputs of the largest step, in whole pages.
    pub fn bytes(&self, page: Bytes) -> Bytes {
        DType::U32.bytes(self.words()).round_up(page)
    }

    /// The smallest size that takes a step. `None` if no size does.
    pub fn size_for(&self, batch: &StepBatch) -> Option<GraphKey> {
        let size = |kind| bucket(batch.token_count(), self.most_rows(kind)).map(|rows| GraphKey { rows, kind });
        StepKind::ALL.into_iter().filter_map(size).find(|size| self.layout(*size).takes(batch))
    }

    /// The sizes of captured steps, the smallest first.
    pub fn sizes(&self) -> Vec<GraphKey> {
        let of_kind = |kind| buckets(self.most_rows(kind)).into_iter().map(move |rows| GraphKey { rows, kind });
        let mut sizes: Vec<_> = StepKind::ALL.into_iter().flat_map(of_kind).collect();
        sizes.sort();
        sizes
    }

    fn most_rows(&self, kind: StepKind) -> usize {
        match kind {
            StepKind::Decode => self.decode_rows,
            StepKind::Verify => self.verify_rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use bursar_model::flow::{BlockTable, SequencePart, StateSlots};

    use super::*;

    #[test]
    fn sizes_double_to_eight_then_rise_by_eight() {
        assert_eq!(buckets(1), [1]);
        assert_eq!(buckets(4), [1, 2, 4]);
        assert_eq!(buckets(5), [1, 2, 4, 5]);
        assert_eq!(buckets(8), [1, 2, 4, 8]);
        assert_eq!(buckets(27), [1, 2, 4, 8, 16, 24, 27]);
        assert_eq!(buckets(256).len(), 3 + 32);
        assert!(buckets(0).is_empty());
    }

    /// A step with one sequence for each entry. An entry gives the number of the sequence's rows
    /// that sample, and the number of its rows that run again.
    fn batch(rows: &[(usize, usize)]) -> StepBatch {
        let tables = [BlockTable::from(vec![0, 1])];
        let (tokens, positions) = ([7; 8], [[16; 3]; 8]);
        let part = |(slot, (logit_rows, repeated)): (usize, &(usize, usize))| SequencePart {
            tokens: &tokens[..logit_rows + repeated],
            positions: &positions[..logit_rows + repeated],
            cached_tokens: 16,
            tables: &tables,
            logit_rows: *logit_rows,
            repeated: *repeated,
            state: Some(StateSlots::in_place(slot as u32)),
            ..SequencePart::default()
        };
        StepBatch::pack(&rows.iter().enumerate().map(part).collect::<Vec<_>>())
    }

    #[test]
    fn a_step_gets_the_smallest_size_that_takes_its_drafts() {
        let format = StepFormat { has_states: true, ..StepFormat::TEXT };
        let shape = GraphLimits { verify_rows: 20, logit_rows: 9, ..GraphLimits::without_drafts(4, 32, format) };
        let verify = |rows| Some(GraphKey { rows, kind: StepKind::Verify });
        assert_eq!(shape.size_for(&batch(&[(1, 0); 3])), Some(GraphKey::decode(4)));
        assert_eq!(shape.size_for(&batch(&[(3, 0), (1, 0)])), verify(4));
        assert_eq!(shape.size_for(&batch(&[(1, 0), (1, 3), (4, 3)])), verify(16));
        assert_eq!(shape.size_for(&batch(&[(4, 0), (4, 0), (2, 0)])), None, "more than nine rows of logits");
        assert_eq!(shape.sizes().len(), 3 + 6);
        // Without recurrent states, the graphs of decode steps verify drafts.
        let format = StepFormat { has_states: false, ..format };
        let shape = GraphLimits { decode_rows: 9, logit_rows: 9, ..GraphLimits::without_drafts(4, 32, format) };
        assert_eq!(shape.size_for(&batch(&[(3, 0), (1, 0)])), None, "keys would be read before they are written");
        let shape = GraphLimits { has_linked_rows: true, ..shape };
        assert_eq!(shape.size_for(&batch(&[(3, 0), (1, 0)])), Some(GraphKey::decode(4)));
        assert_eq!(shape.size_for(&batch(&[(3, 1), (1, 0)])), None, "only a state needs tokens to run again");
    }

    #[test]
    fn each_row_count_gets_a_bucket_with_at_most_seven_padding() {
        for most in 1..=100 {
            let buckets = buckets(most);
            for rows in 1..=most {
                let size = bucket(rows, most).expect("there is a bucket for every size");
                assert_eq!(Some(&size), buckets.iter().find(|bucket| **bucket >= rows), "{rows} rows of {most}");
                assert!((rows..rows + STEP).contains(&size), "{rows} rows run in a bucket of {size}");
            }
            assert_eq!(bucket(most + 1, most), None);
        }
    }
}
