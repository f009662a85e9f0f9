//! The draft head of Qwen3.5 and later: one layer that predicts the token after the next
//! (multi-token prediction, Gloeckle et al. 2024, arXiv 2404.19737). The order of the inputs and
//! the norms is the same as in vLLM (0.33, `qwen3_5_mtp.py`).

use bursar_kernels::{Activations, Backend, KernelError, RankShard, Scope, Tensor, Weight};

use crate::{
    blocks::{
        decoder_config::DecoderConfig,
        decoder_share::DecoderShare,
        layer::{Layer, LayerPass, Stream},
        layer_cache::LayerCache,
    },
    weights::{WeightError, WeightMap},
};

/// The name of the head's module in a checkpoint.
pub const MODULE: &str = "mtp";

/// The shard of a draft head on one rank. The head shares the decoder's embedding and output
/// projection.
pub struct MtpHead {
    embedding_norm: Tensor<'static>, // [hidden]
    hidden_norm: Tensor<'static>,    // [hidden]
    /// `[hidden, hidden]` each: the columns of the input projection for the normalized embedding,
    /// and the columns for the normalized row of the decoder. Each rank has all columns, because
    /// the projection is less than 1 % of a step's work in all released models.
    projections: [Weight<'static>; 2],
    layer: Layer,
    norm: Tensor<'static>, // [hidden]
}

impl MtpHead {
    /// Claims the tensors `mtp.*`. `loads` yields the counters of expert choices if the head's
    /// layer has experts.
    ///
    /// # Errors
    /// [`WeightError::NoDraftHead`] if the checkpoint has no such tensor, and the error of a tensor
    /// that is missing or has the wrong shape.
    pub fn claim(
        config: &DecoderConfig,
        share: &DecoderShare,
        map: &mut WeightMap<'_>,
        loads: &mut impl Iterator<Item = Tensor<'static>>,
    ) -> Result<Self, WeightError> {
        if map.lacks(MODULE) {
            return Err(WeightError::NoDraftHead { module: MODULE });
        }
        let name = |part: &str| format!("{MODULE}.{part}");
        let hidden = config.hidden;
        let mut half = |index: usize| {
            let columns = RankShard { first: index * hidden, count: hidden, whole: 2 * hidden };
            map.unquantized_linear(&[(&name("fc"), hidden.into())], columns).map(|linear| linear.weight)
        };
        let projections = [half(0)?, half(1)?];
        map.set_in_decoder(true);
        let layer = Layer::claim(config, share, config.layers, &name("layers.0"), map, loads)?;
        map.set_in_decoder(false);
        let mut norm = |part: &str| map.tensor(&name(&format!("{part}.weight")), [hidden]);
        Ok(MtpHead {
            embedding_norm: norm("pre_fc_norm_embedding")?,
            hidden_norm: norm("pre_fc_norm_hidden")?,
            norm: norm("norm")?,
            projections,
            layer,
        })
    }

    /// Writes the input of the head's layer to `out` `[tokens, hidden]`. `embedded`
    /// `[tokens, hidden]` has the embedding of the token after each row. `hidden`
    /// `[tokens, hidden]` has the rows of [`DraftRows::hidden`](super::rows::DraftRows::hidden).
    pub fn combine<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        config: &DecoderConfig,
        embedded: &Tensor<'_>,
        hidden: &Tensor<'_>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let [of_embedding, of_hidden] = &self.projections;
        {
            let scope = scope.scope();
            let normed = scope.rms_norm(embedded, config.norm(&self.embedding_norm))?;
            scope.linear_into(&normed, of_embedding, None, out)?;
        }
        let scope = scope.scope();
        let normed = scope.rms_norm(hidden, config.norm(&self.hidden_norm))?;
        scope.linear_add(&normed, of_hidden, None, out)
    }

    /// Runs the head's layer on `input` `[tokens, hidden]`, which [`combine`](Self::combine) wrote,
    /// and writes the chosen rows after the head's norm to `normed` `[logit_rows, hidden]`. The
    /// output projection and the MLP run only on the chosen rows. If no row is chosen, only keys
    /// and values are computed.
    pub fn forward<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        pass: &LayerPass<'_>,
        cache: &LayerCache,
        input: Tensor<'s>,
        normed: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let (rows, hidden) = (input.rows(), pass.config.hidden);
        // The chosen rows are a separate tensor even if they are most of the rows, and this tensor
        // is allocated even if every row is chosen. Memory then grows monotonically with the number
        // of rows and of chosen rows, so the worst case is the pass with the maximum of both.
        let chosen_rows = pass.inputs.chosen_rows.as_ref();
        let mut chosen = scope.empty([chosen_rows.map_or(rows, Tensor::rows), hidden])?;
        let scratch = scope.activation_scratch(self.layer.norm_formats(), rows, hidden)?;
        let mut stream = Stream { hidden: input, scratch, is_normed: false };
        let last = if let Some(rows) = chosen_rows {
            self.layer.forward_chosen(scope, pass, cache, &mut stream, rows, &mut chosen)?;
            chosen
        } else {
            self.layer.forward(scope, pass, cache, &mut stream, None)?;
            stream.hidden
        };
        if last.rows() == 0 {
            return Ok(());
        }
        let mut out = Activations::of_plain(normed.row_range_mut(0..last.rows()));
        scope.rms_norm_into(&last, pass.config.norm(&self.norm), &mut out)
    }
}
