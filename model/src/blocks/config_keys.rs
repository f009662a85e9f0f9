//! Keys of a `config.json`: merging them over defaults, and refusing keys that change results
//! and are not supported.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::config_error::ConfigError;

/// Keys that enable a computation that most of the supported families do not have. Other families
/// and modified checkpoints of the supported families use these keys. A family that supports a key
/// passes it to [`refuse_unknown_but`]. RoPE keys are matched by prefix instead, because every
/// family has invented different keys.
const CHANGING: [&str; 12] = [
    "attn_logit_softcapping",
    "attn_output_gate",
    "compression_config",
    "deepstack_visual_indexes",
    "final_logit_softcapping",
    "partial_rotary_factor",
    "per_layer_config",
    "quantization",
    "quantization_config",
    "query_pre_attn_scalar",
    "use_bidirectional_attention",
    "use_qk_norm",
];
const CHANGING_PREFIXES: [&str; 3] = ["rope_", "mrope_", "rotary_"];

/// [`Checkpoint::weight_formats`](crate::checkpoint::Checkpoint::weight_formats) reads this key,
/// but only at the top level.
const QUANTIZATION: &str = "quantization_config";

/// Keys with one of the [`CHANGING_PREFIXES`] that [`RopeConfig`](super::rope_config::RopeConfig)
/// reads.
const ROPE: [&str; 3] = ["rope_theta", "rope_scaling", "rope_parameters"];

/// Maximum number of characters of a value in an error message.
const VALUE_CHARS_MAX: usize = 60;

/// The object under `name`, if the file has it.
pub fn part<'c>(config: &'c Map<String, Value>, name: &str) -> Result<Option<&'c Map<String, Value>>, ConfigError> {
    match config.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(part)) => Ok(Some(part)),
        Some(_) => Err(ConfigError::Contradiction(format!("{name} is not an object"))),
    }
}

/// Merges `given` over `defaults`, key by key at the top level.
pub fn over(defaults: &Value, given: &Map<String, Value>) -> Map<String, Value> {
    let mut fields = defaults.as_object().cloned().unwrap_or_default();
    fields.extend(given.iter().map(|(key, value)| (key.clone(), value.clone())));
    fields
}

/// `tie_word_embeddings`, which may be in `text_config`, at the top level, or in both with the same
/// value. `false` if neither has it.
pub fn tied_embeddings(config: &Map<String, Value>, text: &Map<String, Value>) -> Result<bool, ConfigError> {
    let flag_in =
        |place: &Map<String, Value>| place.get("tie_word_embeddings").map_or(Ok(None), Option::<bool>::deserialize);
    let (outer, inner) = (flag_in(config)?, flag_in(text)?);
    if let (Some(outer), Some(inner)) = (outer, inner)
        && outer != inner
    {
        let text = format!("tie_word_embeddings is {outer}, but {inner} in text_config");
        return Err(ConfigError::Contradiction(text));
    }
    Ok(outer.or(inner) == Some(true))
}

/// Refuses keys that would change what the model computes and that this crate does not support,
/// unless the value is [neutral](is_neutral). `place` is the prefix of the key in an error message.
pub fn refuse_unknown(place: &str, given: &Map<String, Value>) -> Result<(), ConfigError> {
    refuse_unknown_but(place, given, &[])
}

/// Like [`refuse_unknown`], for a family that supports the keys in `followed`.
pub fn refuse_unknown_but(place: &str, given: &Map<String, Value>, followed: &[&str]) -> Result<(), ConfigError> {
    let changes = |key: &str| {
        CHANGING.contains(&key) && !followed.contains(&key) && !(place.is_empty() && key == QUANTIZATION)
            || CHANGING_PREFIXES.iter().any(|prefix| key.starts_with(prefix))
                && !ROPE.contains(&key)
                && !followed.contains(&key)
    };
    match given.iter().find(|(key, value)| changes(key) && !is_neutral(key, value)) {
        None => Ok(()),
        Some((key, value)) => Err(unknown(place, key, value)),
    }
}

/// The error that refuses `key`, with the value truncated to `VALUE_CHARS_MAX` characters.
pub fn unknown(place: &str, key: &str, value: &Value) -> ConfigError {
    let mut value = value.to_string();
    if let Some((end, _)) = value.char_indices().nth(VALUE_CHARS_MAX) {
        value.truncate(end);
        value.push('…');
    }
    ConfigError::Unknown { field: format!("{place}{key}"), value }
}

/// Whether a value changes nothing: null, false, empty, or a `partial_rotary_factor` of 1.
pub fn is_neutral(key: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        value => key == "partial_rotary_factor" && value.as_f64() == Some(1.0),
    }
}
