//! Why a GPU that is there cannot be computed on.

use std::path::PathBuf;

use bursar_budgets::{DeviceError, Hint};
use thiserror::Error;

/// A backend that was not made.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The driver refused, or the device is lost.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// cuBLASLt is nowhere.
    #[error("cuBLASLt was not found: looked for {} in the system's folders{}", .names.join(", "), listed(.folders))]
    NoBlas {
        /// What was looked for.
        names: Vec<&'static str>,
        /// Where, beside what the system searches.
        folders: Vec<PathBuf>,
    },
    /// A file that is called cuBLASLt is not it.
    #[error("{library} is not a cuBLASLt that can be used: {reason}")]
    BadBlas {
        /// Which file.
        library: String,
        /// Why not.
        reason: String,
    },
    /// A GPU before Turing.
    #[error("the device is of compute capability {}.{}; the oldest that is served is 7.5", .found.0, .found.1)]
    TooOld {
        /// What it is of.
        found: (u32, u32),
    },
    /// The driver does not take our compiled code.
    #[error("the driver does not load the kernels {module}: {said}")]
    Image {
        /// Which module.
        module: &'static str,
        /// What the driver said.
        said: String,
    },
}

fn listed(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| format!(", {}", folder.display())).collect()
}

impl Hint for OpenError {
    fn hint(&self) -> Option<String> {
        match self {
            OpenError::Device(error) => error.hint(),
            OpenError::NoBlas { .. } => Some(
                "install it with `pip install nvidia-cublas` (or nvidia-cublas-cu12, or the CUDA toolkit), or name the \
                 folder that has libcublasLt.so.12 or .13: in BURSAR_CUDA_LIB for `bursar`, in LoadOptions::blas for a \
                 program of your own"
                    .to_owned(),
            ),
            OpenError::BadBlas { .. } => Some(
                "CUDA 12.4 to 13 are served: name another folder, in BURSAR_CUDA_LIB for `bursar`, in LoadOptions::blas for a \
                 program of your own"
                    .to_owned(),
            ),
            OpenError::TooOld { .. } => Some("use another GPU, or the host device".to_owned()),
            OpenError::Image { .. } => Some("install a newer NVIDIA driver (550 or later)".to_owned()),
        }
    }
}
