//! The image processor compared with recorded results of transformers.

use bursar_model::error::ImageError;
use bursar_model::flow::{ResizeLimits, encoded_image::EncodedImage, encoded_image::ImageLimits, rgb_image::RgbImage};
use bursar_model::processor::{
    ImageProcessor, ImageProcessorConfig, PixelBounds, Size, VideoLength, largest_size, smart_resize,
    smart_resize_video,
};
use serde_json::Value;

use crate::bench::cut;
use crate::common::{golden, golden_bytes, golden_json, golden_png};

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
}

fn processor(case: &Value) -> ImageProcessor {
    let bounds = PixelBounds {
        min: case["min_pixels"].as_u64().expect("a number"),
        max: case["max_pixels"].as_u64().expect("a number"),
    };
    ImageProcessor::new(ImageProcessorConfig { pixel_bounds: bounds, ..Default::default() }).expect("a valid config")
}

fn decode(file: &str) -> RgbImage {
    let limits = ImageLimits::default();
    EncodedImage::open(golden(file), &limits).and_then(|bytes| bytes.decode(&limits)).expect("the picture decodes")
}

fn differences(one: &RgbImage, other: &RgbImage) -> (u8, f64) {
    assert_eq!((one.width(), one.height()), (other.width(), other.height()));
    let pairs = || one.data().iter().zip(other.data());
    let worst = pairs().map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0);
    let equal = pairs().filter(|(a, b)| a == b).count() as f64 / one.data().len() as f64;
    (worst, equal)
}

/// Whether the input of a case is deliberately read differently from the recorded call.
fn reads_otherwise(case: &Value) -> bool {
    // Pillow clips 16-bit gray at 255, but this processor scales it. The recorded call ignores
    // EXIF, but `load_image` and this processor apply it. The recorded call drops alpha, as
    // transformers 5.17 did; `picture_kinds` tests the behavior of 5.24.
    let otherwise = ["grey_16_bit", "scene_jpeg_turned", "scene_rgba", "scene_grey_alpha", "scene_palette_transparent"];
    case["name"].as_str().is_some_and(|name| otherwise.contains(&name))
}

fn is_lossy(file: &str) -> bool {
    file.ends_with(".jpg") || file.ends_with("lossy.webp")
}

#[test]
fn smart_resize_matches_the_recorded_sizes_and_refusals() {
    let table = golden_json("smart_resize.json");
    let call = |row: &Value| {
        let input = numbers(&row["in"]);
        let [height, width, factor, min, max] = input[..] else { panic!("each row has five columns") };
        let size = Size { width: width as u32, height: height as u32 };
        smart_resize(size, factor as u32, PixelBounds { min, max })
    };
    let rows = table["rows"].as_array().expect("rows");
    assert!(rows.len() > 50);
    let mut compared = 0;
    for row in rows {
        if numbers(&row["out"]).contains(&0) {
            // The reference returns an empty picture here and fails later. This
            // processor fails at once.
            assert!(matches!(call(row), Err(ImageError::NoSize { .. })), "{row}");
            continue;
        }
        let size = call(row).unwrap_or_else(|error| panic!("{row}: {error}"));
        assert_eq!(numbers(&row["out"]), [u64::from(size.height), u64::from(size.width)], "{row}");
        // Per-picture limits give the same size, whatever the model's limits are.
        let [height, width, factor, min, max] = numbers(&row["in"])[..] else { panic!("each row has five columns") };
        let own = ResizeLimits { pixels_min: Some(min), pixels_max: Some(max), tiles_max: None };
        let source = Size { width: width as u32, height: height as u32 };
        let config = ImageProcessorConfig { patch_size: factor as u32 / 2, ..ImageProcessorConfig::default() };
        if factor % 2 == 0 && (factor * factor..=1 << 40).contains(&max) {
            let processor = ImageProcessor::new(config).expect("valid settings");
            let plan = processor.plan_own(source, own, usize::MAX).unwrap_or_else(|error| panic!("{row}: {error}"));
            assert_eq!(plan.resized, size, "{row}");
            compared += 1;
        }
    }
    assert!(compared > 40, "{compared}");
    for row in table["refused"].as_array().expect("refused rows") {
        assert!(call(row).is_err(), "{row}");
    }
}

