//! Draft models that are in a separate checkpoint.

use serde_json::{Map, Value};

use super::gemma4_assistant;
use crate::blocks::{ConfigError, DecoderConfig, DraftHeadConfig, draft_head::read_eagle3};

/// Reads `config`, the `config.json` of a draft model for `decoder`. Any model that is not a Gemma 4
/// assistant is read as an EAGLE-3 head, because EAGLE-3 checkpoints have many values of `model_type`.
///
/// # Errors
/// [`ConfigError`] if a setting is not supported, or if the head does not fit the decoder.
pub fn read(config: &Map<String, Value>, decoder: &DecoderConfig) -> Result<DraftHeadConfig, ConfigError> {
    Ok(match gemma4_assistant::is_unified(config) {
        Some(is_unified) => DraftHeadConfig::Assistant(Box::new(gemma4_assistant::read(config, decoder, is_unified)?)),
        None => DraftHeadConfig::Eagle3(Box::new(read_eagle3(config, decoder)?)),
    })
}
