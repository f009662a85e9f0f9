//! Generation defaults: the settings of a checkpoint's `generation_config.json`. They apply to
//! parameters that a request does not set.

use serde_json::Value;

use super::error::SamplingError;
use super::parameters::SamplingParams;

/// A checkpoint's sampling parameters and end tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// Checked sampling parameters. The temperature is 0 if `do_sample` is off, and the seed is 0.
    pub sampling: SamplingParams,
    /// Sampling parameters as vLLM reads the file: a setting that the file omits does not apply,
    /// the default temperature is 1, and `do_sample` is ignored.
    pub listed: SamplingParams,
    /// Tokens that end a reply.
    pub eos_ids: Vec<u32>,
    /// The token at the beginning of a text, if the family uses one.
    pub bos_id: Option<u32>,
}

/// The defaults if there is no file: `sampling` is greedy, [`listed`](GenerationDefaults::listed)
/// samples at temperature 1, and no token ends a reply.
impl Default for GenerationDefaults {
    fn default() -> Self {
        let listed = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
        GenerationDefaults { sampling: SamplingParams::default(), listed, eos_ids: Vec::new(), bos_id: None }
    }
}

impl GenerationDefaults {
    /// Parses the file. Absent settings get transformers' defaults (`GenerationConfig`, 5.17):
    /// `do_sample` false, temperature 1, top-k 50, top-p 1, no penalty.
    ///
    /// # Errors
    /// [`SamplingError::Defaults`] for a setting of the wrong type; [`SamplingError::OutOfRange`].
    pub fn from_json(json: &[u8]) -> Result<Self, SamplingError> {
        let file = serde_json::from_slice::<Value>(json).ok().filter(Value::is_object);
        let file = file.ok_or(SamplingError::Defaults { setting: "(the file)" })?;
        let number = |setting: &'static str, default: f64| match &file[setting] {
            Value::Null => Ok(default),
            value => value.as_f64().ok_or(SamplingError::Defaults { setting }),
        };
        let do_sample = match &file["do_sample"] {
            Value::Null => false,
            value => value.as_bool().ok_or(SamplingError::Defaults { setting: "do_sample" })?,
        };
        let top_k = match &file["top_k"] {
            Value::Null => 50,
            value => value.as_u64().ok_or(SamplingError::Defaults { setting: "top_k" })?,
        };
        let temperature = number("temperature", 1.0)?;
        let sampling = SamplingParams {
            temperature: if do_sample { temperature } else { 0.0 },
            top_k: usize::try_from(top_k).unwrap_or(usize::MAX),
            top_p: number("top_p", 1.0)?,
            min_p: number("min_p", 0.0)?,
            repetition_penalty: number("repetition_penalty", 1.0)?,
            ..SamplingParams::default()
        };
        sampling.check()?;
        let listed_top_k = if file["top_k"].is_null() { 0 } else { sampling.top_k };
        Ok(GenerationDefaults {
            listed: SamplingParams { temperature, top_k: listed_top_k, ..sampling.clone() },
            sampling,
            eos_ids: ids(&file["eos_token_id"], "eos_token_id")?,
            bos_id: ids(&file["bos_token_id"], "bos_token_id")?.first().copied(),
        })
    }
}

/// One id, a list of ids, or null.
fn ids(value: &Value, setting: &'static str) -> Result<Vec<u32>, SamplingError> {
    let one =
        |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or(SamplingError::Defaults { setting });
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(list) => list.iter().map(one).collect(),
        value => Ok(vec![one(value)?]),
    }
}
