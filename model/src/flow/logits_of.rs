//! Which logits a step leaves on a rank.

/// Whose columns of the logits a rank has after a step. All ranks of a step want the same; one
/// rank alone has all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsOf {
    /// `[rows, vocabulary]`, gathered from all ranks: what draws, changes
    /// or reports likelihoods needs.
    AllRanks,
    /// What choosing the likeliest token takes: `[rows, tokens]` of the rank's own
    /// [`DecoderShare::vocabulary`](crate::blocks::DecoderShare::vocabulary), where ranks
    /// [choose together](bursar_kernels::Scope::chooses_among_ranks), and otherwise all.
    OwnRank,
}
