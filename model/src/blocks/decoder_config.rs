//! A decoder's numbers, read from a Hugging Face `config.json`.

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use super::decoder::DecoderConfig;

/// A `config.json` that does not describe a model that can be built.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A field is missing or of another type.
    #[error("config.json: {0}")]
    Field(#[from] serde_json::Error),
    /// A field has a value that no code here serves.
    #[error("config.json: {field} is {value}, supported: {supported}")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What would be served.
        supported: &'static str,
    },
    /// Two fields contradict each other.
    #[error("config.json: {0}")]
    Contradiction(String),
}

/// Widths that no model reaches. Below them no product of a configuration's numbers overflows.
pub const WIDTH_MAX: usize = 1 << 20;

/// Heads, and elements of one, likewise.
const HEAD_MAX: usize = 1 << 12;

impl ConfigError {
    /// Refuses a size that is zero or larger than any model's: it would overflow, or ask for absurd tensors.
    pub fn check_size(field: &'static str, value: usize, most: usize) -> Result<(), ConfigError> {
        match (1..=most).contains(&value) {
            true => Ok(()),
            false => Err(ConfigError::Contradiction(format!("{field} is {value}, not from 1 to {most}"))),
        }
    }
}

#[derive(Deserialize)]
struct Fields {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f32,
    rope_theta: Option<f64>,
    rope_scaling: Option<Rope>,
    rope_parameters: Option<Rope>,
    max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    use_sliding_window: bool,
    hidden_act: Option<String>,
}

#[derive(Clone, Default, Deserialize)]
struct Rope {
    rope_type: Option<String>,
    /// The older spelling of `rope_type`; files that were saved again have both.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    mrope_section: Option<Vec<usize>>,
}

/// What checkpoints leave out when it is ten thousand (Hugging Face's default for Qwen2).
const ROPE_THETA_DEFAULT: f64 = 10_000.0;

impl DecoderConfig {
    /// Reads the text fields of `config`: at the top as the released Qwen2 and Qwen2.5-VL checkpoints have them, or
    /// in `text_config` as newer versions of transformers write them.
    pub fn read(config: &Value) -> Result<Self, ConfigError> {
        let fields: Fields = serde_json::from_value(with_text_config(config))?;
        refuse_unsupported(&fields)?;
        check_sizes(&fields)?;
        let heads = fields.num_attention_heads;
        let kv_heads = fields.num_key_value_heads.unwrap_or(heads);
        ConfigError::check_size("num_key_value_heads", kv_heads, HEAD_MAX)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(ConfigError::Contradiction(format!("{heads} query heads do not share {kv_heads} key heads")));
        }
        let head_dim = fields.head_dim.unwrap_or(fields.hidden_size / heads);
        ConfigError::check_size("head_dim", head_dim, HEAD_MAX)?;
        if !head_dim.is_multiple_of(2) {
            return Err(ConfigError::Contradiction(format!(
                "a head of {head_dim} elements cannot be rotated in pairs"
            )));
        }
        let rope = fields.rope_parameters.or(fields.rope_scaling).unwrap_or_default();
        Ok(DecoderConfig {
            vocabulary: fields.vocab_size,
            hidden: fields.hidden_size,
            intermediate: fields.intermediate_size,
            layers: fields.num_hidden_layers,
            heads,
            kv_heads,
            head_dim,
            norm_epsilon: fields.rms_norm_eps,
            rope_theta: rope.rope_theta.or(fields.rope_theta).unwrap_or(ROPE_THETA_DEFAULT),
            rope_sections: sections(rope.mrope_section, head_dim)?,
            context_tokens: fields.max_position_embeddings,
            tied_embeddings: fields.tie_word_embeddings,
        })
    }
}

/// The fields of `text_config` over those of the top level.
fn with_text_config(config: &Value) -> Value {
    let mut fields = config.clone();
    if let (Some(fields), Some(text)) = (fields.as_object_mut(), config.get("text_config").and_then(Value::as_object)) {
        for (name, value) in text {
            fields.insert(name.clone(), value.clone());
        }
        // The whole model's word on tying stands above the text part's default.
        if let Some(tied) = config.get("tie_word_embeddings") {
            fields.insert("tie_word_embeddings".to_owned(), tied.clone());
        }
    }
    fields
}

fn check_sizes(fields: &Fields) -> Result<(), ConfigError> {
    ConfigError::check_size("vocab_size", fields.vocab_size, 1 << 24)?;
    ConfigError::check_size("hidden_size", fields.hidden_size, WIDTH_MAX)?;
    ConfigError::check_size("intermediate_size", fields.intermediate_size, WIDTH_MAX)?;
    ConfigError::check_size("num_hidden_layers", fields.num_hidden_layers, HEAD_MAX)?;
    ConfigError::check_size("num_attention_heads", fields.num_attention_heads, HEAD_MAX)
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ConfigError> {
    if let Some(act) = fields.hidden_act.as_ref().filter(|act| *act != "silu") {
        return Err(ConfigError::Unsupported { field: "hidden_act", value: act.clone(), supported: "silu" });
    }
    if fields.use_sliding_window {
        return Err(ConfigError::Unsupported {
            field: "use_sliding_window",
            value: "true".to_owned(),
            supported: "false",
        });
    }
    let ropes = [&fields.rope_scaling, &fields.rope_parameters].into_iter().flatten();
    let kinds = ropes.flat_map(|rope| [&rope.rope_type, &rope.r#type]).flatten();
    for kind in kinds {
        if kind != "default" && kind != "mrope" {
            return Err(ConfigError::Unsupported {
                field: "rope_scaling.type",
                value: kind.clone(),
                supported: "default, mrope",
            });
        }
    }
    Ok(())
}

fn sections(sections: Option<Vec<usize>>, head_dim: usize) -> Result<Vec<usize>, ConfigError> {
    let sections = sections.unwrap_or_else(|| vec![head_dim / 2]);
    let pairs = sections.iter().try_fold(0usize, |pairs, section| pairs.checked_add(*section));
    if pairs != Some(head_dim / 2) || !matches!(sections.len(), 1 | 3) {
        return Err(ConfigError::Contradiction(format!(
            "mrope_section {sections:?} does not share the {} pairs of a head among one or three axes",
            head_dim / 2
        )));
    }
    Ok(sections)
}
