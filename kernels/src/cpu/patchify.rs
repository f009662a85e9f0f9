//! Pictures cut into normalized patches.

use super::{
    memory::{Rows, write_rows},
    threads::Threads,
};
use crate::calls::{CHANNELS, PatchSize, Patchify};

/// Cost per value in multiply-adds: a division, and a read with a stride of three bytes.
const VALUE_COST: usize = 4;

pub(super) fn patchify(threads: &Threads, call: Patchify<'_>) {
    let PatchSize { side, frames } = call.size;
    let bytes = Rows::<u8>::of(&call.bytes).all();
    let (layout, levels) = (Rows::<u32>::of(&call.layout), Rows::<f32>::of(&call.levels));
    let places = Rows::<u32>::of(&call.places);
    write_rows(threads, &call.out, VALUE_COST, |patch, out| {
        let [picture, row, column] = [0, 1, 2].map(|axis| places.row(axis)[patch] as usize);
        let [first, down, across, given] = [0, 1, 2, 3].map(|number| layout.row(picture)[number] as usize);
        assert!(row < down && column < across, "patch {row}, {column} is outside a picture of {down} x {across}");
        assert!((1..=frames).contains(&given), "a picture has {given} frames; expected 1 to {frames}");
        let row_bytes = across * side * CHANNELS;
        let frame_bytes = down * side * row_bytes;
        let corner = first + row * side * row_bytes + column * side * CHANNELS;
        let (factor, channels) = levels.row(picture).split_first().expect("the shape was checked before");
        let (shifts, scales) = channels.split_at(CHANNELS);
        for (channel, planes) in out.chunks_exact_mut(frames * side * side).enumerate() {
            let (shift, scale) = (shifts[channel], scales[channel]);
            let (seen, repeated) = planes.split_at_mut(given * side * side);
            for (frame, plane) in seen.chunks_exact_mut(side * side).enumerate() {
                for (y, line) in plane.chunks_exact_mut(side).enumerate() {
                    let pixels = &bytes[corner + frame * frame_bytes + y * row_bytes..][..side * CHANNELS];
                    for (value, pixel) in line.iter_mut().zip(pixels.chunks_exact(CHANNELS)) {
                        *value = (f32::from(pixel[channel]) * factor - shift) / scale;
                    }
                }
            }
            let last = &seen[seen.len() - side * side..];
            repeated.chunks_exact_mut(side * side).for_each(|plane| plane.copy_from_slice(last));
        }
    });
}
