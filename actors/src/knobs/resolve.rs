//! Conversion of names and values to the options with which a model is loaded.

use std::time::Duration;

use bursar_budgets::Bytes;
use bursar_model::checkpoint::CheckpointOrigin;
use serde_json::Value;

use crate::scheduler::{DraftSource, NgramSizes};

use super::{
    DraftMethod, DraftQuantization, Knob, Knobs, Limits, LoadOptions, Names, error::KnobError, error::described, nested,
};

/// Default number of draft tokens per sequence and step for prompt lookup.
const DRAFT_TOKENS: usize = 4;

/// Default number of draft tokens per sequence and step for a separate draft model.
const DRAFT_MODEL_TOKENS: usize = 3;

impl Knobs {
    /// Reads settings by any known name. Values are as in JSON, or text as typed by a user.
    ///
    /// # Errors
    /// An unknown name, a value that the knob does not accept, two names of one knob with different
    /// values, or the errors of [`check`](Self::check).
    pub fn from_settings<N: Into<String>>(settings: impl IntoIterator<Item = (N, Value)>) -> Result<Self, KnobError> {
        Ok(Knobs::named_from(settings)?.0)
    }

    /// Like [`from_settings`](Self::from_settings), but also returns the names used.
    ///
    /// # Errors
    /// The errors of [`from_settings`](Self::from_settings).
    pub fn named_from<N: Into<String>>(
        settings: impl IntoIterator<Item = (N, Value)>,
    ) -> Result<(Self, Names), KnobError> {
        let mut knobs = Knobs::default();
        let mut requested: Vec<(&'static str, String, Value)> = Vec::new();
        let mut names = Names::default();
        for (name, value) in settings {
            let name = name.into();
            // `null` means that the value is not set. For `max_model_len`, -1 is vLLM's way to
            // derive the context from the model and the device.
            if value.is_null() || (name == "max_model_len" && described(&value) == "-1") {
                continue;
            }
            let object = nested::is_nested(&name).then(|| nested::object(&name, &value)).transpose()?;
            let settings = match &object {
                Some(object) => nested::settings(&name, object)?,
                None => {
                    let knob = Knob::named(&name).ok_or_else(|| KnobError::unknown(&name))?;
                    vec![(name, knob.name, value)]
                }
            };
            for (name, knob, value) in settings {
                // Read the value under the knob's own name. Errors use the name that the user
                // typed.
                let differs = knobs.put(knob, &value).map_err(|error| error.about(&name))?;
                if let Some((_, first, first_value)) =
                    requested.iter().find(|(requested, ..)| differs && *requested == knob)
                {
                    return Err(KnobError::ConflictingValues {
                        knob,
                        first: first.clone(),
                        first_value: described(first_value),
                        second_value: described(&value),
                        second: name,
                    });
                }
                names.insert(knob, name.clone(), object.clone().map(Value::Object));
                requested.push((knob, name, value));
            }
        }
        knobs.check()?;
        Ok((knobs, names))
    }

    /// Checks that the settings do not contradict each other.
    ///
    /// # Errors
    /// [`KnobError::Contradiction`]. [`KnobError::Value`] for sizes of n-grams that contradict
    /// `draft_method` or each other.
    pub fn check(&self) -> Result<(), KnobError> {
        let pairs = [
            (
                self.memory_fraction.is_some() && self.device_fraction.is_some(),
                "memory_fraction",
                "device_fraction",
                "the size of the KV cache",
            ),
            (self.kv_tokens.is_some() && self.kv_bytes.is_some(), "kv_tokens", "kv_bytes", "the size of the KV cache"),
            (
                self.picture_pixels.is_some() && self.picture_patches.is_some(),
                "picture_pixels",
                "picture_patches",
                "the maximum size of a picture",
            ),
        ];
        for (both, first, second, what) in pairs {
            if both {
                return Err(KnobError::Contradiction { first, second, what });
            }
        }
        let sizes = [("draft_ngram_min", self.draft_ngram_min), ("draft_ngram_max", self.draft_ngram_max)];
        if let Some(expected) = match self.draft_method() {
            Some(DraftMethod::Mtp) => Some("no value, because `draft_method` is mtp"),
            Some(DraftMethod::Eagle3) => Some("no value, because `draft_method` is eagle3"),
            _ => None,
        } && let Some((name, size)) = sizes.into_iter().find_map(|(name, size)| Some((name, size?)))
        {
            return Err(KnobError::value(name, &size.into(), expected));
        }
        if let (Some(name), Some(DraftMethod::Ngram | DraftMethod::None)) = (&self.draft_model, self.draft_method) {
            let expected = "no value, because `draft_method` is neither eagle3 nor mtp";
            return Err(KnobError::value("draft_model", &name.as_str().into(), expected));
        }
        match self.ngram_sizes() {
            Some(NgramSizes { min, max }) if min > max => {
                Err(KnobError::value("draft_ngram_min", &min.into(), "a whole number of at most `draft_ngram_max`"))
            }
            _ => Ok(()),
        }
    }

    /// Returns a sentence for each setting that has no effect, with the reason.
    pub fn notes(&self) -> Vec<&'static str> {
        let notes = [(
            self.disable_log_requests == Some(true),
            "disable_log_requests affects only the log of `bursar serve`; logs never contain the text of a request",
        )];
        notes.into_iter().filter(|(is_said, _)| *is_said).map(|(_, note)| note).collect()
    }

