//! The demo model, compiled into the library: its checkpoint and its example pictures.
//! `demo/README.md` describes its training.

use std::{io::Read, sync::LazyLock};

use lzma_rust2::XzReader;

use crate::checkpoint::{CheckpointSource, EmbeddedFile};

macro_rules! embedded {
    ($name:literal) => {
        EmbeddedFile::Plain(include_bytes!(concat!("../demo/checkpoint/", $name)))
    };
}

/// The weights, 7.4 MB when decompressed.
static WEIGHTS: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut weights = Vec::new();
    let compressed = include_bytes!("../demo/checkpoint/model.safetensors.xz");
    XzReader::new(compressed.as_slice(), false).read_to_end(&mut weights).expect("the archive is intact");
    weights
});

static FILES: [(&str, EmbeddedFile); 6] = [
    ("config.json", embedded!("config.json")),
    ("generation_config.json", embedded!("generation_config.json")),
    ("preprocessor_config.json", embedded!("preprocessor_config.json")),
    ("tokenizer.json", embedded!("tokenizer.json")),
    ("tokenizer_config.json", embedded!("tokenizer_config.json")),
    ("model.safetensors", EmbeddedFile::Compressed(&WEIGHTS)),
];

/// The demo checkpoint, a Hugging Face folder compiled into the library.
pub fn checkpoint() -> CheckpointSource {
    CheckpointSource::Embedded(&FILES)
}

/// A bundled picture with a question about it.
#[derive(Clone, Copy, Debug)]
pub struct Picture {
    pub name: &'static str,
    /// The PNG file's content.
    pub bytes: &'static [u8],
    /// A question that the demo model can answer.
    pub question: &'static str,
}

pub fn pictures() -> &'static [Picture] {
    &[
        Picture {
            name: "shapes.png",
            bytes: include_bytes!("../demo/pictures/shapes.png"),
            question: "Describe the picture.",
        },
        Picture {
            name: "number.png",
            bytes: include_bytes!("../demo/pictures/number.png"),
            question: "What number is written?",
        },
    ]
}
