//! Quantized weights of a checkpoint and their format, from its configuration or from the user's
//! choice.
//!
//! FP4 numbers and packed integers of 8 bits are dequantized while they load. Packed integers of 4
//! bits stay packed if the target and the operation have kernels for the weight's shape and order.
//! `packed_config` and `fp4_config` read the settings of these formats, [`packed`](super::packed)
//! reads the numbers from the file, and `weights::dequantizing` dequantizes them.
//!
//! A new format of quantized weights needs an element type in [`stored`](super::stored), a scheme
//! ([`bursar_kernels::QuantizationScheme`]), and a function in `config` that reads its settings.
//! `weights::quantized_numbers` has the E4M3 arithmetic that runs while weights load. Memory claims
//! and the upload query the scheme.

mod choice;
mod config;
mod error;
mod fields;
mod formats;
mod fp4_config;
mod modules;
mod packed_config;
mod unsupported;

pub use choice::{QuantizationMethod, WeightQuantization};
pub(super) use config::{MODELOPT, SETTINGS, stored_formats};
pub use error::QuantizationError;
pub(super) use formats::StoredFormat;
pub use formats::{PackedQuantization, StoredQuantization, WeightFormats};
pub use modules::Modules;
pub(crate) use modules::OUTER;
pub(crate) use unsupported::{unsupported_experts, unsupported_weight};
