//! A GGUF file as a checkpoint: settings, vocabulary and weights in one file. The files of a
//! Hugging Face folder are generated from its metadata, and the rest of this crate reads them like
//! the files of any other checkpoint.

mod config;
mod header;
mod rope_factors;
mod tensors;
mod text_files;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use self::config::Config;
use self::header::{Header, Setting};
use super::error::CheckpointError;
use super::shard::{Content, Shard};

/// A family's description of its GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufArchitecture {
    /// `general.architecture`, the prefix of the settings, and `model_type`
    /// in the generated `config.json`.
    pub name: &'static str,
    /// `architectures` in the generated `config.json`.
    pub class: &'static str,
    /// Whether the rows of queries and keys are ordered for rotary pairs of adjacent elements.
    pub has_paired_rows: bool,
}

/// An open GGUF file.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    files: BTreeMap<&'static str, Vec<u8>>,
    shard: Shard,
}

impl GgufFile {
    /// Maps the file at `path`, checks its header, and generates the small files. The file must
    /// have one of the `known` architectures. No weight is read.
    ///
    /// # Errors
    /// [`CheckpointError::NoGguf`] or [`CheckpointError::Unreadable`]; [`CheckpointError::Header`]
    /// for a damaged file; [`CheckpointError::Setting`] for a file with an unsupported setting.
    pub fn open(path: &Path, known: &[GgufArchitecture]) -> Result<Self, CheckpointError> {
        let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let missing = || CheckpointError::NoGguf { path: path.display().to_string() };
        let content = Content::map(path, &file)?.ok_or_else(missing)?;
        let header =
            Header::read(content.bytes()).map_err(|reason| CheckpointError::Header { file: file.clone(), reason })?;
        let settings = Settings { file: &file, values: &header.settings };
        settings.check()?;
        let architecture = settings.architecture(known)?;
        let config = Config::of(&settings, architecture, &header, content.bytes())?;
        let mut files = text_files::of(&settings)?;
        files.insert("config.json", config.json().to_string().into_bytes());
        let tensors = tensors::places(&settings, &header, content.bytes().len(), &config)?;
        let listing = header.listing.clone();
        Ok(GgufFile { path: path.to_owned(), files, shard: Shard::new(&file, content, listing, tensors) })
    }

    /// The file's path, for messages.
    pub(super) fn place(&self) -> String {
        self.path.display().to_string()
    }

    /// A file that was generated from the metadata.
    pub(super) fn read(&self, file: &str) -> Option<&[u8]> {
        self.files.get(file).map(Vec::as_slice)
    }

    pub(super) fn shard(&self) -> Shard {
        self.shard.clone()
    }
}

/// The settings of a file, by name.
struct Settings<'f> {
    file: &'f str,
    values: &'f BTreeMap<&'f str, Setting<'f>>,
}

impl<'f> Settings<'f> {
    /// Refuses files that are not a complete model.
    fn check(&self) -> Result<(), CheckpointError> {
        if let Some(kind) = self.text("general.type")?
            && kind != "model"
        {
            return Err(self.refused("general.type", kind, "model"));
        }
        match self.number("split.count")? {
            None | Some(0 | 1) => Ok(()),
            Some(count) => Err(self.refused("split.count", count, "one file, as `llama-gguf-split --merge` makes it")),
        }
    }

    fn architecture(&self, known: &[GgufArchitecture]) -> Result<GgufArchitecture, CheckpointError> {
        const NAME: &str = "general.architecture";
        let name = self.required(NAME, self.text(NAME)?)?;
        let found = known.iter().find(|architecture| architecture.name == name);
        let names = || known.iter().map(|known| known.name).collect::<Vec<_>>().join(", ");
        found.copied().ok_or_else(|| self.refused(NAME, name, &names()))
    }

    fn get(&self, name: &str) -> Option<Setting<'f>> {
        self.values.get(name).copied()
    }

    /// A setting that is a count or an id.
    fn number(&self, name: &str) -> Result<Option<u64>, CheckpointError> {
        let number = |value| match value {
            Setting::Unsigned(number) => Ok(number),
            Setting::Signed(number) => u64::try_from(number).map_err(|_| value),
            value => Err(value),
        };
        self.read(name, number, "a whole number")
    }

    fn float(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        let float = |value| match value {
            Setting::Float(number) if number.is_finite() => Ok(number),
            Setting::Unsigned(number) => Ok(number as f64),
            value => Err(value),
        };
        self.read(name, float, "a finite number")
    }

    fn text(&self, name: &str) -> Result<Option<&'f str>, CheckpointError> {
        self.read(name, |value| if let Setting::Text(text) = value { Ok(text) } else { Err(value) }, "a text")
    }

    /// A setting that is a list of texts.
    fn texts(&self, name: &str) -> Result<Option<Vec<&'f str>>, CheckpointError> {
        let text = |value| if let Setting::Text(text) = value { Some(text) } else { None };
        let texts = |value| match value {
            Setting::List(list) => list.iter().map(text).collect::<Option<_>>().ok_or(value),
            value => Err(value),
        };
        self.read(name, texts, "a list of texts")
    }

    /// A setting that is a list of whole numbers.
    fn numbers(&self, name: &str) -> Result<Option<Vec<i64>>, CheckpointError> {
        let number = |value| match value {
            Setting::Signed(number) => Some(number),
            Setting::Unsigned(number) => i64::try_from(number).ok(),
            _ => None,
        };
        let numbers = |value| match value {
            Setting::List(list) => list.iter().map(number).collect::<Option<_>>().ok_or(value),
            value => Err(value),
        };
        self.read(name, numbers, "a list of whole numbers")
    }

    fn read<T>(
        &self,
        name: &str,
        read: impl FnOnce(Setting<'f>) -> Result<T, Setting<'f>>,
        wanted: &str,
    ) -> Result<Option<T>, CheckpointError> {
        self.get(name).map(read).transpose().map_err(|value| self.refused(name, value, wanted))
    }

    fn required<T>(&self, name: &str, value: Option<T>) -> Result<T, CheckpointError> {
        value.ok_or_else(|| self.refused(name, "absent", "a file that has it"))
    }

    fn refused(&self, setting: &str, value: impl ToString, supported: &str) -> CheckpointError {
        let (file, [setting, value]) = (self.file.to_owned(), [setting.to_owned(), value.to_string()].map(cut_short));
        CheckpointError::Setting { file, setting, value, supported: supported.to_owned() }
    }
}

/// Truncates a text of the file for an error message, because it may have megabytes.
fn cut_short(text: String) -> String {
    text.chars().take(SHOWN_MAX).collect()
}

/// Maximum number of characters of a text of the file in an error message.
const SHOWN_MAX: usize = 200;
