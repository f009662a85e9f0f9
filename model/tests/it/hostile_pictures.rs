//! Pictures that are too large, broken, or not pictures at all.

use bursar_budgets::{Bytes, Hint};
use bursar_model::error::{ImageError, ProcessorError};
use bursar_model::flow::encoded_image::{EncodedImage, ImageLimits};
use bursar_model::processor::{ImageFormat, ImageProcessor, ImageProcessorConfig};

use crate::common::{golden, golden_bytes};

const FILES: [&str; 16] = [
    "scene_rgba.png",
    "scene_palette.png",
    "photo_420.jpg",
    "photo_progressive.jpg",
    "photo_lossy.webp",
    "scene_lossless.webp",
    "scene_interlaced.gif",
    "scene_transparent.gif",
    "scene_8.bmp",
    "scene_runs.bmp",
    "scene_masks.bmp",
    "photo_lzw.tif",
    "photo_deflate.tif",
    "scene_packbits.tif",
    "scene_fax.tif",
    "scene_alpha.tif",
];

/// A PNG with a header of `width` x `height` RGBA pixels of 16 bits, and nothing more.
fn bomb(width: u32, height: u32) -> EncodedImage {
    let mut header = b"IHDR".to_vec();
    header.extend(width.to_be_bytes());
    header.extend(height.to_be_bytes());
    header.extend([16, 6, 0, 0, 0]);
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec();
    png.extend(&header);
    png.extend(crc32(&header).to_be_bytes());
    png.extend(b"\0\0\0\0IDAT\x35\xaf\x06\x1e");
    EncodedImage::new(png)
}

/// CRC of ISO 3309, from PNG's annex D.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 })
    })
}

#[test]
fn a_decompression_bomb_is_refused_by_its_header() {
    let limits = ImageLimits::default();
    let error = bomb(60_000, 60_000).decode(&limits).expect_err("3.6 gigapixels are refused");
    let pixels = 3_600_000_000;
    let expected = ImageError::TooManyPixels { width: 60_000, height: 60_000, pixels, pixels_max: 64_000_000 };
    assert_eq!(expected, error);
    let narrow = ImageLimits { decode_bytes_max: Bytes::mib(1), ..limits.clone() };
    assert!(matches!(
        bomb(1000, 1000).probe(&narrow),
        Err(ImageError::TooMuchDecodeMemory { bytes_max: Bytes(1_048_576), .. })
    ));
    assert!(bomb(1000, 1000).probe(&limits).is_ok(), "the header is valid");
    assert_eq!(
        Err(ImageError::Damaged { format: "PNG", stage: "decoding its pixels" }),
        bomb(1000, 1000).decode(&limits)
    );
    assert!(bomb(0, 5).probe(&limits).is_err());
}

/// A segment of a JPEG: marker, length, content.
fn segment(marker: u8, content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u16 + 2).to_be_bytes();
    [&[0xff, marker], &length[..], content].concat()
}

/// A gray progressive JPEG of 8 x 8 pixels: one empty scan, and `more` scans that refine nothing.
fn many_scans(more: usize) -> EncodedImage {
    let mut jpeg = b"\xff\xd8".to_vec();
    jpeg.extend(segment(0xdb, &[&[0][..], &[1; 64]].concat()));
    jpeg.extend(segment(0xc2, &[8, 0, 8, 0, 8, 1, 1, 0x11, 0]));
    // Each Huffman table has one 1-bit code: DC difference 0, and end of block.
    for class in [0x00, 0x10] {
        jpeg.extend(segment(0xc4, &[&[class, 1][..], &[0; 16]].concat()));
    }
    jpeg.extend([segment(0xda, &[1, 1, 0, 0, 0, 0]), vec![0x7f]].concat());
    jpeg.extend([segment(0xda, &[1, 1, 0, 1, 63, 0]), vec![0x7f]].concat().repeat(more));
    jpeg.extend(b"\xff\xd9");
    EncodedImage::new(jpeg)
}

/// A scan of a hundred bytes costs a pass over up to 64 megapixels, so decoding a file of 20 MiB
/// could take an hour.
#[test]
fn a_jpeg_with_too_many_scans_is_refused() {
    let limits = ImageLimits::default();
    assert_eq!(8, many_scans(60).decode(&limits).expect("60 scans are within the limit").width());
    let refused = Err(ImageError::Damaged { format: "JPEG", stage: "counting its scans" });
    assert_eq!(refused, many_scans(200_000).probe(&limits));
    // Scan markers in a comment or after the end do not count.
    let good = golden_bytes("pictures/photo_progressive.jpg");
    let comment = segment(0xfe, &[0xff, 0xda].repeat(1000));
    let commented = [&good[..2], &comment, &good[2..], &[0xff, 0xda].repeat(1000)].concat();
    assert!(EncodedImage::new(commented).probe(&limits).is_ok());
}

