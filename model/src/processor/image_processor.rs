//! The image processor, which first plans sizes and then processes pixels.

use bursar_budgets::Bytes;

use super::config::{CountedPixels, ImageProcessorConfig};
use super::error::ProcessorError;
use super::resample::{resize, resize_bytes};
use super::smart_resize::{PixelBounds, Size};
use super::tiling::{TileCut, Tiling};
use crate::flow::{Grid, ImageError, Levels, MediaGrid, PictureHash, ResizedImage, RgbImage, Tiles};

/// Resizes decoded pictures for the encoder, as transformers' `Qwen2VLImageProcessor`,
/// `GotOcr2ImageProcessor`, `Gemma3ImageProcessor` and `Gemma4ImageProcessor` do.
#[derive(Clone, Debug)]
pub struct ImageProcessor {
    config: ImageProcessorConfig,
    levels: Levels,
}

/// Sizes of a processed picture, computed only from the picture's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizePlan {
    /// Size of the picture before resizing.
    pub source: Size,
    /// Size of the picture after resizing. For a picture in tiles, the size of all
    /// tiles without the thumbnail.
    pub resized: Size,
    /// Patches along time, height and width, of the picture or of each tile.
    pub grid: Grid,
    /// Tiles of the picture. `None` if the processor cuts no tiles.
    pub tiles: Option<Tiles>,
    /// Number of patches, which the vision encoder's permits count.
    pub patches: usize,
    /// Tokens of the picture in the prompt.
    pub tokens: usize,
    /// Host bytes that processing takes in addition to the decoded picture: the picture between the
    /// two resize passes, and the resized picture.
    pub host_bytes: Bytes,
}

impl ResizePlan {
    /// Bytes of one resized frame with all its tiles. For a still picture, only these
    /// bytes remain after processing.
    pub fn patches_bytes(&self) -> Bytes {
        match self.tiles {
            None => self.resized.rgb_bytes(),
            Some(tiles) => self.tile_size(tiles).rgb_bytes() * tiles.count() as u64,
        }
    }

    /// The grid that the picture's placeholder expands to.
    pub fn visual(&self) -> MediaGrid {
        match self.tiles {
            None => MediaGrid::Image(self.grid),
            Some(tiles) => MediaGrid::Tiles { tile: self.grid, tiles },
        }
    }

    fn tile_size(&self, tiles: Tiles) -> Size {
        Size { width: self.resized.width / tiles.columns, height: self.resized.height / tiles.rows }
    }
}

#[derive(Clone, Debug)]
pub struct EncoderInput {
    /// The resized pixels with their grid.
    pub image: ResizedImage,
    /// Cache key of the picture.
    pub hash: PictureHash,
}

impl ImageProcessor {
    /// # Errors
    /// [`ProcessorError::OutOfRange`] for settings that were built by hand and not by `from_json`.
    pub fn new(config: ImageProcessorConfig) -> Result<Self, ProcessorError> {
        config.check()?;
        Ok(ImageProcessor { levels: config.levels(), config })
    }

    /// The same processor with bounds that apply to the pixels that `counted` selects.
    pub(super) fn counting(&self, counted: CountedPixels) -> Self {
        ImageProcessor { levels: self.levels, config: ImageProcessorConfig { counted, ..self.config.clone() } }
    }

    pub fn config(&self) -> &ImageProcessorConfig {
        &self.config
    }

    /// The same processor with at most `pixels_max` pixels per picture, or with its configured
    /// limit if that limit is lower. Serving limits pictures to the envelope this way. The limit is
    /// at least one merge group or one tile. Pictures thinner than a merge group may still exceed
    /// the limit; see [`smart_resize`](super::smart_resize()).
    pub fn limited(&self, pixels_max: u64) -> Result<Self, ProcessorError> {
        let bounds = self.bounds_within(pixels_max);
        ImageProcessor::new(ImageProcessorConfig { pixel_bounds: bounds, ..self.config.clone() })
    }

    fn bounds_within(&self, pixels_max: u64) -> PixelBounds {
        let least = match self.config.tiling {
            None => u64::from(self.config.factor()).pow(2),
            Some(tiling) => tiling.tile_pixels(),
        };
        self.config.pixel_bounds.within(pixels_max.max(least))
    }

    /// Sizes, patches, tokens and host bytes of a picture of `width x height`
    /// pixels, in constant time.
    ///
    /// # Errors
    /// The errors of [`Sizing::choose`](super::Sizing::choose); [`ImageError::NotAMultiple`] if `do_resize` is off and a
    /// side is not a multiple of the factor.
    pub fn plan(&self, width: u32, height: u32) -> Result<ResizePlan, ImageError> {
        self.plan_bounded(Size { width, height }, self.config.pixel_bounds)
    }

