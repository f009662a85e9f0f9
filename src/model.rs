//! Starting a runtime and a model for a command.

use bursar::{DeviceChoice, LoadOptions, ModelHandle, ModelSource, Runtime, RuntimeConfig};

use crate::{DeviceOptions, failure::Failure, progress::Bar};

/// A runtime on the chosen device.
pub async fn start(device: &DeviceOptions) -> Result<Runtime, Failure> {
    let config = RuntimeConfig { device: DeviceChoice::Host(device.capacity), ..RuntimeConfig::default() };
    Ok(Runtime::start(config).await?)
}

/// Loads `demo` or the checkpoint in a folder, with a bar.
pub async fn load(runtime: &Runtime, model: &str, shown: bool) -> Result<ModelHandle, Failure> {
    let source = match model {
        "demo" => ModelSource::demo(),
        folder => ModelSource::folder(folder),
    };
    let bar = Bar::new(shown);
    Ok(runtime.load_with(source, LoadOptions::default(), move |progress| bar.show(progress)).await?)
}
