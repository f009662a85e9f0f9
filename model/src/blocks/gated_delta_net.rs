//! A gated delta net: linear attention whose state has a fixed size for each sequence (Yang et al.
//! 2024, arXiv 2412.06464), in the form of Qwen3.5 (transformers 5.17, `modeling_qwen3_5.py`).

use bursar_kernels::{
    ActivationFormat, Activations, Backend, DType, KernelError, RankShard, Scope, StateDtype, StateLayer, StateShape,
    Tensor, ops::gated_delta::DeltaInputs,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    config_error::{ConfigError, HEAD_MAX},
    mixed::Mixed,
    step_inputs::StepInputs,
};
use crate::weights::{Linear, WeightError, WeightMap};

/// Limit of the width of the convolution, larger than in any known model.
const WIDTH_MAX: usize = 16;

/// The sizes of a decoder's gated delta nets.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct GatedDeltaConfig {
    #[serde(rename = "linear_num_key_heads")]
    pub key_heads: usize,
    #[serde(rename = "linear_num_value_heads")]
    pub value_heads: usize,
    #[serde(rename = "linear_key_head_dim")]
    pub key_dim: usize,
    #[serde(rename = "linear_value_head_dim")]
    pub value_dim: usize,
    /// Tokens that the convolution reads for each token, including that token.
    #[serde(rename = "linear_conv_kernel_dim")]
    pub conv_width: usize,
    /// Whether each layer has such a net.
    #[serde(skip)]
    pub is_in: Vec<bool>,
}

impl GatedDeltaConfig {
    /// Reads the keys of gated delta nets.
    pub(super) fn read(fields: &Map<String, Value>) -> Result<Self, ConfigError> {
        let config: GatedDeltaConfig = serde_json::from_value(fields.clone().into())?;
        for (field, value, most) in [
            ("linear_num_key_heads", config.key_heads, HEAD_MAX),
            ("linear_num_value_heads", config.value_heads, HEAD_MAX),
            ("linear_key_head_dim", config.key_dim, HEAD_MAX),
            ("linear_value_head_dim", config.value_dim, HEAD_MAX),
            ("linear_conv_kernel_dim", config.conv_width, WIDTH_MAX),
        ] {
            ConfigError::check_size(field, value, most)?;
        }
        if config.conv_width < 2 {
            let text = "linear_conv_kernel_dim is 1; expected at least 2, because a state keeps earlier inputs";
            return Err(ConfigError::Contradiction(text.to_owned()));
        }
        if !config.value_heads.is_multiple_of(config.key_heads) {
            let (heads, keys) = (config.value_heads, config.key_heads);
            let text = format!("{heads} value heads of gated delta nets cannot be divided among {keys} key heads");
            return Err(ConfigError::Contradiction(text));
        }
        Ok(config)
    }

    /// Columns of the queries, keys and values of this many heads.
    fn channels(&self, key_heads: usize, value_heads: usize) -> usize {
        2 * key_heads * self.key_dim + value_heads * self.value_dim
    }

    /// Shape of a rank's states in `layers` layers: convolution inputs have the type `activation`,
    /// and state matrices are f32.
    pub fn state_shape(&self, heads: DeltaHeads, layers: usize, activation: DType) -> StateShape {
        let (key_heads, value_heads) = (heads.keys.count, heads.values.count);
        StateShape {
            layers,
            channels: self.channels(key_heads, value_heads),
            conv_rows: self.conv_width - 1,
            key_heads,
            value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            activation,
            state_dtype: StateDtype::F32,
        }
    }
}

/// The heads of a gated delta net that a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    pub keys: RankShard,
    pub values: RankShard,
}

/// One rank's shard of a gated delta net.
pub struct GatedDeltaNet {
    /// `[channels + value_heads * value_dim, hidden]`: queries, keys, values, and the gates of the
    /// output. The rows of `gates` follow, unless this matrix is quantized.
    inputs: Linear,
    /// `[2 * all value heads, hidden]`: the strength of the update and the decay of each head. All
    /// ranks compute all heads, because a GEMM with this few output columns is not worth sharding.
    /// `None` if the rows are part of `inputs`, because one GEMM takes less time than two.
    gates: Option<Linear>,
    /// `[channels, conv_width]`: weights of the causal convolution over queries, keys and values.
    conv: Tensor<'static>,
    /// `[value_heads]` f32: logarithm of the rate of decay.
    log_decay: Tensor<'static>,
    /// `[value_heads]` f32, added to the decay's input.
    bias: Tensor<'static>,
    /// `[value_dim]` f32: weight of the gated norm, the same for all heads.
    norm: Tensor<'static>,
    epsilon: f32,
    /// `[hidden, value_heads * value_dim]`
    out: Linear,
    values: RankShard,
}

