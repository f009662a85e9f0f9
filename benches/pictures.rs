//! Encoded bytes to resized pictures that are ready to be cut into patches, in total and stage by
//! stage, with the default limits of Qwen2.5-VL's processor. The encoder cuts the pictures, which
//! `cargo run --release -p bursar-kernels --example op_times` measures.
//!
//! `cargo bench --bench pictures`

#[path = "common/photograph.rs"]
mod photograph;

use std::sync::LazyLock;

use bursar::ImageLimits;
use bursar_model::{
    flow::EncodedImage, flow::RgbImage, processor::ImageProcessor, processor::ImageProcessorConfig,
    processor::PixelBounds,
};
use divan::{Bencher, black_box};
use photograph::Photograph;

fn main() {
    println!(
        "1920 x 1080: {} bytes as JPEG, {} progressive, {} as PNG; 224 x 224: {} bytes as JPEG",
        LARGE.jpeg.bytes().len(),
        LARGE.progressive.bytes().len(),
        LARGE.png.bytes().len(),
        SMALL.jpeg.bytes().len(),
    );
    divan::main();
}

struct Encoded {
    jpeg: EncodedImage,
    progressive: EncodedImage,
    png: EncodedImage,
    decoded: RgbImage,
}

impl Encoded {
    fn of(width: usize, height: usize) -> Self {
        let drawn = Photograph::draw(width, height, 1);
        let jpeg = EncodedImage::new(drawn.jpeg(85.0));
        Encoded {
            progressive: EncodedImage::new(drawn.progressive_jpeg(85.0)),
            png: EncodedImage::new(drawn.png()),
            decoded: jpeg.decode(&ImageLimits::default()).expect("the picture was just encoded"),
            jpeg,
        }
    }
}

static LARGE: LazyLock<Encoded> = LazyLock::new(|| Encoded::of(1920, 1080));
static SMALL: LazyLock<Encoded> = LazyLock::new(|| Encoded::of(224, 224));

fn processor() -> ImageProcessor {
    ImageProcessor::new(ImageProcessorConfig::default()).expect("defaults are valid")
}

/// The `preprocessor_config.json` of `Qwen2.5-VL-7B-Instruct`, which has nearly no size limit.
fn checkpoints_processor() -> ImageProcessor {
    let pixel_bounds = PixelBounds { min: 56 * 56, max: 28 * 28 * 16384 };
    ImageProcessor::new(ImageProcessorConfig { pixel_bounds, ..ImageProcessorConfig::default() }).expect("valid bounds")
}

/// All work on a picture that a request waits for before the picture can be encoded.
fn to_patches(bencher: Bencher, picture: &EncodedImage, processor: &ImageProcessor) {
    let limits = ImageLimits::default();
    bencher.bench(|| {
        let decoded = black_box(picture).decode(&limits).expect("the picture decodes");
        processor.process(&decoded).expect("the picture is processed")
    });
}

#[divan::bench]
fn jpeg_1920_1080_to_patches(bencher: Bencher) {
    to_patches(bencher, &LARGE.jpeg, &processor());
}

#[divan::bench]
fn jpeg_1920_1080_to_patches_unlimited(bencher: Bencher) {
    to_patches(bencher, &LARGE.jpeg, &checkpoints_processor());
}

#[divan::bench]
fn progressive_jpeg_1920_1080_to_patches(bencher: Bencher) {
    to_patches(bencher, &LARGE.progressive, &processor());
}

#[divan::bench]
fn png_1920_1080_to_patches(bencher: Bencher) {
    to_patches(bencher, &LARGE.png, &processor());
}

#[divan::bench]
fn jpeg_224_to_patches(bencher: Bencher) {
    to_patches(bencher, &SMALL.jpeg, &processor());
}

/// The stages of decoding and resizing the first picture, one by one.
mod stages {
    use super::*;

    fn decode(bencher: Bencher, picture: &EncodedImage) {
        let limits = ImageLimits::default();
        bencher.bench(|| black_box(picture).decode(&limits).expect("the picture decodes"));
    }

    #[divan::bench]
    fn a_header(bencher: Bencher) {
        let limits = ImageLimits::default();
        bencher.bench(|| black_box(&LARGE.jpeg).probe(&limits).expect("a good header"));
    }

    #[divan::bench]
    fn b_decode_jpeg(bencher: Bencher) {
        decode(bencher, &LARGE.jpeg);
    }

    #[divan::bench]
    fn b_decode_png(bencher: Bencher) {
        decode(bencher, &LARGE.png);
    }

    #[divan::bench]
    fn c_resize(bencher: Bencher) {
        let processor = processor();
        bencher.bench(|| processor.resize(black_box(&LARGE.decoded)).expect("the picture is resized"));
    }

    #[divan::bench]
    fn d_resize_and_hash(bencher: Bencher) {
        let processor = processor();
        bencher.bench(|| processor.process(black_box(&LARGE.decoded)).expect("the picture is processed"));
    }
}
