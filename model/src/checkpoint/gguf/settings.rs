//! The settings of a GGUF file, by name, and the supported architectures.

use std::collections::BTreeMap;

use serde_json::Value;

use super::header::Setting;
use crate::checkpoint::error::CheckpointError;

/// A family's description of its GGUF files.
#[derive(Clone, Copy, Debug)]
pub struct GgufArchitecture {
    /// `general.architecture`, the prefix of the settings.
    pub name: &'static str,
    /// `architectures` in the generated `config.json`.
    pub class: &'static str,
    /// `model_type` in the generated `config.json`.
    pub model_type: &'static str,
    pub layers: GgufLayers,
    /// The vision encoder that may be in a second file next to the model; `None` for families
    /// without pictures.
    pub vision: Option<GgufVision>,
}

/// The layers of an architecture, and how its files differ from Hugging Face checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufLayers {
    Attention,
    /// The rows of queries and keys are ordered for rotary pairs of adjacent elements.
    PairedAttention,
    /// Layers with gated delta nets, and norms whose weights are centered on zero.
    Hybrid {
        has_experts: bool,
    },
    /// Norms before and after attention and MLP, with weights centered on zero, and layers with a
    /// sliding window.
    Gemma3,
    /// Like `Gemma3`, with weights of norms as in Hugging Face checkpoints, and with other heads in
    /// layers with full attention.
    Gemma4,
}

/// The files of a checkpoint, by name, without the weights.
pub type NamedFiles = Vec<(&'static str, Vec<u8>)>;

/// A family's description of the files with its vision encoder.
#[derive(Clone, Copy, Debug)]
pub struct GgufVision {
    /// `architectures` in the generated `config.json` of a model with pictures.
    pub class: &'static str,
    /// `model_type` in the generated `config.json` of a model with pictures.
    pub model_type: &'static str,
    /// `clip.projector_type` of the file.
    pub projector: &'static str,
    /// Returns the settings files of processors, such as `preprocessor_config.json`, of the
    /// released checkpoints that match this `config.json`.
    pub processors: fn(&Value) -> NamedFiles,
}

impl GgufArchitecture {
    /// An architecture without pictures, whose name is also the `model_type`.
    pub const fn of_text(name: &'static str, class: &'static str, layers: GgufLayers) -> Self {
        GgufArchitecture { name, class, model_type: name, layers, vision: None }
    }
}

/// The settings of a file, by name.
pub(super) struct Settings<'f> {
    pub file: &'f str,
    pub values: &'f BTreeMap<&'f str, Setting<'f>>,
}

impl<'f> Settings<'f> {
    /// Refuses files whose `general.type`, if present, is not `expected`, and files that contain
    /// only a part of a model.
    pub fn check(&self, expected: &str) -> Result<(), CheckpointError> {
        if let Some(kind) = self.text("general.type")?
            && kind != expected
        {
            return Err(self.refused("general.type", kind, expected));
        }
        match self.number("split.count")? {
            None | Some(0 | 1) => Ok(()),
            Some(count) => Err(self.refused("split.count", count, "one file, as `llama-gguf-split --merge` makes it")),
        }
    }

    pub fn architecture(&self, known: &[GgufArchitecture]) -> Result<GgufArchitecture, CheckpointError> {
        const NAME: &str = "general.architecture";
        let name = self.required(NAME, self.text(NAME)?)?;
        let found = known.iter().find(|architecture| architecture.name == name);
        let names = || known.iter().map(|known| known.name).collect::<Vec<_>>().join(", ");
        found.copied().ok_or_else(|| self.refused(NAME, name, &names()))
    }

    pub fn get(&self, name: &str) -> Option<Setting<'f>> {
        self.values.get(name).copied()
    }

    /// A setting that is a count or an id.
    pub fn number(&self, name: &str) -> Result<Option<u64>, CheckpointError> {
        let number = |value| match value {
            Setting::Unsigned(number) => Ok(number),
            Setting::Signed(number) => u64::try_from(number).map_err(|_| value),
            value => Err(value),
        };
        self.read(name, number, "a whole number")
    }

    pub fn float(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        let float = |value| match value {
            Setting::Float(number) if number.is_finite() => Ok(number),
            Setting::Unsigned(number) => Ok(number as f64),
            value => Err(value),
        };
        self.read(name, float, "a finite number")
    }

    pub fn text(&self, name: &str) -> Result<Option<&'f str>, CheckpointError> {
        self.read(name, |value| if let Setting::Text(text) = value { Ok(text) } else { Err(value) }, "a text")
    }

    /// A setting that is a list of strings.
    pub fn texts(&self, name: &str) -> Result<Option<Vec<&'f str>>, CheckpointError> {
        let text = |value| if let Setting::Text(text) = value { Some(text) } else { None };
        self.list(name, text, "a list of texts")
    }

    /// A setting that is a list of whole numbers.
    pub fn numbers(&self, name: &str) -> Result<Option<Vec<i64>>, CheckpointError> {
        let number = |value| match value {
            Setting::Signed(number) => Some(number),
            Setting::Unsigned(number) => i64::try_from(number).ok(),
            _ => None,
        };
        self.list(name, number, "a list of whole numbers")
    }

    /// A setting that is a list of true or false.
    pub fn switches(&self, name: &str) -> Result<Option<Vec<bool>>, CheckpointError> {
        let switch = |value| if let Setting::Bool(is_on) = value { Some(is_on) } else { None };
        self.list(name, switch, "a list of true or false")
    }

    /// A setting that is true or false.
    pub fn switch(&self, name: &str) -> Result<Option<bool>, CheckpointError> {
        self.read(name, |value| if let Setting::Bool(is_on) = value { Ok(is_on) } else { Err(value) }, "true or false")
    }

    /// A setting that is a list of floating-point numbers, which may be infinite or NaN.
    pub fn floats(&self, name: &str) -> Result<Option<Vec<f64>>, CheckpointError> {
        let number = |value| if let Setting::Float(number) = value { Some(number) } else { None };
        self.list(name, number, "a list of numbers")
    }

    fn list<T>(
        &self,
        name: &str,
        entry: impl Fn(Setting<'f>) -> Option<T>,
        wanted: &str,
    ) -> Result<Option<Vec<T>>, CheckpointError> {
        let entries = |value| match value {
            Setting::List(list) => list.iter().map(&entry).collect::<Option<_>>().ok_or(value),
            value => Err(value),
        };
        self.read(name, entries, wanted)
    }

    fn read<T>(
        &self,
        name: &str,
        read: impl FnOnce(Setting<'f>) -> Result<T, Setting<'f>>,
        wanted: &str,
    ) -> Result<Option<T>, CheckpointError> {
        self.get(name).map(read).transpose().map_err(|value| self.refused(name, value, wanted))
    }

    pub fn required<T>(&self, name: &str, value: Option<T>) -> Result<T, CheckpointError> {
        value.ok_or_else(|| self.refused(name, "absent", "a file that has it"))
    }

    pub fn refused(&self, setting: &str, value: impl ToString, supported: &str) -> CheckpointError {
        let (file, [setting, value]) = (self.file.to_owned(), [setting.to_owned(), value.to_string()].map(cut_short));
        CheckpointError::Setting { file, setting, value, supported: supported.to_owned() }
    }
}

/// Truncates a string from the file for an error message, because the string may be megabytes long.
fn cut_short(text: String) -> String {
    text.chars().take(SHOWN_MAX).collect()
}

/// Maximum number of characters of a text of the file in an error message.
const SHOWN_MAX: usize = 200;
