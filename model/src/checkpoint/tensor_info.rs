//! A tensor in its file: type, shape and bytes.

use bursar_kernels::RankShard;

use super::stored::{Stored, TensorType};

/// A tensor in its file. Nothing is copied, and the disk is read only when the bytes are accessed.
#[derive(Clone, Copy)]
pub struct TensorInfo<'a> {
    /// The type of the elements after they are read. If a file has blocks of quantized elements,
    /// all its matrices are read as F32.
    pub dtype: TensorType,
    /// The storage of the elements in the file.
    pub stored: Stored,
    /// The shape, slowest axis first.
    pub shape: &'a [usize],
    /// The stored elements, little-endian, row-major. Not aligned.
    pub bytes: &'a [u8],
    /// Number of heads whose rotary pairs are in adjacent rows; 0 if rows have the
    /// order of the model.
    pub(super) paired_heads: usize,
    /// Bytes between the end of a row and the start of the next row: columns that other ranks read.
    pub(super) gap: usize,
}

impl<'a> TensorInfo<'a> {
    /// Whether `bytes` are the elements in the type and order of the model.
    pub fn is_in_place(&self) -> bool {
        self.stored == Stored::Plain(self.dtype) && self.paired_heads == 0 && self.gap == 0
    }

    /// The given rows and columns of the tensor, as a tensor of `shape`. Rotary heads and quantized
    /// blocks must not be split.
    pub fn part<'b>(&self, rows: RankShard, columns: RankShard, shape: &'b [usize]) -> TensorInfo<'b>
    where
        'a: 'b,
    {
        let pitch = self.bytes.len() / rows.whole;
        let bytes_of =
            |columns: usize| self.stored.bytes(columns).expect("the requested rows are fewer than the file's");
        let own = bytes_of(columns.count);
        let bytes = match rows.count {
            0 => &[],
            count => &self.bytes[rows.first * pitch + bytes_of(columns.first)..][..(count - 1) * pitch + own],
        };
        let paired_heads = self.paired_heads * rows.count / rows.whole;
        TensorInfo { shape, bytes, paired_heads, gap: pitch - own, ..*self }
    }

    /// The stored bytes of the model's row `row`. [`rows`](Self::rows) defines the rows.
    pub fn row_bytes(&self, row: usize) -> &'a [u8] {
        let pitch = (self.bytes.len() + self.gap) / self.rows().0;
        &self.bytes[self.stored_row(row) * pitch..][..pitch - self.gap]
    }

    /// The number of rows, and the number of elements of each row. A vector is one row, unless its
    /// elements are reordered (`paired_heads`).
    pub fn rows(&self) -> (usize, usize) {
        let rows = self.shape[0];
        match self.shape.len() {
            1 if self.paired_heads == 0 => (1, rows),
            _ => (rows, self.shape[1..].iter().product()),
        }
    }

    /// The index in the file of the model's row `row`. ggml rotates adjacent
    /// elements, so its files have the rows `i` and `i + half` of a head at `2 i` and
    /// `2 i + 1` (transformers 5.17, `modeling_gguf_pytorch_utils.py`).
    pub fn stored_row(&self, row: usize) -> usize {
        if self.paired_heads == 0 {
            return row;
        }
        let of_head = self.shape[0] / self.paired_heads;
        let (head, at) = (row / of_head, row % of_head);
        head * of_head + at % (of_head / 2) * 2 + at / (of_head / 2)
    }
}

impl std::fmt::Debug for TensorInfo<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:?}{:?}", self.dtype, self.shape)
    }
}
