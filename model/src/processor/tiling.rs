//! Tiling of pictures, by one of two methods. InternVL 1.5 (arXiv 2404.16821, section 3.3)
//! stretches a picture over a grid of equal tiles that is chosen by the aspect ratio, and may add a
//! thumbnail. Gemma 3 (pan and scan, arXiv 2503.19786, section 2.1) uses the whole picture as the
//! first tile, and adds crops if the picture is long.

use super::smart_resize::{Size, check_sides};
use crate::flow::{ImageError, Tiles};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiling {
    /// Pixels along a side of a tile.
    pub side: u32,
    /// Minimum number of tiles of a picture, without the thumbnail.
    pub least: u32,
    /// Maximum number of tiles of a picture, without the thumbnail.
    pub most: u32,
    /// Whether a picture of several tiles has one more tile that shows the whole picture.
    pub has_thumbnail: bool,
    pub cut: TileCut,
}

/// How tiles are cut from a picture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TileCut {
    /// The picture is resized to all tiles together, and then cut. The thumbnail is the last tile.
    Resized,
    /// The picture is cut along its longer side, and each crop is resized to a tile. The thumbnail
    /// is the first tile.
    Crops(CropRule),
}

/// Which pictures get crops: `do_pan_and_scan` of transformers' `Gemma3ImageProcessor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CropRule {
    /// Minimum pixels along the shorter side of a crop.
    pub side_min: u32,
    /// Minimum ratio of the longer side of a picture to its shorter side.
    pub ratio_min: f64,
}

impl Tiling {
    pub fn tile_pixels(self) -> u64 {
        u64::from(self.side).pow(2)
    }

    /// Pixels of all tiles of the largest picture, including the thumbnail.
    pub fn pixels_max(self) -> u64 {
        let thumbnail = u64::from(self.has_thumbnail && self.most > 1);
        (u64::from(self.most) + thumbnail) * self.tile_pixels()
    }

    /// Chooses the tiles of a picture of `size`, at most `tiles_max` with the thumbnail: the
    /// arrangement whose aspect ratio is nearest to the picture's. Arrangements are tried in order
    /// of increasing number of tiles. If a later arrangement is equally near, it is chosen only if
    /// the picture has more than half of that arrangement's pixels. Returns one tile if no
    /// arrangement is within `tiles_max`.
    ///
    /// Returns the same numbers as `get_optimal_tiled_canvas` in transformers 5.17,
    /// `models/got_ocr2/image_processing_got_ocr2.py`.
    ///
    /// # Errors
    /// [`ImageError::Empty`]; [`ImageError::AspectRatio`] over 200. The reference does not refuse
    /// such a picture, but the memory for resizing it grows with its longer side.
    pub fn choose(self, size: Size, tiles_max: u64) -> Result<Tiles, ImageError> {
        check_sides(size)?;
        if let TileCut::Crops(rule) = self.cut {
            return Ok(self.crops(size, rule, tiles_max));
        }
        let Size { width, height } = size;
        let (aspect, half_a_tile) = (f64::from(width) / f64::from(height), 0.5 * self.tile_pixels() as f64);
        let (mut nearest, mut chosen) = (f64::INFINITY, self.tiles(1, 1));
        for tiles in self.arrangements().filter(|tiles| tiles.count() as u64 <= tiles_max) {
            let distance = (aspect - f64::from(tiles.columns) / f64::from(tiles.rows)).abs();
            let is_filled = || size.pixels() as f64 > half_a_tile * f64::from(tiles.columns * tiles.rows);
            if distance < nearest || (distance == nearest && is_filled()) {
                (nearest, chosen) = (distance, tiles);
            }
        }
        Ok(chosen)
    }

