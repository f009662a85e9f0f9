//! Helpers that several test files use to read the golden files.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::PathBuf;

use bursar_model::flow::rgb_image::RgbImage;
use bursar_model::text::Tokenizer;
use serde_json::Value;

/// A file or folder of the golden references, which `tests/golden/make.py` writes.
pub fn golden(path: &str) -> PathBuf {
    bursar_golden::path(path)
}

pub fn golden_bytes(path: &str) -> Vec<u8> {
    std::fs::read(golden(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub fn golden_json(path: &str) -> Value {
    serde_json::from_slice(&golden_bytes(path)).expect("golden JSON parses")
}

/// A reference picture, decoded by the image crate without any code under test.
pub fn golden_png(path: &str) -> RgbImage {
    let picture = image::open(golden(path)).expect("golden PNG").into_rgb8();
    RgbImage::new(picture.width(), picture.height(), picture.into_raw()).expect("a picture has pixels")
}

/// The real tokenizer of Qwen2.5.
pub fn qwen_tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(&golden_bytes("qwen2_5_tokenizer/tokenizer.json")).expect("the tokenizer parses")
}

/// The small tokenizer of the golden checkpoints: bytes, a few merges and Qwen2.5's added tokens.
pub fn small_tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(&golden_bytes("qwen2_5_vl/tokenizer.json")).expect("the tokenizer parses")
}
