//! Checkpoints: unmodified Hugging Face folders, on disk or embedded in the binary; or only the shape of one.

pub mod checkpoint_files;
pub(crate) mod error;
pub mod fingerprint;
#[cfg(feature = "hub")]
pub mod hub;
pub mod open;
pub mod origin;
pub mod random_checkpoint;
pub mod shard;
pub mod tensors;

pub use checkpoint_files::CheckpointSource;
pub use fingerprint::CheckpointFingerprint;
#[cfg(feature = "hub")]
pub use hub::{HubError, HubModel, HubOptions};
pub use open::Checkpoint;
pub use origin::{CheckpointOrigin, FetchWatch};
pub use random_checkpoint::{RandomCheckpoint, RandomTensor};
pub use tensors::{TensorIndex, TensorInfo, TensorType};
