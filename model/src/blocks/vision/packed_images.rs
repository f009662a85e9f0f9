//! Pictures packed for one launch of a vision tower: their frames, and the order in which patches
//! are cut from them.

use std::sync::Arc;

use bursar_budgets::Bytes;
use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{
        attention_packed::PackedSequences,
        patchify::{LAYOUT_NUMBERS, LEVEL_NUMBERS, PatchSize, Pixels},
    },
};

use crate::{
    MergeSize,
    flow::{Grid, ResizedImage, RgbImage},
};

/// Pictures packed for one launch. Their pixels are not copied until they are uploaded.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedImages {
    patch: PatchSize,
    merge: MergeSize,
    bytes: Bytes,                       // of all frames
    frames: Vec<Arc<[RgbImage]>>,       // [pictures]
    layout: Vec<[u32; LAYOUT_NUMBERS]>, // [pictures]
    levels: Vec<[f32; LEVEL_NUMBERS]>,  // [pictures]
    places: [Vec<u32>; 3],              // picture, row and column, [patches] each
    frame_starts: Vec<u32>,             // [pictures + 1]
    cache_rows: Vec<u32>,               // [merged patches]: cache row of each embedding
}

/// The position of each patch of a launch, on the device.
pub struct PatchPlaces<'s> {
    /// `[3, patches]` u32: picture, row, column.
    pub places: Tensor<'s>,
    /// `[pictures, LAYOUT_NUMBERS]` u32.
    pub layout: Tensor<'s>,
}

impl PatchPlaces<'_> {
    /// `[2, patches]` u32: row and column.
    pub fn positions(&self) -> Tensor<'_> {
        self.places.row_range(1..3)
    }
}

impl AsRef<PackedImages> for PackedImages {
    fn as_ref(&self) -> &PackedImages {
        self
    }
}

impl PackedImages {
    /// An empty batch for a tower that reads patches of size `patch` and merges them by `merge`.
    pub fn new(patch: PatchSize, merge: MergeSize) -> Self {
        PackedImages {
            patch,
            merge,
            bytes: Bytes::ZERO,
            frames: Vec::new(),
            layout: Vec::new(),
            levels: Vec::new(),
            places: Default::default(),
            frame_starts: vec![0],
            cache_rows: Vec::new(),
        }
    }

    /// Packs pictures, each with the vision cache rows for its embeddings. The patches of a
    /// picture are in this order: merged patches row by row, and within each merged patch its
    /// patches row by row.
    ///
    /// # Panics
    /// See [`push`](Self::push).
    pub fn of(patch: PatchSize, merge: MergeSize, pictures: &[(&ResizedImage, &[u32])]) -> Self {
        let mut packed = PackedImages::new(patch, merge);
        pictures.iter().for_each(|(image, rows)| packed.push(image, rows, 0..image.grid.tokens(merge)));
        packed
    }

    /// Appends a picture whose merged patches are cut in `order`. `cache_rows` has a row for each
    /// merged patch, in row-major order.
    ///
    /// # Panics
    /// If another model's processor resized the picture, or the number of rows differs from the
    /// number of embeddings. Both would be bugs in Bursar.
    pub fn push(&mut self, image: &ResizedImage, cache_rows: &[u32], order: impl IntoIterator<Item = usize>) {
        let PatchSize { side, frames } = self.patch;
        let ResizedImage { frames: given, grid, levels } = image;
        let is_of_grid =
            |frame: &RgbImage| [frame.width(), frame.height()] == [grid.w, grid.h].map(|patches| patches * side as u32);
        assert!(grid.t == 1 && given.iter().all(is_of_grid), "the picture was processed for another model: {image:?}");
        assert!((1..=frames).contains(&given.len()), "a step has 1 to {frames} frames: {image:?}");
        assert_eq!(cache_rows.len(), grid.tokens(self.merge), "each embedding has a cache row");
        // An offset that this cast truncates is never used: `patchify` refuses a launch of more
        // bytes than a u32 can count before it reads the layout.
        self.layout.push([self.bytes.0 as u32, grid.h, grid.w, given.len() as u32]);
        self.levels.push(levels.numbers());
        let in_order: Vec<_> = patch_places(*grid, self.merge).collect();
        let [pictures, rows, columns] = &mut self.places;
        for place in order {
            for (row, column) in &in_order[self.merge.patches(place)..self.merge.patches(place + 1)] {
                pictures.push(self.frames.len() as u32);
                rows.push(*row);
                columns.push(*column);
            }
            self.cache_rows.push(cache_rows[place]);
        }
        self.frames.push(given.clone());
        self.bytes += image.bytes();
        self.frame_starts.push(self.places[0].len() as u32);
    }

    /// Patches over all pictures.
    pub fn patches(&self) -> usize {
        self.places[0].len()
    }

