//! The demo model, embedded: its checkpoint and the pictures that it is shown with. See `demo/README.md` for how it was
//! trained.

use crate::checkpoint::CheckpointSource;

macro_rules! checkpoint_files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../demo/checkpoint/", $name)))),*]
    };
}

/// The checkpoint, a Hugging Face folder compiled into the library.
pub fn checkpoint() -> CheckpointSource {
    CheckpointSource::Embedded(checkpoint_files![
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ])
}

/// A bundled picture with a question about it.
#[derive(Clone, Copy, Debug)]
pub struct Picture {
    /// Its file name.
    pub name: &'static str,
    /// Its content.
    pub bytes: &'static [u8],
    /// What may be asked.
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
