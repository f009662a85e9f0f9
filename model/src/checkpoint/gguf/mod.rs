//! A GGUF file as a checkpoint: settings, vocabulary and weights in one file, and the vision
//! encoder in a second file. The files of a Hugging Face folder are generated from its metadata,
//! and the rest of this crate reads them like the files of any other checkpoint.

mod config;
mod gemma;
mod header;
mod hybrid;
mod keys;
mod rope_factors;
mod settings;
mod storage;
mod tensors;
mod text_files;
mod vision;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use self::config::Config;
use self::header::Header;
use self::settings::Settings;
use self::vision::{Encoder, FoundEncoder};
use super::error::CheckpointError;
use super::shard::{Content, Shard};
pub use settings::{GgufArchitecture, GgufLayers, GgufVision, NamedFiles};

/// An open GGUF file: its mapped tensors, and the small files that are generated from its metadata.
/// If the file of the model's vision encoder is in the same folder, its tensors and settings are
/// included.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    files: BTreeMap<&'static str, Vec<u8>>,
    shards: Vec<Shard>,
    skipped_encoders: Vec<CheckpointError>,
}

// Prefixes of the names of a decoder and of a vision encoder in Hugging Face checkpoints.
const DECODER: &str = "model";
const DECODER_WITH_VISION: &str = "model.language_model";
const ENCODER: &str = "model.visual";

impl GgufFile {
    /// Maps the file at `path`, checks its header, and generates the small files. The file must
    /// have one of the `known` architectures. No weight is read except the rotary divisors and the
    /// rates of decay, which are checked.
    ///
    /// # Errors
    /// [`CheckpointError::NoGguf`] or [`CheckpointError::Unreadable`]; [`CheckpointError::Header`]
    /// for a damaged file; [`CheckpointError::Setting`] for a file with an unsupported setting;
    /// [`CheckpointError::Text`] for a vocabulary that is not valid; [`CheckpointError::Encoders`]
    /// if several files have a vision encoder of the model.
    pub fn open(path: &Path, known: &[GgufArchitecture]) -> Result<Self, CheckpointError> {
        let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let missing = || CheckpointError::NoGguf { path: path.display().to_string() };
        let content = Content::map(path, &file)?.ok_or_else(missing)?;
        let header =
            Header::read(content.bytes()).map_err(|reason| CheckpointError::Header { file: file.clone(), reason })?;
        let settings = Settings { file: &file, values: &header.settings };
        settings.check("model")?;
        let architecture = settings.architecture(known)?;
        let config = Config::of(&settings, architecture, &header, content.bytes())?;
        let mut files = text_files::of(&settings)?;
        let (mut shards, mut json, mut decoder, mut skipped_encoders) =
            (Vec::new(), config.json(), DECODER, Vec::new());
        if let Some(vision) = &architecture.vision {
            let found = FoundEncoder::find(path, vision, &config, ENCODER)?;
            skipped_encoders = found.skipped_encoders;
            match found.encoder.map(|encoder| (text_files::placeholders(&settings), encoder)) {
                Some((Ok(placeholders), encoder)) => {
                    json = with_vision(json, &encoder, vision, &placeholders);
                    files.extend(processors(&json, &encoder, vision));
                    (shards, decoder) = (vec![encoder.shard], DECODER_WITH_VISION);
                }
                Some((Err(error), encoder)) => {
                    skipped_encoders.push(CheckpointError::Encoder { file: encoder.file, reason: error.to_string() });
                }
                None => {}
            }
        }
        files.insert("config.json", json.to_string().into_bytes());
        let tensors = tensors::stored_tensors(&file, &header, content.bytes(), &config, decoder)?;
        let listing = header.listing.clone();
        shards.insert(0, Shard::new(&file, content, listing, tensors));
        Ok(GgufFile { path: path.to_owned(), files, shards, skipped_encoders })
    }

    /// The file's path, for messages.
    pub(super) fn place(&self) -> String {
        self.path.display().to_string()
    }

    /// A file that was generated from the metadata.
    pub(super) fn read(&self, file: &str) -> Option<&[u8]> {
        self.files.get(file).map(Vec::as_slice)
    }

    pub(super) fn skipped_encoders(&self) -> &[CheckpointError] {
        &self.skipped_encoders
    }

    pub(super) fn shards(&self) -> &[Shard] {
        &self.shards
    }
}

/// The `config.json` of a model with pictures, from the settings of its decoder and its encoder.
fn with_vision(text: Value, encoder: &Encoder, vision: &GgufVision, placeholders: &[u64; 2]) -> Value {
    let [image, video] = placeholders;
    json!({
        "architectures": [vision.class],
        "model_type": vision.model_type,
        "image_token_id": image,
        "video_token_id": video,
        "text_config": text,
        "vision_config": encoder.config,
    })
}

/// The released settings of the processors. Settings in the encoder's file take precedence.
fn processors(config: &Value, encoder: &Encoder, vision: &GgufVision) -> Vec<(&'static str, Vec<u8>)> {
    let released = (vision.processors)(config).into_iter();
    let merge = |into: &mut Value, from: &Value| {
        for (key, value) in from.as_object().into_iter().flatten() {
            into[key] = value.clone();
        }
    };
    let changed = released.map(|(name, json)| {
        let mut settings: Value = serde_json::from_slice(&json).expect("a family writes valid JSON");
        merge(&mut settings, &encoder.pixels);
        if name == "preprocessor_config.json" {
            merge(&mut settings["size"], &encoder.limits);
        }
        (name, settings.to_string().into_bytes())
    });
    changed.collect()
}
