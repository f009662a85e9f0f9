//! Keys of a GGUF file that begin with the name of its architecture.

use super::settings::Settings;
use crate::checkpoint::error::CheckpointError;

pub(super) const VALUE_LENGTH: &str = "attention.value_length";
pub(super) const ROTATED: &str = "rope.dimension_count";

/// The settings of the file's architecture.
pub(super) struct Keys<'s, 'f> {
    pub settings: &'s Settings<'f>,
    pub architecture: &'static str,
}

impl Keys<'_, '_> {
    pub fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    pub fn number(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        self.settings.number(&self.name(key))
    }

    pub fn required(&self, key: &str) -> Result<u64, CheckpointError> {
        self.settings.required(&self.name(key), self.number(key)?)
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.settings.float(&self.name(key))
    }

    pub fn float_required(&self, key: &str) -> Result<f64, CheckpointError> {
        self.settings.required(&self.name(key), self.float(key)?)
    }

    pub fn refused(&self, key: &str, value: impl ToString, supported: &str) -> CheckpointError {
        self.settings.refused(&self.name(key), value, supported)
    }
}
