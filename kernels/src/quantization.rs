//! Quantization of numbers to E4M3.

/// Rows and columns of a block of a weight, and columns of a group of activations. Each block and
/// each group has one scale.
pub const FP8_BLOCK: usize = 128;

/// How activations are quantized to E4M3. Each scale is the largest magnitude of the numbers that
/// it covers, divided by 448.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantization {
    /// Each group of [`FP8_BLOCK`] columns of a row has a scale.
    Groups,
    Rows,
    /// All numbers share this scale. Magnitudes above 448 after scaling are clamped to 448.
    Fixed(f32),
}

impl Quantization {
    /// Returns the number of scales that are stored for each row of `columns` numbers.
    pub fn row_scales(self, columns: usize) -> usize {
        match self {
            Quantization::Groups => columns.div_ceil(FP8_BLOCK),
            Quantization::Rows => 1,
            Quantization::Fixed(_) => 0,
        }
    }
}
