//! The memory plan of a quantized model without its quantization, to show what quantization saves.

use bursar::{Bytes, Forecast, LoadOptions};
use bursar_actors::{engine::Question, profile::MemoryState};
use bursar_budgets::grouped;
use bursar_kernels::{Quantization, Target};
use bursar_model::{LoadError, Model, checkpoint::Checkpoint, checkpoint::WeightFormats, flow::CacheFormat};
use serde::Serialize;

use crate::failure::Failure;

/// The plan of the same model without the quantized weights and KV cache that the user asked for.
#[derive(Serialize)]
pub struct Unquantized {
    weight_bytes: Bytes,
    /// Capacity of the KV cache in tokens. `None` if the model does not fit.
    kv_tokens: Option<usize>,
}

impl Unquantized {
    /// Plans `checkpoint` without rounding weights at load and without a quantized KV cache.
    /// Returns `None` if neither was asked for.
    pub fn of(
        checkpoint: Checkpoint,
        ranks: usize,
        target: Target,
        options: &LoadOptions,
        place: MemoryState,
    ) -> Result<Option<Self>, Failure> {
        let formats = checkpoint.weight_formats().map_err(LoadError::from)?;
        if !matches!(formats, WeightFormats::Requested(_)) && checkpoint.cache() == CacheFormat::Plain {
            return Ok(None);
        }
        let checkpoint = checkpoint.with_quantization(None).with_cache(CacheFormat::Plain);
        let model = &Model::plan_heaviest(&checkpoint, &target, ranks)?;
        let question =
            Question { model, pictures: checkpoint.image_processor.as_ref(), checkpoint: None, target, options, place };
        let kv_tokens = question.kv_tokens()?;
        Ok(Some(Unquantized { weight_bytes: model.weight_bytes(), kv_tokens }))
    }

    /// Describes the memory that the quantized `model` saves compared with this plan. Returns
    /// `None` if it saves nothing.
    pub fn note(&self, model: &Model, target: &Target, forecast: &Forecast) -> Option<String> {
        let plain = match target {
            Target::Cpu { .. } => "unquantized".to_owned(),
            Target::Cuda(_) => format!("in {}", target.activation().name()),
        };
        let (weights, before) = (model.weight_bytes(), self.weight_bytes);
        // Scales of a quantized KV cache count as weights, so the weights may be larger than
        // without a quantized KV cache.
        let name = model.quantized_type();
        let weights =
            (weights < before).then(|| format!("weights take {weights} in {name} instead of {before} {plain}"));
        let kept = if model.cache().is_quantized() { format!(" in {}", Quantization::NAME) } else { String::new() };
        let is_more = forecast.fits() && self.kv_tokens != Some(forecast.kv_tokens);
        let tokens = is_more.then(|| {
            let instead = match self.kv_tokens {
                Some(tokens) => grouped(tokens as u64),
                None => "none, because the model would not fit".to_owned(),
            };
            let tokens = grouped(forecast.kv_tokens as u64);
            format!("the KV cache{kept} holds {tokens} tokens instead of {instead}")
        });
        let parts: Vec<String> = [weights, tokens].into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join(", and "))
    }
}
