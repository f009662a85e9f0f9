//! Settings of Gemma 4 assistants, small models that draft tokens for Gemma 4 (transformers 5.17,
//! `configuration_gemma4_assistant.py`).

use bursar_kernels::ops::clustered_argmax::CLUSTERS_MAX;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::gemma4_decoder::defaults;
use crate::blocks::{
    AssistantConfig, ClusterConfig, ConfigError, DecoderConfig, KvSizes, config_keys, draft_head::check_fit,
};

/// Keys that the configuration of a decoder does not have. The defaults are those of
/// `Gemma4AssistantConfig`, except that `backbone_hidden_size` is required.
#[derive(Deserialize)]
struct Fields {
    backbone_hidden_size: usize,
    #[serde(default)]
    use_ordered_embeddings: bool,
    #[serde(default = "default_centroids")]
    num_centroids: usize,
    #[serde(default = "default_top")]
    centroid_intermediate_top_k: usize,
    tie_word_embeddings: Option<bool>,
}

fn default_centroids() -> usize {
    2048
}

fn default_top() -> usize {
    32
}

/// Whether `config` belongs to the assistant of Gemma 4 12B. `None` if it does not belong to an assistant.
pub fn is_unified(config: &Map<String, Value>) -> Option<bool> {
    match config.get("model_type")?.as_str()? {
        "gemma4_assistant" => Some(false),
        "gemma4_unified_assistant" => Some(true),
        _ => None,
    }
}

/// Reads the `config.json` of an assistant for `decoder`. `is_unified` selects the defaults.
///
/// # Errors
/// [`ConfigError`] if a setting is not supported, or if the assistant does not fit the decoder.
pub fn read(
    config: &Map<String, Value>,
    decoder: &DecoderConfig,
    is_unified: bool,
) -> Result<AssistantConfig, ConfigError> {
    let fields = Fields::deserialize(config)?;
    config_keys::refuse_unknown("", config)?;
    let mut text = config_keys::part(config, "text_config")?.cloned().unwrap_or_default();
    // Assistants have no per-layer embeddings, but Gemma 4's default for this key is not 0.
    text.entry("hidden_size_per_layer_input").or_insert(0.into());
    let sharing = text.remove("num_kv_shared_layers");
    let layers = DecoderConfig::read("text_config.", &text, &defaults(is_unified))?;
    check_layers(&layers, sharing.as_ref())?;
    check_fit("backbone_hidden_size", fields.backbone_hidden_size, decoder.hidden)?;
    check_fit("text_config.vocab_size", layers.vocabulary, decoder.vocabulary)?;
    let sources = (0..layers.layers).map(|layer| source(&layers, layer, decoder)).collect::<Result<_, _>>()?;
    let tied_embeddings = fields.tie_word_embeddings.unwrap_or(true);
    Ok(AssistantConfig {
        clusters: clusters(&fields, layers.vocabulary)?,
        sources,
        layers: DecoderConfig { own_kv_layers: 0, tied_embeddings, ..layers },
    })
}

/// Refuses layers with features that only decoders have. `sharing` is `num_kv_shared_layers`: the number of
/// layers, 0 or `None`, which all mean the same here.
fn check_layers(layers: &DecoderConfig, sharing: Option<&Value>) -> Result<(), ConfigError> {
    let unsupported = |key: &str, value: String, supported| {
        Err(ConfigError::Unsupported { field: format!("text_config.{key}"), value, supported })
    };
    if let Some(sharing) = sharing.filter(|sharing| !sharing.is_null() && **sharing != 0 && **sharing != layers.layers)
    {
        return unsupported("num_kv_shared_layers", sharing.to_string(), "0 or num_hidden_layers");
    }
    if let Some(embeddings) = &layers.per_layer_embeddings {
        return unsupported("hidden_size_per_layer_input", embeddings.width.to_string(), "0");
    }
    if layers.mixture.is_some() {
        return unsupported("enable_moe_block", "true".to_owned(), "false");
    }
    if layers.double_wide_shared_mlp {
        return unsupported("use_double_wide_mlp", "true".to_owned(), "false");
    }
    Ok(())
}

/// The decoder layer whose keys and values the assistant's layer `layer` reads: the last one with the same
/// kind of attention that computes them.
fn source(layers: &DecoderConfig, layer: usize, decoder: &DecoderConfig) -> Result<usize, ConfigError> {
    let window = layers.window(layer);
    let source = decoder.last_own_kv(window).filter(|_| decoder.full_attention.is_some());
    let Some(source) = source else {
        let kind = window.map_or("full attention".to_owned(), |tokens| format!("a window of {tokens} tokens"));
        return Err(ConfigError::Contradiction(format!(
            "text_config.layer_types has a layer with {kind}, but the model has no such layer of Gemma 4"
        )));
    };
    let (own, expected): (KvSizes, KvSizes) = (layers.attention(layer), decoder.attention(source));
    let keys = match window {
        Some(_) => ["num_key_value_heads", "head_dim"],
        None => ["num_global_key_value_heads", "global_head_dim"],
    };
    check_fit(&format!("text_config.{}", keys[0]), own.kv_heads, expected.kv_heads)?;
    check_fit(&format!("text_config.{}", keys[1]), own.head_dim, expected.head_dim)?;
    if layers.rope_of(layer) != decoder.rope_of(source) {
        let kind = window.map_or("full_attention", |_| "sliding_attention");
        return Err(ConfigError::Contradiction(format!(
            "text_config.rope_parameters.{kind} differs from the model's, so queries would not match the model's keys"
        )));
    }
    Ok(source)
}

fn clusters(fields: &Fields, vocabulary: usize) -> Result<Option<ClusterConfig>, ConfigError> {
    let clusters = ClusterConfig { count: fields.num_centroids, top: fields.centroid_intermediate_top_k };
    if !fields.use_ordered_embeddings {
        return Ok(None);
    }
    ConfigError::check_size("num_centroids", clusters.count, CLUSTERS_MAX)?;
    ConfigError::check_size("centroid_intermediate_top_k", clusters.top, clusters.count)?;
    if !vocabulary.is_multiple_of(clusters.count) {
        let text =
            format!("num_centroids is {}, which does not divide text_config.vocab_size, {vocabulary}", clusters.count);
        return Err(ConfigError::Contradiction(text));
    }
    Ok(Some(clusters))
}
