//! A decoder's sizes and settings, read from a Hugging Face `config.json`.

use bursar_kernels::{
    Tensor,
    ops::{gate_mul::GateActivation, rms_norm::RmsNorm, rotary::PairAxes},
};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    axes_rule::AxesRule,
    config_error::{ConfigError, HEAD_MAX, WIDTH_MAX},
    config_keys,
    gated_delta_net::GatedDeltaConfig,
    kv_sizes::{self, KvSizes},
    mixture::MixtureConfig,
    per_layer_embeddings_config::PerLayerEmbeddingsConfig,
    rope_config::RopeConfig,
    rope_scaling::RopeScaling,
    sliding_window::{SlidingWindow, WindowRule, check_layer_types},
};
use crate::flow::{CacheGroups, DraftPositions, SegmentLayers, StepFormat};

#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Rows of the embedding and of the logits.
    pub vocabulary: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Activation of the gates of the MLP and of experts.
    pub activation: GateActivation,
    /// Factor of the tokens' embeddings. Embeddings of pictures are not scaled.
    pub embedding_scale: f32,
    /// Experts that replace the MLP or are added to it.
    pub mixture: Option<MixtureConfig>,
    pub layers: usize,
    pub heads: usize,
    /// Number of key and value heads, a divisor of `heads`.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The heads of keys and values of full-attention layers, if they differ from other layers.
    pub full_attention: Option<KvSizes>,
    /// Number of leading layers that compute keys and values. The layers after them
    /// [read](Self::kv_source) the keys and values of earlier layers.
    pub own_kv_layers: usize,
    /// Number of leading elements of a head that RoPE rotates.
    pub rotary_dim: usize,
    /// Factor of the attention scores, without the factor of YaRN.
    pub attention_scale: f32,
    /// Whether the attention output is multiplied by the sigmoid of a gate.
    pub output_gate: bool,
    /// The layers with a gated delta net in place of attention, if there are any.
    pub gated_delta: Option<GatedDeltaConfig>,
    /// The layers whose attention has a sliding window, if there are any.
    pub sliding: Option<SlidingWindow>,
    pub picture_mask: PictureMask,
    /// Added to the weights of norms: 1 if the checkpoint's weights are centered on zero.
    pub norm_offset: f32,
    /// Epsilon that norms add to the mean square.
    pub norm_epsilon: f32,
    /// Whether the results of attention and of the MLP are normalized before they are added to the
    /// residual stream.
    pub output_norms: bool,
    pub biases: Biases,
    /// Whether each query and key head is normalized (RMS) before rotation.
    pub head_norms: bool,
    /// Whether each value head is normalized (RMS), without a weight.
    pub value_norms: bool,
    /// Whether the residual stream is multiplied by a number of the checkpoint after each layer.
    pub layer_scalars: bool,
    /// Whether the layers that read the keys and values of earlier layers have an MLP of twice the
    /// width.
    pub double_wide_shared_mlp: bool,
    /// Per-layer embeddings, if the model has them.
    pub per_layer_embeddings: Option<PerLayerEmbeddingsConfig>,
    /// Logit softcapping: `cap * tanh(logits / cap)`.
    pub logit_softcap: Option<f32>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// Separate rotary frequencies of the sliding-window layers, if any.
    pub local_rope: Option<LocalRope>,
    /// Position axis by which each pair of elements is rotated.
    pub rope_axes: PairAxes,
    /// Longest sequence that the model serves, in tokens. With YaRN, it may be longer than the
    /// sequences of the training.
    pub context_tokens: usize,
    /// Whether the embedding is also the output projection.
    pub tied_embeddings: bool,
    /// The draft head, if it is loaded.
    pub draft_head: Option<DraftHeadConfig>,
}

/// How tokens of a picture attend to one another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PictureMask {
    /// To earlier tokens, as text does.
    #[default]
    Causal,
    /// To all tokens of the picture that the layer's window reaches (Gemma 3, arXiv 2503.19786).
    WholePicture,
    /// Like `WholePicture` in sliding-window layers, and causal in all other layers (Gemma 4).
    WholePictureInWindows,
}

/// Rotary frequencies of the layers that were trained with a sliding window. They apply even if the
/// window is longer than the context.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalRope {
    pub theta: f64,
    pub scaling: RopeScaling,
    /// `[layers]`: whether the layer has these frequencies.
    pub is_in: Vec<bool>,
}

