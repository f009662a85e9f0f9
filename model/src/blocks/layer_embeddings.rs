//! Embeddings of layers: each layer adds a projection of a row that depends on the token and on its
//! embedding to the residual stream (Gemma 3n and Gemma 4, "per-layer embeddings").

use std::ops::Range;

use bursar_kernels::{
    Backend, KernelError, RankShard, Scope, Tensor, Weight,
    ops::{gate_mul::GateActivation, rms_norm::RmsNorm},
};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    config_error::{ConfigError, WIDTH_MAX},
    decoder_config::DecoderConfig,
    decoder_share::DecoderShare,
};
use crate::weights::{Linear, WeightError, WeightMap};

/// Factor of the sum of the two parts of a row.
const SUM_FACTOR: f32 = std::f32::consts::FRAC_1_SQRT_2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerEmbeddingsConfig {
    /// Rows of the table.
    pub vocabulary: usize,
    /// Elements of a token's row for one layer.
    pub width: usize,
    /// The token whose row the tokens of pictures have.
    pub picture_token: u32,
}

#[derive(Deserialize)]
struct Fields {
    vocab_size_per_layer_input: usize,
    hidden_size_per_layer_input: Option<usize>,
    pad_token_id: Option<u32>,
}

impl LayerEmbeddingsConfig {
    /// Reads the settings. `fields` must have all keys, possibly from the defaults. `None` if the
    /// width is null or 0.
    pub fn read(fields: &Map<String, Value>) -> Result<Option<Self>, ConfigError> {
        let fields = Fields::deserialize(fields)?;
        let Some(width) = fields.hidden_size_per_layer_input.filter(|width| *width > 0) else { return Ok(None) };
        ConfigError::check_size("hidden_size_per_layer_input", width, WIDTH_MAX)?;
        ConfigError::check_size("vocab_size_per_layer_input", fields.vocab_size_per_layer_input, 1 << 24)?;
        let (vocabulary, picture_token) = (fields.vocab_size_per_layer_input, fields.pad_token_id.unwrap_or(0));
        Ok(Some(LayerEmbeddingsConfig { vocabulary, width, picture_token }))
    }
}

/// The weights that compute the rows of all layers before the first layer runs.
pub struct LayerEmbeddings {
    /// `[own tokens, layers * width]`
    pub table: Weight<'static>,
    /// The tokens of this rank's rows of `table`.
    pub tokens: RankShard,
    /// `[layers * width, hidden]`
    projection: Linear,
    norm: Tensor<'static>,       // [width]
    sum_factor: Tensor<'static>, // [1] f32
    width: usize,
    /// Epsilon of the norm, for the projection before it is divided by the root of its inputs.
    epsilon: f32,
}

impl LayerEmbeddings {
    /// Claims the weights under `prefix`.
    pub fn claim(
        map: &mut WeightMap<'_>,
        prefix: &str,
        config: &DecoderConfig,
        settings: LayerEmbeddingsConfig,
        share: &DecoderShare,
    ) -> Result<Self, WeightError> {
        let LayerEmbeddingsConfig { vocabulary, width, .. } = settings;
        let name = |part: &str| format!("{prefix}.{part}");
        let columns = config.layers * width;
        let tokens = share.rank.share_rounded_up(vocabulary);
        Ok(LayerEmbeddings {
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
        // The projection is divided by the root of its inputs. The norm undoes this division, and
        // the epsilon accounts for it.
        let norm = RmsNorm { weight: &self.norm, weight_offset: 0.0, epsilon: self.epsilon };
        let mut sums = rows.row_range_mut(0..tokens).into_shape(each);
        scope.rms_norm_add(&projected.into_shape(each), norm, Some(&self.sum_factor), &mut sums)
    }
}

/// The weights with which a layer adds its row to the residual stream.
pub struct LayerEmbedding {
    gate: Linear,          // [width, hidden]
    out: Linear,           // [hidden, width]
    norm: Tensor<'static>, // [hidden]
    activation: GateActivation,
}

impl LayerEmbedding {
    /// Claims the weights of the layer under `prefix`.
    pub fn claim(
        map: &mut WeightMap<'_>,
        prefix: &str,
        config: &DecoderConfig,
        width: usize,
    ) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(LayerEmbedding {
            gate: map.linear(&name("per_layer_input_gate"), width, config.hidden, false)?,
            out: map.linear(&name("per_layer_projection"), config.hidden, width, false)?,
            norm: map.tensor(&name("post_per_layer_input_norm.weight"), [config.hidden])?,
            activation: config.activation,
        })
    }

    /// The columns of layer `index` in the rows of [`LayerEmbeddings`].
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
