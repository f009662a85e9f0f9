//! Pure: the names of the tensors of a packed weight.

use super::scheme::PackedFormat;

/// Suffixes of the names of a module's tensors.
pub(super) struct Suffixes {
    pub words: &'static str,
    pub scales: &'static str,
    pub zero_points: &'static str,
    pub groups: &'static str,
    /// The tensor with the shape of the weight.
    pub shape: Option<&'static str>,
    /// The f32 that divides or multiplies the scales.
    pub factors: Option<&'static str>,
    /// The scale of activations. It is not used, because activations are not quantized.
    pub unused: Option<&'static str>,
}

const COMPRESSED_TENSORS: Suffixes = Suffixes {
    words: "weight_packed",
    scales: "weight_scale",
    zero_points: "weight_zero_point",
    groups: "weight_g_idx",
    shape: None,
    factors: None,
    unused: Some("input_global_scale"),
};

impl PackedFormat {
    pub(super) fn suffixes(self) -> Suffixes {
        match self {
            PackedFormat::Awq | PackedFormat::Gptq | PackedFormat::GptqV2 => Suffixes {
                words: "qweight",
                scales: "scales",
                zero_points: "qzeros",
                groups: "g_idx",
                shape: None,
                factors: None,
                unused: None,
            },
            PackedFormat::CompressedTensors => Suffixes { shape: Some("weight_shape"), ..COMPRESSED_TENSORS },
            PackedFormat::Nvfp4 => Suffixes { factors: Some("weight_global_scale"), ..COMPRESSED_TENSORS },
            PackedFormat::Mxfp4 => COMPRESSED_TENSORS,
            PackedFormat::ModelOptNvfp4 => Suffixes {
                words: "weight",
                factors: Some("weight_scale_2"),
                unused: Some("input_scale"),
                ..COMPRESSED_TENSORS
            },
        }
    }

    /// The suffix of the name of the tensor with packed elements.
    pub(in crate::checkpoint) fn words(self) -> &'static str {
        self.suffixes().words
    }

    /// The type of the tensor with packed elements.
    pub(in crate::checkpoint) fn word_type(self) -> &'static str {
        if self.is_fp4() { "U8" } else { "I32" }
    }
}

/// The end of the names of packed experts that are not modules.
const FLAT_WORDS: &str = "_packed";

/// A module with a packed weight.
pub(in crate::checkpoint) struct PackedModule {
    pub name: String,
    /// Whether the names of the module's tensors have the form `name_packed` instead of
    /// `name.weight_packed`. llm-compressor writes such names for the experts of a layer (its pull
    /// request 3017).
    pub is_flat: bool,
}

impl PackedModule {
    /// The module whose packed elements are the tensor `name` of type `kind`; `None` if the tensor
    /// does not have packed elements.
    pub fn of(name: &str, kind: &str, format: PackedFormat) -> Option<Self> {
        // ModelOpt has packed elements under the same name as other weights.
        if format == PackedFormat::ModelOptNvfp4 && kind != format.word_type() {
            return None;
        }
        let (words, is_flat) = (format.words(), format.words().ends_with(FLAT_WORDS));
        if let Some(name) = name.strip_suffix(words).and_then(|name| name.strip_suffix('.')) {
            return Some(PackedModule { name: name.to_owned(), is_flat: false });
        }
        let name = name.strip_suffix(FLAT_WORDS).filter(|_| is_flat)?;
        Some(PackedModule { name: name.to_owned(), is_flat: true })
    }

    /// The name of the module's tensor with this suffix.
    pub fn tensor(&self, suffix: &str) -> String {
        let PackedModule { name, is_flat } = self;
        if *is_flat { format!("{name}_{}", suffix.trim_start_matches("weight_")) } else { format!("{name}.{suffix}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_have_either_kind_of_name() {
        let found = |name, format| {
            let module = PackedModule::of(name, "U8", format)?;
            Some((module.tensor("weight_scale"), module.tensor("input_scale")))
        };
        let names = |scale: &str, input: &str| Some((scale.to_owned(), input.to_owned()));
        for format in [PackedFormat::CompressedTensors, PackedFormat::Nvfp4, PackedFormat::Mxfp4] {
            assert_eq!(found("x.y.weight_packed", format), names("x.y.weight_scale", "x.y.input_scale"));
            assert_eq!(found("x.y_packed", format), names("x.y_scale", "x.y_input_scale"));
            assert_eq!(found("x.y.weight", format), None);
        }
        let format = PackedFormat::ModelOptNvfp4;
        assert_eq!(found("x.y.weight", format), names("x.y.weight_scale", "x.y.input_scale"));
        assert!(PackedModule::of("x.y.weight", "BF16", format).is_none());
        assert_eq!(found("x.y_packed", format), None);
        assert_eq!(found("x.y_packed", PackedFormat::Gptq), None);
    }
}