/// The settings of a draft head.
#[derive(Clone, Debug, PartialEq)]
pub enum DraftHeadConfig {
    /// The head of Qwen3.5 and later, which is part of the model's checkpoint.
    Mtp {
        /// Layers between the head's input projection and its norm.
        layers: usize,
        /// Whether the head has a separate embedding in place of the decoder's.
        has_embedding: bool,
    },
    /// An EAGLE-3 head, which is in a separate checkpoint.
    Eagle3(Box<Eagle3Config>),
    /// A Gemma 4 assistant, which is in a separate checkpoint.
    Assistant(Box<AssistantConfig>),
}

/// The settings of a Gemma 4 assistant.
#[derive(Clone, Debug, PartialEq)]
pub struct AssistantConfig {
    /// The assistant's layers. They compute no keys and values.
    pub layers: DecoderConfig,
    /// The decoder layer whose keys and values each of the assistant's layers reads.
    pub sources: Vec<usize>,
    /// Clusters of tokens, if the assistant computes logits only for the tokens of the best clusters.
    /// `None` if it computes the logits of all tokens.
    pub clusters: Option<ClusterConfig>,
}

/// Clusters of the tokens of a vocabulary, all of the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterConfig {
    pub count: usize,
    /// Number of best clusters whose tokens get logits. There are more if scores are equal.
    pub top: usize,
}

/// The settings of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840).
#[derive(Clone, Debug, PartialEq)]
pub struct Eagle3Config {
    /// The sizes of the head's layer, a Llama layer whose QKV projection has twice as many columns.
    /// `hidden` is the width of the head's rows.
    pub layer: DecoderConfig,
    /// Rows of the head's output projection. If this is less than the decoder's vocabulary, the
    /// head's checkpoint maps each row to a token.
    pub vocabulary: usize,
    /// The decoder layers whose input rows the head reads, in ascending order.
    pub layers_read: Vec<usize>,
    /// Whether the residual connection of attention adds the normalized rows in place of the rows
    /// before the norm.
    pub adds_normed: bool,
}

/// The projections of a layer that have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Biases {
    pub qkv: bool,
    /// The output projection of attention.
    pub out: bool,
    /// All three projections of the MLP.
    pub mlp: bool,
}

/// A family's defaults for keys that the file lacks, and the properties that
/// its configuration class implies.
pub struct DecoderDefaults {
    /// Values by key, from `configuration_<family>.py` of transformers.
    pub fields: Value,
    /// Values of `type` or `rope_type` that mean unscaled frequencies in this family.
    pub rope_types: &'static [&'static str],
    /// How the pairs of a head are assigned to the axes of a position.
    pub axes: AxesRule,
    /// The biases and norms of the family's layers.
    pub layer: LayerKind,
    /// How the family decides which layers have a sliding window.
    pub window: WindowRule,
}

/// The biases and norms of the layers of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Qwen2: only queries, keys and values have biases.
    QkvBias,
    /// Llama: `attention_bias` enables the biases of all four attention projections, and `mlp_bias`
    /// the biases of the three MLP projections.
    ConfiguredBias,
    /// Qwen3: like Llama without `mlp_bias`, and each query and key head
    /// is normalized before rotation.
    HeadNorms,
    /// Qwen3.5: like Qwen3, with gates on the result of attention, norms whose weights are centered
    /// on zero, and gated delta nets in the layers that `layer_types` or `full_attention_interval`
    /// selects.
    Hybrid,
    /// Gemma 3: like Qwen3, with norms whose weights are centered on zero, norms of the results of
    /// attention and of the MLP, separate rotary frequencies for the layers with a window,
    /// embeddings multiplied by the root of their width, and `query_pre_attn_scalar` in place of
    /// the size of a head.
    OutputNorms,
    /// Gemma 4: like Gemma 3, except that the weights of norms are not centered on zero, attention
    /// scores are not scaled, values are normalized, full attention has [separate sizes](KvSizes),
    /// and the residual stream is multiplied by a scalar after each layer. Optional: shared keys and
    /// values, per-layer embeddings, and logit softcapping.
    LayerScalars,
}

