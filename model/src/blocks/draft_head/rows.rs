//! Rows that a draft head reads and writes, and the logits of its drafts.

use bursar_kernels::{Backend, KernelError, Scope, Tensor, Weight, ops::clustered_argmax::TokenClusters};

use crate::{blocks::decoder_config::DecoderConfig, sampling::argmax_into};

/// The rows that a pass of the draft head reads and writes.
pub struct DraftRows<'a, 'm> {
    /// `[draft rows, width]`: for the first draft, the rows that the decoder's step left in
    /// [`DraftMemory::hidden`]. For a further draft, the head's [`output`](Self::output) rows of the
    /// previous draft.
    pub hidden: &'a Tensor<'a>,
    /// `[logit_rows, width]`: receives the head's rows from which the logits are computed.
    pub output: &'a mut Tensor<'m>,
}

/// Tensors of the draft head's pass in a step. They are allocated first, at the beginning of the
/// workspace, so that they have the same addresses in a captured step and in its replay.
pub struct DraftMemory<'s> {
    /// `[draft rows, width]`: see [`DraftRows::hidden`]. There is one row for each token of the step,
    /// or only for each row of logits if the head reads no other rows
    /// ([`DecoderConfig::draft_rows`]).
    pub hidden: Tensor<'s>,
    /// `[logit_rows, width]`: see [`DraftRows::output`].
    pub output: Tensor<'s>,
    /// `[logit_rows]` u32: the token that is drafted for each row of logits.
    pub drafted: Tensor<'s>,
}

impl<'s> DraftMemory<'s> {
    /// Allocates the memory for a step of `tokens` rows. A token is chosen for `logit_rows` of
    /// these rows.
    pub fn take<B: Backend>(
        scope: &'s Scope<'_, B>,
        decoder: &DecoderConfig,
        tokens: usize,
        logit_rows: usize,
    ) -> Result<Self, KernelError> {
        let width = decoder.draft_width();
        Ok(DraftMemory {
            hidden: scope.empty([decoder.draft_rows(tokens, logit_rows), width])?,
            output: scope.empty([logit_rows, width])?,
            drafted: scope.empty_u32([logit_rows])?,
        })
    }

    /// The rows that the pass reads and writes.
    pub fn rows(&mut self) -> DraftRows<'_, 's> {
        DraftRows { hidden: &self.hidden, output: &mut self.output }
    }
}

/// Outputs of the draft head's pass. They are allocated before the memory of the pass, because they outlive
/// it.
pub(in crate::blocks) struct DraftResults<'s> {
    /// `[logit_rows, padded columns]` f32
    pub logits: Tensor<'s>,
    /// `[logit_rows, assistant's hidden]`: an assistant's rows after its final norm. `None` for other heads.
    pub normed: Option<Tensor<'s>>,
}

/// Logits of drafts, and how a token is chosen from them.
pub struct DraftLogits<'s> {
    /// `[logit_rows, columns]` f32, possibly with gaps between rows. The columns are the whole
    /// vocabulary, this rank's tokens, the head's reduced vocabulary, or clusters of tokens.
    pub logits: Tensor<'s>,
    pub(in crate::blocks) columns: DraftColumns<'s>,
}

/// The tokens that the columns of a draft head's logits stand for.
pub(in crate::blocks) enum DraftColumns<'s> {
    /// The decoder's vocabulary of this number of tokens, divided among the ranks.
    OfRanks(usize),
    /// The whole vocabulary, on every rank.
    Whole,
    /// `[columns]` u32: the tokens of a reduced vocabulary, on every rank.
    Reduced(Tensor<'s>),
    /// The scores of clusters of tokens, on every rank.
    Clusters {
        /// `[logit_rows, assistant's hidden]`: the rows that are multiplied by the output projection.
        normed: Tensor<'s>,
        projection: &'s Weight<'static>, // [padded vocabulary, assistant's hidden]
        /// `[vocabulary]` u32: the tokens of each cluster.
        tokens: &'s Tensor<'static>,
        top: usize,
    },
}

impl DraftLogits<'_> {
    /// Writes the likeliest token of each row to `out` `[logit_rows]` u32.
    ///
    /// # Errors
    /// Same as [`argmax_into`].
    pub fn choose<B: Backend>(&self, scope: &Scope<'_, B>, out: &mut Tensor<'_>) -> Result<(), KernelError> {
        if self.logits.rows() == 0 {
            return Ok(());
        }
        match &self.columns {
            DraftColumns::OfRanks(vocabulary) => argmax_into(scope, &self.logits, *vocabulary, out),
            DraftColumns::Whole => scope.argmax_into(&self.logits, out),
            DraftColumns::Reduced(ids) => scope.argmax_ids_into(&self.logits, ids, out),
            DraftColumns::Clusters { normed, projection, tokens, top } => {
                let clusters = TokenClusters { scores: &self.logits, tokens, top: *top };
                scope.clustered_argmax_into(normed, projection, clusters, out)
            }
        }
    }
}
