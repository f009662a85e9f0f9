//! A tensor in its file: type, shape and bytes.

use bursar_kernels::RankShard;

use super::packed::PackedMatrix;
#[cfg(test)]
use super::stored::BlockType;
use super::stored::{Stored, TensorType};

/// A tensor in its file, or a part of it. Nothing is copied, and the disk is read only when the
/// bytes are accessed.
#[derive(Clone, Copy)]
pub struct TensorInfo<'a> {
    /// The type of the elements after they are read. If a file has blocks of quantized elements,
    /// all its matrices are read as F32.
    pub dtype: TensorType,
    /// The storage of the elements in the file.
    pub stored: Stored,
    /// The shape, slowest axis first.
    pub shape: &'a [usize],
    /// The stored elements, little-endian, row-major. Not aligned. A part of a reordered or packed
    /// tensor, and a part that cuts blocks, have the bytes of the whole tensor.
    pub bytes: &'a [u8],
    /// The elements of a second tensor, for [`ElementOrder::Interleaved`]; empty for other orders.
    pub(super) second: &'a [u8],
    pub(super) order: ElementOrder,
    pub(super) change: Change,
    /// Bytes from the start of a stored row to the start of the next stored row.
    pub(super) pitch: usize,
    /// The part's first row and first column, if the part has the bytes of the whole tensor.
    pub(super) first: [usize; 2],
    /// The whole weight, if its elements are packed integers or packed FP4 numbers. `bytes` are its
    /// words.
    pub(crate) packed: Option<PackedMatrix<'a>>,
}

/// The order of a tensor's elements in its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ElementOrder {
    /// The order of the model.
    #[default]
    Model,
    /// The two rows of a rotary pair are adjacent. Each head has this number of rows.
    PairedRows(usize),
    /// The rows of value heads are in the order that [`Tiling`] describes.
    TiledRows(Tiling),
    /// The columns of each row are in the order that [`Tiling`] describes.
    TiledColumns(Tiling),
    /// Each row of the model alternates between this number of elements of the stored tensor and
    /// the same number of elements of a second tensor.
    Interleaved(usize),
}

/// The order of the heads of values in llama.cpp's gated delta nets. The model has the values of a
/// key head one after the other. The file has the first value of each key head, then the second
/// value of each key head, and so on (llama.cpp, `conversion/qwen.py`, `_reorder_v_heads`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Rows or columns before the first head. Their order is that of the model.
    pub before: usize,
    pub key_heads: usize,
    /// Value heads of each key head.
    pub values: usize,
    /// Rows or columns of a head.
    pub width: usize,
}

impl Tiling {
    /// The end of the last head.
    pub fn end(&self) -> usize {
        self.before + self.key_heads * self.values * self.width
    }

    /// The index in the file of the model's row or column `at`.
    pub fn stored(&self, at: usize) -> usize {
        let Some(within) = at.checked_sub(self.before) else { return at };
        let (head, within) = (within / self.width, within % self.width);
        self.before + (head % self.values * self.key_heads + head / self.values) * self.width + within
    }
}

/// A function that is applied to the elements of a file, as f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Change {
    #[default]
    Unchanged,
    /// Subtracts 1, which llama.cpp adds to the weights of norms that are centered on zero.
    MinusOne,
    /// `ln(-x)`, because llama.cpp stores `-exp(x)` for the rates of decay.
    LogOfNegative,
}

impl<'a> TensorInfo<'a> {
    /// A packed weight with its `shape`, which may have an axis of experts before the axes of each
    /// matrix.
    pub(crate) fn of_packed(matrix: PackedMatrix<'a>, shape: &'a [usize]) -> Self {
        let (stored, bytes, pitch) = (Stored::Packed(matrix.scheme), matrix.words(), 0);
        let (order, change, first, packed) = (ElementOrder::Model, Change::Unchanged, [0; 2], Some(matrix));
        TensorInfo { dtype: matrix.dtype(), stored, shape, bytes, second: &[], order, change, pitch, first, packed }
    }

    /// Whether `bytes` are the elements in the type and order of the model.
    pub fn is_in_place(&self) -> bool {
        self.stored == Stored::Plain(self.dtype)
            && (self.order, self.change) == (ElementOrder::Model, Change::Unchanged)
            && self.bytes.len() == self.bytes_of(self.shape.iter().product())
    }

