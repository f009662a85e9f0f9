//! Errors that make a GPU unusable for the CUDA backend.

use std::path::PathBuf;

use bursar_budgets::{DeviceError, Hint};
use thiserror::Error;

/// A failure to open the CUDA backend.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The driver refused a call, or the device is lost.
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("cuBLASLt was not found: looked for {} in the system's folders{}", .names.join(", "), listed(.folders))]
    NoBlas {
        /// The file names that were searched for.
        names: Vec<&'static str>,
        /// The folders that were searched, in addition to the system's folders.
        folders: Vec<PathBuf>,
    },
    /// A library that is named like cuBLASLt but cannot be used.
    #[error("{library} cannot be used as cuBLASLt: {reason}")]
    BadBlas {
        /// Path of the file.
        library: String,
        /// Why the library cannot be used.
        reason: String,
    },
    /// NCCL is needed but was not found.
    #[error(
        "NCCL is needed because {why}, but was not found: looked for {} in the system's folders{}",
        .names.join(", "),
        listed(.folders)
    )]
    NoNccl {
        /// Why NCCL is needed.
        why: String,
        /// The file names that were searched for.
        names: Vec<&'static str>,
        /// The folders that were searched, in addition to the system's folders.
        folders: Vec<PathBuf>,
    },
    /// A library that is named like NCCL but cannot be used.
    #[error("{library} cannot be used as NCCL: {reason}")]
    BadNccl {
        /// Path of the file.
        library: String,
        /// Why the library cannot be used.
        reason: String,
    },
    /// The GPU is older than Turing.
    #[error("the device has compute capability {}.{}; expected 7.5 or later", .found.0, .found.1)]
    TooOld {
        /// The GPU's compute capability, major and minor.
        found: (u32, u32),
    },
    /// The compiled code does not contain a kernel or variable, for instance because the GPU has no
    /// kernels for the requested activation type.
    #[error("the device code does not contain {name}")]
    NoKernel {
        /// Name of the missing kernel or variable.
        name: String,
    },
    /// The driver refused to load the compiled code.
    #[error("the driver refused to load the kernels {module}: {message}")]
    Image {
        /// Name of the kernel image.
        module: String,
        /// The driver's error message.
        message: String,
    },
}

fn listed(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| format!(", {}", folder.display())).collect()
}

impl Hint for OpenError {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        match self {
            OpenError::Device(error) => error.hint(),
            OpenError::NoBlas { .. } => Some(
                "install it with `pip install nvidia-cublas` (or nvidia-cublas-cu12, or the CUDA toolkit), or name the \
                 folder of libcublasLt.so.12 or .13 in BURSAR_CUDA_LIB (for `bursar`) or `LoadOptions::blas` (in your \
                 own program)"
                    .to_owned(),
            ),
            OpenError::BadBlas { .. } => Some(
                "name the folder of cuBLASLt from CUDA 12.4 to 13 in BURSAR_CUDA_LIB (for `bursar`) or \
                 `LoadOptions::blas` (in your own program)"
                    .to_owned(),
            ),
            OpenError::NoNccl { .. } => Some(
                "install it with `pip install nvidia-nccl-cu12` (or -cu13), or name the folder of libnccl.so.2 in \
                 BURSAR_CUDA_LIB (for `bursar`) or `LoadOptions::blas` (in your own program), or choose GPUs that are \
                 linked (nvidia-smi topo -p2p r) and leave out disable_custom_all_reduce"
                    .to_owned(),
            ),
            OpenError::BadNccl { .. } => Some(
                "name the folder of NCCL 2.14 or later in BURSAR_CUDA_LIB (for `bursar`) or `LoadOptions::blas` (in \
                 your own program)"
                    .to_owned(),
            ),
            OpenError::TooOld { .. } => Some("use another GPU, or the host device".to_owned()),
            OpenError::NoKernel { .. } => {
                Some("use f16 activations, or bf16 activations on a GPU of compute capability 8.0 or later".to_owned())
            }
            OpenError::Image { .. } => Some("install a newer NVIDIA driver (550 or later)".to_owned()),
        }
    }
}
