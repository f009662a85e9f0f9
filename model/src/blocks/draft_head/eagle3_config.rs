//! Settings of an EAGLE-3 head: the `config.json` of the head's checkpoint.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::select::check_fit;
use crate::blocks::{
    axes_rule::AxesRule,
    config_error::ConfigError,
    config_keys,
    decoder_config::{DecoderConfig, DecoderDefaults, Eagle3Config, LayerKind},
    sliding_window::{SlidingWindow, WindowRule},
};

/// Keys of an EAGLE-3 head that a Llama configuration does not have.
#[derive(Deserialize)]
struct Fields {
    draft_vocab_size: Option<usize>,
    target_hidden_size: Option<usize>,
    norm_before_residual: Option<bool>,
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    eagle_config: Option<Map<String, Value>>,
}

/// Keys of variants of EAGLE-3 that add norms, read other rows or draft several tokens in parallel
/// (vLLM 0.33, `llama_eagle3.py`).
const VARIANTS: [&str; 5] = ["norm_before_fc", "fc_norm", "norm_output", "parallel_drafting", "target_layer_ids"];

/// Keys of `eagle_config` with the value that means EAGLE-3 (ModelOpt, SpecForge). Any other key must
/// be [neutral](config_keys::is_neutral).
const EAGLE: [(&str, Value); 4] = [
    ("use_aux_hidden_state", Value::Bool(true)),
    ("use_input_layernorm_in_first_layer", Value::Bool(true)),
    ("use_last_layernorm", Value::Bool(true)),
    ("use_mtp_layernorm", Value::Bool(false)),
];

/// Reads the head's `config.json`, in the layout of the EAGLE authors, or with the layer's settings
/// in `transformer_layer_config` (speculators). `decoder` verifies the drafts.
///
/// # Errors
/// [`ConfigError`] if a setting is not supported, or if the head does not fit the decoder.
pub fn read(config: &Map<String, Value>, decoder: &DecoderConfig) -> Result<Eagle3Config, ConfigError> {
    // The head's layer would need blocks of other sizes than the layers of its cache group.
    if decoder.full_attention.is_some() {
        return Err(ConfigError::Unsupported {
            field: "global_head_dim".to_owned(),
            value: "set for the decoder".to_owned(),
            supported: "decoders whose layers all have heads of one size",
        });
    }
    let fields = Fields::deserialize(config)?;
    let inner = config_keys::part(config, "transformer_layer_config")?;
    let layer = layer(inner.map_or("", |_| "transformer_layer_config."), inner.unwrap_or(config), decoder)?;
    let is_on = |key: &&&str| config.get(**key).is_some_and(|value| !config_keys::is_neutral(key, value));
    if let Some(key) = VARIANTS.iter().find(is_on) {
        return Err(config_keys::unknown("", key, &config[*key]));
    }
    let outputs = fields.eagle_config.as_ref().map(layer_outputs).transpose()?.flatten();
    let (field, size) = match fields.target_hidden_size {
        Some(size) => ("target_hidden_size", size),
        None => ("hidden_size", layer.hidden),
    };
    check_fit(field, size, decoder.hidden)?;
    check_fit("vocab_size", layer.vocabulary, decoder.vocabulary)?;
    check_fit("num_key_value_heads", layer.kv_heads, decoder.kv_heads)?;
    check_fit("head_dim", layer.head_dim, decoder.head_dim)?;
    let vocabulary = fields.draft_vocab_size.unwrap_or(layer.vocabulary);
    ConfigError::check_size("draft_vocab_size", vocabulary, layer.vocabulary)?;
    // The top level lists the layers whose inputs are read, as in vLLM. `eagle_config` lists the layers
    // before them, as in SGLang.
    let inputs = outputs.map(|outputs| outputs.into_iter().map(|layer| layer.saturating_add(1)).collect());
    let listed = fields.eagle_aux_hidden_state_layer_ids.or(inputs);
    Ok(Eagle3Config {
        layer,
        vocabulary,
        layers_read: layers_read(listed, decoder.layers)?,
        // The default of each layout, as in vLLM (`configs/speculators/algos.py`).
        adds_normed: fields.norm_before_residual.unwrap_or(inner.is_some()),
    })
}

/// The layers in `eagle_config` whose outputs the head reads.
fn layer_outputs(config: &Map<String, Value>) -> Result<Option<Vec<usize>>, ConfigError> {
    const LAYERS: &str = "eagle_aux_hidden_state_layer_ids";
    let is_usual = |(key, value): (&String, &Value)| match EAGLE.iter().find(|(own, _)| own == key) {
        Some((_, usual)) => value.is_null() || value == usual,
        None => key == LAYERS || config_keys::is_neutral(key, value),
    };
    match config.iter().find(|pair| !is_usual(*pair)) {
        Some((key, value)) => Err(config_keys::unknown("eagle_config.", key, value)),
        None => Ok(Option::deserialize(config.get(LAYERS).unwrap_or(&Value::Null))?),
    }
}

/// The layers whose input rows the head reads. The default is that of the EAGLE authors: the third
/// layer, a middle layer and the third layer from the end.
fn layers_read(listed: Option<Vec<usize>>, layers: usize) -> Result<Vec<usize>, ConfigError> {
    let read = listed.filter(|listed| !listed.is_empty());
    let read = read.unwrap_or_else(|| vec![2, layers / 2, layers.saturating_sub(3)]);
    if read.is_sorted_by(|layer, next| layer < next) && read.iter().all(|layer| *layer < layers) {
        return Ok(read);
    }
    Err(ConfigError::Contradiction(format!(
        "eagle_aux_hidden_state_layer_ids is {read:?}; expected ascending layer indices below {layers}, the number of \
         layers of the model"
    )))
}

/// Reads the settings of the head's layer, on top of the defaults of `LlamaConfig` (transformers
/// 5.17, `configuration_llama.py`).
fn layer(place: &str, fields: &Map<String, Value>, decoder: &DecoderConfig) -> Result<DecoderConfig, ConfigError> {
    let scaling = ["rope_scaling", "rope_parameters"].into_iter().find_map(|key| fields.get(key)?.as_object());
    let has = |key: &str| {
        scaling.is_some_and(|scaling| scaling.get(key).is_some_and(|value| !config_keys::is_neutral(key, value)))
    };
    // Without pictures in the decoder's positions, all axes are equal.
    let axes = match decoder.rope_axes.count() {
        1 => AxesRule::One,
        _ if !has("mrope_section") => AxesRule::One,
        _ if has("mrope_interleaved") => AxesRule::Interleaved([0; 3]),
        _ => AxesRule::Consecutive([0; 3]),
    };
    let defaults = DecoderDefaults {
        fields: json!({
            "vocab_size": decoder.vocabulary,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
        }),
        rope_types: &["default", "mrope"],
        axes,
        layer: LayerKind::ConfiguredBias,
        window: WindowRule::Never,
    };
    let layer = DecoderConfig::read(place, fields, &defaults)?;
    ConfigError::check_size("num_hidden_layers", layer.layers, 1)?;
    let sliding = decoder.sliding.as_ref().filter(|sliding| sliding.has(decoder.layers));
    let sliding = sliding.map(|sliding| SlidingWindow { tokens: sliding.tokens, is_in: vec![true] });
    Ok(DecoderConfig { sliding, ..layer })
}
