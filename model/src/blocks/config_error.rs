//! Errors of a `config.json`, and the check of its sizes.

use thiserror::Error;

/// Maximum width of a layer, larger than in any known model. Products of a configuration's sizes do
/// not overflow if no width exceeds this value.
pub const WIDTH_MAX: usize = 1 << 20;

/// Maximum number of heads, of elements of a head, and of layers. Larger than in any known model.
pub const HEAD_MAX: usize = 1 << 12;

/// A `config.json` from which no model can be built.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A field is missing or has the wrong type.
    #[error("config.json: {0}")]
    Field(#[from] serde_json::Error),
    /// A field has a value that this crate does not support.
    #[error("config.json: {field} is {value}; supported: {supported}")]
    Unsupported {
        /// The field's path in the file.
        field: String,
        value: String,
        supported: &'static str,
    },
    /// A field changes what the model computes, and this crate does not support the field.
    #[error("config.json: {field} is {value}; this changes what the model computes and is not supported")]
    Unknown {
        /// The field's path in the file.
        field: String,
        /// The value, truncated to 60 characters.
        value: String,
    },
    /// The draft head is to be loaded, but the model has none.
    #[error("config.json has no mtp_num_hidden_layers, so the model has no draft head")]
    NoDraftHead,
    /// The settings of a draft model are not supported, or do not fit the model.
    #[error("draft model: {0}")]
    DraftModel(Box<ConfigError>),
    /// Two fields contradict each other.
    #[error("config.json: {0}")]
    Contradiction(String),
}

impl ConfigError {
    /// Refuses a size that is 0 or greater than `most`. A larger size would overflow products or
    /// describe tensors that no device can hold.
    pub fn check_size(field: &'static str, value: usize, most: usize) -> Result<(), ConfigError> {
        if (1..=most).contains(&value) {
            Ok(())
        } else {
            Err(ConfigError::Contradiction(format!("{field} is {value}; expected from 1 to {most}")))
        }
    }

    /// Refuses a token id that the vocabulary does not have. `field` names the id in the error.
    pub fn check_token(field: &str, token: usize, vocabulary: usize) -> Result<(), ConfigError> {
        if token < vocabulary {
            Ok(())
        } else {
            Err(ConfigError::Contradiction(format!("{field} is {token}, but vocab_size is {vocabulary}")))
        }
    }

    /// Refuses the first setting that is not supported. A setting is its key, its value, whether this
    /// value is supported, and the supported values. `place` is the prefix of the key in the error.
    pub fn check_supported<const N: usize>(
        place: &str,
        settings: [(&str, String, bool, &'static str); N],
    ) -> Result<(), ConfigError> {
        match settings.into_iter().find(|(_, _, is_supported, _)| !is_supported) {
            None => Ok(()),
            Some((key, value, _, supported)) => {
                Err(ConfigError::Unsupported { field: format!("{place}{key}"), value, supported })
            }
        }
    }
}
