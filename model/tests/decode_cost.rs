//! Host memory for decoding. The memory is leased before a picture is decoded, so the cost that is
//! computed from the header must be enough.

mod heap;

use std::io::Cursor;

use bursar_model::flow::encoded_image::{EncodedImage, ImageLimits};
use bursar_model::flow::rgb_image::RgbImage;
use bursar_model::flow::video::Video;
use bursar_model::processor::{ImageProcessor, ImageProcessorConfig, PixelBounds, TileCut, Tiling, VideoProcessor};
use heap::peak_of;
use image::{DynamicImage, ImageFormat};

/// One picture of 1,601 x 1,200 pixels in every format, depth and number of channels.
fn pictures() -> Vec<(String, Vec<u8>)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pictures");
    let mut pictures: Vec<_> = std::fs::read_dir(folder)
        .expect("the folder of test pictures")
        .map(|entry| entry.expect("an entry").path())
        .map(|path| (path.display().to_string(), std::fs::read(&path).expect("a file")))
        .collect();
    let plain = DynamicImage::ImageRgb8(image::RgbImage::from_fn(1601, 1200, |x, y| image::Rgb([x as u8, y as u8, 7])));
    let kinds: [(&str, DynamicImage); 8] = [
        ("rgb8", plain.to_rgb8().into()),
        ("rgba8", plain.to_rgba8().into()),
        ("rgb16", plain.to_rgb16().into()),
        ("rgba16", plain.to_rgba16().into()),
        ("gray8", plain.to_luma8().into()),
        ("gray alpha 8", plain.to_luma_alpha8().into()),
        ("gray16", plain.to_luma16().into()),
        ("gray alpha 16", plain.to_luma_alpha16().into()),
    ];
    for (name, picture) in kinds {
        let mut encoded = Cursor::new(Vec::new());
        picture.write_to(&mut encoded, ImageFormat::Png).expect("the picture encodes");
        pictures.push((format!("png {name}"), encoded.into_inner()));
    }
    let small: [(&str, DynamicImage, ImageFormat); 8] = [
        ("gif", plain.to_rgb8().into(), ImageFormat::Gif),
        ("gif rgba8", plain.to_rgba8().into(), ImageFormat::Gif),
        ("tiff gray16", plain.to_luma16().into(), ImageFormat::Tiff),
        ("bmp", plain.to_rgb8().into(), ImageFormat::Bmp),
        ("bmp gray", plain.to_luma8().into(), ImageFormat::Bmp),
        ("tiff rgb8", plain.to_rgb8().into(), ImageFormat::Tiff),
        ("tiff rgba16", plain.to_rgba16().into(), ImageFormat::Tiff),
        ("tiff gray8", plain.to_luma8().into(), ImageFormat::Tiff),
    ];
    for (name, picture, format) in small {
        let mut encoded = Cursor::new(Vec::new());
        picture.write_to(&mut encoded, format).expect("the picture encodes");
        pictures.push((name.to_owned(), encoded.into_inner()));
    }
    pictures
}

/// All checks are one test, because the heap counter covers the whole process and
/// tests run in parallel.
#[test]
fn decoding_and_processing_stay_within_their_announced_memory() {
    decode_all();
    decode_kinds();
    side_chunks();
    process_one();
    process_tiles();
    process_video();
}

/// Nine frames of 801 x 600 pixels, decoded one by one. The resized frames of each step are kept.
fn process_video() {
    let processor = VideoProcessor::new(ImageProcessorConfig::default()).expect("defaults are valid");
    let limits = ImageLimits::default();
    let frame = image::RgbImage::from_fn(801, 600, |x, y| image::Rgb([x as u8, y as u8, 7]));
    let mut encoded = Cursor::new(Vec::new());
    frame.write_to(&mut encoded, ImageFormat::Png).expect("the picture encodes");
    let video = Video::new(vec![EncodedImage::new(encoded.into_inner()); 9], 2.0);
    let plan = processor.plan(&video, &limits, 200).expect("a plan");
    let (taken, _) = peak_of(|| processor.process(&video, &plan, &limits).expect("patches"));
    let estimated = (plan.decoding_bytes + plan.patches_bytes()).0;
    println!("a video: estimated {estimated}, took {taken}");
    assert!(taken <= estimated, "took {taken} bytes, the estimate was {estimated}");
    assert!(estimated <= 2 * taken, "took {taken} bytes, the estimate of {estimated} is too high");
}

/// Three by four tiles and the thumbnail. All of them are kept, and each has exactly the
/// memory of its pixels.
fn process_tiles() {
    let tiling = Tiling { side: 84, least: 1, most: 12, has_thumbnail: true, cut: TileCut::Resized };
    let pixel_bounds = PixelBounds { min: 1, max: tiling.pixels_max() };
    let config = ImageProcessorConfig { tiling: Some(tiling), pixel_bounds, ..ImageProcessorConfig::default() };
    let processor = ImageProcessor::new(config).expect("valid settings");
    let picture = RgbImage::new(600, 800, vec![9; 600 * 800 * 3]).expect("a picture");
    let plan = processor.plan(picture.width(), picture.height()).expect("a plan");
    let (taken, tiles) = peak_of(|| processor.process_tiles(&picture).expect("tiles"));
    let (estimated, kept) = (plan.host_bytes.0, plan.patches_bytes().0);
    println!("{} tiles: estimated {estimated}, took {taken}", tiles.len());
    assert_eq!((tiles.len(), kept), (13, 13 * 84 * 84 * 3));
    assert!(taken <= estimated + (1 << 20), "took {taken} bytes, the estimate was {estimated}");
    assert!(2 * taken >= estimated, "took {taken} bytes, the estimate of {estimated} is too high");
}

