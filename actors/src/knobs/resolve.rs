//! From names and values to what a model is loaded with.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Knob, Knobs, error::KnobError, error::told, nested};
use crate::engine::{Limits, LoadOptions};

/// By which names knobs were set: whoever says another value of one says it by the name that stands there already.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names(BTreeMap<&'static str, String>);

impl Names {
    /// The name that this knob was set by, as it was said; of one inside an object the path, such as
    /// `limit_mm_per_prompt.image`. None if nothing was said of it.
    pub fn of(&self, knob: &str) -> Option<&str> {
        self.0.get(knob).map(String::as_str)
    }
}

impl Knobs {
    /// Reads settings by any names, as they are written in JSON or typed as text.
    ///
    /// # Errors
    /// A name that nobody has, a value that a knob does not take, two names of one knob that say different things.
    pub fn from_settings<N: Into<String>>(settings: impl IntoIterator<Item = (N, Value)>) -> Result<Self, KnobError> {
        Ok(Knobs::named_from(settings)?.0)
    }

    /// The same, with the names.
    ///
    /// # Errors
    /// As [`from_settings`](Self::from_settings).
    pub fn named_from<N: Into<String>>(
        settings: impl IntoIterator<Item = (N, Value)>,
    ) -> Result<(Self, Names), KnobError> {
        let mut knobs = Knobs::default();
        let mut said: Vec<(&'static str, String, Value)> = Vec::new();
        for (name, value) in settings {
            let name = name.into();
            // As JSON writes what is not set, and vLLM a context that follows from the model and the device.
            if value.is_null() || (name == "max_model_len" && told(&value) == "-1") {
                continue;
            }
            let settings = match nested::settings(&name, &value) {
                Some(settings) => settings?,
                None => {
                    let knob = Knob::named(&name).ok_or_else(|| KnobError::unknown(&name))?;
                    vec![(name, knob.name, value)]
                }
            };
            for (name, knob, value) in settings {
                // Read by the knob's name, told by its own.
                let differs = knobs.put(knob, &value).map_err(|error| error.about(&name))?;
                if let Some((_, first, first_value)) = said.iter().find(|(said, ..)| differs && *said == knob) {
                    return Err(KnobError::Twice {
                        knob,
                        first: first.clone(),
                        first_value: told(first_value),
                        second_value: told(&value),
                        second: name,
                    });
                }
                said.push((knob, name, value));
            }
        }
        knobs.check()?;
        let names = said.into_iter().map(|(knob, name, _)| (knob, name)).collect();
        Ok((knobs, Names(names)))
    }

    /// Whether what is set goes together.
    ///
    /// # Errors
    /// [`KnobError::Contradiction`] and [`KnobError::HostSwap`].
    pub fn check(&self) -> Result<(), KnobError> {
        let pairs = [
            (
                self.memory_fraction.is_some() && self.device_fraction.is_some(),
                "memory_fraction",
                "device_fraction",
                "how much keys and values take",
            ),
            (
                self.kv_tokens.is_some() && self.kv_bytes.is_some(),
                "kv_tokens",
                "kv_bytes",
                "how large keys and values are",
            ),
            (
                self.picture_pixels.is_some() && self.picture_patches.is_some(),
                "picture_pixels",
                "picture_patches",
                "how large a picture may be",
            ),
        ];
        for (both, first, second, what) in pairs {
            if both {
                return Err(KnobError::Contradiction { first, second, what });
            }
        }
        match self.swap_space {
            Some(gibibytes) if gibibytes != 0.0 => Err(KnobError::HostSwap { gibibytes: gibibytes.to_string() }),
            _ => Ok(()),
        }
    }

    /// What a model is loaded with; what is not set stays as in `base`. The canary is the runtime's:
    /// [`RuntimeConfig::canary`](crate::runtime::RuntimeConfig).
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn over(&self, base: LoadOptions) -> Result<LoadOptions, KnobError> {
        self.check()?;
        let mut options = base;
        let limits = &mut options.limits;
        *limits = Limits {
            context_tokens: self.context_tokens.or(limits.context_tokens),
            sequences: self.sequences.or(limits.sequences),
            step_tokens: self.step_tokens.or(limits.step_tokens),
            picture_pixels: self.picture_pixels.or(limits.picture_pixels),
            picture_pixels_min: self.picture_pixels_min.or(limits.picture_pixels_min),
            picture_patches: self.picture_patches.or(limits.picture_patches),
            pictures: self.pictures.or(limits.pictures),
            video_frames: self.video_frames.or(limits.video_frames),
            launch_patches: self.launch_patches.or(limits.launch_patches),
        };
        if self.memory_fraction.is_some() || self.device_fraction.is_some() {
            (options.memory_fraction, options.device_fraction) = (self.memory_fraction, self.device_fraction);
        }
        if self.kv_tokens.is_some() || self.kv_bytes.is_some() {
            (options.kv_tokens, options.kv_bytes) = (self.kv_tokens, self.kv_bytes);
        }
        options.requests = self.requests.unwrap_or(options.requests);
        options.threads = self.threads.unwrap_or(options.threads);
        options.full_stress = self.full_stress.unwrap_or(options.full_stress);
        let image = &mut options.image_limits;
        image.bytes_max = self.picture_file_bytes.map_or(image.bytes_max, |bytes| bytes.0);
        image.pixels_max = self.picture_source_pixels.unwrap_or(image.pixels_max);
        Ok(options)
    }

    /// The same over the default.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn options(&self) -> Result<LoadOptions, KnobError> {
        self.over(LoadOptions::default())
    }
}

impl KnobError {
    /// The same about a setting by its full name.
    fn about(self, full: &str) -> Self {
        match self {
            KnobError::Value { value, expected, .. } => KnobError::Value { name: full.to_owned(), value, expected },
            error => error,
        }
    }
}

#[cfg(test)]
mod tests;
