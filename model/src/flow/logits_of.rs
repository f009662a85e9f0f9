//! Which logits a step leaves on a rank.

/// Whose columns of the logits a rank has after a step. All ranks of a step want the same; one rank alone has all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsOf {
    /// `[rows, vocabulary]`, gathered from all ranks: what draws, changes or reports likelihoods needs.
    AllRanks,
    /// `[rows, tokens]` of the rank's own [`DecoderShare::vocabulary`](crate::blocks::DecoderShare::vocabulary). Enough to choose the likeliest token, for which ranks exchange a number and a place a row.
    OwnRank,
}
