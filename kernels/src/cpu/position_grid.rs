//! Learned position embeddings of a square grid, interpolated between its points.

use super::{
    memory::{Rows, add_widened, write_rows},
    threads::Threads,
};
use crate::calls::PositionGrid;

/// Cost per element in multiply-adds: four grid points are converted to `f32` and summed with
/// weights.
const ELEMENT_COST: usize = 8;

pub(super) fn position_grid(threads: &Threads, call: PositionGrid<'_>) {
    let (layout, places) = (Rows::<u32>::of(&call.layout), Rows::<u32>::of(&call.places));
    let side = call.side;
    write_rows(threads, &call.out, ELEMENT_COST, |patch, out| {
        let [picture, row, column] = [0, 1, 2].map(|axis| places.row(axis)[patch] as usize);
        let [down, across] = [1, 2].map(|number| layout.row(picture)[number] as usize);
        assert!(row < down && column < across, "patch {row}, {column} is outside a picture of {down} x {across}");
        let (rows, columns) = (Between::of(row, down, side), Between::of(column, across, side));
        out.fill(0.0);
        for (row, row_weight) in rows.points() {
            for (column, column_weight) in columns.points() {
                add_widened(&call.table, row * side + column, row_weight * column_weight, out);
            }
        }
    });
}

/// A position on one axis of the grid: between two points, or on the last point.
struct Between {
    points: [usize; 2],
    weights: [f32; 2],
}

impl Between {
    /// Returns the position of patch `index` on an axis of `count` patches.
    fn of(index: usize, count: usize, side: usize) -> Self {
        let place = index as f32 * (side - 1) as f32 / (count - 1).max(1) as f32;
        let before = place.floor();
        let weight = 1.0 - (place - before);
        let point = before as usize;
        Between { points: [point, point + 1].map(|point| point.min(side - 1)), weights: [weight, 1.0 - weight] }
    }

    fn points(&self) -> impl Iterator<Item = (usize, f32)> {
        self.points.into_iter().zip(self.weights)
    }
}