    /// The same elements in another shape.
    pub fn reshaped<'b>(&self, shape: &'b [usize]) -> TensorInfo<'b>
    where
        'a: 'b,
    {
        TensorInfo { shape, ..*self }
    }

    /// The given rows and columns of the tensor, as a tensor of `shape`. Rotary heads must not be
    /// split.
    pub fn part<'b>(&self, rows: RankShard, columns: RankShard, shape: &'b [usize]) -> TensorInfo<'b>
    where
        'a: 'b,
    {
        let is_cut = [columns.first, columns.count].iter().any(|at| !at.is_multiple_of(self.stored.elements()));
        if self.order != ElementOrder::Model || self.packed.is_some() || is_cut {
            // A row of packed experts is a whole matrix.
            let of_row = self.packed.map_or(1, |packed| packed.shape[0] / rows.whole);
            let first = [self.first[0] + rows.first * of_row, self.first[1] + columns.first];
            return TensorInfo { shape, first, ..*self };
        }
        let pitch = self.bytes.len() / rows.whole;
        let own = self.bytes_of(columns.count);
        let bytes = match rows.count {
            0 => &[],
            count => &self.bytes[rows.first * pitch + self.bytes_of(columns.first)..][..(count - 1) * pitch + own],
        };
        TensorInfo { shape, bytes, pitch, ..*self }
    }

    fn bytes_of(&self, columns: usize) -> usize {
        self.stored.bytes(columns).expect("the requested elements are fewer than the file's")
    }

    /// The stored bytes of the model's row `row`. [`rows`](Self::rows) defines the rows. If the
    /// columns are reordered, the result is the whole stored row. If the part cuts blocks, the
    /// result consists of whole blocks, so it may begin before the part's first column.
    pub fn row_bytes(&self, row: usize) -> &'a [u8] {
        let of_row = &self.bytes[self.stored_row(row) * self.pitch..];
        match self.order {
            ElementOrder::TiledColumns(tiling) => &of_row[..self.bytes_of(tiling.end())],
            ElementOrder::Interleaved(_) => &of_row[..self.pitch],
            _ => {
                let end = (self.first[1] + self.rows().1).next_multiple_of(self.stored.elements());
                &of_row[self.bytes_of(self.first[1])..self.bytes_of(end)]
            }
        }
    }

    /// Columns of the first stored block that are before the part's first column.
    pub(crate) fn skipped_columns(&self) -> usize {
        self.first[1] % self.stored.elements()
    }

    /// The bytes of the row `row` of the second tensor, for [`ElementOrder::Interleaved`].
    pub(crate) fn second_row_bytes(&self, row: usize) -> &'a [u8] {
        &self.second[self.stored_row(row) * self.pitch..][..self.pitch]
    }

    pub(crate) fn order(&self) -> ElementOrder {
        self.order
    }

    pub(crate) fn change(&self) -> Change {
        self.change
    }

    /// Whether two whole tensors have the same elements in the same form.
    pub(crate) fn is_same(&self, other: &TensorInfo<'_>) -> bool {
        (self.dtype, self.shape, self.bytes) == (other.dtype, other.shape, other.bytes) && self.packed == other.packed
    }

    /// The part's first column, counted from the start of `bytes`. The result is 0 unless the
    /// tensor is reordered or packed, or the part cuts blocks, because `bytes` otherwise begin at
    /// the part.
    pub(crate) fn first_column(&self) -> usize {
        self.first[1]
    }

    /// The number of rows, and the number of elements of each row. A vector is one row, unless its
    /// elements are reordered. Packed weights have the rows of all matrices.
    pub fn rows(&self) -> (usize, usize) {
        let rows = self.shape[0];
        match self.shape.len() {
            1 if self.order == ElementOrder::Model => (1, rows),
            3 if self.packed.is_some() => (rows * self.shape[1], self.shape[2]),
            _ => (rows, self.shape[1..].iter().product()),
        }
    }

    /// The index in the file of the model's row `row`. ggml rotates adjacent
    /// elements, so its files have the rows `i` and `i + half` of a head at `2 i` and
    /// `2 i + 1` (transformers 5.17, `modeling_gguf_pytorch_utils.py`).
    pub fn stored_row(&self, row: usize) -> usize {
        let row = self.first[0] + row;
        match self.order {
            ElementOrder::PairedRows(of_head) => {
                let (head, at) = (row / of_head, row % of_head);
                head * of_head + at % (of_head / 2) * 2 + at / (of_head / 2)
            }
            ElementOrder::TiledRows(tiling) => tiling.stored(row),
            ElementOrder::Model | ElementOrder::TiledColumns(_) | ElementOrder::Interleaved(_) => row,
        }
    }
}

#[cfg(test)]
impl<'a> TensorInfo<'a> {
    /// A matrix of quantized blocks whose columns are tiled.
    pub(crate) fn tiled_columns(
        kind: BlockType,
        shape: &'a [usize],
        bytes: &'a [u8],
        (key_heads, values, width): (usize, usize, usize),
    ) -> Self {
        let order = ElementOrder::TiledColumns(Tiling { before: 0, key_heads, values, width });
        let (dtype, stored, change) = (TensorType::F32, Stored::Blocks(kind), Change::Unchanged);
        let pitch = bytes.len() / shape[0];
        TensorInfo { dtype, stored, shape, bytes, second: &[], order, change, pitch, first: [0; 2], packed: None }
    }
}

impl std::fmt::Debug for TensorInfo<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:?}{:?}", self.dtype, self.shape)
    }
}
