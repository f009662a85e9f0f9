//! What FP8 saves: the same plan without it.

use bursar::{Bytes, Forecast, LoadOptions};
use bursar_actors::{engine::Question, profile::MemoryState};
use bursar_kernels::Target;
use bursar_model::{LoadError, Model, checkpoint::Checkpoint, checkpoint::WeightFormats, flow::CacheFormat};
use serde::Serialize;

use crate::failure::Failure;

/// The plan without what the user wants in FP8.
#[derive(Serialize)]
pub struct Unquantized {
    weight_bytes: Bytes,
    /// None if it does not fit.
    kv_tokens: Option<usize>,
}

impl Unquantized {
    /// Plans `checkpoint` without weights that are rounded while they load and with plain keys and values; `None` if
    /// neither was asked for.
    pub fn of(
        checkpoint: Checkpoint,
        ranks: usize,
        target: Target,
        options: &LoadOptions,
        place: MemoryState,
    ) -> Result<Option<Self>, Failure> {
        let formats = checkpoint.weight_formats().map_err(LoadError::from)?;
        if !matches!(formats, WeightFormats::Made(_)) && checkpoint.cache() == CacheFormat::Plain {
            return Ok(None);
        }
        let checkpoint = checkpoint.with_quantization(None).with_cache(CacheFormat::Plain);
        let model = &Model::plan_heaviest(&checkpoint, &target, ranks)?;
        let question = Question { model, pictures: checkpoint.image_processor.as_ref(), target, options, place };
        let kv_tokens = question.kv_tokens()?;
        Ok(Some(Unquantized { weight_bytes: model.weight_bytes(), kv_tokens }))
    }

    /// What `model`, which is in FP8, saves in comparison, if anything.
    pub fn note(&self, model: &Model, target: &Target, forecast: &Forecast) -> Option<String> {
        let plain = match target {
            Target::Cpu { .. } => "unquantized".to_owned(),
            Target::Cuda(_) => format!("in {}", target.activation().name()),
        };
        let (weights, before) = (model.weight_bytes(), self.weight_bytes);
        // Scales of keys and values are weights too.
        let weights = (weights < before).then(|| format!("weights take {weights} in FP8 instead of {before} {plain}"));
        let kept = match model.cache() {
            CacheFormat::Fp8 => " in FP8",
            CacheFormat::Plain => "",
        };
        let is_more = forecast.fits() && self.kv_tokens != Some(forecast.kv_tokens);
        let tokens = is_more.then(|| {
            let instead = match self.kv_tokens {
                Some(tokens) => tokens.to_string(),
                None => "none, because the model would not fit".to_owned(),
            };
            format!("the KV cache{kept} holds {} tokens instead of {instead}", forecast.kv_tokens)
        });
        let parts: Vec<String> = [weights, tokens].into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join(", and "))
    }
}
