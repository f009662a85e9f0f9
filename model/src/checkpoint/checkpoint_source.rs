//! The source of a checkpoint's files: a folder, the binary, a GGUF file,
//! or settings without weights.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use bursar_kernels::DType;
use serde_json::Value;

use super::error::CheckpointError;
use super::gguf::GgufFile;
use super::layout::{EXTENSION, TEXT_BYTES_MAX};
use super::shard::Content;

/// A checkpoint in Hugging Face's layout, or a checkpoint that is converted to this layout.
#[derive(Clone, Debug)]
pub enum CheckpointSource {
    Folder(PathBuf),
    /// File names and contents, compiled into the binary.
    Embedded(&'static [(&'static str, EmbeddedFile)]),
    /// Settings in memory or in a folder, and weights from a seed.
    Random(Arc<RandomCheckpoint>),
    /// A single GGUF file, which [`registry::open_gguf`](crate::registry::open_gguf) opens.
    Gguf(Arc<GgufFile>),
}

/// The content of a file that is compiled into the binary.
#[derive(Clone, Copy, Debug)]
pub enum EmbeddedFile {
    Plain(&'static [u8]),
    /// Bytes that are decompressed on first use and kept until the process ends.
    Compressed(&'static LazyLock<Vec<u8>>),
}

impl CheckpointSource {
    /// The path of the folder or file, "(embedded)", or the shape's name of a random checkpoint,
    /// for messages.
    pub fn place(&self) -> String {
        match self {
            CheckpointSource::Folder(folder) => folder.display().to_string(),
            CheckpointSource::Embedded(_) => "(embedded)".into(),
            CheckpointSource::Random(random) => random.place(),
            CheckpointSource::Gguf(file) => file.place(),
        }
    }

    /// Why each `mmproj` file next to a GGUF file was skipped: it does not fit the model or cannot
    /// be read. If there is an entry, the model does not accept pictures. Empty for other sources,
    /// and if a matching encoder was found.
    pub fn skipped_encoders(&self) -> &[CheckpointError] {
        if let CheckpointSource::Gguf(file) = self { file.skipped_encoders() } else { &[] }
    }

    /// A small file's content; `None` if there is no such file.
    ///
    /// # Errors
    /// [`CheckpointError::Unreadable`]; [`CheckpointError::TooLarge`] over 128 MiB.
    pub fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        match self {
            CheckpointSource::Embedded(files) => Ok(embedded(files, file).map(Cow::Borrowed)),
            CheckpointSource::Random(random) => random.read(file),
            CheckpointSource::Gguf(whole) => Ok(whole.read(file).map(|content| Cow::Owned(content.to_owned()))),
            CheckpointSource::Folder(folder) => {
                let path = folder.join(file);
                let bytes = match std::fs::metadata(&path) {
                    Ok(metadata) => metadata.len(),
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(CheckpointError::unreadable(file, &error)),
                };
                if bytes > TEXT_BYTES_MAX {
                    return Err(CheckpointError::TooLarge { file: file.into(), bytes, bytes_max: TEXT_BYTES_MAX });
                }
                std::fs::read(&path)
                    .map(|content| Some(Cow::Owned(content)))
                    .map_err(|error| CheckpointError::unreadable(file, &error))
            }
        }
    }

    /// Like [`read`](Self::read), for a file that must exist.
    ///
    /// # Errors
    /// See [`read`](Self::read); [`CheckpointError::MissingFile`],
    /// [`CheckpointError::MissingFolder`] or [`CheckpointError::Adapter`].
    pub fn require(&self, file: &str) -> Result<Cow<'static, [u8]>, CheckpointError> {
        if let Some(content) = self.read(file)? {
            return Ok(content);
        }
        if let Some(json) = self.read("adapter_config.json")? {
            let settings: Value = serde_json::from_slice(&json).unwrap_or_default();
            let base = settings["base_model_name_or_path"].as_str().map(str::to_owned);
            return Err(CheckpointError::Adapter { place: self.place(), base });
        }
        Err(match self {
            CheckpointSource::Folder(folder) if !folder.exists() => {
                CheckpointError::MissingFolder { place: self.place() }
            }
            _ => CheckpointError::MissingFile { place: self.place(), file: file.into() },
        })
    }

    /// Maps a file of weights. `None` if there is no such file, or only a Git LFS pointer.
    ///
    /// # Errors
    /// [`CheckpointError::Unreadable`].
    pub(super) fn map(&self, file: &str) -> Result<Option<Content>, CheckpointError> {
        let content = match self {
            CheckpointSource::Embedded(files) => embedded(files, file).map(Content::Embedded),
            CheckpointSource::Random(_) | CheckpointSource::Gguf(_) => None,
            CheckpointSource::Folder(folder) => Content::map(&folder.join(file), file)?,
        };
        Ok(content.filter(|content| !content.is_pointer()))
    }