fn process_one() {
    let processor = ImageProcessor::new(ImageProcessorConfig::default()).expect("defaults are valid");
    let picture = RgbImage::new(801, 600, vec![9; 801 * 600 * 3]).expect("a picture");
    // Start Rayon's pool first, so that its memory is not counted as the picture's.
    rayon::join(|| (), || ());
    let plan = processor.plan(picture.width(), picture.height()).expect("a plan");
    let (taken, _) = peak_of(|| processor.process(&picture).expect("patches"));
    let estimated = plan.host_bytes.0;
    println!("processing: estimated {estimated}, took {taken}");
    // Two parts are not in the plan and take a few kilobytes each: the filter's weights, and a band
    // of eight rows per thread.
    assert!(taken <= estimated + (1 << 20), "took {taken} bytes, the estimate was {estimated}");
    assert!(taken >= estimated, "took {taken} bytes, the estimate was {estimated}");
}

/// Small pictures with a large chunk: a color profile or text that decompresses to 200 MB, or 3 MiB
/// of text or EXIF data.
fn side_chunks() {
    let mut encoded = Cursor::new(Vec::new());
    DynamicImage::ImageRgb8(image::RgbImage::new(20, 20))
        .write_to(&mut encoded, ImageFormat::Png)
        .expect("the picture encodes");
    let plain = encoded.into_inner();
    let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
    for _ in 0..200 {
        std::io::Write::write_all(&mut packed, &vec![0; 1 << 20]).expect("writing to memory succeeds");
    }
    let packed = packed.finish().expect("writing to memory succeeds");
    let text = [b"\0\0\0", &vec![b'x'; 3 << 20][..]].concat(); // as long as some programs' metadata
    for (kind, data) in [(b"iCCP", &packed), (b"zTXt", &packed), (b"iTXt", &text), (b"eXIf", &text)] {
        let content = [&kind[..], b"a name\0\0", data].concat();
        let mut crc = flate2::Crc::new();
        crc.update(&content);
        let length = (content.len() as u32 - 4).to_be_bytes();
        let (header, rest) = plain.split_at(33); // the signature and IHDR
        let bytes = EncodedImage::new([header, &length, &content, &crc.sum().to_be_bytes(), rest].concat());
        let limits = ImageLimits::default();
        let estimated = bytes.probe(&limits).expect("a good header").cost.peak_bytes().0;
        let (taken, outcome) = peak_of(|| bytes.decode(&limits));
        println!("{}: estimated {estimated}, took {taken}, {outcome:?}", String::from_utf8_lossy(kind));
        assert!(outcome.is_ok(), "the picture decodes: {outcome:?}");
        assert!(taken <= estimated, "took {taken} bytes, the estimate was {estimated}");
    }
}

/// The small TIFFs of every compression. For LZMA, the largest dictionary is leased.
fn decode_kinds() {
    let packed = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/picture_kinds.tar.xz")).expect("a file");
    let mut archive = tar::Archive::new(lzma_rust2::XzReader::new(&packed[..], false));
    for entry in archive.entries().expect("an archive") {
        let mut entry = entry.expect("an entry");
        let name = entry.path().expect("a name").display().to_string();
        let mut encoded = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut encoded).expect("the bytes of the entry are read");
        let (bytes, limits) = (EncodedImage::new(encoded), ImageLimits::default());
        let estimated = bytes.probe(&limits).expect("a good header").cost.peak_bytes().0;
        let (taken, _) = peak_of(|| bytes.decode(&limits).expect("the picture decodes"));
        assert!(taken <= estimated, "{name}: took {taken} bytes, the estimate was {estimated}");
    }
}

fn decode_all() {
    let limits = ImageLimits::default();
    for (name, encoded) in pictures() {
        let bytes = EncodedImage::new(encoded);
        let (probing, header) = peak_of(|| bytes.probe(&limits).expect("a good header"));
        let estimated = header.cost.peak_bytes().0;
        let (taken, _) = peak_of(|| bytes.decode(&limits).expect("the picture decodes"));
        println!(
            "{name}: estimated {estimated}, took {taken} ({:.2}), probing {probing}",
            estimated as f64 / taken as f64
        );
        assert!(taken <= estimated, "{name}: took {taken} bytes, the estimate was {estimated}");
        // libjpeg allocates most memory of a progressive picture outside Rust, where it is not
        // counted.
        let counted = if name.ends_with("progressive.jpg") { 4 } else { 3 };
        assert!(estimated <= counted * taken, "{name}: took {taken} bytes, the estimate of {estimated} is too high");
        assert!(probing <= bytes.bytes().len() as u64 + (1 << 20), "{name}: probing took {probing} bytes");
    }
}