#[test]
fn frames_with_a_shared_pixel_limit_get_the_recorded_sizes() {
    let table = golden_json("smart_resize.json");
    let rows = table["videos"].as_array().expect("rows");
    assert!(rows.len() > 50);
    for row in rows {
        let input = numbers(&row["in"]);
        let [frames, height, width, factor, min, max] = input[..] else { panic!("each row has six columns") };
        let (size, length) =
            (Size { width: width as u32, height: height as u32 }, VideoLength { frames: frames as usize, temporal: 2 });
        let size = smart_resize_video(size, length, factor as u32, PixelBounds { min, max });
        let size = size.unwrap_or_else(|error| panic!("{row}: {error}"));
        assert_eq!(numbers(&row["out"]), [u64::from(size.height), u64::from(size.width)], "{row}");
    }
}

#[test]
fn enlarged_sizes_match_the_recording() {
    let table = golden_json("smart_resize.json");
    let rows = table["enlarged"].as_array().expect("rows");
    assert!(rows.len() > 100);
    for row in rows {
        let [height, width, patch, patches, pool] = numbers(&row["in"])[..] else {
            panic!("each row has five columns")
        };
        let size = Size { width: width as u32, height: height as u32 };
        let size = largest_size(size, (patch * pool) as u32, patches * patch * patch);
        let size = size.unwrap_or_else(|error| panic!("{row}: {error}"));
        assert_eq!(numbers(&row["out"]), [u64::from(size.height), u64::from(size.width)], "{row}");
    }
    let empty = largest_size(Size { width: 0, height: 9 }, 48, 1 << 20);
    assert!(matches!(empty, Err(ImageError::Empty { .. })), "{empty:?}");
    let small = largest_size(Size { width: 9, height: 9 }, 48, 48 * 48 - 1);
    assert!(matches!(small, Err(ImageError::NoSize { .. })), "{small:?}");
}

#[test]
fn equal_input_pixels_resize_to_exactly_the_recorded_pixels() {
    let cases = golden_json("image_processor/cases.json");
    let mut compared = 0;
    for case in cases["cases"].as_array().expect("cases").iter().filter(|case| !reads_otherwise(case)) {
        let file = case["file"].as_str().expect("a file");
        // Another test covers the decoder's rounding for lossy files, so start from the
        // pixels that Pillow decoded.
        let input = if is_lossy(file) {
            golden_png(&format!("image_processor/{}.decoded.png", file.trim_start_matches("pictures/")))
        } else {
            decode(file)
        };
        let resized = processor(case).resize(&input).expect("the picture can be resized");
        let expected = golden_png(case["resized"].as_str().expect("a file"));
        assert_eq!((0, 1.0), differences(&resized, &expected), "{}", case["name"]);
        compared += 1;
    }
    assert!(compared > 20, "{compared} cases");
}

#[test]
fn jpeg_and_lossy_webp_are_decoded_to_the_recorded_pixels() {
    let cases = golden_json("image_processor/cases.json");
    let lossy = cases["cases"].as_array().expect("cases").iter();
    let lossy = lossy.filter(|case| !reads_otherwise(case) && case["file"].as_str().is_some_and(is_lossy));
    let mut compared = 0;
    for case in lossy {
        let file = case["file"].as_str().expect("a file");
        let resized = processor(case).resize(&decode(file)).expect("the picture can be resized");
        let expected = golden_png(case["resized"].as_str().expect("a file"));
        assert_eq!((0, 1.0), differences(&resized, &expected), "{file}");
        compared += 1;
    }
    assert!(compared >= 5, "{compared} cases");
}

