//! The part of the logits that a step leaves on each rank.

/// The columns of the logits that a rank has after a step. All ranks of a step ask for the same
/// variant. With a single rank, both variants give all columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsOf {
    /// `[rows, vocabulary]`, gathered from all ranks. Needed to sample at random, to change logits
    /// and to report log-probabilities.
    AllRanks,
    /// Enough to choose the likeliest token: `[rows, tokens]` of the rank's share
    /// [`DecoderShare::vocabulary`](crate::blocks::DecoderShare::vocabulary) if the ranks [choose
    /// together](bursar_kernels::Scope::chooses_among_ranks), and otherwise all columns.
    OwnRank,
}
