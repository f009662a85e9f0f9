//! Pure: the axes of the tensors of a packed weight.

use super::scheme::{PackedFormat, PackedScheme};

/// The axes of a tensor of packed elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Axes {
    /// The number of matrices, if the tensor has the matrices of all experts of a layer.
    pub experts: Option<usize>,
    /// Lengths of the other two axes, in their order in the tensor.
    pub first: usize,
    pub second: usize,
}

/// The shapes of the parts of a packed weight.
pub(super) struct PartShapes {
    pub words: Vec<usize>,
    pub scales: Vec<usize>,
    pub zero_points: Vec<usize>,
}

/// Number of packed elements in one number of the stored tensor. FP4 elements are packed in bytes,
/// integers in 32-bit words.
fn per_number(scheme: PackedScheme) -> usize {
    if scheme.format.is_fp4() { 8 / scheme.bits } else { scheme.per_word() }
}

impl Axes {
    /// The axes of a tensor of `shape`; `None` if a packed weight of this scheme cannot have this
    /// shape. Rows of FP4 numbers must consist of whole groups.
    pub fn of(shape: &[usize], scheme: PackedScheme) -> Option<Self> {
        let (experts, first, second) = match *shape {
            [first, second] => (None, first, second),
            [experts, first, second] if scheme.format.is_by_row() => (Some(experts), first, second),
            _ => return None,
        };
        let is_whole = |group: usize| (second * per_number(scheme)).is_multiple_of(group);
        let is_valid = shape.iter().all(|extent| *extent > 0) && scheme.format.fp4_group().is_none_or(is_whole);
        is_valid.then_some(Axes { experts, first, second })
    }

    /// A description of the tensors that [`of`](Self::of) accepts, for messages.
    pub fn expected(scheme: PackedScheme) -> &'static str {
        match scheme.format.fp4_group() {
            None => "I32 with two axes",
            Some(16) => "U8 with two axes and rows of whole groups of 16 elements",
            Some(_) => "U8 with two axes and rows of whole groups of 32 elements",
        }
    }

    /// Rows and columns of the matrix, or of each expert. `columns` is the exact number of columns,
    /// if another tensor gives this number. Otherwise, the last word is assumed to be full.
    pub fn matrix(self, scheme: PackedScheme, columns: Option<usize>) -> [usize; 2] {
        let Axes { first, second, .. } = self;
        match scheme.format {
            PackedFormat::Awq => [second * scheme.per_word(), first],
            PackedFormat::Gptq | PackedFormat::GptqV2 => [second, columns.unwrap_or(first * scheme.per_word())],
            _ => [first, second * per_number(scheme)],
        }
    }

    /// The shapes of the parts of a weight with matrices of this shape.
    pub fn parts(self, scheme: PackedScheme, [rows, columns]: [usize; 2]) -> PartShapes {
        let (per_word, count) = (scheme.per_word(), scheme.groups(columns));
        let packed_rows = rows.div_ceil(per_word);
        let (words, scales, zero_points) = match scheme.format {
            PackedFormat::Awq => ([columns, packed_rows], [count, rows], [count, packed_rows]),
            PackedFormat::Gptq | PackedFormat::GptqV2 => {
                ([columns.div_ceil(per_word), rows], [count, rows], [count, packed_rows])
            }
            _ => ([rows, columns.div_ceil(per_number(scheme))], [rows, count], [packed_rows, count]),
        };
        let of_experts = |shape: [usize; 2]| self.experts.into_iter().chain(shape).collect();
        PartShapes { words: of_experts(words), scales: of_experts(scales), zero_points: of_experts(zero_points) }
    }
}
