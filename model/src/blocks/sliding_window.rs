//! Layers whose attention has a sliding window (Beltagy et al. 2020, arXiv 2004.05150).

use serde::Deserialize;
use serde_json::{Map, Value};

use super::config_error::{ConfigError, HEAD_MAX};

/// The layers of a decoder with a sliding window. A query at position `p` attends to the keys at
/// the positions after `p - tokens`, up to and including `p` (transformers 5.17,
/// `sliding_window_overlay` in `masking_utils.py`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Number of keys that a query attends to, including its own, at least 1.
    pub tokens: usize,
    /// `[layers]`: whether the layer has the window. At least one layer has it.
    pub is_in: Vec<bool>,
}

/// The keys of `config.json` by which a class of transformers 5.17 decides which layers have a
/// window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRule {
    /// No layer has a window, whatever the file says.
    Never,
    /// All layers, if `sliding_window` is a number (`modeling_mistral.py`).
    AllLayers,
    /// All layers, if `sliding_window` is a number and `use_sliding_window` is true
    /// (`configuration_qwen3_moe.py`).
    AllLayersIfUsed,
    /// If `sliding_window` is a number and `use_sliding_window` is true: the layers that
    /// `layer_types` calls `sliding_attention`, or without `layer_types` all layers except the
    /// first `max_window_layers` (`configuration_qwen2.py`).
    PerLayer,
    /// If `sliding_window` is a number: the layers that `layer_types` calls `sliding_attention`, or
    /// without `layer_types`, all layers except every `n`th, where `n` is `sliding_window_pattern`
    /// (`configuration_gemma3.py`).
    Pattern,
    /// Like `Pattern`, but the last layer never has a window (`configuration_gemma4.py`).
    PatternButLast,
}

#[derive(Deserialize)]
struct Fields {
    use_sliding_window: Option<bool>,
    sliding_window: Option<usize>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    sliding_window_pattern: Option<usize>,
}

pub(super) const FULL: &str = "full_attention";
pub(super) const SLIDING: &str = "sliding_attention";

impl SlidingWindow {
    /// Reads the window from a file's fields, merged over the family's defaults. `place` is the
    /// fields' prefix in errors. Returns `None` if no layer has a window. The window may be longer
    /// than the model's context.
    pub fn read(
        place: &str,
        fields: &Map<String, Value>,
        rule: WindowRule,
        layers: usize,
    ) -> Result<Option<Self>, ConfigError> {
        let fields = Fields::deserialize(fields)?;
        let is_used = match rule {
            WindowRule::Never => false,
            WindowRule::AllLayers | WindowRule::Pattern | WindowRule::PatternButLast => true,
            WindowRule::AllLayersIfUsed | WindowRule::PerLayer => fields.use_sliding_window == Some(true),
        };
        let window = fields.sliding_window.filter(|_| is_used);
        let mut is_in: Vec<_> = match (rule, &fields.layer_types) {
            (WindowRule::PerLayer | WindowRule::Pattern | WindowRule::PatternButLast, Some(types)) => {
                types.iter().map(|kind| kind == SLIDING).collect()
            }
            (WindowRule::PerLayer, None) if window.is_some() => {
                let first = fields.max_window_layers.ok_or_else(|| ConfigError::Unsupported {
                    field: format!("{place}max_window_layers"),
                    value: "null".to_owned(),
                    supported: "a number of layers",
                })?;
                (0..layers).map(|layer| layer >= first).collect()
            }
            (WindowRule::Pattern | WindowRule::PatternButLast, None) => {
                let pattern = fields.sliding_window_pattern.unwrap_or(6);
                ConfigError::check_size("sliding_window_pattern", pattern, HEAD_MAX)?;
                (1..=layers).map(|layer| !layer.is_multiple_of(pattern)).collect()
            }
            _ => vec![window.is_some(); layers],
        };
        if let Some(types) = &fields.layer_types {
            check_layer_types(types, layers)?;
            check_kinds(place, types, rule, &is_in)?;
        }
        if let (WindowRule::PatternButLast, Some(last)) = (rule, is_in.last_mut()) {
            *last = false;
        }
        let Some(tokens) = window else {
            return match is_in.iter().position(|is_in| *is_in) {
                None => Ok(None),
                Some(layer) => Err(ConfigError::Contradiction(format!(
                    "{place}layer_types[{layer}] is {SLIDING}, but sliding_window is not set or use_sliding_window \
                     is not true"
                ))),
            };
        };
        if tokens == 0 {
            let (field, value) = (format!("{place}sliding_window"), "0".to_owned());
            return Err(ConfigError::Unsupported { field, value, supported: "null, or at least 1" });
        }
        Ok(is_in.contains(&true).then_some(SlidingWindow { tokens, is_in }))
    }

    /// Whether a layer has the window. The layer of a draft head, which comes after the decoder's
    /// layers, has the window if all of the decoder's layers have it.
    pub fn has(&self, layer: usize) -> bool {
        self.is_in.get(layer).copied().unwrap_or_else(|| self.is_in.iter().all(|is_in| *is_in))
    }
}

/// Refuses `layer_types` whose length is not the number of layers.
pub fn check_layer_types(types: &[String], layers: usize) -> Result<(), ConfigError> {
    if types.len() == layers {
        return Ok(());
    }
    let text = format!("layer_types names {} layers, but num_hidden_layers is {layers}", types.len());
    Err(ConfigError::Contradiction(text))
}

/// Refuses kinds of attention other than full and sliding. If the transformers class ignores
/// `layer_types`, also refuses entries that contradict the attention that the class computes.
fn check_kinds(place: &str, types: &[String], rule: WindowRule, is_in: &[bool]) -> Result<(), ConfigError> {
    let is_listed = matches!(rule, WindowRule::PerLayer | WindowRule::Pattern | WindowRule::PatternButLast);
    let kinds = is_in.iter().map(|is_in| if *is_in { SLIDING } else { FULL });
    match types.iter().zip(kinds).enumerate().find(|(_, (given, kind))| given != kind) {
        None => Ok(()),
        Some((layer, (given, kind))) => Err(ConfigError::Unsupported {
            field: format!("{place}layer_types[{layer}]"),
            value: given.clone(),
            supported: if is_listed { "full_attention and sliding_attention" } else { kind },
        }),
    }
}
