//! Order in which the tower reads a picture's patches: window by window, so that each window is
//! a range of rows.

use crate::{MergeSize, flow::Grid};

/// Merged patches of a picture, in window order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WindowOrder {
    /// Index of each merged patch in the picture's row-major order.
    pub merged: Vec<usize>,
    /// Number of merged patches of each window, in order. Windows at the right and bottom borders
    /// may be smaller.
    pub lengths: Vec<usize>,
}

impl WindowOrder {
    /// Cuts a grid of patches into windows of `side` by `side` merged patches, frame by
    /// frame, row by row.
    pub(super) fn of(grid: Grid, merge: MergeSize, side: usize) -> Self {
        let (rows, columns) = grid.merged(merge);
        let mut order =
            WindowOrder { merged: Vec::with_capacity(grid.t as usize * rows * columns), lengths: Vec::new() };
        for frame in 0..grid.t as usize {
            for top in (0..rows).step_by(side) {
                for left in (0..columns).step_by(side) {
                    let (bottom, right) = ((top + side).min(rows), (left + side).min(columns));
                    for row in top..bottom {
                        order.merged.extend((left..right).map(|column| (frame * rows + row) * columns + column));
                    }
                    order.lengths.push((bottom - top) * (right - left));
                }
            }
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SQUARES: MergeSize = MergeSize::new(2);

    #[test]
    fn windows_at_the_border_are_smaller_but_never_empty() {
        // 3 x 5 merged patches, windows of 2 x 2.
        let order = WindowOrder::of(Grid { t: 1, h: 6, w: 10 }, SQUARES, 2);
        assert_eq!(order.lengths, [4, 4, 2, 2, 2, 1]);
        assert_eq!(order.merged, [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]);
        let exact = WindowOrder::of(Grid { t: 2, h: 4, w: 4 }, SQUARES, 2);
        assert_eq!((exact.lengths, exact.merged), (vec![4, 4], vec![0, 1, 2, 3, 4, 5, 6, 7]));
    }

    /// A tensor of integers that the reference recorded. `None` if the case does not have this
    /// tensor.
    fn recorded(case: &str, tensor: &str) -> Option<Vec<usize>> {
        let path = bursar_golden::path(format!("qwen2_5_vl/cases/{case}.safetensors"));
        let file = std::fs::read(path).expect("the golden case exists");
        let tensors = safetensors::SafeTensors::deserialize(&file).expect("safetensors");
        let numbers = tensors
            .tensor(tensor)
            .ok()?
            .data()
            .chunks_exact(8)
            .map(|bytes| bytes.try_into().expect("chunks of eight bytes"));
        Some(numbers.map(|bytes| i64::from_le_bytes(bytes) as usize).collect())
    }

    #[test]
    fn window_order_matches_the_recorded_reference() {
        for case in ["single_image", "several_images", "two_turns", "same_image_twice", "long_text"] {
            let grids = recorded(case, "image_grid_thw").expect("grids");
            let (mut index, mut ends) = (Vec::new(), vec![0]);
            for grid in grids.chunks_exact(3) {
                let [t, h, w] = [0, 1, 2].map(|axis| grid[axis] as u32);
                let order = WindowOrder::of(Grid { t, h, w }, SQUARES, 4);
                let first = index.len();
                index.extend(order.merged.iter().map(|merged| first + merged));
                for length in order.lengths {
                    ends.push(ends[ends.len() - 1] + SQUARES.patches(length));
                }
            }
            assert_eq!(Some(index), recorded(case, "window_index"), "{case}");
            assert_eq!(Some(ends), recorded(case, "window_ends"), "{case}");
        }
    }
}
