//! The draft head that a checkpoint asks for.

use serde_json::{Map, Value};

use crate::{
    blocks::{
        config_error::ConfigError,
        decoder_config::{DecoderConfig, DraftHeadConfig},
    },
    checkpoint::Checkpoint,
};

/// Selects the draft head that `checkpoint` asks for: none, the head in the model's own checkpoint,
/// or the head of a [draft model](Checkpoint::with_draft_model). `read` reads the `config.json` of a
/// draft model for the decoder.
///
/// # Errors
/// [`ConfigError::NoDraftHead`] if the model has no draft head. [`ConfigError::Unsupported`] if its
/// head has more than one layer or a separate embedding. [`ConfigError::DraftModel`] if the draft
/// model is not a head for this decoder.
pub fn select_draft_head(
    decoder: &mut DecoderConfig,
    checkpoint: &Checkpoint,
    read: impl Fn(&Map<String, Value>, &DecoderConfig) -> Result<DraftHeadConfig, ConfigError>,
) -> Result<(), ConfigError> {
    let unsupported = |field: &str, value: String, supported| {
        Err(ConfigError::Unsupported { field: field.to_owned(), value, supported })
    };
    let own = decoder.draft_head.take();
    if !checkpoint.loads_draft_head() {
        return Ok(());
    }
    if let Some(config) = checkpoint.draft_model() {
        let head = read(config, decoder).map_err(|error| ConfigError::DraftModel(Box::new(error)))?;
        decoder.draft_head = Some(head);
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

/// Refuses a size that differs from the decoder's, because the head reads the decoder's embedding, rows,
/// keys and values.
///
/// # Errors
/// [`ConfigError::Contradiction`] with both sizes.
pub fn check_fit(field: &str, size: usize, of_model: usize) -> Result<(), ConfigError> {
    if size == of_model {
        return Ok(());
    }
    Err(ConfigError::Contradiction(format!("{field} is {size}, but the model has {of_model}")))
}
