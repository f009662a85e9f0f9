//! Pictures in tiles compared with results of transformers: the arrangement, the bytes
//! and the patch values.

use bursar_model::{
    flow::{EncodedImage, ImageError, ImageLimits, ResizeLimits, ResizedImage, RgbImage, Tiles},
    processor::{ImageProcessor, ImageProcessorConfig, PixelBounds, Size, TileCut, Tiling},
};
use serde_json::Value;

use crate::{
    bench::{self, Case, cut, relative_error},
    common::{golden_json, golden_png},
};

const FOLDERS: [&str; 3] = ["tests/golden/internvl", "tests/golden/internvl_chat", "tests/golden/gemma3"];

/// A list of two numbers.
fn pair(value: &Value) -> [u32; 2] {
    [0, 1].map(|at| value[at].as_u64().expect("a number") as u32)
}

#[test]
fn every_picture_size_gets_the_recorded_tile_grid() {
    let recorded = golden_json("tiles.json");
    let limits: Vec<_> = recorded["limits"].as_array().expect("limits").iter().map(pair).collect();
    let rows = recorded["rows"].as_array().expect("rows");
    assert!(rows.len() > 60);
    let tiling = Tiling { side: 448, least: 1, most: 12, has_thumbnail: true, cut: TileCut::Resized };
    let pixel_bounds = PixelBounds { min: 1, max: tiling.pixels_max() };
    let config = ImageProcessorConfig { tiling: Some(tiling), pixel_bounds, ..ImageProcessorConfig::default() };
    let released = ImageProcessor::new(config).expect("valid settings");
    for row in rows {
        let [width, height] = pair(&row["size"]);
        for ([least, most], grid) in limits.iter().zip(row["grids"].as_array().expect("grids")) {
            let tiling = Tiling { side: 448, least: *least, most: *most, has_thumbnail: true, cut: TileCut::Resized };
            let chosen = tiling.choose(Size { width, height }, u64::MAX);
            if width.max(height) > 200 * width.min(height) {
                assert!(matches!(chosen, Err(ImageError::AspectRatio { .. })), "{width} x {height}");
                continue;
            }
            let chosen = chosen.expect("a picture");
            let Tiles { columns, rows, .. } = chosen;
            assert_eq!([columns, rows], pair(grid), "grid of {width} x {height} within {least} to {most} pixels");
            if *least == 1 {
                let own = ResizeLimits { tiles_max: Some(*most), ..ResizeLimits::default() };
                let plan = released.plan_own(Size { width, height }, own, usize::MAX).expect("a plan");
                assert_eq!(plan.tiles, Some(chosen), "tiles of {width} x {height} with a limit of {most}");
            }
        }
    }
}

#[test]
fn tiles_and_thumbnail_have_the_recorded_bytes() {
    let recorded = &golden_json("tiles.json")["picture"];
    let file = recorded["file"].as_str().expect("a file").to_owned();
    let limits = ImageLimits::default();
    let picture = EncodedImage::open(bursar_golden::path(file), &limits).expect("the picture opens");
    let tiling = Tiling { side: 56, least: 1, most: 12, has_thumbnail: true, cut: TileCut::Resized };
    let bounds = PixelBounds { min: 1, max: tiling.pixels_max() };
    let config = ImageProcessorConfig {
        tiling: Some(tiling),
        pixel_bounds: bounds,
        temporal_patch_size: 1,
        ..ImageProcessorConfig::default()
    };
    let processor = ImageProcessor::new(config).expect("valid settings");
    let tiles = processor.process_tiles(&picture.decode(&limits).expect("the picture decodes")).expect("tiles");
    let all: RgbImage = golden_png(recorded["tiles"].as_str().expect("a file"));
    assert_eq!((all.width(), all.height()), (56 * tiles.len() as u32, 56));
    for (index, tile) in tiles.iter().enumerate() {
        let rows = all.data().chunks_exact(3 * all.width() as usize);
        let expected: Vec<u8> = rows.flat_map(|row| &row[3 * 56 * index..3 * 56 * (index + 1)]).copied().collect();
        assert!(tile.image.frames[0].data() == expected, "tile {index}");
    }
}

#[test]
fn crops_of_a_picture_have_the_recorded_bytes() {
    const FOLDER: &str = "tests/golden/gemma3";
    let checkpoint = bench::open(FOLDER);
    for name in ["pan_and_scan", "pan_and_scan_tall"] {
        let case = Case::read(FOLDER, &checkpoint, name);
        let mut count = 0;
        for (picture, place) in &case.shown {
            let Some(recorded) = case.bytes(&format!("levels.{picture}")) else { continue }; // [tiles, 3, side, side]
            let planes = |image: &ResizedImage| {
                let pixels = image.frames[0].data();
                (0..3).flat_map(|channel| pixels.iter().skip(channel).step_by(3)).copied().collect::<Vec<u8>>()
            };
            let found: Vec<u8> = case.images[place.clone()].iter().flat_map(planes).collect();
            let wrong = found.iter().zip(&recorded).filter(|(found, recorded)| found != recorded).count();
            assert_eq!(found.len(), recorded.len());
            assert_eq!(wrong, 0, "{picture}: {wrong} of {} levels", found.len());
            count += place.len();
        }
        assert!(count > 2, "{name} has {count} tiles of pictures with crops");
    }
}

#[test]
fn pixel_values_of_a_tile_match_the_recording() {
    const PICTURE: &str = "small_58x54.png";
    for folder in FOLDERS {
        let checkpoint = bench::open(folder);
        let case = Case::read(folder, &checkpoint, "several_images");
        let (_, place) =
            case.shown.iter().find(|(name, _)| name == PICTURE).expect("the case shows the picture").clone();
        let processor = checkpoint.image_processor.as_ref().expect("the checkpoint takes pictures");
        let tower = processor.config();
        let patches = cut(&case.images[place.start], tower);
        let recorded = case.floats(&format!("pixel_values.{PICTURE}")).expect("pixel values"); // [1, 3, side, side]
        let side = tower.tiling.expect("tiles").side as usize;
        let expected = patches_of(&recorded, side, 14);
        let worst = relative_error(&patches, &expected);
        assert!(worst < 1e-6, "{folder}: {worst:e}");
    }
}

/// The patches of `[3, side, side]` in the order of merged patches, each with its values by
/// channel, row and column.
fn patches_of(pixels: &[f32], side: usize, patch: usize) -> Vec<f32> {
    let squares = side / patch / 2;
    let mut out = Vec::with_capacity(pixels.len());
    for place in 0..4 * squares * squares {
        let (square, inner) = (place / 4, place % 4);
        let (top, left) = (square / squares * 2 + inner / 2, square % squares * 2 + inner % 2);
        for channel in 0..3 {
            for row in 0..patch {
                let from = (channel * side + top * patch + row) * side + left * patch;
                out.extend_from_slice(&pixels[from..from + patch]);
            }
        }
    }
    out
}