/// A little-endian TIFF with one directory and no pixels.
fn tiff(entries: &[(u16, u16, u32, u32)]) -> EncodedImage {
    let mut tiff = b"II\x2a\0\x08\0\0\0".to_vec();
    tiff.extend((entries.len() as u16).to_le_bytes());
    for (tag, kind, count, value) in entries {
        tiff.extend([tag.to_le_bytes(), kind.to_le_bytes()].concat());
        tiff.extend([count.to_le_bytes(), value.to_le_bytes()].concat());
    }
    tiff.extend([0; 64]);
    EncodedImage::new(tiff)
}

#[test]
fn gif_bmp_and_tiff_bombs_are_refused_by_their_headers() {
    let limits = ImageLimits { pixels_max: 4_000_000, ..ImageLimits::default() };
    let probe = |bytes: Vec<u8>| EncodedImage::new(bytes).probe(&limits);
    let too_many = |found: Result<_, ImageError>| matches!(found, Err(ImageError::TooManyPixels { .. }));
    let mut gif = golden_bytes("pictures/scene.gif");
    gif[6..10].fill(0xff);
    assert!(too_many(probe(gif)), "a screen of 65,535 x 65,535 is refused");
    let mut gif = golden_bytes("pictures/scene_on_a_screen.gif");
    let frame = gif.windows(5).position(|bytes| bytes == [b',', 7, 0, 5, 0]).expect("the frame");
    gif[frame + 5..frame + 9].fill(0xff);
    assert!(too_many(probe(gif)), "a frame of 65,535 x 65,535, to which the screen grows, is refused");
    let mut bmp = golden_bytes("pictures/scene_24.bmp");
    bmp[18..26].copy_from_slice(&[0x30, 0x75, 0, 0, 0x30, 0x75, 0, 0]);
    assert!(too_many(probe(bmp)), "30,000 x 30,000");
    let grey = |side: u32| vec![(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (262, 3, 1, 1)];
    let strips = [(273, 4, 1, 100), (277, 3, 1, 1), (278, 4, 1, 60_000), (279, 4, 1, 10)];
    assert!(too_many(tiff(&[grey(60_000), strips.to_vec()].concat()).probe(&limits)));
    // A picture of 64 pixels with a million strips, or with a tile of gigapixels.
    let damaged = Err(ImageError::Damaged { format: "TIFF", stage: "reading its header" });
    let many = [(273, 4, 1 << 20, 100), (279, 4, 1 << 20, 100)];
    assert_eq!(damaged, tiff(&[grey(8), many.to_vec()].concat()).probe(&limits));
    let tiles = [(322, 4, 1, 65_520), (323, 4, 1, 65_520), (324, 4, 1, 100), (325, 4, 1, 10)];
    assert_eq!(damaged, tiff(&[grey(8), tiles.to_vec()].concat()).probe(&limits));
    assert_eq!(
        damaged,
        EncodedImage::new(b"II\x2a\0\xff\xff\xff\xff\0\0".to_vec()).probe(&limits),
        "a TIFF without a directory is damaged"
    );
}

/// If the first scan lacks a color, the decoder keeps all coefficients, with or without more scans.
#[test]
fn a_jpeg_with_a_partial_first_scan_reserves_all_coefficients() {
    let limits = ImageLimits::default();
    let mut good = golden_bytes("pictures/photo_420.jpg");
    let frame = good.windows(2).position(|pair| pair == [0xff, 0xc0]).expect("a frame");
    good[frame + 5..frame + 7].copy_from_slice(&4000u16.to_be_bytes());
    let whole = EncodedImage::new(good.clone()).probe(&limits).expect("a good header");
    let scan = good.windows(2).position(|pair| pair == [0xff, 0xda]).expect("a scan");
    let lone = [&good[..scan], &segment(0xda, &[1, 1, 0, 0, 63, 0]), b"\x7f\xff\xd9"].concat();
    let lone = EncodedImage::new(lone).probe(&limits).expect("a good header");
    let pixels = u64::from(lone.width) * u64::from(lone.height);
    assert!(lone.cost.scratch_bytes >= Bytes(2 * 3 * pixels), "{:?}", lone.cost);
    assert!(whole.cost.scratch_bytes < Bytes::mib(1) + Bytes(2 * pixels), "{:?}", whole.cost);
}

#[test]
fn a_picture_file_over_the_byte_limit_is_refused() {
    let few = ImageLimits { bytes_max: Bytes(10), ..ImageLimits::default() };
    let bytes = EncodedImage::new(golden_bytes("pictures/scene_84x56.png"));
    let error = bytes.probe(&few).expect_err("the file is longer than the limit");
    assert_eq!(format!("the encoded picture has {} bytes; the limit is 10", bytes.bytes().len()), error.to_string());
    assert!(error.hint().contains("ImageLimits::bytes_max"));
    assert!(EncodedImage::open(golden("pictures/scene_84x56.png"), &few).is_err());
}

#[test]
fn files_that_are_not_pictures_are_refused() {
    let limits = ImageLimits::default();
    let probe = |bytes: &[u8]| EncodedImage::new(bytes).probe(&limits);
    for bytes in [&b""[..], b"GIF86a.....", b"%PDF-1.7", b"\x89PNG", b"BM, a text that begins like this"] {
        assert_eq!(Err(ImageError::UnknownFormat), probe(bytes));
    }
    assert!(matches!(probe(b"\xff\xd8\xff\xe0\0\x10JFIF"), Err(ImageError::Damaged { format: "JPEG", .. })));
    let error = EncodedImage::open("/no/such/picture.png", &limits).expect_err("the file does not exist");
    assert_eq!("the picture picture.png could not be read: entity not found", error.to_string());
}

#[test]
fn a_files_name_does_not_decide_its_format() {
    let bytes = EncodedImage::named(golden_bytes("pictures/photo_lossy.webp"), "cat.png");
    assert_eq!(ImageFormat::WebP, bytes.probe(&ImageLimits::default()).expect("a good header").format);
}

#[test]
fn a_damaged_picture_is_refused_or_has_its_announced_size() {
    // Small limits, so that a header changed to a large size costs nothing.
    let limits = ImageLimits { pixels_max: 1 << 18, decode_bytes_max: Bytes::mib(16), ..ImageLimits::default() };
    let mut random = 1u64;
    let mut refused = 0;
    for file in FILES {
        let good = golden_bytes(&format!("pictures/{file}"));
        for round in 0..120 {
            let mut bad = good.clone();
            // Three bytes are changed, at offsets from a linear congruential generator (Knuth's
            // constants); every fourth file is also truncated.
            for _ in 0..3 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = (random >> 33) as usize % bad.len();
                bad[at] ^= (random >> 20) as u8 | 1;
            }
            if round % 4 == 0 {
                bad.truncate((random >> 33) as usize % good.len());
            }
            let bytes = EncodedImage::new(bad);
            match (bytes.probe(&limits), bytes.decode(&limits)) {
                (Ok(header), Ok(picture)) => {
                    assert_eq!((header.width, header.height), (picture.width(), picture.height()));
                }
                (_, Err(_)) => refused += 1,
                (Err(error), Ok(_)) => panic!("{file}: decoded although the probe said {error}"),
            }
        }
    }
    assert!(refused > 100, "{refused} of 1,920: the damage did not reach the decoders");
}

