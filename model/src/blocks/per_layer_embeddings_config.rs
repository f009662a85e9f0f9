//! Settings of [per-layer embeddings](super::per_layer_embeddings).

use serde::Deserialize;
use serde_json::{Map, Value};

use super::config_error::{ConfigError, WIDTH_MAX};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayerEmbeddingsConfig {
    /// Rows of the table.
    pub vocabulary: usize,
    /// Elements of a token's row for one layer.
    pub width: usize,
    /// Picture tokens use this token's row of the table.
    pub picture_token: u32,
}

#[derive(Deserialize)]
struct Fields {
    vocab_size: usize,
    vocab_size_per_layer_input: usize,
    hidden_size_per_layer_input: Option<usize>,
    pad_token_id: Option<u32>,
}

impl PerLayerEmbeddingsConfig {
    /// Reads the settings. `fields` must have all keys except `pad_token_id`, possibly from the
    /// defaults. `None` if the width is null or 0.
    pub fn read(place: &str, fields: &Map<String, Value>) -> Result<Option<Self>, ConfigError> {
        let fields = Fields::deserialize(fields)?;
        let Some(width) = fields.hidden_size_per_layer_input.filter(|width| *width > 0) else { return Ok(None) };
        ConfigError::check_size("hidden_size_per_layer_input", width, WIDTH_MAX)?;
        ConfigError::check_size("vocab_size_per_layer_input", fields.vocab_size_per_layer_input, 1 << 24)?;
        let (vocabulary, picture_token) = (fields.vocab_size_per_layer_input, fields.pad_token_id.unwrap_or(0));
        if vocabulary < fields.vocab_size || picture_token as usize >= vocabulary {
            return Err(ConfigError::Contradiction(format!(
                "{place}vocab_size_per_layer_input is {vocabulary}; expected at least vocab_size ({}), and more than \
                 pad_token_id ({picture_token})",
                fields.vocab_size
            )));
        }
        Ok(Some(PerLayerEmbeddingsConfig { vocabulary, width, picture_token }))
    }
}
