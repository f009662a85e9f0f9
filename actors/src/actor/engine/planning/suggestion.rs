//! Pure: suggestions of single knobs with a value that would make a model fit.

use std::fmt;

use bursar_budgets::Bytes;
use bursar_model::checkpoint::WeightQuantization;
use serde::Serialize;

use crate::{
    engine::LoadOptions,
    knobs::{Names, Setting},
};

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Change {
    /// A number, in the knob's unit.
    Count(u64),
    /// A size in bytes.
    Size(Bytes),
    /// A fraction. Suggested fractions are multiples of 1/1000.
    KvShare(f64),
    /// The format in which weights are quantized while they load. `None` if they are not quantized.
    Format(Option<WeightQuantization>),
}

impl Change {
    /// Returns `options` with one knob set to this value. `None` for a knob that is not one of
    /// these options.
    pub(super) fn over(self, options: &LoadOptions, knob: &str) -> Option<LoadOptions> {
        let mut changed = options.clone();
        let LoadOptions { limits, .. } = &mut changed;
        let count = |value: u64| usize::try_from(value).ok();
        match (knob, self) {
            ("step_tokens", Change::Count(value)) => limits.step_tokens = count(value),
            ("sequences", Change::Count(value)) => limits.sequences = count(value),
            ("context_tokens", Change::Count(value)) => limits.context_tokens = count(value),
            ("picture_pixels", Change::Count(value)) => limits.picture_pixels = Some(value),
            ("picture_patches", Change::Count(value)) => limits.picture_patches = count(value),
            ("launch_patches", Change::Count(value)) => limits.launch_patches = count(value),
            ("pictures", Change::Count(value)) => limits.pictures = count(value),
            ("kv_tokens", Change::Count(value)) => changed.kv_tokens = count(value),
            ("kv_bytes", Change::Size(bytes)) => changed.kv_bytes = Some(bytes),
            ("memory_fraction", Change::KvShare(share)) => changed.memory_fraction = Some(share),
            ("device_fraction", Change::KvShare(share)) => changed.device_fraction = Some(share),
            (QUANTIZATION, Change::Format(format)) => changed.quantization = format,
            _ => return None,
        }
        Some(changed)
    }
}

/// Formats the value as a user types it.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Count(count) => write!(f, "{count}"),
            Change::Size(bytes) if bytes.is_multiple_of(Bytes::mib(1)) => write!(f, "{}MiB", *bytes / Bytes::mib(1)),
            Change::Size(bytes) => write!(f, "{}", bytes.0),
            Change::KvShare(share) => write!(f, "{share}"),
            Change::Format(Some(format)) => write!(f, "{format}"),
            Change::Format(None) => write!(f, "none"),
        }
    }
}

/// A knob, and a value with which the plan would fit if no other knob is changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Suggestion {
    /// Bursar's name for the knob. [`TOTAL`] is the device's memory, which is not a knob of a
    /// model.
    pub knob: &'static str,
    /// The name under which the user set the knob, or Bursar's name if the user did not set it.
    pub name: String,
    /// The knob's current value, lowered to the limits of the model and its image processor.
    pub from: Change,
    /// The nearest value with which the plan fits while all other knobs stay the same. `None` if no
    /// value does.
    pub to: Option<Change>,
    /// The setting that replaces the current setting of that name. `None` if there is no suggested
    /// value, or if the knob is the device's memory.
    pub setting: Option<Setting>,
    /// Bytes that the change makes available, because the model claims less or the device has more.
    /// 0 if there is no suggested value, or if the device has enough memory and only a fraction was
    /// too small.
    pub frees: Bytes,
}

/// The name of the device's memory in suggestions.
pub const TOTAL: &str = "total";

/// The knob that quantizes weights while they load.
pub(super) const QUANTIZATION: &str = "quantization";

impl Suggestion {
    pub(super) fn new(names: &Names, knob: &'static str, from: Change, to: Option<Change>, frees: Bytes) -> Self {
        let name = names.of(knob).unwrap_or(knob).to_owned();
        let setting = to.filter(|_| knob != TOTAL).map(|to| {
            let value = serde_json::to_value(to).expect("a number");
            names.setting(knob, value)
        });
        Suggestion { knob, name, from, to, setting, frees: if to.is_some() { frees } else { Bytes::ZERO } }
    }

    /// Returns `options` with this knob at the suggested value. Returns `None` if there is no
    /// suggested value. Also returns `None` for the device's memory and the canary, which are not
    /// options of a model.
    pub fn over(&self, options: &LoadOptions) -> Option<LoadOptions> {
        self.to?.over(options, self.knob)
    }

    /// Returns all suggestions in one sentence. `None` if there is no suggestion.
    pub fn advice(all: &[Suggestion]) -> Option<String> {
        let helpful = all.iter().filter_map(|suggestion| match (&*suggestion.name, suggestion.to?) {
            (TOTAL, _) => Some(format!("free {} more of the device's memory", suggestion.frees)),
            (name, to) => Some(format!("set `{name}` to {to} instead of {}", suggestion.from)),
        });
        let hopeless = all.iter().filter(|suggestion| suggestion.to.is_none());
        let hopeless = hopeless.map(|suggestion| format!("`{}`", suggestion.name)).collect::<Vec<_>>().join(", ");
        let hopeless = (!hopeless.is_empty()).then(|| format!("changing only one of these is not enough: {hopeless}"));
        let helpful = Some(helpful.collect::<Vec<_>>().join("; or ")).filter(|helpful| !helpful.is_empty());
        let advice = helpful.into_iter().chain(hopeless).collect::<Vec<_>>().join("; ");
        Some(advice).filter(|advice| !advice.is_empty())
    }
}