/// Every kind of TIFF that is supported, truncated or with changed bytes, as in the previous test.
#[test]
fn a_damaged_tiff_is_refused_or_has_its_announced_size() {
    let limits = ImageLimits { pixels_max: 1 << 18, decode_bytes_max: Bytes::mib(96), ..ImageLimits::default() };
    let mut random = 1_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize
    };
    let (mut refused, mut tried) = (0, 0);
    for (name, good) in crate::picture_kinds::files().iter().filter(|(name, _)| name.ends_with(".tif")) {
        for round in 0..150 {
            let mut bad = good.clone();
            for _ in 0..1 + round % 3 {
                // Half of the changes hit the directory, which libtiff writes last.
                let at = if next() % 2 == 0 { next() % bad.len() } else { bad.len() - 1 - next() % bad.len().min(250) };
                bad[at] = next() as u8;
            }
            if round % 8 == 0 {
                bad.truncate(next() % good.len());
            }
            let bytes = EncodedImage::new(bad);
            tried += 1;
            match (bytes.probe(&limits), bytes.decode(&limits)) {
                (Ok(header), Ok(picture)) => {
                    assert_eq!((header.width, header.height), (picture.width(), picture.height()), "{name}");
                }
                (_, Err(_)) => refused += 1,
                (Err(error), Ok(_)) => panic!("{name}: decoded although the probe said {error}"),
            }
        }
    }
    assert!(refused > tried / 10, "{refused} of {tried}: the damage did not reach the decoders");
}

