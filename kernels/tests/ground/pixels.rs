//! Pictures as bytes, and the expected contents of their patches.

use super::Random;

/// The bytes of several pictures, after a few unused bytes, and patches of these pictures in random
/// order.
pub(super) struct PixelData {
    pub(super) bytes: Vec<u8>,
    pub(super) layout: Vec<[u32; 4]>,
    pub(super) levels: Vec<[f32; 7]>,
    pub(super) places: [Vec<u32>; 3],
}

impl PixelData {
    pub(super) fn new(pictures: &[(usize, usize, usize)], side: usize, patches: usize, random: &mut Random) -> Self {
        let (mut end, mut layout) = (12, Vec::new());
        for (down, across, frames) in pictures {
            layout.push([end, *down, *across, *frames].map(|number| number as u32));
            end += down * across * side * side * 3 * frames;
        }
        let levels = |random: &mut Random| {
            let numbers = random.floats(6);
            let factor = if random.below(2) == 0 { 1.0 } else { 1.0 / 255.0 };
            std::array::from_fn(|at| match at {
                0 => factor,
                1..4 => 128.0 * factor + numbers[at - 1],
                _ => 64.0 * factor + 0.1 + numbers[at - 1].abs(),
            })
        };
        let mut places = [vec![], vec![], vec![]];
        for _ in 0..patches {
            let picture = random.below(pictures.len());
            let (down, across, _) = pictures[picture];
            let place = [picture, random.below(down), random.below(across)];
            places.iter_mut().zip(place).for_each(|(axis, number)| axis.push(number as u32));
        }
        let bytes = random.indices(end, 256).into_iter().map(|level| level as u8).collect();
        PixelData { bytes, layout, levels: pictures.iter().map(|_| levels(random)).collect(), places }
    }

    /// One expected value of a patch, computed from the pixel's position in the whole picture.
    pub(super) fn value(&self, patch: usize, channel: usize, frame: usize, side: usize, [y, x]: [usize; 2]) -> f64 {
        let [picture, row, column] = [0, 1, 2].map(|axis| self.places[axis][patch] as usize);
        let [first, down, across, frames] = self.layout[picture].map(|number| number as usize);
        let (top, left, frame) = (row * side + y, column * side + x, frame.min(frames - 1));
        let pixel = (frame * down * side + top) * across * side + left;
        let levels = self.levels[picture].map(f64::from);
        (f64::from(self.bytes[first + pixel * 3 + channel]) * levels[0] - levels[1 + channel]) / levels[4 + channel]
    }

    /// One element of a patch's expected position embedding: the sum over all points of the grid,
    /// each weighted by a hat function around the point.
    pub(super) fn position(&self, table: &[f64], [side, hidden]: [usize; 2], patch: usize, element: usize) -> f64 {
        let [picture, row, column] = [0, 1, 2].map(|axis| self.places[axis][patch]);
        let [_, down, across, _] = self.layout[picture as usize];
        // The position is rounded to f32, as it is in the models.
        let on_grid = |index: u32, count: u32| f64::from(index as f32 * (side - 1) as f32 / (count.max(2) - 1) as f32);
        let (y, x) = (on_grid(row, down), on_grid(column, across));
        let near = |place: f64, point: usize| (1.0 - (place - point as f64).abs()).max(0.0);
        let points = (0..side).flat_map(|row| (0..side).map(move |column| (row, column)));
        points
            .map(|(row, column)| near(y, row) * near(x, column) * table[(row * side + column) * hidden + element])
            .sum()
    }
}
