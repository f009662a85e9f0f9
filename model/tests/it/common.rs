//! Helpers of several test files: reading the golden files.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::Read;
use std::path::PathBuf;

use bursar_model::flow::rgb_image::RgbImage;
use bursar_model::text::Tokenizer;
use serde_json::Value;

/// The folder of golden references, which `tests/golden/make.py` writes.
pub fn golden(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden")).join(path)
}

pub fn golden_bytes(path: &str) -> Vec<u8> {
    std::fs::read(golden(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub fn golden_json(path: &str) -> Value {
    serde_json::from_slice(&golden_bytes(path)).expect("golden JSON parses")
}

/// A reference picture, read by the image crate alone.
pub fn golden_png(path: &str) -> RgbImage {
    let picture = image::open(golden(path)).expect("golden PNG").into_rgb8();
    RgbImage::new(picture.width(), picture.height(), picture.into_raw()).expect("a picture has pixels")
}

/// The real tokenizer of Qwen2.5.
pub fn qwen_tokenizer() -> Tokenizer {
    let mut json = Vec::new();
    let zipped = golden_bytes("qwen2_5_tokenizer/tokenizer.json.gz");
    flate2::read::GzDecoder::new(zipped.as_slice()).read_to_end(&mut json).expect("gzip");
    Tokenizer::from_bytes(&json).expect("the tokenizer parses")
}

/// The small tokenizer of the golden checkpoints: bytes, a few merges and Qwen2.5's added tokens.
pub fn small_tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(&golden_bytes("qwen2_5_vl/tokenizer.json")).expect("the tokenizer parses")
}
