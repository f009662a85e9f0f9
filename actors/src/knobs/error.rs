//! Settings that are refused, and why.

use bursar_budgets::Hint;
use bursar_model::nearest_names;
use serde_json::Value;
use thiserror::Error;

use super::{Knob, NESTED, TABLE};

/// Why a setting is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KnobError {
    /// No knob has this name.
    #[error("unknown knob {name:?}; the most similar is `{nearest}`")]
    Unknown {
        /// The name that was set.
        name: String,
        /// The most similar known name.
        nearest: &'static str,
    },
    /// A value that the knob does not take.
    #[error("`{name}` is {value}; expected {expected}")]
    Value {
        /// The name that was set.
        name: String,
        /// The value that was set.
        value: String,
        /// The values allowed.
        expected: &'static str,
    },
    /// Two names of one knob were set to different values.
    #[error("`{first}` is {first_value} and `{second}` is {second_value}, but both set `{knob}`")]
    Twice {
        /// The knob.
        knob: &'static str,
        /// The first name.
        first: String,
        /// Its value.
        first_value: String,
        /// The second name.
        second: String,
        /// Its value.
        second_value: String,
    },
    /// Two knobs were set that exclude each other.
    #[error("`{first}` and `{second}` are both set, but each of them sets {what}; set one")]
    Contradiction {
        /// The first knob.
        first: &'static str,
        /// The second knob.
        second: &'static str,
        /// What each of them sets.
        what: &'static str,
    },
    /// A number of videos was set without their frames.
    #[error("`{name}` allows {videos} videos, but Bursar limits the frames of all videos of a request")]
    Videos {
        /// The name that was set.
        name: String,
        /// The number of videos.
        videos: u64,
    },
    /// It is said of the runtime, which may have several models.
    #[error("`{name}` is a setting of the runtime, not a knob of a model")]
    OfRuntime {
        /// The name that was set.
        name: String,
    },
    /// A kind of input was allowed that no model here takes.
    #[error("`{name}` is {value}, but no supported model takes {what}")]
    Modality {
        /// The name that was set.
        name: String,
        /// The value that was set.
        value: String,
        /// The kind of input.
        what: String,
    },
}

impl KnobError {
    pub(super) fn unknown(name: &str) -> Self {
        let known = TABLE.iter().flat_map(|knob| std::iter::once(knob.name).chain(names_of(knob)));
        let known = known.chain(NESTED.iter().map(|nested| nested.name));
        let typed = name.to_lowercase().replace('-', "_");
        if ["tensor_parallel_size", "tp_size", "tp", "device"].contains(&&*typed) {
            return KnobError::OfRuntime { name: name.to_owned() };
        }
        let nearest = nearest_names(&typed, known, 1);
        KnobError::Unknown { name: name.to_owned(), nearest: nearest[0] } // the table has lines
    }

    pub(super) fn value(name: &str, value: &Value, expected: &'static str) -> Self {
        KnobError::Value { name: name.to_owned(), value: told(value), expected }
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
            KnobError::Twice { first, second, .. } => format!("leave out `{first}` or `{second}`"),
            KnobError::Contradiction { first, second, .. } => format!("leave out `{first}` or `{second}`"),
            KnobError::Videos { .. } => {
                "set `video_frames` to the total frames of a request, or give count and num_frames".to_owned()
            }
            KnobError::Modality { name, .. } => format!("set `{name}` to 0 or leave it out"),
        }
    }
}

fn names_of(knob: &'static Knob) -> impl Iterator<Item = &'static str> {
    knob.aliases.iter().map(|alias| alias.name)
}

/// A value as a user types it.
pub(super) fn told(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}
