//! Rotary position settings of a `config.json`: at the top level, in
//! `rope_scaling` or in `rope_parameters`.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    config_error::ConfigError,
    config_keys,
    rope_scaling::RopeScaling,
    sliding_window::{FULL, SLIDING},
};

#[derive(Debug, Default, PartialEq)]
pub struct RopeConfig {
    pub theta: f64,
    pub scaling: RopeScaling,
    /// Number of element pairs that rotate with each position axis, if the file has this key.
    pub sections: Option<Vec<usize>>,
    /// `true` if pairs alternate between the axes; `None` if the file does not have this key.
    pub interleaved: Option<bool>,
    /// The fraction of a head's elements that is rotated, if the file has this key.
    pub partial: Option<f64>,
}

#[derive(Clone, Deserialize)]
struct Outer {
    rope_theta: f64,
    rope_scaling: Option<Map<String, Value>>,
    rope_parameters: Option<Map<String, Value>>,
    max_position_embeddings: Option<usize>,
    partial_rotary_factor: Option<f64>,
    rope_local_base_freq: Option<f64>,
}

#[derive(Default, Deserialize)]
struct Inner {
    rope_type: Option<String>,
    /// The older name of `rope_type`. Files saved again by newer transformers versions have both.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    mrope_section: Option<Vec<usize>>,
    mrope_interleaved: Option<bool>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
}

/// Keys that are read for every type.
const ALWAYS: [&str; 4] = ["rope_type", "type", "rope_theta", "mrope_section"];

/// RoPE type of Gemma 4. Only the pairs with the highest frequencies are rotated, with the
/// frequencies that they have if the whole head is rotated.
const PROPORTIONAL: &str = "proportional";

/// Types that scale frequencies, and the keys that are read for each type.
const SCALED: [(&str, &[&str]); 5] = [
    ("linear", &["factor"]),
    (PROPORTIONAL, &["factor", "partial_rotary_factor"]),
    ("dynamic", &["factor"]),
    ("llama3", &["factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"]),
    (
        "yarn",
        &[
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ],
    ),
];

impl RopeConfig {
    /// Reads `rope_scaling`, or `rope_parameters` if `rope_scaling` is missing or empty. If that
    /// object has no `rope_theta`, the top-level `rope_theta` is used. This is the order of
    /// transformers 5.17 (`RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`). `types` are
    /// the values that mean unscaled frequencies. `more` are additional keys that only this model
    /// reads. `fields` must have `rope_theta`, possibly from the defaults.
    pub fn read(place: &str, fields: &Map<String, Value>, types: &[&str], more: &[&str]) -> Result<Self, ConfigError> {
        let outer: Outer = serde_json::from_value(fields.clone().into())?;
        let is_there = |rope: &Map<String, Value>| !rope.is_empty();
        let scaling = outer.rope_scaling.clone().filter(is_there).map(|rope| ("rope_scaling", rope));
        let parameters = outer.rope_parameters.clone().filter(is_there).map(|rope| ("rope_parameters", rope));
        let Some((name, rope)) = scaling.or(parameters) else {
            let partial = outer.partial_rotary_factor;
            return Ok(RopeConfig { theta: outer.rope_theta, partial, ..RopeConfig::default() });
        };
        RopeConfig::of(&format!("{place}{name}."), &rope, &outer, types, more)
    }