    /// The sorted names of a folder's tensor files, without adapter files. The list is empty for a
    /// source that is not a folder.
    ///
    /// # Errors
    /// [`CheckpointError::Unreadable`].
    pub(super) fn tensor_files(&self) -> Result<Vec<String>, CheckpointError> {
        let CheckpointSource::Folder(folder) = self else { return Ok(Vec::new()) };
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(CheckpointError::unreadable(&self.place(), &error)),
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_of_tensors =
            |name: &String| name.ends_with(EXTENSION) && !name.starts_with('.') && !name.starts_with("adapter_");
        let mut files: Vec<String> = names.filter(is_of_tensors).collect();
        files.sort_unstable();
        Ok(files)
    }

    /// The type of the weights according to `config.json`; `None` if the type is
    /// missing or not supported.
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn stored_type(&self) -> Result<Option<DType>, CheckpointError> {
        let config: Option<Value> = self.read("config.json")?.and_then(|json| serde_json::from_slice(&json).ok());
        Ok(config.as_ref().and_then(stored_type))
    }
}

/// Reads `dtype`, or the `torch_dtype` of releases before transformers 4.56, from the top
/// level or from `text_config`.
fn stored_type(config: &Value) -> Option<DType> {
    let parts = [Some(config), config.get("text_config")].into_iter().flatten();
    let named =
        parts.flat_map(|part| [part.get("dtype"), part.get("torch_dtype")]).flatten().find_map(Value::as_str)?;
    match named.trim_start_matches("torch.") {
        "bfloat16" => Some(DType::BF16),
        "float16" => Some(DType::F16),
        "float32" => Some(DType::F32),
        _ => None,
    }
}

fn embedded(files: &'static [(&'static str, EmbeddedFile)], file: &str) -> Option<&'static [u8]> {
    let (_, content) = files.iter().find(|(name, _)| *name == file)?;
    Some(match *content {
        EmbeddedFile::Plain(content) => content,
        EmbeddedFile::Compressed(content) => content,
    })
}

/// An untrained checkpoint: settings and vocabulary in memory or in a folder, and a seed for the
/// weights. Tensors are drawn directly on the device, so the host never has a copy or a file of
/// them. The model needs as much memory and runs as fast as a trained model of the same shape (with
/// experts, only with a [routing skew](Self::with_routing_skew)), but its replies mean nothing.
#[derive(Clone)]
pub struct RandomCheckpoint {
    name: String,
    seed: u64,
    routing_skew: Option<f32>,
    /// A checkpoint whose files take precedence over `files`.
    folder: Option<CheckpointSource>,
    files: BTreeMap<&'static str, Vec<u8>>,
}

impl RandomCheckpoint {
    /// A checkpoint of `files`, keyed by file name, without stored weights. Equal
    /// seeds give equal weights.
    pub fn new(name: impl Into<String>, seed: u64, files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        let files = files.into_iter().collect();
        RandomCheckpoint { name: name.into(), seed, routing_skew: None, folder: None, files }
    }

    /// The checkpoint of `folder` without its weights. `files` supplies the files
    /// that the folder lacks.
    pub fn over(folder: CheckpointSource, files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        let name = folder.place();
        RandomCheckpoint { folder: Some(folder), ..RandomCheckpoint::new(name, 0, files) }
    }

    /// The name of the model's shape.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The seed of all weights.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The same checkpoint, with routers that prefer some experts, as the routers of trained
    /// mixtures do for text. By Zipf's law, the `r`-th most frequent expert is chosen in proportion
    /// to `r^-exponent`, but for at most 45 % of all rows. Without a skew, experts are chosen
    /// evenly, which reads the most weights.
    pub fn with_routing_skew(self, exponent: f32) -> Self {
        RandomCheckpoint { routing_skew: Some(exponent), ..self }
    }

    /// The exponent of Zipf's law by which experts are chosen; `None` if experts are chosen evenly.
    pub fn routing_skew(&self) -> Option<f32> {
        self.routing_skew
    }

    /// The folder, or the shape's name, for messages.
    pub(super) fn place(&self) -> String {
        match &self.folder {
            Some(folder) => folder.place(),
            None => format!("({}, random)", self.name),
        }
    }

    pub(super) fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        let found = self.folder.as_ref().map_or(Ok(None), |folder| folder.read(file))?;
        Ok(found.or_else(|| self.files.get(file).map(|content| Cow::Owned(content.clone()))))
    }
}

impl fmt::Debug for RandomCheckpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RandomCheckpoint({}, seed {})", self.name, self.seed)
    }
}
