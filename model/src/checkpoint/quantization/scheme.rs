//! Quantization schemes: the elements of a weight, the parts of it that share a scale, and the
//! rounding of its activations.

use std::fmt;

use bursar_kernels::{DType, FP8_BLOCK, Target};

/// The parts of a weight that have separate scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaledBy {
    /// Each block of 128 rows and 128 columns.
    Block,
    /// Each output channel, which is a row.
    Row,
    Tensor,
}

/// The parts of activations that have separate scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundedBy {
    /// Each group of 128 columns of a row. The scale is computed from the largest magnitude.
    Group,
    /// Each row. The scale is computed from the largest magnitude.
    Row,
    /// All activations of a GEMM. The scale comes from the checkpoint.
    Fixed,
}

impl ScaledBy {
    /// Number of adjacent columns that share a scale, in a weight with `columns` columns.
    pub fn group_columns(self, columns: usize) -> usize {
        match self {
            ScaledBy::Block => FP8_BLOCK,
            ScaledBy::Row | ScaledBy::Tensor => columns,
        }
    }

    /// Number of scales of a row of `columns` columns.
    pub fn scales_of_row(self, columns: usize) -> usize {
        match self {
            ScaledBy::Block => columns.div_ceil(FP8_BLOCK),
            ScaledBy::Row | ScaledBy::Tensor => 1,
        }
    }
}

/// How a quantized weight is stored and how its activations are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizationScheme {
    /// The type of the weight's elements.
    pub elements: DType,
    /// The parts of the weight that have separate scales.
    pub weights: ScaledBy,
    /// The parts of activations that have separate scales.
    pub activations: RoundedBy,
}

impl QuantizationScheme {
    /// The scheme of Qwen's and DeepSeek's releases.
    pub const BLOCK: QuantizationScheme = QuantizationScheme::fp8(ScaledBy::Block, RoundedBy::Group);
    /// The scheme `FP8-dynamic` of compressed-tensors.
    pub const CHANNEL: QuantizationScheme = QuantizationScheme::fp8(ScaledBy::Row, RoundedBy::Row);
    /// All schemes that checkpoints may have, for error messages.
    pub(super) const SUPPORTED: &str = "FP8 by blocks of 128 x 128, by channel or by tensor";
    /// Number of rows, and number of columns, of a block of weights that shares a scale in a
    /// checkpoint.
    pub const BLOCK_SIDE: usize = FP8_BLOCK;

    /// A scheme of FP8 elements.
    pub const fn fp8(weights: ScaledBy, activations: RoundedBy) -> Self {
        QuantizationScheme { elements: DType::F8E4M3, weights, activations }
    }

    /// Number of rows of a scale block in a fused weight; 1 if the scheme has no blocks. `parts`
    /// has the number of rows of each part of the weight. Each part must begin with a new block, so
    /// the result is the largest power of two that divides the start of every part, up to 128, the
    /// height of a checkpoint's block. Usually the result is 128, because all parts have whole
    /// blocks.
    pub fn block_rows(self, parts: impl Iterator<Item = usize>) -> usize {
        if self.weights != ScaledBy::Block {
            return 1;
        }
        let parts: Vec<usize> = parts.collect();
        let begun = parts.len().saturating_sub(1);
        let starts = parts[..begun].iter().scan(0, |start, rows| {
            *start += rows;
            Some(*start)
        });
        starts.fold(FP8_BLOCK, |height, start| height.min(1 << start.trailing_zeros().min(7)))
    }
}

impl fmt::Display for QuantizationScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.weights {
            ScaledBy::Block => "FP8 with a scale for each block of 128 x 128",
            ScaledBy::Row => "FP8 with a scale for each output",
            ScaledBy::Tensor => "FP8 with a scale for each matrix",
        })
    }
}

/// Whether elements of a type are quantized, so that they need scales.
pub(crate) fn needs_scales(elements: DType) -> bool {
    elements == DType::F8E4M3
}

/// Describes the quantized weights for which `target` has no kernels. `None` if it has kernels for
/// an FP8 weight of `shape` `[out_features, in_features]`. `block_rows` is the number of rows of a
/// scale block, if the weight has blocks.
pub(crate) fn unserved_weight(target: &Target, shape: [usize; 2], block_rows: Option<usize>) -> Option<&'static str> {
    if target.has_fp8(shape, block_rows) {
        return None;
    }
    let has_any = target.has_fp8([FP8_BLOCK, FP8_BLOCK], None);
    Some(if has_any { "FP8 weights of this shape" } else { "FP8 weights" })
}

/// Like [`unserved_weight`], for the weight of one of several experts.
pub(crate) fn unserved_experts(target: &Target, shape: [usize; 2], block_rows: Option<usize>) -> Option<&'static str> {
    if target.has_fp8_experts(shape, block_rows) {
        return None;
    }
    let has_any = target.has_fp8_experts([FP8_BLOCK, FP8_BLOCK], None);
    Some(if has_any { "FP8 weights of experts of this shape" } else { "FP8 weights of experts" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_high_as_the_places_where_parts_begin_allow() {
        for (parts, expected) in [
            (&[300][..], 128),
            (&[512, 128, 128], 128),
            (&[256, 320, 77], 64),
            (&[64, 16, 16], 16),
            (&[9, 9], 1),
            (&[768; 200], 128),
        ] {
            assert_eq!(QuantizationScheme::BLOCK.block_rows(parts.iter().copied()), expected, "{parts:?}");
        }
        assert_eq!(QuantizationScheme::CHANNEL.block_rows([256, 256].into_iter()), 1);
    }
}