impl GatedDeltaNet {
    /// Claims the weights under `name`, for the heads of this rank.
    pub fn claim(
        map: &mut WeightMap<'_>,
        name: &str,
        hidden: usize,
        config: &GatedDeltaConfig,
        heads: DeltaHeads,
        epsilon: f32,
    ) -> Result<Self, WeightError> {
        let part = |part: &str| format!("{name}.{part}");
        let channels = config.channels(heads.keys.whole, heads.values.whole);
        // The three parts of `in_proj_qkv`, each with this rank's heads.
        let keys = heads.keys.times(config.key_dim);
        let values = heads.values.times(config.value_dim);
        let within =
            |shard: RankShard, first: usize| RankShard { first: first + shard.first, whole: channels, ..shard };
        let parts = [within(keys, 0), within(keys, keys.whole), within(values, 2 * keys.whole)];
        let [qkv, gate, update, decay] = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"].map(part);
        let of_input: Vec<_> =
            parts.iter().map(|rows| (qkv.as_str(), *rows)).chain([(gate.as_str(), values)]).collect();
        let of_heads = RankShard::all(heads.values.whole);
        let of_gates = [(update.as_str(), of_heads), (decay.as_str(), of_heads)];
        let (inputs, gates) = if map.is_quantized(&qkv)? {
            (map.fused_linear(&of_input, hidden, false)?, Some(map.unquantized_linear(&of_gates, hidden)?))
        } else {
            (map.fused_linear(&[of_input, of_gates.to_vec()].concat(), hidden, false)?, None)
        };
        Ok(GatedDeltaNet {
            inputs,
            gates,
            conv: map.rows_of_parts(&part("conv1d.weight"), &parts, config.conv_width)?,
            log_decay: map.tensor_f32(&part("A_log"), heads.values)?,
            bias: map.tensor_f32(&part("dt_bias"), heads.values)?,
            norm: map.tensor_f32(&part("norm.weight"), config.value_dim)?,
            epsilon,
            out: map.linear(&part("out_proj"), hidden, values, false)?,
            values: heads.values,
        })
    }

    /// The activation format that the projections read directly.
    pub fn reads(&self) -> ActivationFormat {
        let inputs = self.inputs.reads();
        self.gates.as_ref().map_or(inputs, |gates| inputs.and(gates.reads()))
    }

    pub fn out(&self) -> &Linear {
        &self.out
    }

    /// Runs the net on `normed` `[tokens, hidden]` and updates the states in `layer`. Returns
    /// `[tokens, value_heads * value_dim]`, the input of [`out`](Self::out).
    pub fn mix<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        normed: &Activations<'_>,
        step: &StepInputs<'_>,
        layer: &StateLayer,
    ) -> Result<Mixed<'s>, KernelError> {
        let sequences = step.states.as_ref().expect("the step has the slots of the states");
        let (channels, values) = (layer.shape().channels, layer.shape().value_heads * layer.shape().value_dim);
        let inputs = self.inputs.forward(scope, normed)?; // [tokens, channels + values + gates]
        let mut mixed = scope.empty([inputs.rows(), values])?;
        {
            let scope = scope.scope();
            let separate = self.gates.as_ref().map(|gates| gates.forward(&scope, normed)).transpose()?;
            let (gates, first) = separate.as_ref().map_or((&inputs, channels + values), |gates| (gates, 0));
            let of_rank = |first: usize| gates.column_range(first + self.values.first..first + self.values.range().end);
            let (update, decay) = (of_rank(first), of_rank(first + self.values.whole));
            let qkv = scope.causal_conv(&inputs.column_range(0..channels), &self.conv, layer, sequences)?;
            let (log_decay, bias) = (&self.log_decay, &self.bias);
            let delta = DeltaInputs { qkv: &qkv, update: &update, decay: &decay, log_decay, bias };
            let out = scope.gated_delta(&delta, layer, sequences)?;
            let gate = inputs.column_range(channels..channels + values);
            scope.gated_rms_norm_into(&out, &gate, &self.norm, self.epsilon, &mut mixed)?;
        }
        Ok(Mixed { rows: mixed, spare: inputs })
    }
}
