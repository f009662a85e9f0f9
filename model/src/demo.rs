//! The demo model, compiled in: its checkpoint and its example pictures. `demo/README.md` says how it was trained.

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