#[derive(Deserialize)]
struct Fields {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f32,
    max_position_embeddings: usize,
    tie_word_embeddings: Option<bool>,
    layer_types: Option<Vec<String>>,
    full_attention_interval: Option<usize>,
    attn_output_gate: Option<bool>,
    output_gate_type: Option<String>,
    hidden_act: Option<String>,
    hidden_activation: Option<String>,
    query_pre_attn_scalar: Option<f32>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    mtp_num_hidden_layers: Option<usize>,
    mtp_use_dedicated_embeddings: Option<bool>,
    final_logit_softcapping: Option<f32>,
    use_double_wide_mlp: Option<bool>,
}

impl DecoderConfig {
    /// Reads the text fields of a vision model: only from `text_config` if it exists, otherwise
    /// from the top level, where the released checkpoints have them. `tie_word_embeddings` may be
    /// in `text_config` or at the top level (transformers 5.17, `Qwen2_5_VLConfig.__post_init__`).
    pub fn read_nested(config: &Map<String, Value>, defaults: &DecoderDefaults) -> Result<Self, ConfigError> {
        let Some(text) = config_keys::part(config, "text_config")? else {
            return DecoderConfig::read("", config, defaults);
        };
        config_keys::refuse_unknown("", config)?;
        let mut decoder = DecoderConfig::read("text_config.", text, defaults)?;
        decoder.tied_embeddings |= config.get("tie_word_embeddings").is_some_and(|tied| *tied == Value::Bool(true));
        Ok(decoder)
    }

    /// Reads the text fields of a `config.json`, on top of the family's defaults. `place` is the
    /// fields' prefix in errors: empty, or `text_config.`.
    pub fn read(place: &str, given: &Map<String, Value>, defaults: &DecoderDefaults) -> Result<Self, ConfigError> {
        let (is_hybrid, has_scalars) = (defaults.layer == LayerKind::Hybrid, defaults.layer == LayerKind::LayerScalars);
        let output_norms = has_scalars || defaults.layer == LayerKind::OutputNorms;
        config_keys::refuse_unknown_but(place, given, defaults.layer.keys())?;
        let given = config_keys::over(&defaults.fields, given);
        let more = [defaults.axes.keys(), if is_hybrid { &["partial_rotary_factor"] } else { &[] }].concat();
        let (rope, local_rope) = if output_norms {
            let [rope, local] = RopeConfig::read_by_kind(place, &given, defaults.rope_types)?;
            (rope, Some(local))
        } else {
            (RopeConfig::read(place, &given, defaults.rope_types, &more)?, None)
        };
        let mixture = if has_scalars { MixtureConfig::read_gemma4(&given)? } else { MixtureConfig::read(&given)? };
        if let Some(mixture) = mixture.as_ref().filter(|_| defaults.layer == LayerKind::OutputNorms) {
            return Err(config_keys::unknown(place, "num_experts", &mixture.experts.into()));
        }
        let delta = is_hybrid.then(|| GatedDeltaConfig::read(&given)).transpose()?;
        let fields = Fields::deserialize(&given)?;
        let activation = defaults.layer.activation(place, &fields)?;
        check_sizes(&fields)?;
        let context_tokens = rope.scaling.context_tokens(fields.max_position_embeddings);
        let (gated_delta, sliding) = match delta {
            Some(delta) => (Some(delta_layers(place, &fields, delta)?), None),
            None => (None, SlidingWindow::read(place, &given, defaults.window, fields.num_hidden_layers)?),
        };
        let is_windowed = sliding.as_ref().map(|sliding| sliding.is_in.clone());
        let is_windowed = is_windowed.unwrap_or_else(|| vec![false; fields.num_hidden_layers]);
        let (full_attention, own_kv_layers) = if has_scalars {
            let full = KvSizes::read_full(place, &given, &is_windowed)?;
            (Some(full), kv_sizes::read_own_layers(place, &given, &is_windowed)?)
        } else {
            (None, fields.num_hidden_layers)
        };
        let of_window = |(rope, sliding): (RopeConfig, &SlidingWindow)| LocalRope {
            theta: rope.theta,
            scaling: rope.scaling,
            is_in: sliding.is_in.clone(),
        };
        let local_rope = local_rope.zip(sliding.as_ref()).map(of_window);
        let [heads, kv_heads, head_dim] = heads(&fields)?;
        let rotary_dim = rope.rotary_dim(place, head_dim)?;
        let rope_axes = defaults.axes.of(place, &rope, rotary_dim)?;
        Ok(DecoderConfig {
            biases: defaults.layer.biases(&fields),
            head_norms: is_hybrid || output_norms || defaults.layer == LayerKind::HeadNorms,
            value_norms: has_scalars,
            layer_scalars: has_scalars,
            double_wide_shared_mlp: fields.use_double_wide_mlp == Some(true),
            per_layer_embeddings: if has_scalars { PerLayerEmbeddingsConfig::read(place, &given)? } else { None },
            logit_softcap: logit_softcap(place, &fields)?,
            vocabulary: fields.vocab_size,
            hidden: fields.hidden_size,
            intermediate: fields.intermediate_size,
            activation,
            embedding_scale: if output_norms { (fields.hidden_size as f64).sqrt() as f32 } else { 1.0 },
            mixture,
            layers: fields.num_hidden_layers,
            heads,
            kv_heads,
            head_dim,
            full_attention,
            own_kv_layers,
            rotary_dim,
            attention_scale: if has_scalars { 1.0 } else { attention_scale(place, &fields, head_dim)? },
            output_gate: is_hybrid,
            gated_delta,
            // The sizes of a layer depend on whether it has a window.
            sliding: sliding.filter(|sliding| has_scalars || sliding.tokens < context_tokens),
            picture_mask: PictureMask::Causal,
            norm_offset: if is_hybrid || defaults.layer == LayerKind::OutputNorms { 1.0 } else { 0.0 },
            norm_epsilon: fields.rms_norm_eps,
            output_norms,
            rope_theta: rope.theta,
            rope_scaling: rope.scaling,
            local_rope,
            rope_axes,
            context_tokens,
            tied_embeddings: fields.tie_word_embeddings.unwrap_or(false),
            draft_head: fields.mtp_num_hidden_layers.filter(|layers| is_hybrid && *layers > 0).map(|layers| {
                DraftHeadConfig::Mtp { layers, has_embedding: fields.mtp_use_dedicated_embeddings == Some(true) }
            }),
        })
    }

