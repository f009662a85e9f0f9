//! The rotary positions of a `config.json`, which has three spellings for them in two places.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{config_keys, decoder_config::ConfigError};

/// The settings of rotary positions.
#[derive(Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Pairs of elements that rotate with each position axis, if the file has them.
    pub sections: Option<Vec<usize>>,
}

#[derive(Deserialize)]
struct Outer {
    rope_theta: f64,
    rope_scaling: Option<Map<String, Value>>,
    rope_parameters: Option<Map<String, Value>>,
}

#[derive(Default, Deserialize)]
struct Inner {
    rope_type: Option<String>,
    /// The older name of `rope_type`; files that newer versions saved again have both.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    mrope_section: Option<Vec<usize>>,
}

/// The keys of [`Inner`].
const KNOWN: [&str; 4] = ["rope_type", "type", "rope_theta", "mrope_section"];

impl RopeConfig {
    /// Reads `rope_scaling`, else `rope_parameters`, else neither, and takes the outer `rope_theta` if they have none.
    /// That is the order of transformers 5.17 (`RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`). `types` are
    /// the values that mean unscaled frequencies. `fields` must have `rope_theta`, if only by default.
    pub fn read(place: &str, fields: &Map<String, Value>, types: &[&str]) -> Result<Self, ConfigError> {
        let outer: Outer = serde_json::from_value(fields.clone().into())?;
        let is_there = |rope: &Map<String, Value>| !rope.is_empty();
        let scaling = outer.rope_scaling.filter(is_there).map(|rope| ("rope_scaling", rope));
        let parameters = outer.rope_parameters.filter(is_there).map(|rope| ("rope_parameters", rope));
        let Some((name, rope)) = scaling.or(parameters) else {
            return Ok(RopeConfig { theta: outer.rope_theta, sections: None });
        };
        let inner: Inner = serde_json::from_value(rope.clone().into())?;
        for (key, kind) in [("rope_type", &inner.rope_type), ("type", &inner.r#type)] {
            if let Some(kind) = kind.as_ref().filter(|kind| !types.contains(&kind.as_str())) {
                return Err(ConfigError::Unsupported {
                    field: format!("{place}{name}.{key}"),
                    value: kind.clone(),
                    supported: "default, and mrope for positions of pictures",
                });
            }
        }
        let is_read = |key: &str, value: &Value| KNOWN.contains(&key) || config_keys::is_neutral(key, value);
        if let Some((key, value)) = rope.iter().find(|(key, value)| !is_read(key, value)) {
            return Err(config_keys::unknown(&format!("{place}{name}."), key, value));
        }
        Ok(RopeConfig { theta: inner.rope_theta.unwrap_or(outer.rope_theta), sections: inner.mrope_section })
    }
}
