//! Checkpoints: unmodified Hugging Face folders (on disk or embedded in the binary), GGUF files,
//! and settings with random weights.

pub mod checkpoint_files;
pub(crate) mod error;
pub mod fingerprint;
pub mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
pub mod open;
pub mod origin;
mod pytorch;
pub mod quantization;
pub mod random_checkpoint;
pub mod shard;
pub mod stored;
pub mod tensors;

pub use checkpoint_files::{CheckpointSource, EmbeddedFile};
pub use fingerprint::CheckpointFingerprint;
pub use gguf::{GgufArchitecture, GgufFile};
#[cfg(feature = "hub")]
pub use hub::{HubError, HubModel, HubOptions};
pub use open::Checkpoint;
pub use origin::{CheckpointOrigin, FetchWatch};
pub use quantization::{
    Fp8Scheme, QuantizationError, QuantizationMethod, RoundedBy, ScaledBy, StoredFp8, WeightFormats, WeightQuantization,
};
pub use random_checkpoint::{RandomCheckpoint, RandomTensor};
pub use stored::{BlockType, Stored};
pub use tensors::{TensorIndex, TensorInfo, TensorType};