#[test]
fn cmyk_jpegs_are_decoded_to_the_recorded_pixels() {
    for name in ["cmyk.jpg", "cmyk_progressive.jpg", "cmyk_unmarked.jpg", "ycck.jpg"] {
        let expected = golden_png(&format!("image_processor/{name}.decoded.png"));
        assert_eq!((0, 1.0), differences(&decode(&format!("pictures/{name}")), &expected), "{name}");
    }
}

#[test]
fn an_animated_picture_is_decoded_to_its_first_frame() {
    for name in ["animated.webp", "animated.png"] {
        let expected = golden_png(&format!("image_processor/{name}.decoded.png"));
        assert_eq!((0, 1.0), differences(&decode(&format!("pictures/{name}")), &expected), "{name}");
    }
}

#[test]
fn patches_have_the_recorded_grid_order_and_values() {
    let cases = golden_json("image_processor/cases.json");
    for case in cases["cases"].as_array().expect("cases") {
        // The resized picture keeps its size, so only rescaling, normalization and the order
        // of patches can differ.
        let resized = golden_png(case["resized"].as_str().expect("a file"));
        let processor = ImageProcessor::new(ImageProcessorConfig { do_resize: false, ..Default::default() });
        let processor = processor.expect("a valid config");
        let processed = processor.process(&resized).expect("the picture fits");
        let grid = processed.image.grid;
        let expected_grid = numbers(&case["image_grid_thw"]);
        assert_eq!(expected_grid, [u64::from(grid.t), u64::from(grid.h), u64::from(grid.w)], "{}", case["name"]);
        let (values, width) = (cut(&processed.image, processor.config()), 3 * 2 * 14 * 14);
        assert_eq!(grid.patches() * width, values.len());
        let probes = case["pixel_value_probes"].as_array().expect("probes");
        assert!(!probes.is_empty());
        for probe in probes {
            let at = |index: usize| probe[index].as_u64().expect("an index") as usize;
            let value = values[at(0) * width + at(1)];
            let expected = probe[2].as_f64().expect("a value") as f32;
            assert_eq!(expected, value, "{} {probe}", case["name"]);
        }
    }
}

