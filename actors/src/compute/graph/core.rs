//! Pure: sizes of captured decode steps.

/// Sizes double up to this size and then grow in steps of it. A step therefore has fewer padding
/// rows than this, and the cost of a padding row is negligible compared with the cost of reading
/// the weights.
const STEP: usize = 8;

/// The numbers of rows for which decode steps of at most `sequences` rows are captured: 1, 2, 4, 8,
/// then multiples of 8, and `sequences` itself.
pub fn buckets(sequences: usize) -> Vec<usize> {
    (1..=sequences).filter(|rows| bucket(*rows, sequences) == Some(*rows)).collect()
}

/// The size in which a step of `rows` rows runs. `None` if `rows` exceeds `sequences`.
pub(super) fn bucket(rows: usize, sequences: usize) -> Option<usize> {
    let size = if rows <= STEP { rows.next_power_of_two() } else { rows.next_multiple_of(STEP) };
    (rows <= sequences).then_some(size.min(sequences))
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
                let size = bucket(rows, sequences).expect("there is one");
                assert_eq!(Some(&size), buckets.iter().find(|bucket| **bucket >= rows), "{rows} rows of {sequences}");
                assert!((rows..rows + STEP).contains(&size), "{rows} rows in {size}");
            }
            assert_eq!(bucket(sequences + 1, sequences), None);
        }
    }
}
