//! Checkpoints: Hugging Face folders as they are, on disk or embedded in the binary.

pub mod checkpoint_files;
pub(crate) mod error;
pub mod fingerprint;
pub mod open;
pub mod shard;
pub mod tensors;

pub use checkpoint_files::CheckpointSource;
pub use fingerprint::CheckpointFingerprint;
pub use open::Checkpoint;
pub use tensors::{TensorIndex, TensorInfo, TensorType};
