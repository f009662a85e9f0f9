//! Quantization schemes: the element type and the scales of a weight, and the quantization of the
//! activations that are multiplied by the weight.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{DType, Shape};

/// Columns of a group of activations. Blocks of an FP8 weight have the same number of columns and,
/// in checkpoints, the same number of rows. Each group and each block has one scale.
pub const SCALE_BLOCK: usize = 128;

/// How activations are quantized to [`Quantization::ELEMENTS`]. Unless the scale is fixed, each
/// scale is the largest magnitude of the numbers that it covers, divided by 448, but at least the
/// smallest normal f32. `Scale` is `()` in a scheme, because a fixed scale has a different value
/// for each weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Quantization<Scale = f32> {
    /// Each group of [`SCALE_BLOCK`] columns of a row has a scale.
    Groups,
    Rows,
    /// All numbers share this scale. Magnitudes above 448 after scaling are clamped to 448.
    Fixed(Scale),
}

impl Quantization {
    /// The type of quantized activations.
    pub const ELEMENTS: DType = DType::F8E4M3;
    /// The usual name of [`ELEMENTS`](Self::ELEMENTS), for messages.
    pub const NAME: &str = "FP8";
}

impl<Scale> Quantization<Scale> {
    /// Returns the number of scales that are stored for each row of `columns` numbers.
    pub fn row_scales(self, columns: usize) -> usize {
        match self {
            Quantization::Groups => columns.div_ceil(SCALE_BLOCK),
            Quantization::Rows => 1,
            Quantization::Fixed(_) => 0,
        }
    }

    /// Replaces the fixed scale, if there is one, with `value(scale)`.
    pub fn map<Value>(self, value: impl FnOnce(Scale) -> Value) -> Quantization<Value> {
        match self {
            Quantization::Groups => Quantization::Groups,
            Quantization::Rows => Quantization::Rows,
            Quantization::Fixed(scale) => Quantization::Fixed(value(scale)),
        }
    }
}

/// The part of a weight that shares one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ScaledBy {
    /// Each block of this many rows and columns. A block of one row is a group of columns.
    Block { rows: usize, columns: usize },
    /// Each output channel, which is a row.
    Row,
    /// The whole weight. In memory, its scale is stored once for each row.
    Tensor,
}

impl ScaledBy {
    /// Returns the number of rows of a block, or `None` if the scales are not by blocks.
    pub fn block_rows(self) -> Option<usize> {
        if let ScaledBy::Block { rows, .. } = self { Some(rows) } else { None }
    }

    /// Returns the number of adjacent columns that share a scale, in a weight with `columns`
    /// columns.
    pub fn group_columns(self, columns: usize) -> usize {
        if let ScaledBy::Block { columns, .. } = self { columns } else { columns }
    }

    /// Returns the number of scales of a row of `columns` columns.
    pub fn scales_of_row(self, columns: usize) -> usize {
        if let ScaledBy::Block { columns: width, .. } = self { columns.div_ceil(width) } else { 1 }
    }

    /// Returns the shape in memory of the scales of a weight `[rows, columns]`.
    pub fn shape(self, [rows, columns]: [usize; 2]) -> Shape {
        match self {
            ScaledBy::Block { rows: height, .. } => [rows.div_ceil(height), self.scales_of_row(columns)].into(),
            ScaledBy::Row | ScaledBy::Tensor => [rows].into(),
        }
    }
}

/// How a quantized weight is stored and how its activations are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QuantizationScheme {
    /// The type of the weight's elements.
    pub elements: DType,
    /// The part of the weight that shares one scale.
    pub weights: ScaledBy,
    /// The part of activations that shares one scale. If `None`, activations are not quantized.
    pub activations: Option<Quantization<()>>,
    /// `true` if each scale has a zero point, which is subtracted from the elements.
    #[serde(default)]
    pub has_zero_points: bool,
}

impl QuantizationScheme {
    /// The scheme of Qwen's and DeepSeek's releases.
    pub const BLOCK: QuantizationScheme =
        QuantizationScheme::fp8(ScaledBy::Block { rows: SCALE_BLOCK, columns: SCALE_BLOCK }, Quantization::Groups);
    /// The scheme `FP8-dynamic` of compressed-tensors.
    pub const ROW: QuantizationScheme = QuantizationScheme::fp8(ScaledBy::Row, Quantization::Rows);

    /// Returns a scheme of FP8 elements.
    pub const fn fp8(weights: ScaledBy, activations: Quantization<()>) -> Self {
        let (elements, activations) = (DType::F8E4M3, Some(activations));
        QuantizationScheme { elements, weights, activations, has_zero_points: false }
    }

    /// Returns a scheme of [4-bit integers](crate::int4) with a scale for each `group` columns of a
    /// row.
    pub const fn int4(group: usize, has_zero_points: bool) -> Self {
        let weights = ScaledBy::Block { rows: 1, columns: group };
        QuantizationScheme { elements: DType::U4, weights, activations: None, has_zero_points }
    }

    /// Returns `true` for a scheme of [4-bit integers](crate::int4).
    pub const fn is_int4(self) -> bool {
        matches!(self.elements, DType::U4)
    }

    /// Returns the type of activations that are multiplied by the weight, if unquantized
    /// activations are of type `activation`.
    pub fn operand(self, activation: DType) -> DType {
        self.activations.map_or(activation, |_| Quantization::ELEMENTS)
    }

    /// Returns the scheme in memory, where each scale covers one row or a block of `block_rows`
    /// rows.
    pub fn in_memory(self, block_rows: usize) -> Self {
        let weights = match self.weights {
            ScaledBy::Block { columns, .. } => ScaledBy::Block { rows: block_rows, columns },
            ScaledBy::Row | ScaledBy::Tensor => ScaledBy::Row,
        };
        QuantizationScheme { weights, ..self }
    }

    /// Returns the number of rows of a scale block in a fused weight, or 1 if the scheme has no
    /// blocks. `parts` has the number of rows of each part of the weight. Each part must begin with
    /// a new block, so the result is the largest power of two that divides the start of every part,
    /// up to the height of a checkpoint's block. Usually the result is this height, because all
    /// parts have whole blocks.
    pub fn fused_block_rows(self, parts: impl Iterator<Item = usize>) -> usize {
        let Some(most) = self.weights.block_rows() else { return 1 };
        let parts: Vec<usize> = parts.collect();
        let begun = parts.len().saturating_sub(1);
        let starts = parts[..begun].iter().scan(0, |start, rows| {
            *start += rows;
            Some(*start)
        });
        starts.fold(most, |height, start| height.min(1 << start.trailing_zeros().min(most.ilog2())))
    }
}

impl fmt::Display for QuantizationScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (true, ScaledBy::Block { columns, .. }) = (self.is_int4(), self.weights) {
            return write!(f, "INT4 with a scale for each {columns} columns of an output");
        }
        let part = match self.weights {
            ScaledBy::Block { .. } => "block of 128 x 128",
            ScaledBy::Row => "output",
            ScaledBy::Tensor => "matrix",
        };
        write!(f, "{} with a scale for each {part}", Quantization::NAME)
    }
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
            assert_eq!(QuantizationScheme::BLOCK.fused_block_rows(parts.iter().copied()), expected, "{parts:?}");
        }
        assert_eq!(QuantizationScheme::ROW.fused_block_rows([256, 256].into_iter()), 1);
    }
}
