//! Sizes of keys and values that differ between the layers of a decoder (Gemma 4): full attention
//! with wider heads than sliding-window attention, and layers that read the keys and values of
//! earlier layers.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::config_error::{ConfigError, HEAD_MAX};

/// The heads of keys and values of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSizes {
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Whether the layer has no projection of values: the values are the keys before their norm and
    /// rotation.
    pub keys_are_values: bool,
}

/// How full-attention layers differ from sliding-window layers.
#[derive(Deserialize)]
struct Fields {
    num_attention_heads: usize,
    num_key_value_heads: usize,
    global_head_dim: usize,
    num_global_key_value_heads: Option<usize>,
    attention_k_eq_v: bool,
    per_layer_config: Option<Map<String, Value>>,
    num_kv_shared_layers: usize,
}

/// An entry of `per_layer_config`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerFields {
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
}

impl KvSizes {
    /// Reads the sizes of the layers with full attention (transformers 5.17, `Gemma4TextConfig`).
    /// `is_windowed` is true for each layer with a window. `fields` must have all keys except
    /// `per_layer_config` and `num_global_key_value_heads`, possibly from the defaults.
    pub fn read_full(place: &str, fields: &Map<String, Value>, is_windowed: &[bool]) -> Result<Self, ConfigError> {
        let fields = Fields::deserialize(fields)?;
        let global_heads = fields.num_global_key_value_heads.filter(|_| fields.attention_k_eq_v);
        let mut sizes = KvSizes {
            kv_heads: global_heads.unwrap_or(fields.num_key_value_heads),
            head_dim: fields.global_head_dim,
            keys_are_values: fields.attention_k_eq_v,
        };
        if let Some(listed) = &fields.per_layer_config {
            let field = format!("{place}per_layer_config");
            let listed = full_of_list(&field, listed, is_windowed)?;
            sizes.head_dim = listed.head_dim.unwrap_or(sizes.head_dim);
            sizes.kv_heads = listed.num_key_value_heads.unwrap_or(fields.num_key_value_heads);
        }
        ConfigError::check_size("global_head_dim", sizes.head_dim, HEAD_MAX)?;
        ConfigError::check_size("num_global_key_value_heads", sizes.kv_heads, HEAD_MAX)?;
        let KvSizes { kv_heads, head_dim, .. } = sizes;
        if !fields.num_attention_heads.is_multiple_of(kv_heads) {
            let text = format!(
                "{} query heads cannot be divided among {kv_heads} key heads of full attention",
                fields.num_attention_heads
            );
            return Err(ConfigError::Contradiction(text));
        }
        if !head_dim.is_multiple_of(2) {
            let text = format!("a head of {head_dim} elements cannot be rotated in pairs");
            return Err(ConfigError::Contradiction(text));
        }
        Ok(sizes)
    }
}

/// The settings of the layers with full attention in `per_layer_config`, which has an entry for each
/// such layer. Its keys are layer numbers, which transformers pads with leading zeros.
fn full_of_list(field: &str, listed: &Map<String, Value>, is_windowed: &[bool]) -> Result<LayerFields, ConfigError> {
    let mut layers: Vec<_> = listed.keys().filter_map(|key| key.parse::<usize>().ok()).collect();
    layers.sort_unstable();
    let is_each_full = (0..is_windowed.len()).filter(|layer| !is_windowed[*layer]).eq(layers);
    let first = listed.values().next().filter(|first| listed.values().all(|other| other == *first));
    match first.filter(|_| is_each_full) {
        Some(first) => Ok(LayerFields::deserialize(first)?),
        None => {
            let text =
                format!("{field} must have one entry per layer with full attention, and all entries must be equal");
            Err(ConfigError::Contradiction(text))
        }
    }
}

/// Reads the number of leading layers that compute keys and values. Each later layer reads the keys
/// and values of the last such layer with the same attention type: sliding-window or full.
pub fn read_own_layers(place: &str, fields: &Map<String, Value>, is_windowed: &[bool]) -> Result<usize, ConfigError> {
    let (shared, layers) = (Fields::deserialize(fields)?.num_kv_shared_layers, is_windowed.len());
    let own = layers.saturating_sub(shared);
    let has_source = |layer: usize| is_windowed[..own].contains(&is_windowed[layer]);
    if own > 0 && (own..layers).all(has_source) {
        return Ok(own);
    }
    Err(ConfigError::Contradiction(format!(
        "{place}num_kv_shared_layers is {shared} of {layers} layers; the other layers must include each attention \
         type that these layers have"
    )))
}
