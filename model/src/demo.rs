//! The demo model, compiled in: its checkpoint and its example pictures. `demo/README.md` says how it was trained.

use std::{io::Read, sync::LazyLock};

use lzma_rust2::XzReader;

use crate::checkpoint::CheckpointSource;

macro_rules! embedded {
    ($name:literal) => {
        include_bytes!(concat!("../demo/checkpoint/", $name)).as_slice()
    };
}

/// The weights, decompressed when the checkpoint is first opened and kept until the process ends (7.4 MB).
static WEIGHTS: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut weights = Vec::new();
    XzReader::new(embedded!("model.safetensors.xz"), false).read_to_end(&mut weights).expect("the archive is intact");
    weights
});

static FILES: LazyLock<[(&str, &[u8]); 6]> = LazyLock::new(|| {
    [
        ("config.json", embedded!("config.json")),
        ("generation_config.json", embedded!("generation_config.json")),
        ("preprocessor_config.json", embedded!("preprocessor_config.json")),
        ("tokenizer.json", embedded!("tokenizer.json")),
        ("tokenizer_config.json", embedded!("tokenizer_config.json")),
        ("model.safetensors", &WEIGHTS),
    ]
});

/// The checkpoint, a Hugging Face folder compiled into the library.
pub fn checkpoint() -> CheckpointSource {
    CheckpointSource::Embedded(FILES.as_slice())
}

/// A bundled picture with a question about it.
#[derive(Clone, Copy, Debug)]
pub struct Picture {
    /// Its file name.
    pub name: &'static str,
    /// The PNG file's content.
    pub bytes: &'static [u8],
    /// A question that the demo model can answer.
    pub question: &'static str,
}

/// The bundled pictures.
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
