//! The source of a checkpoint's files, and functions that read the small files.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use bursar_kernels::DType;
use serde_json::Value;

use super::error::CheckpointError;
use super::gguf::GgufFile;
use super::random_checkpoint::RandomCheckpoint;
use super::tensors::EXTENSION;

/// Size limit of a config or vocabulary file in bytes. The largest known tokenizer.json has 33 MB.
pub(super) const TEXT_BYTES_MAX: u64 = 128 << 20;

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
    /// The folder's or file's path, "(embedded)", or the name of a shape, for messages.
    pub fn place(&self) -> String {
        match self {
            CheckpointSource::Folder(folder) => folder.display().to_string(),
            CheckpointSource::Embedded(_) => "(embedded)".into(),
            CheckpointSource::Random(random) => random.place(),
            CheckpointSource::Gguf(file) => file.place(),
        }
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
                    Err(error) => return Err(unreadable(file, &error)),
                };
                if bytes > TEXT_BYTES_MAX {
                    return Err(CheckpointError::TooLarge { file: file.into(), bytes, bytes_max: TEXT_BYTES_MAX });
                }
                std::fs::read(&path).map(|content| Some(Cow::Owned(content))).map_err(|error| unreadable(file, &error))
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
            Err(error) => return Err(unreadable(&self.place(), &error)),
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

/// A tokenizer in one file.
pub(super) const TOKENIZER: &str = "tokenizer.json";
// The files that replace a missing tokenizer.json: the vocabulary, the merges, and the added
// tokens. A newer `tokenizer_config.json` also contains the added tokens.
pub(super) const VOCABULARY: [&str; 2] = ["vocab.json", "merges.txt"];
pub(super) const ADDED_TOKENS: &str = "added_tokens.json";
/// Small files that a checkpoint may have in addition to `config.json` and its vocabulary.
pub(super) const OPTIONAL: [&str; 8] = [
    "generation_config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "hf_quant_config.json",
];
/// The optional files that belong to the tokenizer.
const OF_TOKENIZER: [&str; 3] = ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"];

/// The small files of a checkpoint except `config.json`.
#[derive(Debug)]
pub(super) struct TextFiles {
    place: String,
    files: Vec<(&'static str, Option<Cow<'static, [u8]>>)>,
}

impl TextFiles {
    /// Reads the files that exist. The tokenizer's files are read from `tokenizer` if it is given.
    /// The files that replace `tokenizer.json` are read only if it is missing.
    ///
    /// # Errors
    /// See [`CheckpointSource::read`].
    pub(super) fn read(
        source: &CheckpointSource,
        tokenizer: Option<&CheckpointSource>,
    ) -> Result<Self, CheckpointError> {
        let mut names = vec![TOKENIZER];
        names.extend(OPTIONAL);
        let of_tokenizer = tokenizer.unwrap_or(source);
        let read = |name: &'static str| {
            let is_of_checkpoint = OPTIONAL.contains(&name) && !OF_TOKENIZER.contains(&name);
            Ok((name, if is_of_checkpoint { source.read(name)? } else { of_tokenizer.read(name)? }))
        };
        let mut files = names.into_iter().map(read).collect::<Result<Vec<_>, CheckpointError>>()?;
        if files[0].1.is_none() {
            let parts = VOCABULARY.into_iter().chain([ADDED_TOKENS]).map(read);
            files.extend(parts.collect::<Result<Vec<_>, CheckpointError>>()?);
        }
        Ok(TextFiles { place: of_tokenizer.place(), files })
    }

    /// Every file name that was looked up, with its content if the file exists.
    pub(super) fn named(&self) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
        self.files.iter().map(|(name, content)| (*name, content.as_deref()))
    }

    /// The id of an added token, from any file that has it.
    pub(super) fn added_token(&self, content: &str) -> Option<u32> {
        let id = |id: &Value| u32::try_from(id.as_u64()?).ok();
        let by_content = || id(self.json("added_tokens.json")?.get(content)?);
        let by_id = || {
            let settings = self.json("tokenizer_config.json")?;
            let tokens = settings.get("added_tokens_decoder")?.as_object()?;
            tokens.iter().find(|(_, token)| token["content"] == content)?.0.parse().ok()
        };
        let in_list = || {
            let whole = self.json(TOKENIZER)?;
            id(&whole.get("added_tokens")?.as_array()?.iter().find(|token| token["content"] == content)?["id"])
        };
        by_content().or_else(by_id).or_else(in_list)
    }

    /// The text of the tokenizer's end token.
    pub(super) fn end_token(&self) -> Option<String> {
        let settings = self.json("tokenizer_config.json")?;
        let token = settings.get("eos_token")?;
        token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
    }

    fn json(&self, name: &str) -> Option<Value> {
        serde_json::from_slice(self.get(name)?).ok()
    }

    /// A file's content, if it exists.
    pub(super) fn get(&self, name: &str) -> Option<&[u8]> {
        self.named().find(|(known, _)| *known == name)?.1
    }

    /// The content of a file that replaces `tokenizer.json`. If the file is missing, the error
    /// names `tokenizer.json`, which users know.
    ///
    /// # Errors
    /// [`CheckpointError::MissingFile`].
    pub(super) fn require(&self, part: &str) -> Result<&[u8], CheckpointError> {
        let missing = || CheckpointError::MissingFile { place: self.place.clone(), file: TOKENIZER.into() };
        self.get(part).ok_or_else(missing)
    }
}

pub(super) fn embedded(files: &'static [(&'static str, EmbeddedFile)], file: &str) -> Option<&'static [u8]> {
    let (_, content) = files.iter().find(|(name, _)| *name == file)?;
    Some(match *content {
        EmbeddedFile::Plain(content) => content,
        EmbeddedFile::Compressed(content) => content,
    })
}

pub(super) fn unreadable(file: &str, error: &std::io::Error) -> CheckpointError {
    CheckpointError::Unreadable { file: file.into(), kind: error.kind() }
}