    /// A norm of the residual stream with this weight `[hidden]`.
    pub fn norm<'w>(&self, weight: &'w Tensor<'w>) -> RmsNorm<'w> {
        RmsNorm { weight, weight_offset: self.norm_offset, epsilon: self.norm_epsilon }
    }

    /// The base and the scaling of the rotary frequencies of a layer.
    pub fn rope_of(&self, layer: usize) -> (f64, &RopeScaling) {
        match &self.local_rope {
            Some(local) if self.has_local_rope(layer) => (local.theta, &local.scaling),
            _ => (self.rope_theta, &self.rope_scaling),
        }
    }

    /// Whether the rotary frequencies of a layer are the [local ones](Self::local_rope).
    pub fn has_local_rope(&self, layer: usize) -> bool {
        self.local_rope.as_ref().is_some_and(|local| local.is_in.get(layer) == Some(&true))
    }

    /// Whether a layer has attention. A layer without attention has a gated delta net. The layer of
    /// a draft head always has attention.
    pub fn has_attention(&self, layer: usize) -> bool {
        self.gated_delta.as_ref().is_none_or(|delta| !delta.is_in.get(layer).is_some_and(|is_in| *is_in))
    }

    /// Number of layers with attention, not counting the layer of a draft head.
    pub fn attention_layers(&self) -> usize {
        (0..self.layers).filter(|layer| self.has_attention(*layer)).count()
    }

    /// The layers with keys and values, in groups that share block tables. The layer of a draft head
    /// comes after the decoder's layers.
    pub fn cache_groups(&self) -> CacheGroups {
        let has_cache = |layer: &usize| self.has_attention(*layer) && self.has_own_kv(*layer);
        let layers = (0..self.layers + self.draft_cache_layers()).filter(has_cache);
        let of_segment = self.full_attention.map_or(SegmentLayers::ONE, |full| {
            SegmentLayers::of_widths(full.kv_heads * full.head_dim, self.kv_heads * self.head_dim)
        });
        CacheGroups::of_segments(layers.map(|layer| (layer, self.window(layer))), of_segment)
    }

