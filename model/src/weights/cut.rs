//! The part of a tensor that a rank reads.

use bursar_kernels::RankShard;

use super::WeightError;
use crate::checkpoint::TensorInfo;

/// The rows and columns that a rank reads from a checkpoint tensor. All axes except the first count
/// as columns.
#[derive(Clone, Debug)]
pub struct Cut {
    rows: RankShard,
    columns: RankShard,
    /// The shape of the part.
    shape: Vec<usize>,
}

impl Cut {
    /// The part of a tensor of `shape`; `None` if the part is the whole tensor.
    pub(super) fn of(rows: RankShard, columns: RankShard, shape: &[usize]) -> Option<Cut> {
        if rows.is_whole() && columns.is_whole() {
            return None;
        }
        let mut shape = shape.to_vec();
        if columns.is_whole() {
            shape[0] = rows.count
        } else {
            shape = vec![rows.count, columns.count]
        }
        Some(Cut { rows, columns, shape })
    }

    /// The part of `found` to read. Other bytes of the file are not read.
    pub(crate) fn take<'a>(&'a self, found: &TensorInfo<'a>) -> TensorInfo<'a> {
        found.part(self.rows, self.columns, &self.shape)
    }

    /// The offset of the part's first element in the whole tensor, and the distance from the start
    /// of one row to the start of the next row, both in elements.
    pub(crate) fn place(&self) -> (u64, usize) {
        let pitch = self.columns.whole;
        ((self.rows.first * pitch + self.columns.first) as u64, pitch)
    }
}

/// Converts a share of elements to a share of units of `unit` elements.
///
/// # Errors
/// [`WeightError::Cut`] if the share begins or ends within a unit. Only the last unit of the tensor
/// may have fewer than `unit` elements.
pub(super) fn whole_units(
    name: &str,
    share: RankShard,
    (unit, what): (usize, &'static str),
) -> Result<RankShard, WeightError> {
    let end = share.first + share.count;
    let is_cut = |at: usize| !at.is_multiple_of(unit) && at != share.whole;
    if let Some(at) = [share.first, end].into_iter().find(|at| is_cut(*at)) {
        return Err(WeightError::Cut { name: name.to_owned(), at, what, unit });
    }
    let first = share.first / unit;
    Ok(RankShard { first, count: end.div_ceil(unit) - first, whole: share.whole.div_ceil(unit) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_blocks_ends_with_a_block_or_with_all() {
        let share = |first, count| RankShard { first, count, whole: 300 };
        let units = |share| whole_units("x", share, (128, "blocks")).map(|units| (units.first, units.count));
        assert_eq!(units(share(128, 172)).expect("the share ends at the last unit"), (1, 2));
        assert_eq!(units(share(0, 256)).expect("the share consists of whole blocks"), (0, 2));
        let error = units(share(0, 150)).expect_err("the share is cut within a block").to_string();
        assert_eq!(error, "tensor x would be split at 150, but its blocks cannot be split within 128");
        units(share(150, 150)).expect_err("the share is cut within a block");
    }
}
