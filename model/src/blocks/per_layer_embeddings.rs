//! Per-layer embeddings (Gemma 3n, Gemma 4): before the first layer, each token gets one row per
//! layer, computed from its id and its embedding. Each layer adds a gated projection of its row to
//! the residual stream.

use std::ops::Range;

use bursar_kernels::{
    Backend, KernelError, RankShard, Scope, Tensor, Weight,
    ops::{gate_mul::GateActivation, rms_norm::RmsNorm},
};

use super::{
    decoder_config::DecoderConfig, decoder_share::DecoderShare, per_layer_embeddings_config::PerLayerEmbeddingsConfig,
};
use crate::weights::{Linear, WeightError, WeightMap};

/// Factor of the sum of the two parts of a row.
const SUM_FACTOR: f32 = std::f32::consts::FRAC_1_SQRT_2;

/// The weights that compute the rows of all layers.
pub struct PerLayerEmbeddings {
    /// `[own tokens, layers * width]`
    pub table: Weight<'static>,
    /// The tokens of this rank's rows of `table`.
    pub tokens: RankShard,
    /// `[layers * width, hidden]`
    projection: Linear,
    norm: Tensor<'static>,       // [width]
    sum_factor: Tensor<'static>, // [1] f32
    width: usize,
    /// The norm's epsilon times `hidden`. The reference divides the projection by `sqrt(hidden)`,
    /// which this code omits.
    epsilon: f32,
}

impl PerLayerEmbeddings {
    /// Claims the weights under `prefix`.
    pub fn claim(
        map: &mut WeightMap<'_>,
        prefix: &str,
        config: &DecoderConfig,
        settings: PerLayerEmbeddingsConfig,
        share: &DecoderShare,
    ) -> Result<Self, WeightError> {
        let PerLayerEmbeddingsConfig { vocabulary, width, .. } = settings;
        let name = |part: &str| format!("{prefix}.{part}");
        let columns = config.layers * width;
        let tokens = share.rank.share_rounded_up(vocabulary);
        Ok(PerLayerEmbeddings {
            table: map.table(&name("embed_tokens_per_layer.weight"), tokens, columns)?,
            tokens,
            projection: map.linear(&name("per_layer_model_projection"), columns, config.hidden, false)?,
            norm: map.tensor(&name("per_layer_projection_norm.weight"), [width])?,
            sum_factor: map.constant(&[SUM_FACTOR]),
            width,
            epsilon: config.norm_epsilon * config.hidden as f32,
        })
    }

    /// Factor of the table's rows.
    pub fn table_scale(&self) -> f32 {
        (self.width as f32).sqrt()
    }

    /// Adds the projection of `embedded` `[tokens, hidden]` to `rows` `[tokens, layers * width]`,
    /// the scaled rows of the table.
    pub fn combine<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        embedded: &Tensor<'_>,
        rows: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let projected = self.projection.forward(&scope, embedded)?;
        let tokens = rows.rows();
        let each = [tokens * rows.columns() / self.width, self.width];
        // The reference divides the projection by `sqrt(hidden)`. The norm cancels that factor,
        // except in epsilon, which is scaled instead.
        let norm = RmsNorm { weight: &self.norm, weight_offset: 0.0, epsilon: self.epsilon };
        let mut sums = rows.row_range_mut(0..tokens).into_shape(each);
        scope.rms_norm_add(&projected.into_shape(each), norm, Some(&self.sum_factor), &mut sums)
    }
}

/// The weights of one layer.
pub struct PerLayerInput {
    gate: Linear,          // [width, hidden]
    out: Linear,           // [hidden, width]
    norm: Tensor<'static>, // [hidden]
    activation: GateActivation,
}

impl PerLayerInput {
    /// Claims the weights of the layer under `prefix`.
    pub fn claim(
        map: &mut WeightMap<'_>,
        prefix: &str,
        config: &DecoderConfig,
        width: usize,
    ) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(PerLayerInput {
            gate: map.linear(&name("per_layer_input_gate"), width, config.hidden, false)?,
            out: map.linear(&name("per_layer_projection"), config.hidden, width, false)?,
            norm: map.tensor(&name("post_per_layer_input_norm.weight"), [config.hidden])?,
            activation: config.activation,
        })
    }

    /// The columns of layer `index` in the rows of [`PerLayerEmbeddings`].
    pub fn columns(&self, index: usize) -> Range<usize> {
        let width = self.gate.weight.rows();
        index * width..(index + 1) * width
    }

    /// Adds the projection of `row` `[tokens, width]`, gated by `hidden` `[tokens, hidden]`, to
    /// `hidden`, and multiplies the sum by `factor` `[1]` f32.
    pub fn add<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        config: &DecoderConfig,
        row: &Tensor<'_>,
        factor: Option<&Tensor<'_>>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let gates = self.gate.forward(&scope, &*hidden)?;
        let gated = scope.gate_mul(&gates, row, self.activation)?;
        self.out.forward_norm_add(&scope, &gated, config.norm(&self.norm), factor, hidden)
    }
}