    /// Number of tokens that a query attends to in a layer, including its own token. `None` if it
    /// attends to the whole context.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding.as_ref().filter(|sliding| sliding.has(layer)).map(|sliding| sliding.tokens)
    }

    /// The heads of keys and values of a layer.
    pub fn attention(&self, layer: usize) -> KvSizes {
        let usual = KvSizes { kv_heads: self.kv_heads, head_dim: self.head_dim, keys_are_values: false };
        self.full_attention.filter(|_| self.has_full_sizes(layer)).unwrap_or(usual)
    }

    /// Whether a layer has the sizes of [`full_attention`](Self::full_attention).
    pub fn has_full_sizes(&self, layer: usize) -> bool {
        self.full_attention.is_some() && self.window(layer).is_none()
    }

    /// Whether a layer computes its own keys and values. The cached layers of a draft head, which follow
    /// the decoder's layers, do.
    pub fn has_own_kv(&self, layer: usize) -> bool {
        !(self.own_kv_layers..self.layers).contains(&layer)
    }

    /// The layer whose keys and values a layer reads: usually the layer itself. `None` for the layers
    /// of an assistant, which read the decoder's keys and values.
    pub fn kv_source(&self, layer: usize) -> Option<usize> {
        if self.has_own_kv(layer) { Some(layer) } else { self.last_own_kv(self.window(layer)) }
    }

    /// The last layer that computes keys and values and has this window.
    pub fn last_own_kv(&self, window: Option<usize>) -> Option<usize> {
        (0..self.own_kv_layers).rev().find(|layer| self.window(*layer) == window)
    }

    /// Removes the window if it is not shorter than the longest sequence, `tokens`, because it
    /// would then hide no token. Keeps a window that determines the sizes of layers.
    pub(crate) fn limit_context(&mut self, tokens: usize) {
        if self.full_attention.is_none() {
            self.sliding = self.sliding.take().filter(|sliding| sliding.tokens < tokens);
        }
    }

    /// The arrays that a step of this decoder reads.
    pub fn step_format(&self) -> StepFormat {
        let groups = self.cache_groups();
        StepFormat {
            axes: self.rope_axes.count(),
            groups: groups.count(),
            full_groups: groups.full(),
            segment_layers: groups.segment_layers(),
            has_states: self.attention_layers() < self.layers,
            has_draft_positions: self.draft_positions() == DraftPositions::Constant,
            whole_pictures: self.picture_mask != PictureMask::Causal,
            picture_input: self.per_layer_embeddings.map(|of_layers| of_layers.picture_token),
        }
    }
}

fn check_sizes(fields: &Fields) -> Result<(), ConfigError> {
    ConfigError::check_size("vocab_size", fields.vocab_size, 1 << 24)?;
    ConfigError::check_size("hidden_size", fields.hidden_size, WIDTH_MAX)?;
    ConfigError::check_size("intermediate_size", fields.intermediate_size, WIDTH_MAX)?;
    ConfigError::check_size("num_hidden_layers", fields.num_hidden_layers, HEAD_MAX)?;
    ConfigError::check_size("num_attention_heads", fields.num_attention_heads, HEAD_MAX)
}

/// The number of query heads, the number of key heads that they share, and the number of elements
/// of a head.
fn heads(fields: &Fields) -> Result<[usize; 3], ConfigError> {
    let heads = fields.num_attention_heads;
    let kv_heads = fields.num_key_value_heads.unwrap_or(heads);
    ConfigError::check_size("num_key_value_heads", kv_heads, HEAD_MAX)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(ConfigError::Contradiction(format!(
            "{heads} query heads cannot be divided among {kv_heads} key heads"
        )));
    }
    let head_dim = fields.head_dim.unwrap_or(fields.hidden_size / heads);
    ConfigError::check_size("head_dim", head_dim, HEAD_MAX)?;
    if head_dim.is_multiple_of(2) {
        Ok([heads, kv_heads, head_dim])
    } else {
        Err(ConfigError::Contradiction(format!("a head of {head_dim} elements cannot be rotated in pairs")))
    }
}

/// The factor of the attention scores: `query_pre_attn_scalar` to the power of -0.5, or the size of
/// a head in place of a missing `query_pre_attn_scalar`.
fn attention_scale(place: &str, fields: &Fields, head_dim: usize) -> Result<f32, ConfigError> {
    let scalar = fields.query_pre_attn_scalar.unwrap_or(head_dim as f32);
    if scalar > 0.0 && scalar.is_finite() {
        return Ok(scalar.powf(-0.5));
    }
    let field = format!("{place}query_pre_attn_scalar");
    Err(ConfigError::Unsupported { field, value: scalar.to_string(), supported: "numbers greater than 0" })
}

