//! Errors of opening and reading a checkpoint.

use bursar_budgets::Hint;
use thiserror::Error;

use super::stored::TensorType;
use crate::processor::error::ProcessorError;
use crate::sampling::error::SamplingError;
use crate::text::error::TextError;

/// Errors of opening and reading a checkpoint.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The path of the model is not an existing folder.
    #[error("there is no folder {place}")]
    MissingFolder { place: String },
    /// The path ends in `.gguf`, but there is no such file.
    #[error("there is no file {path}")]
    NoGguf { path: String },
    /// A file that every checkpoint must have is absent.
    #[error("the checkpoint at {place} has no {file}")]
    MissingFile {
        /// The folder or the shape's name, or "(embedded)".
        place: String,
        file: String,
    },
    /// The folder holds an adapter, such as a LoRA, and not a model.
    #[error("{place} is an adapter{}, not a model", base.as_ref().map(|base| format!(" of {base}")).unwrap_or_default())]
    Adapter {
        place: String,
        /// The base model, if the adapter names it.
        base: Option<String>,
    },
    /// The index names a shard that is absent.
    #[error("the checkpoint at {place} lacks the shard {shard}, one of {shards}")]
    MissingShard {
        /// The folder, or "(embedded)".
        place: String,
        shard: String,
        /// Number of shards that the index names.
        shards: usize,
    },
    /// The operating system refused to read the file.
    #[error("{file} could not be read: {kind}")]
    Unreadable { file: String, kind: std::io::ErrorKind },
    /// A file is larger than any valid file of its kind.
    #[error("{file} has {bytes} bytes; the limit is {bytes_max}")]
    TooLarge { file: String, bytes: u64, bytes_max: u64 },
    /// A file is not valid JSON, or lacks the expected structure.
    #[error("{file} could not be parsed: {reason}")]
    Malformed { file: String, reason: String },
    /// The index has a shard name that is not a plain file name.
    #[error("the index names the shard {shard}, which is not a plain file name")]
    ShardName {
        /// The name in the index.
        shard: String,
    },
    /// A setting of a GGUF file is missing, or has a value that is not supported.
    #[error("{file}: {setting} is {value}; supported: {supported}")]
    Setting {
        file: String,
        /// The name of the setting or tensor.
        setting: String,
        /// The value, truncated to 200 characters.
        value: String,
        supported: String,
    },
    /// The vision encoder in a file next to a GGUF file belongs to another model, or the GGUF file
    /// has no placeholders for pictures.
    #[error("the vision encoder in {file} does not fit the model: {reason}")]
    Encoder { file: String, reason: String },
    /// Several files next to a GGUF file have a vision encoder that fits the model.
    #[error("{} files next to the model have its vision encoder: {}", files.len(), files.join(", "))]
    Encoders { files: Vec<String> },
    /// The header of a file of weights is incomplete, or the tensors that it lists overlap, leave
    /// gaps or have wrong sizes.
    #[error("the header of {file} is not valid: {reason}")]
    Header { file: String, reason: String },
    /// Two shards define the same tensor, or the index and the shards disagree.
    #[error("the tensor {tensor} is in {file}, but the index or another shard says otherwise")]
    Inconsistent {
        tensor: String,
        /// The shard that has the tensor or lacks it.
        file: String,
    },
    /// The checkpoint has no tensor with this name.
    #[error("there is no tensor {tensor}")]
    MissingTensor { tensor: String, nearest: Vec<String> },
    /// A tensor has an element type that is not supported.
    #[error("the tensor {tensor} has the type {found}; supported: {}", TensorType::NAMES)]
    TensorType {
        tensor: String,
        /// Its type in the file.
        found: String,
    },
    /// A tensor of a GGUF file has a quantization type that is not supported.
    #[error(
        "the tensor {tensor} has the type {found}; supported in GGUF: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, \
         Q4_K, Q5_K and Q6_K"
    )]
    BlockType {
        /// The tensor's name, as in a Hugging Face checkpoint.
        tensor: String,
        /// Its type in the file.
        found: String,
    },
    /// A tensor of a packed weight does not match the other tensors of its module, or
    /// the settings of the quantization.
    #[error("the tensor {tensor} is {found}; a packed weight of this module needs {expected}")]
    PackedTensor {
        tensor: String,
        /// Its type and shape, or its content.
        found: String,
        expected: String,
    },
    /// The file lacks a tensor of a packed weight.
    #[error("the tensor {tensor} is missing, but quantization_config requires it")]
    MissingPart { tensor: String },
    /// A module has a packed weight, but the settings exclude it from quantization.
    #[error("the tensor {packed} is packed, but quantization_config lists module {module} as not quantized")]
    ExcludedPacked {
        /// The tensor with packed elements.
        packed: String,
        module: String,
    },
    /// A module has both a packed weight and a weight that is not packed.
    #[error("module {module} has both {weight} and {packed}; expected one of them")]
    PackedTwice {
        module: String,
        weight: String,
        /// The tensor with packed elements.
        packed: String,
    },
    /// The settings describe packed weights, but the files have none.
    #[error("quantization_config describes packed weights, but no {kind} tensor has a name that ends in .{suffix}")]
    NoPackedWeights { suffix: &'static str, kind: &'static str },
    /// The checkpoint could not be fetched.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] crate::checkpoint::HubError),
    /// The tokenizer or the chat template of the checkpoint is not valid.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The checkpoint's image processor settings are not valid.
    #[error(transparent)]
    Processor(#[from] ProcessorError),
    /// The generation defaults of the checkpoint are not valid.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}

impl CheckpointError {
    pub(super) fn unreadable(file: &str, error: &std::io::Error) -> Self {
        CheckpointError::Unreadable { file: file.into(), kind: error.kind() }
    }
}

impl Hint for CheckpointError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            CheckpointError::MissingFolder { .. } => {
                "check the path, or name a model of the hub as org/name, or the embedded model as demo".into()
            }
            CheckpointError::MissingFile { .. } => {
                "give the folder that contains config.json, tokenizer.json and model.safetensors, or a .gguf file"
                    .into()
            }
            CheckpointError::Adapter { base, .. } => {
                let base = base.as_deref().unwrap_or("its base model");
                format!("merge it into {base} (peft's `merge_and_unload`) and load the merged folder")
            }
            CheckpointError::NoGguf { .. } => "check the path of the .gguf file".into(),
            CheckpointError::Setting { .. } => {
                "load the model's safetensors checkpoint, or another GGUF file of it".into()
            }
            CheckpointError::Encoder { file, .. } => {
                format!("to use pictures, replace {file} with the model's own mmproj file")
            }
            CheckpointError::Encoders { .. } => "keep only one of them in the folder".into(),
            CheckpointError::BlockType { .. } => {
                "load the model in another quantization, such as Q4_K_M or Q8_0".into()
            }
            CheckpointError::MissingShard { shard, .. } => format!("download {shard} into the same folder"),
            CheckpointError::Unreadable { .. } => "check that the file is readable".into(),
            CheckpointError::TooLarge { .. } => "download it again; a checkpoint's file is never this large".into(),
            CheckpointError::Malformed { file, .. } | CheckpointError::Header { file, .. } => {
                format!("download {file} again; a partial download looks like this")
            }
            CheckpointError::ShardName { .. } => "do not trust this checkpoint".into(),
            CheckpointError::Inconsistent { .. } => {
                "download all shards again; they come from different downloads".into()
            }
            CheckpointError::MissingTensor { nearest, .. } if nearest.is_empty() => {
                "download the checkpoint again; it contains no tensor".into()
            }
            CheckpointError::MissingTensor { nearest, .. } => {
                format!("check the checkpoint's release; the nearest names are {}", nearest.join(", "))
            }
            CheckpointError::TensorType { .. } => {
                format!("load a checkpoint that is not quantized, or one in {}", TensorType::QUANTIZED)
            }
            CheckpointError::PackedTensor { .. }
            | CheckpointError::MissingPart { .. }
            | CheckpointError::ExcludedPacked { .. }
            | CheckpointError::PackedTwice { .. }
            | CheckpointError::NoPackedWeights { .. } => {
                "check quantization_config (format, bits, group size, modules that are not quantized) against the \
                 checkpoint's release"
                    .into()
            }
            #[cfg(feature = "hub")]
            CheckpointError::Hub(error) => error.hint(),
            CheckpointError::Text(error) => error.hint(),
            CheckpointError::Processor(error) => error.hint(),
            CheckpointError::Sampling(error) => error.hint(),
        }
    }
}
