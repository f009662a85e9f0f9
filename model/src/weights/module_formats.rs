//! The quantization of each module: its scheme, and whether its scales are in the checkpoint.

use bursar_kernels::{DType, QuantizationScheme};

use super::WeightError;
use crate::checkpoint::{Checkpoint, QuantizationMethod, StoredQuantization, WeightFormats};

/// The format in which a quantized weight is claimed.
#[derive(Clone, Copy)]
pub(super) struct Quantized {
    pub scheme: QuantizationScheme,
    /// The suffix of the names of the scales in the checkpoint; `None` if the scales are computed
    /// while the weight is read.
    pub stored: Option<&'static str>,
}

/// The formats of a model's modules.
pub(super) struct ModuleFormats<'c> {
    checkpoint: &'c Checkpoint,
    formats: WeightFormats,
    is_in_decoder: bool,
    is_in_draft_model: bool,
    is_tower_plain: bool,
}

impl<'c> ModuleFormats<'c> {
    pub fn new(checkpoint: &'c Checkpoint, formats: WeightFormats) -> Self {
        ModuleFormats { checkpoint, formats, is_in_decoder: false, is_in_draft_model: false, is_tower_plain: false }
    }

    /// The formats of all modules.
    pub fn formats(&self) -> &WeightFormats {
        &self.formats
    }

    /// Sets whether the following modules belong to the decoder. Only the decoder's projections are
    /// quantized at the user's request.
    pub fn set_in_decoder(&mut self, is_in_decoder: bool) {
        self.is_in_decoder = is_in_decoder;
    }

    /// Whether the current modules belong to a draft model.
    pub fn is_in_draft_model(&self) -> bool {
        self.is_in_draft_model
    }

    /// Whether the current modules belong to the decoder.
    pub fn is_in_decoder(&self) -> bool {
        self.is_in_decoder
    }

    /// Sets whether the following modules belong to a draft model, which is never quantized.
    pub fn set_in_draft_model(&mut self, is_in_draft_model: bool) {
        self.is_in_draft_model = is_in_draft_model;
    }

    /// Assumes that the vision tower is unquantized if the file is not available.
    pub fn expect_plain_tower(&mut self) {
        self.is_tower_plain = true;
    }

    /// The format in which to claim the weights of modules that are computed as one; `None` if they
    /// are not quantized or are packed in the file.
    ///
    /// # Errors
    /// [`WeightError::PartlyQuantized`].
    pub fn of<'n>(&self, modules: impl IntoIterator<Item = &'n str>) -> Result<Option<Quantized>, WeightError> {
        let found = match &self.formats {
            _ if self.is_in_draft_model => None,
            WeightFormats::Unquantized | WeightFormats::Packed(_) => None,
            WeightFormats::Requested(scheme) => {
                self.is_in_decoder.then_some(Quantized { scheme: *scheme, stored: None })
            }
            WeightFormats::Stored(stored) => {
                let is_plain = |name: &str| {
                    stored.plain.has(name) || !self.is_in_decoder && self.is_unquantized_in_file(name, stored)
                };
                let (plain, quantized): (Vec<_>, Vec<_>) = modules.into_iter().partition(|name| is_plain(name));
                if let (Some(name), Some(other)) = (quantized.first(), plain.first()) {
                    let (name, other) = ((*name).to_owned(), (*other).to_owned());
                    return Err(WeightError::PartlyQuantized { name, other });
                }
                plain.is_empty().then_some(Quantized { scheme: stored.scheme, stored: Some(stored.scale) })
            }
        };
        Ok(found)
    }

    /// Whether a module outside the decoder is unquantized although no list names it: its weight in
    /// the file has a wider type than quantized weights, and there is no scale. Lists of ModelOpt
    /// before 0.39 do not name the vision tower, and vLLM (0.26, `modelopt.py`) treats the tower as
    /// unquantized. Without the file, the module is assumed to be unquantized if ModelOpt quantized
    /// the checkpoint or if [`expect_plain_tower`](Self::expect_plain_tower) was called.
    fn is_unquantized_in_file(&self, module: &str, stored: &StoredQuantization) -> bool {
        let (weight, tensors) = (format!("{module}.weight"), &self.checkpoint.tensors);
        if tensors.random(&weight, 0).is_some() {
            return self.is_tower_plain || stored.method == QuantizationMethod::ModelOpt;
        }
        let is_wide = tensors.contains(&weight)
            && self.checkpoint.tensor(&weight).is_ok_and(|it| !DType::from(it.dtype).needs_scales());
        is_wide && !tensors.contains(&format!("{module}.{}", stored.scale))
    }

    /// Refuses a tensor of type `found` that is quantized in the file although it should not be, or
    /// the reverse. `is_stored` is `true` if the tensor should be quantized in the file.
    ///
    /// # Errors
    /// [`WeightError::Format`] and [`WeightError::AlwaysPlain`].
    pub fn check(&self, name: &str, found: DType, is_stored: bool) -> Result<(), WeightError> {
        if found.needs_scales() == is_stored {
            return Ok(());
        }
        let module = name.strip_suffix(".weight").unwrap_or(name);
        Err(match &self.formats {
            WeightFormats::Stored(stored) if !is_stored && !stored.plain.has(module) => {
                WeightError::AlwaysPlain { name: name.to_owned(), found }
            }
            _ => WeightError::unexpected_format(name, found, is_stored),
        })
    }
}
