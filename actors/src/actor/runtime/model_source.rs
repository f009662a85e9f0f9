//! Sources of models: a folder, a GGUF file, a hub, or embedded data.

use std::sync::Arc;

use bursar_model::checkpoint::{CheckpointOrigin, CheckpointSource, RandomCheckpoint};
#[cfg(feature = "hub")]
use bursar_model::checkpoint::{HubModel, HubOptions};

/// The source of a model's files.
#[derive(Clone, Debug)]
pub struct ModelSource {
    checkpoint: CheckpointOrigin,
    name: String,
}

impl From<ModelSource> for CheckpointOrigin {
    fn from(source: ModelSource) -> Self {
        source.checkpoint
    }
}

impl ModelSource {
    /// A Hugging Face checkpoint folder. The last component of the path is the model's name.
    pub fn folder(path: impl Into<std::path::PathBuf>) -> Self {
        let path = path.into();
        let name = path.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
        ModelSource { checkpoint: CheckpointOrigin::Local(CheckpointSource::Folder(path)), name }
    }

    /// A GGUF file. The model's name is the file name without its extension.
    pub fn gguf(path: impl Into<std::path::PathBuf>) -> Self {
        let path = path.into();
        let name = path.file_stem().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
        ModelSource { checkpoint: bursar_model::registry::gguf(path), name }
    }

    /// A model on the public Hugging Face hub, `org/name` or `org/name@revision`, which is
    /// downloaded into the user's cache. Files in the cache are not downloaded again. The text
    /// after the slash, without the revision, is the model's name.
    #[cfg(feature = "hub")]
    pub fn hub(id: &str) -> Self {
        ModelSource::hub_with(id, HubOptions::default())
    }

    /// A model on another hub, with a token, or with another cache; see [`hub`](ModelSource::hub).
    #[cfg(feature = "hub")]
    pub fn hub_with(id: &str, options: HubOptions) -> Self {
        let model = HubModel::new(id, options);
        ModelSource { name: model.name().to_owned(), checkpoint: CheckpointOrigin::Hub(model) }
    }

    /// The demo model, which is embedded in the library.
    pub fn demo() -> Self {
        ModelSource { checkpoint: CheckpointOrigin::Local(bursar_model::demo::checkpoint()), name: "demo".to_owned() }
    }

    /// A model with random weights, for measurements; see
    /// [`bursar_model::registry::random_checkpoint`].
    pub fn random(checkpoint: RandomCheckpoint) -> Self {
        let name = checkpoint.name().to_owned();
        ModelSource { checkpoint: CheckpointOrigin::Local(CheckpointSource::Random(Arc::new(checkpoint))), name }
    }

    /// Returns the folder, hub or embedded data from which the files come.
    pub fn origin(&self) -> &CheckpointOrigin {
        &self.checkpoint
    }

    /// Returns the model's default name.
    /// [`LoadOptions::name`](crate::engine::LoadOptions::name) replaces it.
    pub fn name(&self) -> String {
        self.name.clone()
    }
}
