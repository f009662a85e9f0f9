//! The columns of the logits that each rank has after a step.

/// The columns of the logits that a rank has after a step. All ranks must ask for the same variant.
/// With a single rank, both variants give all columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsOf {
    /// `[rows, vocabulary]`, gathered from all ranks. Random sampling, changes to logits and
    /// reports of log-probabilities need this variant.
    AllRanks,
    /// Enough columns to choose the likeliest token: `[rows, tokens]` of the rank's shard
    /// [`DecoderShare::vocabulary`](crate::blocks::DecoderShare::vocabulary) if the ranks [choose
    /// together](bursar_kernels::Scope::chooses_among_ranks), and otherwise all columns.
    OwnRank,
}