    pub fn pictures(&self) -> usize {
        self.frames.len()
    }

    /// Embeddings over all pictures.
    pub fn embeddings(&self) -> usize {
        self.cache_rows.len()
    }

    /// Uploads the positions of the patches.
    pub fn places<'s, B: Backend>(&self, scope: &'s Scope<'_, B>) -> Result<PatchPlaces<'s>, KernelError> {
        let [pictures, down, across] = &self.places;
        let places = scope.upload_parts(&[pictures, down, across])?.into_shape([3, self.patches()]);
        let layout = scope.upload([self.frames.len(), LAYOUT_NUMBERS], self.layout.as_flattened())?;
        Ok(PatchPlaces { places, layout })
    }

    /// Uploads the frames and cuts them into `patches` `[patches, values]`. The uploaded bytes
    /// are freed on return.
    pub fn cut<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        places: &PatchPlaces<'_>,
        patches: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let frames: Vec<&[u8]> = self.frames.iter().flat_map(|frames| frames.iter().map(RgbImage::data)).collect();
        let pixels = Pixels {
            bytes: scope.upload_parts(&frames)?,
            layout: places.layout.row_range(0..self.frames.len()),
            levels: scope.upload([self.frames.len(), LEVEL_NUMBERS], self.levels.as_flattened())?,
            places: places.places.row_range(0..3),
        };
        scope.patchify(&pixels, self.patch, patches)
    }

    /// Uploads one [sequence](packed_sequences) of patches per picture. Each patch attends to all
    /// patches of its picture.
    pub fn frames<'s, B: Backend>(&self, scope: &'s Scope<'_, B>) -> Result<PackedSequences<'s>, KernelError> {
        packed_sequences(scope, &self.frame_starts)
    }

    /// The vision cache row of each embedding.
    pub fn rows(&self) -> &[u32] {
        &self.cache_rows
    }

    /// Uploads the vision cache row of each embedding, `[embeddings]` u32.
    pub fn cache_rows<'s, B: Backend>(&self, scope: &'s Scope<'_, B>) -> Result<Tensor<'s>, KernelError> {
        scope.upload([self.embeddings()], &self.cache_rows)
    }
}

/// Uploads packed sequences, which are ranges of consecutive patches. A patch attends only to
/// patches of its sequence. Sequence `s` has the patches `starts[s]..starts[s + 1]`.
pub fn packed_sequences<'s, B: Backend>(
    scope: &'s Scope<'_, B>,
    starts: &[u32],
) -> Result<PackedSequences<'s>, KernelError> {
    let lengths = starts.windows(2).map(|pair| pair[1] - pair[0]);
    let query_key_pairs = lengths.clone().map(|length| u64::from(length).pow(2)).sum();
    let longest = lengths.max().unwrap_or(0) as usize;
    Ok(PackedSequences { starts: scope.upload([starts.len()], starts)?, longest, query_key_pairs })
}

/// The row and the column of each patch of one frame, in the order of [`PackedImages::of`].
fn patch_places(grid: Grid, merge: MergeSize) -> impl Iterator<Item = (u32, u32)> {
    let (rows, columns) = grid.merged(merge);
    (0..rows * columns).flat_map(move |merged| {
        let (row, column) = (merged / columns, merged % columns);
        let side = merge.side();
        (0..merge.patches_per_token())
            .map(move |inner| ((row * side + inner / side) as u32, (column * side + inner % side) as u32))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_of_a_merged_patch_follow_each_other() {
        let places: Vec<_> = patch_places(Grid { t: 1, h: 2, w: 4 }, MergeSize::new(2)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]);
    }

    #[test]
    fn a_picture_begins_behind_the_bytes_and_the_patches_of_those_before_it() {
        let (patch, merge) = (PatchSize { side: 2, frames: 2 }, MergeSize::new(2));
        let still = |grid: Grid| ResizedImage {
            frames: ResizedImage::blank(grid, patch).frames[..1].into(),
            ..ResizedImage::blank(grid, patch)
        };
        let (wide, step) = (still(Grid { t: 1, h: 2, w: 4 }), ResizedImage::blank(Grid { t: 1, h: 2, w: 2 }, patch));
        let packed = PackedImages::of(patch, merge, &[(&wide, &[7, 8]), (&step, &[3]), (&wide, &[5, 4])]);
        // A patch has 2 x 2 pixels of three bytes. The second picture has two frames.
        assert_eq!(packed.layout, [[0, 2, 4, 1], [96, 2, 2, 2], [192, 2, 4, 1]]);
        assert_eq!(
            (packed.frame_starts.as_slice(), packed.cache_rows.as_slice()),
            (&[0, 8, 12, 20][..], &[7, 8, 3, 5, 4][..])
        );
        assert_eq!((packed.patches(), packed.embeddings()), (20, 5));
    }
}
