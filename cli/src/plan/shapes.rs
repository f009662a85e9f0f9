//! `bursar plan --shapes`: every shape, and the GPUs that it fits on.

use std::{collections::BTreeMap, fmt, sync::Arc};

use bursar::{Bytes, LoadOptions, StartError};
use bursar_actors::engine::Question;
use bursar_kernels::Target;
use bursar_model::{
    LoadError, Model, checkpoint::Checkpoint, checkpoint::CheckpointSource, checkpoint::WeightQuantization, registry,
    weights::WeightError,
};
use serde::Serialize;

use super::{device_spec::absent_place, gpu::Gpu};
use crate::failure::Failure;

/// All shapes, each planned for each GPU as `bursar plan --shape NAME --gpu GPU` does.
#[derive(Serialize)]
pub struct Shapes {
    cards: Vec<GpuModel>,
    shapes: Vec<Shape>,
    /// Number of GPUs that each shape is split across.
    ranks: usize,
    /// Format to which the decoder's projections are rounded, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    quantization: Option<WeightQuantization>,
}

#[derive(Serialize)]
struct GpuModel {
    name: String,
    total: Bytes,
}

#[derive(Serialize)]
struct Shape {
    name: &'static str,
    parameters: u64,
    /// Weights on each GPU, including the padding of tiles. Weights that are not
    /// quantized have 16 bits.
    weight_bytes: Bytes,
    /// Bytes of a token's keys and values on each GPU.
    kv_bytes_per_token: Bytes,
    /// Capacity of the KV cache in tokens, by the GPU's name. `None` if the shape does not fit on
    /// that GPU or cannot be split across `ranks` GPUs.
    kv_tokens: BTreeMap<String, Option<usize>>,
}

impl Shapes {
    /// Plans every shape with `load` for groups of `ranks` equal GPUs, and leaves `canary`
    /// free on each GPU.
    pub fn of(load: &LoadOptions, ranks: usize, canary: Option<Bytes>) -> Result<Self, Failure> {
        let cards: Vec<Gpu> = Gpu::of_each_size().collect();
        let shape = |name| Shape::of(name, &cards, ranks, load, canary);
        let shapes = registry::shapes().map(shape).collect::<Result<_, _>>()?;
        let named = |gpu: &Gpu| GpuModel { name: gpu.name.clone(), total: gpu.total.unwrap_or_default() };
        let quantization = load.quantization;
        Ok(Shapes { cards: cards.iter().map(named).collect(), shapes, ranks, quantization })
    }
}

impl Shape {
    fn of(
        name: &'static str,
        cards: &[Gpu],
        ranks: usize,
        load: &LoadOptions,
        canary: Option<Bytes>,
    ) -> Result<Self, Failure> {
        if load.draft_model().is_some() {
            return Err(Failure {
                error: "a draft model fits only one of the shapes".to_owned(),
                hint: "leave the draft model out, or name one shape with --shape".to_owned(),
            });
        }
        let settings = registry::shape_settings(name).map_err(|error| Failure::of(&error))?;
        let files = CheckpointSource::Random(Arc::new(settings));
        let stored = files.stored_type()?;
        let checkpoint = Checkpoint::open(files)?.with_quantization(load.quantization);
        let on = |gpu: &Gpu| load.dtype.on(Target::Cuda(gpu.target()), stored).map_err(StartError::from);
        let usual = on(&Gpu::expected())?;
        let checkpoint = load.apply_on(&usual, checkpoint).map_err(StartError::from)?;
        let whole = Model::plan(&checkpoint, &usual)?;
        let parameters = whole.parameters();
        // The shape's heads may not be divisible among this many ranks.
        let (model, is_shared) = match Model::plan_heaviest(&checkpoint, &usual, ranks) {
            Ok(model) => (model, true),
            Err(LoadError::Weights(WeightError::Ranks(_) | WeightError::Cut { .. })) => (whole, false),
            Err(error) => return Err(error.into()),
        };
        let mut kv_tokens = BTreeMap::new();
        for gpu in cards {
            let (target, place) = (on(gpu)?, absent_place(gpu.total.unwrap_or_default(), canary));
            let pictures = checkpoint.image_processor.as_ref();
            let tokens =
                Question { model: &model, pictures, checkpoint: None, target, options: load, place }.kv_tokens()?;
            kv_tokens.insert(gpu.name.clone(), tokens.filter(|_| is_shared));
        }
        Ok(Shape {
            name,
            parameters,
            weight_bytes: model.weight_bytes(),
            kv_bytes_per_token: model.kv_shape(&usual).token_bytes() * model.cache_groups().count() as u64,
            kv_tokens,
        })
    }
}

impl fmt::Display for Shapes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<24} {:>12} {:>10} {:>12}", "shape", "parameters", "weights", "KV / token")?;
        self.cards.iter().try_for_each(|card| write!(f, " {:>11}", card.name))?;
        writeln!(f)?;
        for shape in &self.shapes {
            let (weights, token) = (shape.weight_bytes.to_string(), shape.kv_bytes_per_token.to_string());
            write!(f, "{:<24} {:>12} {weights:>10} {token:>12}", shape.name, rounded(shape.parameters))?;
            for card in &self.cards {
                let tokens = shape.kv_tokens.get(&card.name).copied().flatten();
                write!(f, " {:>11}", tokens.map_or("-".to_owned(), |tokens| tokens.to_string()))?;
            }
            writeln!(f)?;
        }
        match self.quantization {
            Some(format) => write!(f, "\nThe decoder's projections are {format}; other weights have 16 bits.")?,
            None => write!(f, "\nWeights have 16 bits.")?,
        }
        if self.ranks > 1 {
            let ranks = self.ranks;
            write!(
                f,
                " Each shape is split across {ranks} GPUs. Weights and KV sizes are per GPU, or of the whole shape \
                 if it cannot be split."
            )?;
        }
        writeln!(
            f,
            " Each GPU column shows the KV cache tokens that fit in addition to the weights and the memory of the \
             worst cases, or - if the shape does not fit. `bursar plan --shape NAME --gpu GPU` prints the plan."
        )
    }
}

/// Formats a parameter count the way model names do: 7.62 B, 494 M.
fn rounded(parameters: u64) -> String {
    match parameters as f64 {
        many if many >= 1e9 => format!("{:.2} B", many / 1e9),
        many if many >= 1e6 => format!("{:.0} M", many / 1e6),
        few => format!("{:.0} K", few / 1e3),
    }
}