#[test]
fn all_pixel_values_of_a_picture_match_the_recorded_bits() {
    let cases = golden_json("image_processor/cases.json");
    let case = cases["cases"].as_array().into_iter().flatten().find(|case| case["name"] == "noise_down");
    let case = case.expect("the case with all its values");
    let picture = decode(case["file"].as_str().expect("a file"));
    let processed = processor(case).process(&picture).expect("the picture can be processed");
    let recorded = golden_bytes("image_processor/noise_down.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&recorded).expect("safetensors");
    let expected: Vec<f32> = tensors
        .tensor("pixel_values")
        .expect("the recorded values")
        .data()
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    assert_eq!(expected, cut(&processed.image, processor(case).config()));
}

/// No recorded case covers settings without normalization. With rescaling, the expected values are
/// the results of transformers' `rescale`. Without rescaling, they are the levels themselves.
#[test]
fn unnormalized_levels_are_rescaled_or_unchanged() {
    let settings = |do_rescale| ImageProcessorConfig {
        pixel_bounds: PixelBounds { min: 28 * 28, max: 28 * 28 },
        do_rescale,
        do_normalize: false,
        ..Default::default()
    };
    let every_level = RgbImage::new(28, 28, (0..28 * 28 * 3).map(|at| at as u8).collect()).expect("a picture");
    let values = |config: ImageProcessorConfig| {
        let processor = ImageProcessor::new(config.clone()).expect("a valid config");
        let mut values = cut(&processor.process(&every_level).expect("the picture fits").image, &config);
        values.sort_by(f32::total_cmp);
        values.dedup();
        values
    };
    let levels = (0..=255u8).map(f32::from);
    assert_eq!(values(settings(false)), levels.clone().collect::<Vec<_>>());
    assert_eq!(values(settings(true)), levels.map(|level| level * (1.0f64 / 255.0) as f32).collect::<Vec<_>>());
}

#[test]
fn a_rotated_photograph_is_decoded_upright() {
    let cases = golden_json("image_processor/cases.json");
    let case = cases["cases"].as_array().into_iter().flatten().find(|case| case["name"] == "scene_jpeg_turned");
    let upright = numbers(&case.expect("the turned case")["load_image_size"]);
    let picture = decode("pictures/scene_turned.jpg");
    assert_eq!(upright, [u64::from(picture.height()), u64::from(picture.width())]);
    // The probe already returns the rotated sides, which plans use.
    let bytes = EncodedImage::new(golden_bytes("pictures/scene_turned.jpg"));
    let header = bytes.probe(&ImageLimits::default()).expect("a good header");
    assert_eq!((picture.width(), picture.height()), (header.width, header.height));
}

#[test]
fn sixteen_bit_grey_keeps_its_shades() {
    let stored = image::open(golden("pictures/grey_16_bit.png")).expect("a PNG").into_luma16();
    let expected: Vec<u8> = stored.as_raw().iter().flat_map(|&grey| [(grey >> 8) as u8; 3]).collect();
    assert_eq!(expected, decode("pictures/grey_16_bit.png").data());
}

#[test]
fn the_plan_gives_the_sizes_of_the_processed_picture() {
    let processor = ImageProcessor::new(ImageProcessorConfig::default()).expect("defaults are valid");
    for file in ["pictures/wide_333x97.png", "pictures/scene_1x1.png", "pictures/noise_43x31.png"] {
        let picture = decode(file);
        let plan = processor.plan(picture.width(), picture.height()).expect("a plan");
        let processed = processor.process(&picture).expect("patches");
        assert_eq!(plan.grid, processed.image.grid);
        assert_eq!(plan.tokens * 4, plan.patches);
        assert_eq!(plan.patches_bytes(), processed.image.bytes());
        let frame = &processed.image.frames[0];
        assert_eq!((plan.resized.width, plan.resized.height), (frame.width(), frame.height()));
    }
}

#[test]
fn hashes_depend_on_pixels_and_settings_but_not_encodings() {
    let processor = |change: fn(&mut ImageProcessorConfig)| {
        let mut config = ImageProcessorConfig::default();
        change(&mut config);
        ImageProcessor::new(config).expect("a valid config")
    };
    let plain = processor(|_| {});
    let picture = decode("pictures/scene_84x56.png");
    let hash = plain.process(&picture).expect("patches").hash;
    assert_eq!(hash, plain.process(&picture.clone()).expect("patches").hash);
    let mut data = picture.data().to_vec();
    data[0] ^= 1;
    let touched = RgbImage::new(picture.width(), picture.height(), data).expect("the size is the same");
    let others = [
        plain.process(&touched),
        plain.process(&RgbImage::new(56, 84, picture.data().to_vec()).expect("the number of bytes is the same")),
        processor(|config| config.image_mean[1] += 1e-9).process(&picture),
        processor(|config| config.do_normalize = false).process(&picture),
        processor(|config| config.temporal_patch_size = 1).process(&picture),
    ];
    for (index, other) in others.into_iter().enumerate() {
        assert_ne!(hash, other.expect("patches").hash, "{index}");
    }
}

#[test]
fn gif_bmp_and_tiff_are_decoded_to_the_recorded_pixels() {
    let folder = std::fs::read_dir(golden("pictures")).expect("the pictures");
    let names: Vec<String> = folder.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    for (ending, least) in [(".gif", 6), (".bmp", 8), (".tif", 10)] {
        let files: Vec<&String> = names.iter().filter(|name| name.ends_with(ending)).collect();
        assert!(files.len() >= least, "{files:?}");
        for name in files {
            if ["scene_transparent.gif", "scene_alpha.tif"].contains(&name.as_str()) {
                continue; // recorded without alpha; see `reads_otherwise`
            }
            let expected = golden_png(&format!("image_processor/{name}.decoded.png"));
            assert_eq!((0, 1.0), differences(&decode(&format!("pictures/{name}")), &expected), "{name}");
        }
    }
}
