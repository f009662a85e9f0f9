//! Cutting a resized picture into normalised patches, in the order that the vision encoder reads them.

use rayon::prelude::*;

use super::config::ImageProcessorConfig;
use crate::flow::patches::Grid;
use crate::flow::rgb_image::RgbImage;

const CHANNELS: usize = 3;

/// What a patch is, in pixels, frames and neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchShape {
    /// Pixels of a patch's side.
    pub patch: usize,
    /// Frames of a patch; where there are fewer the last is repeated.
    pub temporal: usize,
    /// Patches of a merge group's side.
    pub merge: usize,
}

impl PatchShape {
    /// Values of one patch: `channels x temporal x patch x patch`.
    pub fn values(&self) -> usize {
        CHANNELS * self.temporal * self.patch * self.patch
    }
}

/// The value of each of 256 levels in each channel, so that rescaling and normalising are one look-up.
///
/// transformers fuses both (`_fuse_mean_std_and_rescale_factor`, 5.17): `(level - mean / scale) / (std / scale)` in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct LevelValues([[f32; 256]; CHANNELS]);

impl LevelValues {
    /// Follows `do_rescale`, `rescale_factor`, `do_normalize`, `image_mean` and `image_std`.
    pub fn new(config: &ImageProcessorConfig) -> Self {
        let fused = if config.do_rescale { (1.0 / config.rescale_factor) as f32 } else { 1.0 };
        let value = |channel: usize, level: usize| {
            let level = level as f32;
            match (config.do_normalize, config.do_rescale) {
                (true, _) => {
                    (level - config.image_mean[channel] as f32 * fused) / (config.image_std[channel] as f32 * fused)
                }
                (false, true) => level * config.rescale_factor as f32,
                (false, false) => level,
            }
        };
        LevelValues(std::array::from_fn(|channel| std::array::from_fn(|level| value(channel, level))))
    }
}

/// Writes the patches of a step of time into `pixels`: of a still picture, or of up to `temporal` frames of one size.
///
/// `pixels` is `[grid.h / merge, grid.w / merge, merge, merge, channels, temporal, patch, patch]`, flattened: patches of
/// a merge group are neighbours, as `patchify` of transformers' Qwen2VLImageProcessor lays them out.
pub fn patchify(frames: &[RgbImage], grid: Grid, shape: PatchShape, levels: &LevelValues, pixels: &mut [f32]) {
    let PatchShape { patch, temporal, merge } = shape;
    let picture = frames.first().expect("a step has a frame");
    let row_bytes = picture.width() as usize * CHANNELS;
    let alike = |frame: &RgbImage| (frame.width(), frame.height()) == (picture.width(), picture.height());
    assert!(frames.len() <= temporal && frames.iter().all(alike), "a step's frames have one size");
    assert_eq!(pixels.len(), grid.patches() * shape.values(), "the caller sized `pixels` by the grid");
    assert_eq!(row_bytes, grid.w as usize * patch * CHANNELS, "the grid was made for this width");
    let band_values = merge * grid.w as usize * shape.values();
    let band_bytes = merge * patch * row_bytes;
    pixels.par_chunks_exact_mut(band_values).enumerate().for_each(|(place, band)| {
        let rows: Vec<&[u8]> = frames.iter().map(|frame| &frame.data()[place * band_bytes..][..band_bytes]).collect();
        for (index, values) in band.chunks_exact_mut(shape.values()).enumerate() {
            let (group, inside) = (index / (merge * merge), index % (merge * merge));
            let (down, across) = (inside / merge, group * merge + inside % merge);
            let corner = down * patch * row_bytes + across * patch * CHANNELS;
            write_patch(&rows, corner, row_bytes, shape, levels, values);
        }
    });
}

/// `frames` are each frame's rows of the band; the patch begins at byte `corner` of them.
fn write_patch(
    frames: &[&[u8]],
    corner: usize,
    row_bytes: usize,
    shape: PatchShape,
    levels: &LevelValues,
    values: &mut [f32],
) {
    let PatchShape { patch, temporal, .. } = shape;
    for (channel, times) in values.chunks_exact_mut(temporal * patch * patch).enumerate() {
        let level_values = &levels.0[channel];
        let (given, repeated) = times.split_at_mut(frames.len() * patch * patch);
        for (rows, frame) in frames.iter().zip(given.chunks_exact_mut(patch * patch)) {
            for (y, line) in frame.chunks_exact_mut(patch).enumerate() {
                let colors = &rows[corner + y * row_bytes..][..patch * CHANNELS];
                for (value, color) in line.iter_mut().zip(colors.chunks_exact(CHANNELS)) {
                    *value = level_values[usize::from(color[channel])];
                }
            }
        }
        let last = &given[given.len() - patch * patch..];
        repeated.chunks_exact_mut(patch * patch).for_each(|frame| frame.copy_from_slice(last));
    }
}