    /// Returns the sizes of the n-grams that are looked up, if set. As in vLLM, both sizes are
    /// equal if only one is set.
    fn ngram_sizes(&self) -> Option<NgramSizes> {
        let (min, max) = (self.draft_ngram_min.or(self.draft_ngram_max)?, self.draft_ngram_max);
        Some(NgramSizes { min, max: max.unwrap_or(min) })
    }

    /// Returns the method that drafts tokens, if set. If only a draft model is set, the method is EAGLE-3.
    fn draft_method(&self) -> Option<DraftMethod> {
        self.draft_method.or(self.draft_model.as_ref().map(|_| DraftMethod::Eagle3))
    }

    /// Returns `swap_space` in bytes, if set.
    pub fn swap_bytes(&self) -> Option<Bytes> {
        self.swap_space.map(|gibibytes| Bytes((gibibytes * Bytes::gib(1).0 as f64) as u64))
    }

    /// Returns the options to load a model with. Knobs that are not set stay as in `base`. Four
    /// knobs are not used here: `canary`, `sleep_for_memory` and `host_bytes` belong to the runtime
    /// ([`RuntimeConfig`](crate::runtime::RuntimeConfig)), and `disable_log_requests` belongs to
    /// the server.
    ///
    /// # Errors
    /// The errors of [`check`](Self::check).
    pub fn over(&self, base: LoadOptions) -> Result<LoadOptions, KnobError> {
        self.check()?;
        let mut options = base;
        let limits = &mut options.limits;
        *limits = Limits {
            context_tokens: self.context_tokens.or(limits.context_tokens),
            sequences: self.sequences.or(limits.sequences),
            step_tokens: self.step_tokens.or(limits.step_tokens),
            draft_tokens: match self.draft_method() {
                Some(DraftMethod::None) => Some(0),
                Some(DraftMethod::Ngram) => self.draft_tokens.or(Some(DRAFT_TOKENS)),
                Some(DraftMethod::Mtp) if self.draft_model.is_none() => self.draft_tokens.or(Some(1)),
                Some(DraftMethod::Mtp | DraftMethod::Eagle3) => self.draft_tokens.or(Some(DRAFT_MODEL_TOKENS)),
                None => self.draft_tokens.or(limits.draft_tokens),
            },
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
        options.has_fixed_drafts = self.draft_fixed.unwrap_or(options.has_fixed_drafts);
        self.set_drafts(&mut options)?;
        options.swap_space = self.swap_bytes().unwrap_or(options.swap_space);
        options.name = self.model_name.clone().or(options.name);
        options.dtype = self.dtype.unwrap_or(options.dtype);
        options.quantization = self.quantization.or(options.quantization);
        options.kv_cache_dtype = self.kv_cache_dtype.unwrap_or(options.kv_cache_dtype);
        options.state_dtype = self.state_dtype.unwrap_or(options.state_dtype);
        options.tenant_weights = self.tenant_weights.clone().unwrap_or(options.tenant_weights);
        options.requests = self.requests.or(options.requests);
        let set = |option: &mut Option<Duration>, milliseconds: Option<usize>| {
            let Some(milliseconds) = milliseconds else { return };
            *option = (milliseconds > 0).then(|| Duration::from_millis(milliseconds as u64));
        };
        set(&mut options.token_interval, self.token_interval);
        set(&mut options.deadlines.queue, self.queue_deadline);
        set(&mut options.deadlines.first_token, self.first_token_deadline);
        set(&mut options.deadlines.reply, self.reply_deadline);
        set(&mut options.sleep_after, self.sleep_after.map(|seconds| seconds * 1000));
        options.wake_within =
            self.wake_within.map_or(options.wake_within, |seconds| Duration::from_secs(seconds as u64));
        options.threads = self.threads.unwrap_or(options.threads);
        options.disable_custom_all_reduce = self.disable_custom_all_reduce.unwrap_or(options.disable_custom_all_reduce);
        options.full_stress = self.full_stress.unwrap_or(options.full_stress);
        let image = &mut options.image_limits;
        image.bytes_max = self.picture_file_bytes.unwrap_or(image.bytes_max);
        image.pixels_max = self.picture_source_pixels.unwrap_or(image.pixels_max);
        Ok(options)
    }

    /// Sets the options of drafts, except their number.
    ///
    /// # Errors
    /// [`KnobError::Value`] if a method lacks its draft model, or a setting belongs to another method.
    fn set_drafts(&self, options: &mut LoadOptions) -> Result<(), KnobError> {
        options.draft_source = match (self.draft_method(), self.ngram_sizes()) {
            (Some(DraftMethod::Mtp | DraftMethod::Eagle3), _) => DraftSource::DraftHead,
            (_, Some(sizes)) => DraftSource::PromptLookup(sizes),
            (Some(DraftMethod::Ngram), None) => DraftSource::default(),
            (Some(DraftMethod::None) | None, None) => options.draft_source,
        };
        options.draft_model = match (self.draft_method(), &self.draft_model) {
            (_, Some(name)) => Some(CheckpointOrigin::named(name)),
            (None | Some(DraftMethod::Eagle3), None) => options.draft_model.take(),
            (Some(_), None) => None,
        };
        if self.draft_method == Some(DraftMethod::Eagle3) && options.draft_model.is_none() {
            let expected = "`draft_model` to be set to an EAGLE-3 head, or another method";
            return Err(KnobError::value("draft_method", &"eagle3".into(), expected));
        }
        let reads_own_projection = options.draft_source == DraftSource::DraftHead && options.draft_model.is_none();
        if self.draft_quantization == Some(DraftQuantization::Int4) && !reads_own_projection {
            let expected = "no value, because int4 needs `draft_method` mtp without `draft_model`";
            return Err(KnobError::value("draft_quantization", &"int4".into(), expected));
        }
        options.draft_quantization = self.draft_quantization.or(options.draft_quantization);
        Ok(())
    }

    /// Like [`over`](Self::over), with the default options as the base.
    ///
    /// # Errors
    /// The errors of [`check`](Self::check).
    pub fn options(&self) -> Result<LoadOptions, KnobError> {
        self.over(LoadOptions::default())
    }
}

impl KnobError {
    /// Returns the same error with the full name of the setting.
    fn about(self, full: &str) -> Self {
        match self {
            KnobError::Value { value, expected, .. } => KnobError::Value { name: full.to_owned(), value, expected },
            error => error,
        }
    }
}

#[cfg(test)]
mod tests;
