//! Errors of settings.

use bursar_budgets::Hint;
use serde_json::Value;
use thiserror::Error;

/// Why a setting was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KnobError {
    /// No knob has this name.
    #[error("unknown knob {name:?}; the most similar is `{nearest}`")]
    Unknown {
        name: String,
        /// The most similar known name.
        nearest: &'static str,
    },
    /// The knob does not accept the value.
    #[error("`{name}` is {value}; expected {expected}")]
    Value { name: String, value: String, expected: &'static str },
    /// Two names of one knob were set to different values.
    #[error("`{first}` is {first_value} and `{second}` is {second_value}, but both set `{knob}`")]
    ConflictingValues { knob: &'static str, first: String, first_value: String, second: String, second_value: String },
    /// Two knobs that exclude each other were set.
    #[error("`{first}` and `{second}` are both set, but each of them sets {what}; set one")]
    Contradiction {
        first: &'static str,
        second: &'static str,
        /// The quantity that both knobs set.
        what: &'static str,
    },
    /// A number of videos was set without their number of frames.
    #[error("`{name}` allows {videos} videos, but Bursar limits the frames of all videos of a request")]
    Videos { name: String, videos: u64 },
    /// The setting belongs to the runtime, which may have several models.
    #[error("`{name}` is a setting of the runtime, not a knob of a model")]
    OfRuntime { name: String },
    /// The setting allows a kind of input that no supported model takes.
    #[error("`{name}` is {value}, but no supported model takes {what}")]
    Modality { name: String, value: String, what: String },
}

impl KnobError {
    pub(super) fn value(name: &str, value: &Value, expected: &'static str) -> Self {
        KnobError::Value { name: name.to_owned(), value: described(value), expected }
    }
}

impl Hint for KnobError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            KnobError::Unknown { nearest, .. } => format!("set `{nearest}`, or see docs/knobs.md for all names"),
            KnobError::OfRuntime { .. } => {
                "leave it out, and use `--device` or `--tensor-parallel-size`, or `RuntimeConfig::device` in a program"
                    .to_owned()
            }
            KnobError::Value { name, expected, .. } => format!("set `{name}` to {expected}"),
            KnobError::ConflictingValues { first, second, .. } => format!("leave out `{first}` or `{second}`"),
            KnobError::Contradiction { first, second, .. } => format!("leave out `{first}` or `{second}`"),
            KnobError::Videos { .. } => {
                "set `video_frames` to the total frames of a request, or give count and num_frames".to_owned()
            }
            KnobError::Modality { name, .. } => format!("set `{name}` to 0 or leave it out"),
        }
    }
}

/// A value as a user types it.
pub(super) fn described(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}