    /// The crops of a picture. Their number is the rounded ratio of its sides, at most the longer
    /// side over `side_min`, and from 2 to the maximum (transformers 5.17,
    /// `image_processing_gemma3.py`). A picture without crops is one tile.
    fn crops(self, Size { width, height }: Size, rule: CropRule, tiles_max: u64) -> Tiles {
        let (long, short) = (width.max(height), width.min(height));
        let ratio = f64::from(long) / f64::from(short);
        let most = u64::from(self.most).min(tiles_max.saturating_sub(1)) as u32;
        let count = ((ratio + 0.5) as u32).min(long / rule.side_min).max(2).min(most);
        if ratio < rule.ratio_min || count < 2 {
            return self.tiles(1, 1);
        }
        let side = long.div_ceil(count);
        // The second condition leaves at least one pixel for the last crop.
        if side.min(short) < rule.side_min || (count - 1) * side >= long {
            return self.tiles(1, 1);
        }
        if width >= height { self.tiles(count, 1) } else { self.tiles(1, count) }
    }

    /// All arrangements, in order of increasing number of tiles.
    fn arrangements(self) -> impl Iterator<Item = Tiles> {
        let allowed = self.least..=self.most;
        let mut all: Vec<_> = (1..=self.most)
            .flat_map(|columns| (1..=self.most / columns).map(move |rows| (columns, rows)))
            .filter(|(columns, rows)| allowed.contains(&(columns * rows)))
            .collect();
        all.sort_by_key(|(columns, rows)| columns * rows);
        all.into_iter().map(move |(columns, rows)| self.tiles(columns, rows))
    }

    fn tiles(self, columns: u32, rows: u32) -> Tiles {
        Tiles { columns, rows, has_thumbnail: self.has_thumbnail && columns * rows > 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELEASED: Tiling = Tiling { side: 448, least: 1, most: 12, has_thumbnail: true, cut: TileCut::Resized };

    fn chosen(tiling: Tiling, width: u32, height: u32, tiles_max: u64) -> (u32, u32, bool) {
        let tiles = tiling.choose(Size { width, height }, tiles_max).expect("a picture");
        (tiles.columns, tiles.rows, tiles.has_thumbnail)
    }

    #[test]
    fn tiles_have_the_nearest_aspect_ratio_and_fit_the_size() {
        assert_eq!(chosen(RELEASED, 448, 448, 13), (1, 1, false));
        assert_eq!(chosen(RELEASED, 1024, 1024, 13), (3, 3, true));
        assert_eq!(chosen(RELEASED, 600, 600, 13), (1, 1, false), "the picture does not fill half of four tiles");
        assert_eq!(chosen(RELEASED, 4000, 3000, 13), (4, 3, true));
        assert_eq!(chosen(RELEASED, 100, 2000, 13), (1, 12, true));
    }

    #[test]
    fn a_tile_limit_includes_the_thumbnail_and_allows_one_tile() {
        assert_eq!(chosen(RELEASED, 4000, 3000, 12), (3, 2, true));
        assert_eq!(chosen(RELEASED, 4000, 3000, 2), (1, 1, false));
        assert_eq!(chosen(Tiling { has_thumbnail: false, ..RELEASED }, 4000, 3000, 12), (4, 3, false));
        assert_eq!(
            chosen(Tiling { least: 2, ..RELEASED }, 448, 448, 2),
            (1, 1, false),
            "no layout of two tiles is left"
        );
        assert_eq!(chosen(Tiling { least: 2, ..RELEASED }, 448, 448, 13), (2, 2, true));
    }

    #[test]
    fn the_largest_picture_has_all_tiles_and_a_thumbnail() {
        assert_eq!(RELEASED.pixels_max(), 13 * 448 * 448);
        assert_eq!(Tiling { most: 1, ..RELEASED }.pixels_max(), 448 * 448);
        let refused = RELEASED.choose(Size { width: 0, height: 5 }, 13);
        assert_eq!(refused, Err(ImageError::Empty { width: 0, height: 5 }));
        let thin = RELEASED.choose(Size { width: 201, height: 1 }, 13);
        assert!(matches!(thin, Err(ImageError::AspectRatio { .. })), "{thin:?}");
    }
}
