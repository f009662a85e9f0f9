//! Keys of a GGUF file that begin with the name of its architecture.

use super::header::Setting;
use super::settings::Settings;
use crate::checkpoint::error::CheckpointError;

pub(super) const KEY_LENGTH: &str = "attention.key_length";
pub(super) const VALUE_LENGTH: &str = "attention.value_length";
pub(super) const ROTATED: &str = "rope.dimension_count";
pub(super) const THETA: &str = "rope.freq_base";
pub(super) const WINDOW: &str = "attention.sliding_window";

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

    /// A setting of each of the file's `layers`: a list, or one number for all layers.
    pub fn of_layers(&self, key: &str, layers: usize) -> Result<Vec<u64>, CheckpointError> {
        let name = self.name(key);
        if !matches!(self.settings.get(&name), Some(Setting::List(_))) {
            return Ok(vec![self.required(key)?; layers]);
        }
        let listed = self.settings.numbers(&name)?.unwrap_or_default();
        let numbers: Option<Vec<u64>> = listed.iter().map(|number| u64::try_from(*number).ok()).collect();
        match numbers.filter(|numbers| numbers.len() == layers) {
            Some(numbers) => Ok(numbers),
            None => {
                Err(self.refused(key, format!("{listed:?}"), &format!("a number above 0 for each of {layers} layers")))
            }
        }
    }

    /// The number that all layers of one kind have; `None` without such layers.
    pub fn one_number(
        &self,
        key: &str,
        mut of_layers: impl Iterator<Item = u64>,
    ) -> Result<Option<u64>, CheckpointError> {
        let Some(first) = of_layers.next() else { return Ok(None) };
        match of_layers.find(|other| *other != first) {
            None => Ok(Some(first)),
            Some(other) => {
                Err(self.refused(key, format!("{first} and {other}"), "one number for all layers of a kind"))
            }
        }
    }

    pub fn refused(&self, key: &str, value: impl ToString, supported: &str) -> CheckpointError {
        self.settings.refused(&self.name(key), value, supported)
    }
}