    /// Same as [`plan`](Self::plan) of a processor that is [`limited`](Self::limited) to
    /// `pixels_max`.
    pub(super) fn plan_within(&self, width: u32, height: u32, pixels_max: u64) -> Result<ResizePlan, ImageError> {
        self.plan_bounded(Size { width, height }, self.bounds_within(pixels_max))
    }

    fn plan_bounded(&self, source: Size, bounds: PixelBounds) -> Result<ResizePlan, ImageError> {
        match self.config.tiling {
            None => self.plan_by(source, |size, factor| self.config.sizing.choose(size, factor, bounds)),
            Some(tiling) => self.plan_tiles(source, tiling, bounds.max / tiling.tile_pixels()),
        }
    }

    /// Plan of a picture in tiles, with at most `tiles_max` tiles including the thumbnail.
    pub(super) fn plan_tiles(&self, source: Size, tiling: Tiling, tiles_max: u64) -> Result<ResizePlan, ImageError> {
        let tiles = tiling.choose(source, tiles_max)?;
        let resized = Size { width: tiles.columns * tiling.side, height: tiles.rows * tiling.side };
        let of_tile = tiling.side / self.config.patch_size;
        let grid = Grid { t: 1, h: of_tile, w: of_tile };
        let patches = grid.patches() * tiles.count();
        let tokens = self.config.merge().tokens(patches);
        let tile = Size { width: tiling.side, height: tiling.side };
        let kept = tile.rgb_bytes() * tiles.count() as u64;
        let host_bytes = match tiling.cut {
            // All tiles are cut from one resized picture, which is freed before the thumbnail is
            // made.
            TileCut::Resized => {
                resize_bytes(source, resized).max(resized.rgb_bytes() + kept) + resize_bytes(source, tile)
            }
            // A crop is copied before it is resized.
            TileCut::Crops(_) => {
                let crop = crop_size(source, tiles);
                kept + resize_bytes(source, tile).max(crop.rgb_bytes() + resize_bytes(crop, tile))
            }
        };
        Ok(ResizePlan { source, resized, grid, tiles: Some(tiles), patches, tokens, host_bytes })
    }

    /// Plan of a picture of size `source`. `resize` returns the resized size for a source
    /// size and a factor.
    pub(super) fn plan_by(
        &self,
        source: Size,
        resize: impl FnOnce(Size, u32) -> Result<Size, ImageError>,
    ) -> Result<ResizePlan, ImageError> {
        let (config, Size { width, height }) = (&self.config, source);
        let factor = config.factor();
        let resized = if config.do_resize {
            resize(source, factor)?
        } else if width == 0 || height == 0 {
            return Err(ImageError::Empty { width, height });
        } else if !width.is_multiple_of(factor) || !height.is_multiple_of(factor) {
            return Err(ImageError::NotAMultiple { width, height, multiple: factor });
        } else {
            source
        };
        let tokens = u64::from(resized.width.max(resized.height) / factor);
        if let Some(limit) = config.side_tokens_max().filter(|limit| tokens > *limit) {
            return Err(ImageError::SideTokens { width, height, tokens, limit });
        }
        let grid = Grid { t: 1, h: resized.height / config.patch_size, w: resized.width / config.patch_size };
        let (patches, tokens) = (grid.patches(), grid.tokens(config.merge()));
        let host_bytes = resize_bytes(source, resized);
        Ok(ResizePlan { source, resized, grid, tiles: None, patches, tokens, host_bytes })
    }

    /// Resizes a picture to its plan, as u8 levels that are not normalized.
    ///
    /// # Errors
    /// The errors of [`plan`](Self::plan).
    pub fn resize(&self, picture: &RgbImage) -> Result<RgbImage, ImageError> {
        let plan = self.plan(picture.width(), picture.height())?;
        Ok(resize(picture, plan.resized, self.config.resample))
    }

    /// Resizes and hashes a picture that is not cut into tiles.
    ///
    /// # Errors
    /// The errors of [`plan`](Self::plan).
    ///
    /// # Panics
    /// If the processor cuts tiles. Use [`process_tiles`](Self::process_tiles) instead.
    pub fn process(&self, picture: &RgbImage) -> Result<EncoderInput, ImageError> {
        assert!(self.config.tiling.is_none(), "a tiled picture has several pieces");
        let plan = self.plan(picture.width(), picture.height())?;
        Ok(self.process_step(vec![self.resize_to(picture, plan.resized)], &plan))
    }

    /// Resizes a picture and hashes each of its tiles, in the order of the prompt: row by row, with
    /// the thumbnail where [`TileCut`] says. A processor without tiling returns one piece.
    ///
    /// # Errors
    /// The errors of [`plan`](Self::plan).
    pub fn process_tiles(&self, picture: &RgbImage) -> Result<Vec<EncoderInput>, ImageError> {
        let plan = self.plan(picture.width(), picture.height())?;
        Ok(self.process_planned(picture, &plan))
    }

