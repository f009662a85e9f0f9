//! Checkpoints: unmodified Hugging Face folders (on disk or embedded in the binary), GGUF files,
//! and configs with random weights.

pub mod checkpoint_source;
pub(crate) mod error;
mod fetch_watch;
pub mod fingerprint;
pub mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
mod layout;
pub mod open;
pub mod origin;
pub mod packed;
mod pytorch;
pub mod quantization;
pub mod random_tensor;
pub mod shard;
pub mod stored;
mod tensor_index;
mod tensor_info;
mod text_files;

pub use checkpoint_source::{CheckpointSource, EmbeddedFile, RandomCheckpoint};
pub use fetch_watch::FetchWatch;
pub use fingerprint::CheckpointFingerprint;
pub use gguf::{GgufArchitecture, GgufFile, GgufLayers, GgufVision, NamedFiles};
#[cfg(feature = "hub")]
pub use hub::{HubError, HubModel, HubOptions};
pub use open::{Checkpoint, DraftProjection};
pub use origin::CheckpointOrigin;
pub use packed::{PackedFormat, PackedMatrix, PackedScheme};
pub use quantization::{
    PackedQuantization, QuantizationError, QuantizationMethod, StoredQuantization, WeightFormats, WeightQuantization,
};
pub use random_tensor::RandomTensor;
pub use stored::{BlockType, Stored, TensorType};
pub use tensor_index::{DRAFT_MODEL, TensorIndex};
pub use tensor_info::TensorInfo;
pub(crate) use tensor_info::{Change, ElementOrder};