#[test]
fn debug_output_shows_no_pixels() {
    let bytes = EncodedImage::named(vec![77; 30], "a.png");
    assert_eq!(r#"EncodedImage { name: Some("a.png"), bytes: 30 }"#, format!("{bytes:?}"));
    let picture = EncodedImage::new(golden_bytes("pictures/scene_84x56.png")).decode(&ImageLimits::default());
    assert_eq!("RgbImage(84 x 56)", format!("{:?}", picture.expect("the picture decodes")));
}

#[test]
fn processor_settings_are_followed_or_refused_by_name() {
    let parse = |json: &str| ImageProcessorConfig::from_json(json.as_bytes());
    let released = r#"{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711], "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor"}"#;
    let config = parse(released).expect("the released settings parse");
    assert_eq!((3136, 12_845_056, 28), (config.pixel_bounds.min, config.pixel_bounds.max, config.factor()));
    let sized = r#"{"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16,
        "image_processor_type": "Qwen2VLImageProcessorFast", "image_mean": [0.5, 0.5, 0.5]}"#;
    let config = parse(sized).expect("settings in Qwen3-VL's form parse");
    assert_eq!((65_536, 16_777_216, 32), (config.pixel_bounds.min, config.pixel_bounds.max, config.factor()));
    let with = |setting: &str| parse(&format!(r#"{{"image_processor_type": "Qwen2VLImageProcessor", {setting}}}"#));
    assert_eq!(Err(ProcessorError::UnknownResample { resample: 1 }), with(r#""resample": 1"#));
    for (setting, name) in [
        (r#""patch_size": 0"#, "patch_size"),
        (r#""merge_size": 1000000"#, "merge_size"),
        (r#""min_pixels": 0"#, "min_pixels"),
        (r#""min_pixels": 100, "max_pixels": 99"#, "min_pixels"),
        (r#""image_std": [0.5, 0, 0.5]"#, "image_std"),
        (r#""image_mean": [0.5]"#, "image_mean"),
        (r#""rescale_factor": 0"#, "rescale_factor"),
        (r#""size": {"height": 448, "width": 448}"#, "size"),
        (r#""size": {"longest_edge": 99}"#, "size"),
    ] {
        let error = with(setting).expect_err("the value is out of range");
        assert!(matches!(&error, ProcessorError::OutOfRange { setting, .. } if *setting == name), "{error}");
    }
    let sides = with(r#""size": {"height": 448, "width": 448}"#).expect_err("the settings do not bound the pixels");
    assert!(sides.to_string().contains("shortest_edge and longest_edge"), "{sides}");
    with(r#""size": {"shortest_edge": 4000}, "max_pixels": 90000"#).expect("one bound in each spelling is accepted");
    assert!(matches!(parse("{}"), Err(ProcessorError::UnknownProcessor { .. })));
    let other = parse(r#"{"image_processor_type": "CLIPImageProcessor"}"#).expect_err("the processor type is unknown");
    assert!(other.to_string().starts_with("the processor CLIPImageProcessor is not supported"));
    assert_eq!(Err(ProcessorError::Malformed { line: 2, column: 0 }), parse("{\n"));
}

#[test]
fn an_envelope_lowers_the_pixels_of_a_picture() {
    let own = ImageProcessor::new(ImageProcessorConfig::default()).expect("defaults are valid");
    let small = own.limited(50_000).expect("a valid limit");
    let before = own.plan(1920, 1080).expect("a plan").resized.pixels();
    let after = small.plan(1920, 1080).expect("a plan").resized.pixels();
    assert!(before > 900_000 && after <= 50_000, "{before} {after}");
    // A limit below one merge group is raised to the merge group. A limit above the processor's
    // own limit changes nothing.
    assert!(own.limited(1).expect("a valid limit").plan(640, 480).is_ok());
    assert_eq!(own.config(), own.limited(u64::MAX).expect("a valid limit").config());
}

#[test]
fn a_processor_without_resizing_requires_whole_patches() {
    let config = ImageProcessorConfig { do_resize: false, ..Default::default() };
    let processor = ImageProcessor::new(config).expect("a valid config");
    assert!(processor.plan(56, 84).is_ok());
    let error = processor.plan(56, 85).expect_err("the size is not a multiple of the patch size");
    assert_eq!(ImageError::NotAMultiple { width: 56, height: 85, multiple: 28 }, error);
    assert!(processor.plan(0, 56).is_err());
}