    /// Reads the settings of the layers with full attention and of the layers with a sliding
    /// window, in this order. `rope_parameters` has an object for each kind. Older files have
    /// `rope_theta` and `rope_scaling` for full attention, and `rope_local_base_freq` for the
    /// others (transformers 5.17, `Gemma3TextConfig.convert_rope_params_to_dict`). `fields` must
    /// have `rope_theta` and `rope_local_base_freq`, possibly from the defaults.
    pub fn read_by_kind(place: &str, fields: &Map<String, Value>, types: &[&str]) -> Result<[Self; 2], ConfigError> {
        let outer: Outer = serde_json::from_value(fields.clone().into())?;
        let local = Outer { rope_theta: outer.rope_local_base_freq.unwrap_or(outer.rope_theta), ..outer.clone() };
        let parameters = outer.rope_parameters.clone().unwrap_or_default();
        let place_of = |key: &str| format!("{place}rope_parameters.{key}");
        let is_unknown =
            |key: &str, value: &Value| ![FULL, SLIDING].contains(&key) && !config_keys::is_neutral(key, value);
        if let Some((key, value)) = parameters.iter().find(|(key, value)| is_unknown(key, value)) {
            return Err(config_keys::unknown(&place_of(""), key, value));
        }
        let of_kind = |kind: &str| config_keys::part(&parameters, kind).map(|rope| rope.cloned().unwrap_or_default());
        let (mut full, sliding) = (of_kind(FULL)?, of_kind(SLIDING)?);
        let scaling = outer.rope_scaling.clone().filter(|scaling| !scaling.is_empty());
        let full_place = if scaling.is_some() { format!("{place}rope_scaling.") } else { place_of("full_attention.") };
        full.extend(scaling.into_iter().flatten());
        Ok([
            RopeConfig::of(&full_place, &full, &outer, types, &[])?,
            RopeConfig::of(&place_of("sliding_attention."), &sliding, &local, types, &[])?,
        ])
    }

    /// The settings of the object `rope`. `place` is its prefix in errors, `outer` has the fields
    /// around it, and the other arguments are as for [`read`](Self::read).
    fn of(
        place: &str,
        rope: &Map<String, Value>,
        outer: &Outer,
        types: &[&str],
        more: &[&str],
    ) -> Result<Self, ConfigError> {
        let inner: Inner = serde_json::from_value(rope.clone().into())?;
        let kind = inner.kind(place, types)?;
        let own = SCALED.iter().find(|(name, _)| *name == kind).map_or(&[][..], |(_, keys)| keys);
        let is_read = |key: &str| ALWAYS.contains(&key) || own.contains(&key) || more.contains(&key);
        if let Some((key, value)) =
            rope.iter().find(|(key, value)| !is_read(key) && !config_keys::is_neutral(key, value))
        {
            return Err(config_keys::unknown(place, key, value));
        }
        let partial = inner.partial_rotary_factor.or(outer.partial_rotary_factor).filter(|_| kind != PROPORTIONAL);
        Ok(RopeConfig {
            theta: inner.rope_theta.unwrap_or(outer.rope_theta),
            scaling: inner.scaling(kind, place, outer.max_position_embeddings)?,
            sections: inner.mrope_section,
            interleaved: inner.mrope_interleaved,
            partial,
        })
    }

    /// Number of elements of a head of `head_dim` elements that are rotated.
    ///
    /// # Errors
    /// The number of elements is 0, odd, or larger than `head_dim`.
    pub fn rotary_dim(&self, place: &str, head_dim: usize) -> Result<usize, ConfigError> {
        let Some(partial) = self.partial else { return Ok(head_dim) };
        // Rounded down, as in transformers 5.17 (`compute_default_rope_parameters`).
        let elements = (head_dim as f64 * partial) as usize;
        if (2..=head_dim).contains(&elements) && elements.is_multiple_of(2) {
            return Ok(elements);
        }
        let text = format!(
            "{place}partial_rotary_factor {partial} rotates {elements} of a head's {head_dim} elements; expected an \
             even number from 2 to {head_dim}"
        );
        Err(ConfigError::Contradiction(text))
    }
}

