//! Starting a runtime and a model for a command.

use std::path::Path;

use bursar::{LoadOptions, ModelHandle, ModelSource, Runtime, RuntimeConfig};

#[cfg(feature = "hub")]
use crate::hub;
use crate::{DeviceOptions, failure::Failure, progress::Bar};

/// A runtime on the chosen device.
pub async fn start(device: &DeviceOptions) -> Result<Runtime, Failure> {
    let config = RuntimeConfig { device: device.choice(), ..RuntimeConfig::default() };
    let runtime = Runtime::start(config).await?;
    device.tell(&runtime);
    Ok(runtime)
}

/// Loads `demo`, the checkpoint in a folder, or a model of the hub, with a bar.
pub async fn load(runtime: &Runtime, model: &str, shown: bool) -> Result<ModelHandle, Failure> {
    let source = match model {
        "demo" => ModelSource::demo(),
        // A folder that is there wins over a model of the same name elsewhere.
        folder if Path::new(folder).exists() => ModelSource::folder(folder),
        #[cfg(feature = "hub")]
        id if bursar::HubModel::is_id(id) => ModelSource::hub_with(id, hub::options()),
        folder => ModelSource::folder(folder),
    };
    let bar = Bar::new(shown);
    Ok(runtime.load_with(source, LoadOptions::default(), move |progress| bar.show(progress)).await?)
}
