//! Claims of weights that stay in the quantized blocks of their file.

use bursar_budgets::Bytes;
use bursar_kernels::{BlockRows, BlockType, DType, RankShard, Weight};

use super::{WeightCopy, WeightError, WeightMap, WeightSource};
use crate::checkpoint::{Change, ElementOrder, Stored};

/// The weights that a checkpoint has in blocks of quantized elements, on a target that multiplies
/// blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockWeights {
    /// Bytes of the weights that stay in blocks.
    pub bytes: Bytes,
    /// The names of the tensors that are widened while they load.
    pub widened: Vec<String>,
}

impl WeightMap<'_> {
    /// Claims the rows `parts` as one weight that stays in the file's blocks. `of_row` selects the
    /// columns of each row. `zero_rows` rows of zeros follow each part. Returns `None` if the rows
    /// must be widened; see [`block_type`](Self::block_type).
    pub(super) fn in_blocks(
        &mut self,
        parts: &[(String, RankShard)],
        of_row: RankShard,
        zero_rows: usize,
    ) -> Result<Option<Weight<'static>>, WeightError> {
        let types = parts.iter().map(|(name, _)| self.block_type(name, of_row));
        let Some(types) = types.collect::<Result<Option<Vec<_>>, _>>()? else { return Ok(None) };
        let columns = of_row.count;
        self.segment.align();
        let start = self.segment.end();
        for ((name, rows), kind) in parts.iter().zip(&types) {
            let (_, source, cut) = self.tensor_source(name, *rows, of_row, [rows.count, columns].into())?;
            if !self.formats.is_in_decoder() {
                self.names.mark_outside_decoder(name);
            }
            let bytes = |rows: usize| Bytes((rows * kind.bytes_of(columns)) as u64);
            let copy = WeightCopy::of(source, DType::U8, (columns, 0), bytes(rows.count));
            self.segment.place(WeightCopy { cut, blocks: Some(*kind), ..copy });
            if zero_rows > 0 {
                let zeros = bytes(zero_rows);
                self.segment.place(WeightCopy::of(WeightSource::Zeros, DType::U8, (zeros.as_usize(), 0), zeros));
            }
        }
        let rows = parts.iter().zip(types).map(|((_, rows), kind)| (kind, rows.count + zero_rows));
        let blocks = BlockRows::new(columns, rows);
        let data = self.segment.tensor(start, [blocks.bytes().as_usize()], DType::U8);
        Ok(Some(Weight::in_blocks(data, blocks)))
    }

    /// The type of the blocks in which the columns `of_row` of the tensor `name` can stay. `None`
    /// if the file does not have blocks, the target does not multiply them, the elements are
    /// changed or reordered within rows while they are read, or a block would be cut.
    pub(super) fn block_type(&self, name: &str, of_row: RankShard) -> Result<Option<BlockType>, WeightError> {
        if !self.target.keeps_blocks() || self.checkpoint.tensors.random(name, 0).is_some() {
            return Ok(None);
        }
        let found = self.checkpoint.tensor(name)?;
        let Stored::Blocks(kind) = found.stored else { return Ok(None) };
        let is_whole = [of_row.first, of_row.count].iter().all(|columns| columns.is_multiple_of(kind.elements()));
        let is_in_order = !matches!(found.order(), ElementOrder::TiledColumns(_) | ElementOrder::Interleaved(_));
        Ok((is_whole && is_in_order && found.change() == Change::Unchanged).then_some(kind))
    }

    /// The weights that the checkpoint has in blocks; `None` if it has none, or if the target does
    /// not multiply blocks. Call this after the last claim.
    pub fn block_weights(&self) -> Result<Option<BlockWeights>, WeightError> {
        let mut found = BlockWeights::default();
        for copy in self.copies().iter().filter(|_| self.target.keeps_blocks()) {
            match (&copy.source, copy.blocks) {
                (_, Some(_)) => found.bytes += copy.bytes,
                (WeightSource::Tensor(name), None)
                    if matches!(self.checkpoint.tensor(name)?.stored, Stored::Blocks(_)) =>
                {
                    found.widened.push(name.clone());
                }
                _ => {}
            }
        }
        found.widened.dedup();
        Ok((found != BlockWeights::default()).then_some(found))
    }
}
