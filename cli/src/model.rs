//! Start of a runtime and a model for a command.

use std::{path::Path, slice};

use bursar::{LoadOptions, ModelHandle, ModelSource, Runtime, RuntimeConfig};
use bursar_model::registry::random_checkpoint;
use clap::Args;

use crate::hub;
use crate::{DeviceOptions, failure::Failure, knobs::KnobOptions, progress::Bar};

/// A model, or only its shape.
#[derive(Args)]
pub struct ModelOptions {
    /// A Hugging Face checkpoint folder, a GGUF file, a model of the hub (`org/name`
    /// or `org/name@revision`), or `demo`.
    #[arg(long, default_value = "demo", conflicts_with = "shape")]
    model: String,
    /// Shape of a released model, used in place of a checkpoint, to measure its size and speed
    /// without its files.
    #[arg(long, value_name = "NAME", requires = "random")]
    shape: Option<String>,
    /// Draws random weights on the device, instead of loading a checkpoint.
    #[arg(long, requires = "shape")]
    random: bool,
    /// Makes the routers of random mixture-of-experts weights prefer some experts, as trained
    /// routers do: the expert of rank `r` is chosen in proportion to `r^-EXPONENT` (Zipf's law; a
    /// typical exponent is 1). By default, all experts are equally likely.
    #[arg(long, value_name = "EXPONENT", requires = "random", value_parser = exponent)]
    zipf: Option<f32>,
}

fn exponent(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(exponent) if (0.0..=4.0).contains(&exponent) => Ok(exponent),
        _ => Err("expected a number from 0 to 4".to_owned()),
    }
}

impl ModelOptions {
    /// Returns the model, or a model of the given shape with weights drawn from `seed`.
    pub fn source(&self, seed: u64) -> Result<ModelSource, Failure> {
        match &self.shape {
            None => Ok(source(&self.model)),
            Some(shape) => self::shape(shape, seed, self.zipf),
        }
    }

    /// Whether the weights are random instead of loaded from a checkpoint.
    pub fn is_random(&self) -> bool {
        self.random
    }
}

/// The models that a command will load, with their options.
pub type Models = Vec<(ModelSource, LoadOptions)>;

/// Starts a runtime on the chosen device for these models, and serves its metrics if the user gave
/// an address. The caller reports the device.
pub async fn start(device: &DeviceOptions, config: RuntimeConfig, models: Models) -> Result<Runtime, Failure> {
    let runtime = Runtime::start(RuntimeConfig { device: device.choice_for(models)?, ..config }).await?;
    device.serve_metrics(slice::from_ref(&runtime)).await?;
    Ok(runtime)
}

/// Starts a runtime on the chosen device, with the knobs that concern the runtime.
pub async fn start_with_knobs(device: &DeviceOptions, knobs: &KnobOptions, models: Models) -> Result<Runtime, Failure> {
    knobs.report_notes()?;
    start_with(device, knobs.runtime(RuntimeConfig::default().host_bytes, 1, device.ranks())?, models).await
}

/// Starts a runtime on the chosen device, with all other settings from `config`. Reports on a
/// terminal why no GPU is used, if one was expected.
pub async fn start_with(device: &DeviceOptions, config: RuntimeConfig, models: Models) -> Result<Runtime, Failure> {
    let runtime = start(device, config, models).await?;
    device.report_missing_gpu(&runtime);
    Ok(runtime)
}

/// Returns the source for `demo`, a checkpoint folder, a GGUF file or a model of the hub.
pub fn source(model: &str) -> ModelSource {
    source_of(model, hub::options())
}

/// Like [`source`], with the given settings of the hub.
pub fn source_of(model: &str, hub: bursar::HubOptions) -> ModelSource {
    match model {
        "demo" => ModelSource::demo(),
        file if Path::new(file).is_file() || file.ends_with(".gguf") && !Path::new(file).exists() => {
            ModelSource::gguf(file)
        }
        // An existing folder wins over a hub model of the same name.
        folder if Path::new(folder).exists() => ModelSource::folder(folder),
        id if bursar::HubModel::is_id(id) => ModelSource::hub_with(id, hub),
        folder => ModelSource::folder(folder),
    }
}

/// Returns a model of this shape with weights drawn from `seed`. With `zipf`, its experts are
/// chosen by Zipf's law with that exponent.
pub fn shape(shape: &str, seed: u64, zipf: Option<f32>) -> Result<ModelSource, Failure> {
    let random = random_checkpoint(shape, seed).map_err(|error| Failure::of(&error))?;
    Ok(ModelSource::random(match zipf {
        Some(exponent) => random.with_routing_skew(exponent),
        None => random,
    }))
}

/// Loads a model and shows a progress bar.
pub async fn load(runtime: &Runtime, device: &DeviceOptions, model: &str, shown: bool) -> Result<ModelHandle, Failure> {
    let options = LoadOptions { blas: device.blas(), profiles: device.profiles(), ..LoadOptions::default() };
    load_with(runtime, source(model), options, shown).await
}

/// Like [`load`], with the given options.
pub async fn load_with(
    runtime: &Runtime,
    source: ModelSource,
    options: LoadOptions,
    shown: bool,
) -> Result<ModelHandle, Failure> {
    let bar = Bar::new(shown);
    Ok(runtime.load_with(source, options, move |progress| bar.show(progress)).await?)
}
