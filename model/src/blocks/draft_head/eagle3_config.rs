//! Settings of an EAGLE-3 head: the `config.json` of the head's checkpoint.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    blocks::{
        config_error::{ConfigError, HEAD_MAX},
        config_keys,
        decoder_config::{AxesRule, DecoderConfig, DecoderDefaults, DraftHeadConfig, Eagle3Config, LayerKind},
        sliding_window::{SlidingWindow, WindowRule},
    },
    checkpoint::Checkpoint,
};

/// Selects the draft head that `checkpoint` asks for: none, the head in the model's own checkpoint,
/// or the head of a [draft model](Checkpoint::with_draft_model).
///
/// # Errors
/// [`ConfigError::NoDraftHead`] if the model has no draft head. [`ConfigError::Unsupported`] if its
/// head has more than one layer or a separate embedding. [`ConfigError::DraftModel`] if the draft
/// model is not an EAGLE-3 head for this decoder.
pub fn select_draft_head(decoder: &mut DecoderConfig, checkpoint: &Checkpoint) -> Result<(), ConfigError> {
    let unsupported = |field: &str, value: String, supported| {
        Err(ConfigError::Unsupported { field: field.to_owned(), value, supported })
    };
    let own = decoder.draft_head.take();
    if !checkpoint.loads_draft_head() {
        return Ok(());
    }
    if let Some(config) = checkpoint.draft_model() {
        let head = read(config, decoder).map_err(|error| ConfigError::DraftModel(Box::new(error)))?;
        decoder.draft_head = Some(DraftHeadConfig::Eagle3(Box::new(head)));
        return Ok(());
    }
    match own {
        None => return Err(ConfigError::NoDraftHead),
        Some(DraftHeadConfig::Mtp { layers: 1, has_embedding: true }) => {
            return unsupported("mtp_use_dedicated_embeddings", true.to_string(), "false");
        }
        Some(DraftHeadConfig::Mtp { layers, .. }) if layers != 1 => {
            return unsupported("mtp_num_hidden_layers", layers.to_string(), "1");
        }
        own => decoder.draft_head = own,
    }
    Ok(())
}

/// Keys of an EAGLE-3 head that a Llama configuration does not have.
#[derive(Deserialize)]
struct Fields {
    draft_vocab_size: Option<usize>,
    target_hidden_size: Option<usize>,
    norm_before_residual: Option<bool>,
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    eagle_config: Option<EagleFields>,
}

/// `eagle_config`, where some tools write the list of layers.
#[derive(Deserialize)]
struct EagleFields {
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    use_aux_hidden_state: Option<bool>,
}

/// Keys of variants of EAGLE-3 that add norms or draft several tokens in parallel (vLLM 0.33,
/// `llama_eagle3.py`).
const VARIANTS: [&str; 4] = ["norm_before_fc", "fc_norm", "norm_output", "parallel_drafting"];

/// Reads the head's `config.json`, in the layout of the EAGLE authors, or with the layer's settings
/// in `transformer_layer_config` (speculators). `decoder` verifies the drafts.
fn read(config: &Map<String, Value>, decoder: &DecoderConfig) -> Result<Eagle3Config, ConfigError> {
    let fields = Fields::deserialize(config)?;
    let inner = config_keys::part(config, "transformer_layer_config")?;
    let layer = layer(inner.map_or("", |_| "transformer_layer_config."), inner.unwrap_or(config), decoder)?;
    let is_on = |key: &&&str| config.get(**key).is_some_and(|value| !config_keys::is_neutral(key, value));
    if let Some(key) = VARIANTS.iter().find(is_on) {
        return Err(config_keys::unknown("", key, &config[*key]));
    }
    if let Some(false) = fields.eagle_config.as_ref().and_then(|eagle| eagle.use_aux_hidden_state) {
        let (field, value) = ("eagle_config.use_aux_hidden_state".to_owned(), "false".to_owned());
        return Err(ConfigError::Unsupported { field, value, supported: "true, as in EAGLE-3" });
    }
    let (field, size) = match fields.target_hidden_size {
        Some(size) => ("target_hidden_size", size),
        None => ("hidden_size", layer.hidden),
    };
    fits(field, size, decoder.hidden)?;
    fits("vocab_size", layer.vocabulary, decoder.vocabulary)?;
    fits("num_key_value_heads", layer.kv_heads, decoder.kv_heads)?;
    fits("head_dim", layer.head_dim, decoder.head_dim)?;
    let vocabulary = fields.draft_vocab_size.unwrap_or(layer.vocabulary);
    ConfigError::check_size("draft_vocab_size", vocabulary, layer.vocabulary)?;
    let listed = fields.eagle_aux_hidden_state_layer_ids;
    let listed = listed.or(fields.eagle_config.and_then(|eagle| eagle.eagle_aux_hidden_state_layer_ids));
    Ok(Eagle3Config {
        layer,
        vocabulary,
        layers_read: layers_read(listed, decoder.layers)?,
        adds_normed: fields.norm_before_residual == Some(true),
    })
}

/// Refuses a size that differs from the decoder's. The head uses the decoder's embedding, rows and
/// blocks of keys and values.
fn fits(field: &str, size: usize, of_model: usize) -> Result<(), ConfigError> {
    if size == of_model {
        return Ok(());
    }
    Err(ConfigError::Contradiction(format!("{field} is {size}, but the model has {of_model}")))
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
    let has = |key: &str| scaling.is_some_and(|scaling| scaling.get(key).is_some_and(|value| !value.is_null()));
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
    ConfigError::check_size("num_attention_heads", layer.heads, HEAD_MAX)?;
    let sliding = decoder.sliding.as_ref().filter(|sliding| sliding.has(decoder.layers));
    let sliding = sliding.map(|sliding| SlidingWindow { tokens: sliding.tokens, is_in: vec![true] });
    Ok(DecoderConfig { sliding, ..layer })
}