/// The cap of logit softcapping.
fn logit_softcap(place: &str, fields: &Fields) -> Result<Option<f32>, ConfigError> {
    match fields.final_logit_softcapping {
        Some(cap) if !(cap > 0.0 && cap.is_finite()) => {
            let field = format!("{place}final_logit_softcapping");
            Err(ConfigError::Unsupported {
                field,
                value: cap.to_string(),
                supported: "null, and numbers greater than 0",
            })
        }
        cap => Ok(cap),
    }
}

impl LayerKind {
    /// Keys that change what other families compute, and that models of this kind support.
    fn keys(self) -> &'static [&'static str] {
        match self {
            LayerKind::QkvBias | LayerKind::ConfiguredBias | LayerKind::HeadNorms => &[],
            LayerKind::Hybrid => &["attn_output_gate", "partial_rotary_factor"],
            LayerKind::OutputNorms => &["query_pre_attn_scalar", "rope_local_base_freq"],
            LayerKind::LayerScalars => &["final_logit_softcapping", "per_layer_config", "use_bidirectional_attention"],
        }
    }

    /// The activation of the gates of the MLP and of the experts.
    fn activation(self, place: &str, fields: &Fields) -> Result<GateActivation, ConfigError> {
        let (key, value) = match self {
            LayerKind::OutputNorms | LayerKind::LayerScalars => ("hidden_activation", &fields.hidden_activation),
            _ => ("hidden_act", &fields.hidden_act),
        };
        match value.as_deref() {
            Some("silu") => Ok(GateActivation::Silu),
            Some("gelu_pytorch_tanh") => Ok(GateActivation::GeluTanh),
            value => Err(ConfigError::Unsupported {
                field: format!("{place}{key}"),
                value: value.unwrap_or("null").to_owned(),
                supported: "silu and gelu_pytorch_tanh",
            }),
        }
    }

    /// The projections of a layer that have a bias.
    fn biases(self, fields: &Fields) -> Biases {
        let has_bias = fields.attention_bias == Some(true);
        match self {
            LayerKind::QkvBias => Biases { qkv: true, out: false, mlp: false },
            LayerKind::ConfiguredBias => Biases { qkv: has_bias, out: has_bias, mlp: fields.mlp_bias == Some(true) },
            LayerKind::HeadNorms | LayerKind::Hybrid | LayerKind::OutputNorms | LayerKind::LayerScalars => {
                Biases { qkv: has_bias, out: has_bias, mlp: false }
            }
        }
    }
}

/// Adds to `delta` the layers with gated delta nets: the layers that `layer_types` calls
/// `linear_attention`, or without `layer_types` all layers except every `full_attention_interval`th
/// (transformers 5.17, `configuration_qwen3_5.py`).
fn delta_layers(place: &str, fields: &Fields, delta: GatedDeltaConfig) -> Result<GatedDeltaConfig, ConfigError> {
    let unsupported = |key: &str, value: String, supported| {
        Err(ConfigError::Unsupported { field: format!("{place}{key}"), value, supported })
    };
    if fields.attn_output_gate == Some(false) {
        return unsupported("attn_output_gate", "false".to_owned(), "true");
    }
    // `output_gate_type` is the activation of the norm's gate in gated delta nets. `swish` is
    // another name of SiLU.
    if let Some(kind) = fields.output_gate_type.as_deref().filter(|kind| !["swish", "silu"].contains(kind)) {
        return unsupported("output_gate_type", kind.to_owned(), "swish and silu");
    }
    let Some(types) = &fields.layer_types else {
        let interval = fields.full_attention_interval.unwrap_or(4);
        ConfigError::check_size("full_attention_interval", interval, HEAD_MAX)?;
        let is_in = (1..=fields.num_hidden_layers).map(|layer| !layer.is_multiple_of(interval)).collect();
        return Ok(GatedDeltaConfig { is_in, ..delta });
    };
    check_layer_types(types, fields.num_hidden_layers)?;
    let mut is_in = Vec::new();
    for (layer, kind) in types.iter().enumerate() {
        match kind.as_str() {
            "linear_attention" => is_in.push(true),
            "full_attention" => is_in.push(false),
            _ => {
                let key = format!("layer_types[{layer}]");
                return unsupported(&key, kind.clone(), "linear_attention and full_attention");
            }
        }
    }
    Ok(GatedDeltaConfig { is_in, ..delta })
}
