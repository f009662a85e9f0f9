//! What may be asked of the runtime supervisor.

use std::sync::Arc;

use bursar_model::checkpoint::CheckpointSource;

use crate::{
    chat::ModelHandle,
    engine::{LoadOptions, ProgressSink, StartError},
    reply::Reply,
};

/// From users; few and far between.
pub enum RuntimeMessage {
    /// Load a model; answered when it is READY or has failed.
    Load {
        /// Its name.
        name: String,
        /// Its files.
        source: CheckpointSource,
        /// Its limits.
        options: Box<LoadOptions>,
        /// Who watches.
        progress: ProgressSink,
        /// A handle.
        reply: Reply<Result<ModelHandle, Arc<StartError>>>,
    },
    /// End a model; answered when every byte that it had is home. Unknown names are nobody's loss.
    Unload {
        /// Its name.
        name: String,
        /// All is home.
        reply: Reply<()>,
    },
    /// A model's name is free again after a start that failed.
    Forget {
        /// Its name.
        name: String,
        /// Which engine of that name.
        generation: u64,
    },
}
