//! Pure: sizes of captured steps and the layout of their inputs.

use bursar_budgets::Bytes;
use bursar_kernels::DType;
use bursar_model::flow::{StepFormat, StepLayout};

/// Sizes double up to this number of rows and then grow by this number. A step therefore has fewer
/// than this number of padding rows. Padding rows cost little compared with reading the weights.
const STEP: usize = 8;

/// The numbers of rows for which decode steps of at most `sequences` rows are captured: 1, 2, 4, 8,
/// then multiples of 8, and `sequences` itself.
pub fn buckets(sequences: usize) -> Vec<usize> {
    (1..=sequences).filter(|rows| bucket(*rows, sequences) == Some(*rows)).collect()
}

/// The size in which a step of `rows` rows runs. `None` if `rows` exceeds `sequences`.
fn bucket(rows: usize, sequences: usize) -> Option<usize> {
    let size = if rows <= STEP { rows.next_power_of_two() } else { rows.next_multiple_of(STEP) };
    (rows <= sequences).then_some(size.min(sequences))
}

/// Limits that determine the layouts of captured steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphShape {
    /// Sequences in the largest step.
    pub sequences: usize,
    /// Maximum tokens of a sequence.
    pub context_tokens: usize,
    /// The arrays that the model reads.
    pub format: StepFormat,
}

impl GraphShape {
    /// The layout of the arrays of a captured step of `rows` rows.
    pub fn layout(&self, rows: usize) -> StepLayout {
        StepLayout::decode(rows, self.format, self.context_tokens)
    }

    /// Bytes of the inputs of the largest step, in whole pages.
    pub fn bytes(&self, page: Bytes) -> Bytes {
        DType::U32.bytes(self.layout(self.sequences).words()).round_up(page)
    }

    /// The layout of the smallest size that holds a step of `rows` decoding sequences. `None`
    /// if no size does.
    pub fn layout_holding(&self, rows: usize) -> Option<StepLayout> {
        bucket(rows, self.sequences).map(|rows| self.layout(rows))
    }

    /// The sizes of captured steps, in rows.
    pub fn buckets(&self) -> Vec<usize> {
        buckets(self.sequences)
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn each_row_count_gets_a_bucket_with_at_most_seven_padding() {
        for sequences in 1..=100 {
            let buckets = buckets(sequences);
            for rows in 1..=sequences {
                let size = bucket(rows, sequences).expect("there is a bucket for every size");
                assert_eq!(Some(&size), buckets.iter().find(|bucket| **bucket >= rows), "{rows} rows of {sequences}");
                assert!((rows..rows + STEP).contains(&size), "{rows} rows run in a bucket of {size}");
            }
            assert_eq!(bucket(sequences + 1, sequences), None);
        }
    }
}
