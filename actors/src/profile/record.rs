//! Where profiles are recorded: one file per model and device, with the latest profile of each basis.

use std::path::{Path, PathBuf};

use bursar_model::cache_file::{CacheFile, CacheFileError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Difference, ProfileKey, RecordedProfile};

/// The version of the file's format. A file of another version is not read further.
const FORMAT: u32 = 3;

/// Profiles that a file keeps, the latest first: one for each way in which a user alternates, such as chat and
/// benchmark.
const KEPT: usize = 4;

/// The file for the profiles of one model on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPath {
    file: CacheFile,
}

/// What a file holds for a basis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordLookup {
    /// No profile is recorded.
    Nothing,
    /// A profile of the same basis.
    Applies(RecordedProfile),
    /// Profiles of other bases only. Lists how the nearest one differs.
    Differs(Vec<Difference>),
}

/// Why a file is useless.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RecordError {
    /// It could not be read or written.
    #[error(transparent)]
    File(#[from] CacheFileError),
    /// It is incomplete, or not ours.
    #[error("it is not valid at line {line}, column {column}")]
    Broken {
        /// The line of the error, from 1.
        line: usize,
        /// The column of the error, from 1; 0 if the previous line ended too soon.
        column: usize,
    },
    /// Another version of Bursar wrote it, and its fields may mean something else.
    #[error("{0}")]
    Format(FormatDiffers),
}

/// The file has another format version.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("format was {was}, is {FORMAT}")]
pub struct FormatDiffers {
    /// The version in the file.
    pub was: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Book {
    format: u32,
    profiles: Vec<RecordedProfile>,
}

/// The only field that is read before the format is known.
#[derive(Deserialize)]
struct Cover {
    format: u64,
}

impl RecordPath {
    /// The file for the model of this name from `origin`, on devices of this name, in `folder`.
    pub fn new(folder: &Path, model: &str, origin: &str, device: &str) -> Self {
        RecordPath { file: CacheFile::named(folder, &[model, device], &[model, origin, device]) }
    }

    /// The path of the file.
    pub fn path(&self) -> PathBuf {
        self.file.path()
    }

    /// Looks for a profile of this basis. Blocks.
    ///
    /// # Errors
    /// [`RecordError`]: the file exists and is useless.
    pub fn find(&self, basis: &ProfileKey) -> Result<RecordLookup, RecordError> {
        let Some(content) = self.file.read()? else { return Ok(RecordLookup::Nothing) };
        Ok(Book::parse(&content)?.find(basis))
    }

    /// Records a profile, in place of one of the same basis. A useless file is replaced. If two processes write at
    /// once, one profile may be lost, and is measured again later. Blocks.
    ///
    /// # Errors
    /// [`CacheFileError::Unwritable`], as [`RecordError::File`].
    pub fn keep(&self, profile: RecordedProfile) -> Result<(), RecordError> {
        let there = self.file.read().ok().flatten();
        let mut book = there.and_then(|content| Book::parse(&content).ok()).unwrap_or_else(Book::empty);
        book.keep(profile);
        Ok(self.file.replace(&book.print())?)
    }
}

impl Book {
    fn empty() -> Self {
        Book { format: FORMAT, profiles: Vec::new() }
    }

    fn parse(content: &[u8]) -> Result<Self, RecordError> {
        let broken = |error: serde_json::Error| RecordError::Broken { line: error.line(), column: error.column() };
        let Cover { format } = serde_json::from_slice(content).map_err(broken)?;
        if format != u64::from(FORMAT) {
            return Err(RecordError::Format(FormatDiffers { was: format }));
        }
        serde_json::from_slice(content).map_err(broken)
    }

    /// JSON for machines, laid out so that people can read it.
    fn print(&self) -> Vec<u8> {
        let mut content = serde_json::to_vec_pretty(self).expect("text and numbers");
        content.push(b'\n');
        content
    }

    fn find(self, basis: &ProfileKey) -> RecordLookup {
        let with_differences = self.profiles.into_iter().map(|profile| {
            let differences = ProfileKey::differences(&profile.basis, basis);
            (profile, differences)
        });
        // Among equally near profiles this picks the latest, which comes first.
        match with_differences.min_by_key(|(_, differences)| differences.len()) {
            None => RecordLookup::Nothing,
            Some((profile, differences)) if differences.is_empty() => RecordLookup::Applies(profile),
            Some((_, differences)) => RecordLookup::Differs(differences),
        }
    }

    fn keep(&mut self, profile: RecordedProfile) {
        self.profiles.retain(|other| other.basis != profile.basis);
        self.profiles.insert(0, profile);
        self.profiles.truncate(KEPT);
    }
}
