//! Quantized weights of a checkpoint and their format, from its configuration or from the user's
//! choice.
//!
//! A new weight format needs an element type in [`stored`](super::stored), a scheme
//! ([`bursar_kernels::QuantizationScheme`]), and a function in `config` that reads its settings.
//! The arithmetic that runs while weights load is in `weights::quantized_numbers`. Memory claims
//! and the upload query the scheme.

mod choice;
mod config;
mod error;
mod formats;
mod modules;
mod served;

pub use choice::{QuantizationMethod, WeightQuantization};
pub(super) use config::{MODELOPT, SETTINGS, stored_formats};
pub use error::QuantizationError;
pub use formats::{StoredQuantization, WeightFormats};
pub use modules::Modules;
pub(crate) use modules::OUTER;
pub(crate) use served::{unserved_experts, unserved_weight};