impl Inner {
    /// The scaling type, which must be the same under both keys. The result is empty if the
    /// type means unscaled frequencies.
    fn kind(&self, place: &str, types: &[&str]) -> Result<&str, ConfigError> {
        let mut kinds = Vec::new();
        for (key, kind) in [("rope_type", &self.rope_type), ("type", &self.r#type)] {
            let Some(kind) = kind.as_deref() else { continue };
            let is_known = |name: &str| name == kind && (name != PROPORTIONAL || types.contains(&PROPORTIONAL));
            match SCALED.iter().find(|(name, _)| is_known(name)) {
                Some((name, _)) => kinds.push(*name),
                None if types.contains(&kind) => kinds.push(""),
                None => {
                    return Err(ConfigError::Unsupported {
                        field: format!("{place}{key}"),
                        value: kind.to_owned(),
                        supported: "default, linear, dynamic, llama3, yarn, and mrope for positions of pictures",
                    });
                }
            }
        }
        match kinds[..] {
            [] => Ok(""),
            [kind] => Ok(kind),
            [one, other, ..] if one == other => Ok(one),
            _ => Err(ConfigError::Contradiction(format!("{place}rope_type and {place}type differ"))),
        }
    }

    /// Checks the numbers that the scaling type `kind` uses, and returns the scaling. `context` is
    /// the file's `max_position_embeddings`.
    fn scaling(&self, kind: &str, place: &str, context: Option<usize>) -> Result<RopeScaling, ConfigError> {
        let refuse = |key: &str, rule: &str| {
            Err(ConfigError::Contradiction(format!("{place}{key} must be {rule} where the type is {kind}")))
        };
        if kind.is_empty() {
            return Ok(RopeScaling::Plain);
        }
        let original_context = self.original_max_position_embeddings.or(context).filter(|tokens| *tokens > 0);
        let implied = context.zip(original_context).map(|(context, original)| context as f64 / original as f64);
        let factor = match kind {
            "yarn" => self.factor.or(implied),
            PROPORTIONAL => self.factor.or(Some(1.0)),
            _ => self.factor,
        };
        let Some(factor) = factor.filter(|factor| *factor >= 1.0 && factor.is_finite()) else {
            return refuse("factor", "1 or more");
        };
        match (kind, original_context) {
            ("linear", _) => Ok(RopeScaling::Linear { factor }),
            (PROPORTIONAL, _) => match self.partial_rotary_factor.unwrap_or(1.0) {
                rotated if (0.0..=1.0).contains(&rotated) => Ok(RopeScaling::Proportional { rotated, factor }),
                _ => refuse("partial_rotary_factor", "from 0 to 1"),
            },
            // This type changes frequencies only for sequences longer than
            // `max_position_embeddings`, and no admitted sequence is longer.
            ("dynamic", _) => Ok(RopeScaling::Plain),
            (_, None) => refuse("original_max_position_embeddings", "given"),
            ("llama3", Some(original_context)) => match (self.low_freq_factor, self.high_freq_factor) {
                (Some(low_factor), Some(high_factor)) if low_factor > 0.0 && high_factor > low_factor => {
                    Ok(RopeScaling::Llama3 { factor, low_factor, high_factor, original_context })
                }
                _ => refuse("high_freq_factor", "greater than low_freq_factor, which must be greater than 0,"),
            },
            (_, Some(original_context)) => {
                // 0 also means the default, as in transformers 5.17 (`_compute_yarn_parameters`).
                let or = |given: Option<f64>, default: f64| given.filter(|given| *given != 0.0).unwrap_or(default);
                let (beta_fast, beta_slow) = (or(self.beta_fast, 32.0), or(self.beta_slow, 1.0));
                if !(beta_slow > 0.0 && beta_fast >= beta_slow) {
                    return refuse("beta_fast", "at least beta_slow, which must be greater than 0,");
                }
                let attention_factor = self.attention_factor.unwrap_or_else(|| self.yarn_attention(factor));
                if !(attention_factor > 0.0 && attention_factor.is_finite()) {
                    return refuse("attention_factor", "greater than 0");
                }
                let truncates = self.truncate.unwrap_or(true);
                Ok(RopeScaling::Yarn { factor, beta_fast, beta_slow, truncates, attention_factor, original_context })
            }
        }
    }

    /// YaRN's factor for queries and keys if the file has no `attention_factor`: section 3.4 of the
    /// paper, as implemented in transformers.
    fn yarn_attention(&self, factor: f64) -> f64 {
        let scale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
        match (self.mscale, self.mscale_all_dim) {
            (Some(one), Some(other)) if one != 0.0 && other != 0.0 => scale(one) / scale(other),
            _ => scale(1.0),
        }
    }
}