    /// Same as [`process_tiles`](Self::process_tiles), for a picture that was already planned.
    ///
    /// # Panics
    /// If the plan was made for a picture of another size.
    pub fn process_planned(&self, picture: &RgbImage, plan: &ResizePlan) -> Vec<EncoderInput> {
        let (width, height) = (picture.width(), picture.height());
        assert_eq!(Size { width, height }, plan.source, "a picture has the size that its header says");
        let cut = match plan.tiles.zip(self.config.tiling) {
            None => vec![self.resize_to(picture, plan.resized)],
            Some((tiles, Tiling { cut: TileCut::Resized, .. })) => self.resized_tiles(picture, plan, tiles),
            Some((tiles, Tiling { cut: TileCut::Crops(_), .. })) => self.crops(picture, plan, tiles),
        };
        cut.into_iter().map(|tile| self.process_step(vec![tile], plan)).collect()
    }

    /// Resizes the picture to the whole grid of tiles, cuts it, and appends the thumbnail.
    fn resized_tiles(&self, picture: &RgbImage, plan: &ResizePlan, tiles: Tiles) -> Vec<RgbImage> {
        let whole = self.resize_to(picture, plan.resized);
        let size = plan.tile_size(tiles);
        let mut cut: Vec<_> = places(tiles).map(|place| tile(&whole, size, place)).collect();
        drop(whole);
        cut.extend(tiles.has_thumbnail.then(|| self.resize_to(picture, size)));
        cut
    }

    /// The whole picture as one tile, followed by its crops.
    fn crops(&self, picture: &RgbImage, plan: &ResizePlan, tiles: Tiles) -> Vec<RgbImage> {
        let (size, crop) = (plan.tile_size(tiles), crop_size(plan.source, tiles));
        let mut cut = vec![self.resize_to(picture, size)];
        if tiles.has_thumbnail {
            cut.extend(places(tiles).map(|place| self.resize_to(&tile(picture, crop, place), size)));
        }
        cut
    }

    /// Resizes a frame to the size of its video's plan.
    pub(super) fn resize_to(&self, frame: &RgbImage, size: Size) -> RgbImage {
        resize(frame, size, self.config.resample)
    }

    /// Hashes a resized picture, or a resized time step of a video with up to `temporal_patch_size`
    /// frames. A step with one frame has the same hash as a picture with the same pixels.
    pub(super) fn process_step(&self, frames: Vec<RgbImage>, plan: &ResizePlan) -> EncoderInput {
        let hash = self.hash(&frames, plan.grid);
        EncoderInput { image: ResizedImage { frames: frames.into(), grid: plan.grid, levels: self.levels }, hash }
    }

    /// Hashes the resized bytes and the settings that turn them into patches. The grid determines
    /// the length of a frame, so frames need no separator.
    fn hash(&self, resized: &[RgbImage], grid: Grid) -> PictureHash {
        let config = &self.config;
        let mut hasher = blake3::Hasher::new_derive_key("bursar 2026 picture hash v1");
        let sizes = [grid.t, grid.h, grid.w, config.patch_size, config.temporal_patch_size, config.merge_size];
        sizes.iter().for_each(|size| {
            hasher.update(&size.to_le_bytes());
        });
        config.image_mean.iter().chain(&config.image_std).chain([&config.rescale_factor]).for_each(|number| {
            hasher.update(&number.to_bits().to_le_bytes());
        });
        hasher.update(&[u8::from(config.do_rescale), u8::from(config.do_normalize)]);
        resized.iter().for_each(|frame| {
            hasher.update(frame.data());
        });
        PictureHash(*hasher.finalize().as_bytes())
    }
}

/// The column and the row of each tile, row by row, without the thumbnail.
fn places(tiles: Tiles) -> impl Iterator<Item = (u32, u32)> {
    (0..tiles.rows).flat_map(move |row| (0..tiles.columns).map(move |column| (column, row)))
}

/// Size of the crops of a picture. The last crop of a row or column may be smaller.
fn crop_size(source: Size, tiles: Tiles) -> Size {
    Size { width: source.width.div_ceil(tiles.columns), height: source.height.div_ceil(tiles.rows) }
}

/// The part of `whole` at this column and row, if it is divided into parts of `size`. Parts at the
/// right and bottom may be smaller.
fn tile(whole: &RgbImage, size: Size, (column, row): (u32, u32)) -> RgbImage {
    let pitch = 3 * whole.width() as usize;
    let (left, top) = (column * size.width, row * size.height);
    let size = Size { width: size.width.min(whole.width() - left), height: size.height.min(whole.height() - top) };
    let (left, wide) = (3 * left as usize, 3 * size.width as usize);
    let rows = whole.data().chunks_exact(pitch).skip(top as usize).take(size.height as usize);
    // The exact capacity keeps the allocation within the lease.
    let mut data = Vec::with_capacity(size.rgb_bytes().as_usize());
    rows.for_each(|row| data.extend_from_slice(&row[left..left + wide]));
    RgbImage::new(size.width, size.height, data).expect("tiles fill the picture")
}
